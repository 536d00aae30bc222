"""Ranks whose dtypes differ get an error that names both, for every collective and transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Crew
from torch import Tensor

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator

PAIRS = [
    ("int16", "int32"),
    ("bool", "uint8"),
    ("int16", "bfloat16"),
    ("float16", "bfloat16"),
    ("float16", "int16"),
    ("complex64", "float64"),
    ("int32", "float32"),
    ("int64", "float64"),
    ("int8", "uint8"),
    ("float32", "float64"),
    ("int8", "int64"),
]
REAL = {"complex64": "float32"}
NATIVE = [pair for pair in PAIRS if not {"int16", "bool", "complex64"} & set(pair)]

# The collectives of torch.distributed and of a communicator, on four elements and two ranks.
DISTRIBUTED: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x[:2], x[2:]]),
    "reduce": lambda x: dist.reduce(x, 0),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([x, x.clone()], x.clone()),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, x[:2].clone()),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [x.clone(), x.clone()]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x[:2], x.clone()),
    "async": lambda x: dist.all_reduce(x, async_op=True).wait(),
}
COMMUNICATOR: dict[str, Callable[[Any, Tensor], object]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce_coalesced": lambda comm, x: comm.all_reduce([x[:2], x[2:]]),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x, x[:2].clone()),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x[:2], x.clone()),
    "async": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
}


def error_of_call(call: Callable[[Tensor], object], dtype: str) -> str:
    """Return the text of the call's ArgumentError, after which the tensor is as before."""
    tensor = torch.arange(4).to(getattr(torch, dtype))
    before = tensor.clone()
    try:
        call(tensor)
    except pr.ArgumentError as error:
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)), "it was written"
        return str(error)
    return "no error"


def failures(texts: dict[Any, str]) -> list[Any]:
    """Return the cases whose text does not name both ranks and both dtypes.

    torch hands most complex tensors to a backend as pairs of real numbers.
    """
    return [
        (name, pair, text)
        for (name, pair), text in texts.items()
        if text.count("rank ") < 2
        or not all(dtype in text or REAL.get(dtype, "?") in text for dtype in pair)
    ]


def on_backend(rank: int, size: int, store: Any) -> list[Any]:
    texts = {}
    for number, (name, pair) in enumerate((n, p) for n in DISTRIBUTED for p in PAIRS):
        view = dist.PrefixStore(str(number), store)
        dist.init_process_group("ringar", store=view, rank=rank, world_size=size)
        texts[name, pair] = error_of_call(DISTRIBUTED[name], pair[rank])
        dist.destroy_process_group()
    return failures(texts)


def on_communicator(rank: int, size: int, store: Any, kind: str, machines: str) -> list[Any]:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    make = {"process": pr.ProcessCommunicator, "machines": HierarchicalCommunicator}[kind]
    texts = {}
    for number, (name, pair) in enumerate((n, p) for n in COMMUNICATOR for p in NATIVE):
        with make(store, rank, size, name=str(number), timeout=20.0) as comm:
            call = COMMUNICATOR[name]
            texts[name, pair] = error_of_call(lambda x, c=comm, f=call: f(c, x), pair[rank])
    return failures(texts)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_threads_name_both_dtypes(name):
    def program(pair: tuple[str, str]) -> str:
        dist.init_process_group()
        return error_of_call(DISTRIBUTED[name], pair[dist.get_rank()])

    for pair in PAIRS:
        try:
            texts = pr.launch(program, 2, args=(pair,))
        except pr.ArgumentError as error:
            texts = [str(error)]
        for text in texts:
            assert failures({(name, pair): text}) == []


def test_backend_names_both_dtypes():
    with Crew(2) as crew:
        assert crew.check(on_backend, timeout_s=100) == [[], []]


@pytest.mark.parametrize(("kind", "machines"), [("process", "aa"), ("machines", "ab")])
def test_communicators_name_both_dtypes(kind, machines):
    with Crew(2) as crew:
        assert crew.check(on_communicator, kind, machines, timeout_s=100) == [[], []]
