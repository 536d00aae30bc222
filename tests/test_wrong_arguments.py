"""Each public callable raises an ArgumentError that names the wrong argument."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal, mismatch_flags, shard_sizes

T = torch.ones(3)
WRONG = {
    **{"None": None, "int": 3, "float": 1.5, "str": "ab", "tensor": T, "object": object()},
    **{"empty list": [], "nested lists": [[[T]]], "ints": [1, 2], "Nones": [None], "dict": {1: T}},
}
X, Y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
NET = nn.Linear(2, 2)
C, P, D, G, S = (
    pr.Communicator,
    pr.ProcessCommunicator,
    pr.DataParallel,
    pr.GradientBucketer,
    pr.ShardedStep,
)
NUMBER, NOTHING, SIZES = {"int", "float"}, {"None"}, {"int", "ints", "empty list"}
LISTS = {"empty list", "nested lists", "ints", "Nones"}


@functools.cache
def ranks() -> pr.Communicator:
    return pr.Communicator(["cpu"] * 2)


def ones(k: int = 2, n: int = 3) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(k)]


def accuracy(*args: Any, **options: Any) -> float:
    return pr.evaluate_accuracy_gpus(*args, **options)


def bucketer(**options: Any) -> None:
    pr.GradientBucketer([NET], **options).close()


def process(*args: Any, **options: Any) -> None:
    pr.ProcessCommunicator(*args, **options).close()


def alone(**options: Any) -> None:
    process(torch.distributed.HashStore(), 0, 1, **options)


# Each row: a callable, an argument, the keys of WRONG that are valid for it, and the call.
CASES: list[tuple[Any, str, set[str], Callable[[Any], Any]]] = [
    (pr.allreduce, "tensors", set(), lambda v: pr.allreduce(v)),
    (pr.allreduce, "op", set(), lambda v: pr.allreduce(ones(), v)),
    (C, "devices", set(), lambda v: C(v)),
    (C, "algorithm", set(), lambda v: C(["cpu"], algorithm=v)),
    (C, "order", set(), lambda v: C(["cpu"], order=v)),
    (C, "timeout", NUMBER, lambda v: C(["cpu"], timeout=v)),
    (C.all_reduce, "tensors", set(), lambda v: ranks().all_reduce(v)),
    (C.all_reduce, "op", set(), lambda v: ranks().all_reduce(ones(), v)),
    (C.all_reduce, "algorithm", NOTHING, lambda v: ranks().all_reduce(ones(), algorithm=v)),
    (C.all_reduce, "order", NOTHING, lambda v: ranks().all_reduce(ones(), order=v)),
    (C.all_reduce_coalesced, "lists", set(), lambda v: ranks().all_reduce_coalesced(v)),
    (C.reduce_scatter, "outputs", set(), lambda v: ranks().reduce_scatter(v, ones(2, 6))),
    (C.reduce_scatter, "inputs", set(), lambda v: ranks().reduce_scatter(ones(), v)),
    (C.all_gather, "outputs", set(), lambda v: ranks().all_gather(v, ones())),
    (C.all_gather, "inputs", set(), lambda v: ranks().all_gather(ones(2, 6), v)),
    (C.broadcast, "tensors", set(), lambda v: ranks().broadcast(v)),
    (C.broadcast, "root", set(), lambda v: ranks().broadcast(ones(), v)),
    (C.broadcast_coalesced, "lists", set(), lambda v: ranks().broadcast_coalesced(v)),
    (C.broadcast_coalesced, "root", set(), lambda v: ranks().broadcast_coalesced([ones()] * 2, v)),
    (C.reduce, "output", {"tensor"}, lambda v: ranks().reduce(v, ones())),
    (C.reduce, "inputs", set(), lambda v: ranks().reduce(T, v)),
    (C.reduce, "op", set(), lambda v: ranks().reduce(T, ones(), v)),
    (C.reduce, "root", set(), lambda v: ranks().reduce(T, ones(), root=v)),
    (C.reduce_coalesced, "outputs", set(), lambda v: ranks().reduce_coalesced(v, [ones(), ones()])),
    (C.reduce_coalesced, "lists", set(), lambda v: ranks().reduce_coalesced(ones(), v)),
    (C.bind, "tensors", set(), lambda v: ranks().bind(v)),
    (C.bind_coalesced, "lists", set(), lambda v: ranks().bind_coalesced(v)),
    (C.plan, "nbytes", {"int"}, lambda v: ranks().plan(v)),
    (C.plan, "dtype", set(), lambda v: ranks().plan(3, v)),
    (P, "store", NOTHING, lambda v: process(v, 0, 1)),
    (P, "name", {"str"}, lambda v: alone(name=v)),
    (P, "algorithm", set(), lambda v: alone(algorithm=v)),
    (P, "timeout", NUMBER, lambda v: alone(timeout=v)),
    (P, "device", NOTHING, lambda v: alone(device=v)),
    (G, "replicas", set(), lambda v: G(v)),
    (G, "comm", NOTHING, lambda v: G([NET], comm=v)),
    (G, "op", set(), lambda v: G([NET], op=v)),
    (G, "bucket_cap_mb", NUMBER, lambda v: G([NET], bucket_cap_mb=v)),
    (S, "replicas", set(), lambda v: S(v, 2)),
    (S, "num_shards", {"int"}, lambda v: S([NET], v)),
    (S, "comm", NOTHING, lambda v: S([NET], 2, comm=v)),
    (S, "num_threads", {"int"}, lambda v: S([NET], 2, num_threads=v)),
    (S, "seed", {"int", "None"}, lambda v: S([NET], 2, seed=v)),
    (S.__call__, "loss_of", set(), lambda v: S([NET], 2)(v)),
    (D, "module", set(), lambda v: D(v, ["cpu"])),
    (D, "devices", NOTHING, lambda v: D(NET, v)),
    (D, "device_ids", NOTHING, lambda v: D(NET, device_ids=v)),
    (D, "dim", {"int"}, lambda v: D(NET, ["cpu"], dim=v)),
    (D, "order", set(), lambda v: D(NET, ["cpu"], order=v)),
    (D, "bucket_cap_mb", NUMBER | NOTHING, lambda v: D(NET, ["cpu"], bucket_cap_mb=v)),
    (D, "weights", NOTHING, lambda v: D(NET, ["cpu"], weights=v)),
    (D, "batchnorm", set(), lambda v: D(NET, ["cpu"], batchnorm=v)),
    (D, "output_device", NOTHING, lambda v: D(NET, ["cpu"], output_device=v)),
    (pr.replicate, "module", set(), lambda v: pr.replicate(v, ["cpu"])),
    (pr.replicate, "devices", set(), lambda v: pr.replicate(NET, v)),
    (pr.get_params, "params", {"empty list"}, lambda v: pr.get_params(v, "cpu")),
    (pr.get_params, "device", set(), lambda v: pr.get_params([T], v)),
    (pr.split_batch, "X", set(), lambda v: pr.split_batch(v, Y, ["cpu"])),
    (pr.split_batch, "y", set(), lambda v: pr.split_batch(X, v, ["cpu"])),
    (pr.split_batch, "devices", set(), lambda v: pr.split_batch(X, Y, v)),
    (pr.split_batch, "weights", NOTHING, lambda v: pr.split_batch(X, Y, ["cpu"], v)),
    (shard_sizes, "n", {"int"}, lambda v: shard_sizes(v, 2)),
    (shard_sizes, "num_shards", {"int"}, lambda v: shard_sizes(2, v)),
    (pr.evaluate_accuracy_gpus, "replicas", set(), lambda v: accuracy(v, [(X, Y)])),
    (pr.evaluate_accuracy_gpus, "data_iter", set(), lambda v: accuracy([NET], v)),
    (pr.evaluate_accuracy_gpus, "split_f", set(), lambda v: accuracy([NET], [(X, Y)], v)),
    (pr.evaluate_accuracy_gpus, "devices", NOTHING, lambda v: accuracy([NET], [(X, Y)], devices=v)),
    (check_replicas_equal, "replicas", set(), lambda v: check_replicas_equal(v)),
    (mismatch_flags, "replicas", set(), lambda v: mismatch_flags(v)),
    (pr.check_allreduce, "fn", set(), lambda v: pr.check_allreduce(v)),
    (pr.check_allreduce, "devices", NOTHING, lambda v: pr.check_allreduce(pr.allreduce, v)),
    (pr.launch, "fn", set(), lambda v: pr.launch(v)),
    (pr.launch, "ranks", {"int"}, lambda v: pr.launch(print, v)),
    (pr.launch, "devices", NOTHING, lambda v: pr.launch(print, devices=v)),
    (pr.launch, "args", LISTS, lambda v: pr.launch(abs, args=v)),
    (pr.launch, "kwargs", NOTHING, lambda v: pr.launch(abs, kwargs=v)),
    (pr.launch, "seed", {"int"}, lambda v: pr.launch(print, seed=v)),
    (pr.launch, "timeout", NUMBER, lambda v: pr.launch(print, timeout=v)),
]


def name_of(case: Any) -> str:
    return f"{case[0].__qualname__}({case[1]})"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_error_names_wrong_argument(case):
    _, argument, right, call = case
    for kind, value in WRONG.items():
        if kind in right:
            continue
        with pytest.raises(pr.ArgumentError) as refused:
            call(value)
        text = str(refused.value)
        assert re.search(rf"\b{argument}\b", text), (kind, text)
        assert not re.search(r"\ba (int|object|ndarray)\b|NoneType|\b1 entries", text), text


def test_cases_cover_every_public_callable():
    public = {name: getattr(pr, name) for name in pr.__all__}
    callables = {
        name
        for name, found in public.items()
        if not (inspect.isclass(found) and issubclass(found, Exception))
    }
    assert callables <= {case[0].__name__ for case in CASES}


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: ranks().all_reduce(ones(), "avg"), "mean"),
        (lambda: pr.allreduce(ones(), "summ"), "sum"),
        (lambda: pr.Communicator(["cpu"], algorithm="rings"), "ring"),
        (lambda: pr.Communicator(["cpu"], order="ranks"), "rank"),
        (lambda: pr.Communicator(["cup"]), "cpu"),
        (lambda: pr.DataParallel(NET, ["cpu"], batchnorm="synced"), "sync"),
        (lambda: pr.train.TrainConfig(dtype="float"), "float64"),
    ],
)
def test_error_suggests_nearest_name(call, near):
    with pytest.raises(pr.ArgumentError, match=rf"; did you mean '{near}'\?$"):
        call()


def test_unrelated_name_gets_no_suggestion():
    with pytest.raises(pr.ArgumentError, match=r"expected one of (?!.*did you mean)"):
        ranks().all_reduce(ones(), "xyzzy")
