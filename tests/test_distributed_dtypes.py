"""Ranks with different dtypes get an error that names both dtypes, on every transport."""

import os

import pytest
import torch
import torch.distributed as dist
from rank_processes import RankGroup

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator

NATIVE = "float16 bfloat16, int32 float32, int64 float64, int8 uint8, int8 int64"
NATIVE_PAIRS = [pair.split() for pair in NATIVE.split(", ")]
PAIRS = [*NATIVE_PAIRS, ["int16", "int32"], ["int16", "bfloat16"], ["bool", "uint8"]]
COMMUNICATOR = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "coalesced": lambda comm, x: comm.all_reduce([x[:2], x[2:]]),
    "broadcast": lambda comm, x: comm.broadcast(x, 0),
    "all_gather": lambda comm, x: comm.all_gather(x, x[:2].clone()),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x[:2], x.clone()),
}
DISTRIBUTED = {
    "all_reduce": lambda _, x: dist.all_reduce(x),
    "async": lambda _, x: dist.all_reduce(x, async_op=True).wait(),
    "reduce": lambda _, x: dist.reduce(x, 0),
    "broadcast": lambda _, x: dist.broadcast(x, 0),
    "all_gather": lambda _, x: dist.all_gather([x, x.clone()], x.clone()),
    "reduce_scatter": lambda _, x: dist.reduce_scatter(x, [x.clone(), x.clone()]),
}


def failures(rank, calls, pair, make):
    """Return (call, dtypes, error) for each error that does not name both ranks and dtypes."""
    found = []
    for name, call in calls.items():
        comm, text = make(name), "no error"
        try:
            call(comm, torch.arange(4).to(getattr(torch, pair[rank])))
        except pr.ArgumentError as error:
            text = str(error)
        comm.close() if comm else dist.destroy_process_group()
        if not all(word in text for word in ("rank 0", "rank 1", *pair)):
            found.append((name, pair, text))
    return found


def as_rank(rank, size, store, kind, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]

    def make(name):
        view = dist.PrefixStore(f"{pair} {name}", store)
        if kind == "backend":
            return dist.init_process_group("ringar", store=view, rank=rank, world_size=size)
        kinds = {"processes": pr.ProcessCommunicator, "machines": HierarchicalCommunicator}
        return kinds[kind](view, rank, size, timeout=20.0)

    calls, pairs = (DISTRIBUTED, PAIRS) if kind == "backend" else (COMMUNICATOR, NATIVE_PAIRS)
    found = []
    for pair in pairs:
        found += failures(rank, calls, pair, make)
    return found


@pytest.mark.parametrize(
    ("kind", "machines"), [("backend", "aa"), ("processes", "aa"), ("machines", "ab")]
)
def test_dtype_mismatch_error_names_dtypes(kind, machines):
    with RankGroup(2) as group:
        assert group.check(as_rank, kind, machines, timeout_s=100) == [[], []]


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_dtype_mismatch_of_threads_raises(name):
    def program(pair):
        dist.init_process_group()
        DISTRIBUTED[name](None, torch.arange(4).to(getattr(torch, pair[dist.get_rank()])))

    for pair in PAIRS:
        with pytest.raises(pr.ArgumentError, match=f"(?s)rank 0.*{pair[0]}.*rank 1.*{pair[1]}"):
            pr.launch(program, 2, args=(pair,))
