"""On a GPU: are the other collectives, bound calls, refusals and other libraries' arrays right?"""

from __future__ import annotations

import subprocess
import sys

import gpu
import pytest
import torch
from oracle import NATIVE, expected, reduced

import pyringar as pr

pytestmark = gpu.needed


def test_grader_passes_in_own_process(device):
    """Not in this process, which has a GPU already: one that forks has none."""
    command = ["-m", "pyringar", "check", "pyringar:allreduce", "--timeout", "60"]
    devices = ["--devices", f"{device},{device},cpu"]
    done = subprocess.run([sys.executable, *command, *devices], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plan_and_stats(make_ranks):
    comm = make_ranks(4)
    assert comm.plan(2**20).algorithm == "fused"
    tensors = gpu.ones(comm, 256)
    for algorithm in (None, "fused", "ring", "naive"):
        comm.all_reduce(tensors, algorithm=algorithm)
    stats = comm.stats()
    assert {name: row["calls"] for name, row in stats.items()} == {
        "fused": 2,
        "ring": 1,
        "naive": 1,
    }
    assert stats["fused"]["bytes"] == 2 * 1024


# -- refusals --------------------------------------------------------------------------------------


@gpu.only
def test_wrong_device_is_refused(ranks_of, comm_of, device):
    mixed = [torch.ones(3, device=device), torch.ones(3)]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] is on cpu, expected cuda:0"):
        ranks_of(2).all_reduce(mixed)
    with pytest.raises(pr.ArgumentError, match=r"tensors\[0\] is on cuda:0, expected cpu"):
        comm_of(2).all_reduce(mixed)
    assert mixed[0].tolist() == mixed[1].tolist() == [1, 1, 1]


@gpu.only
def test_missing_device_is_refused():
    with pytest.raises(pr.ArgumentError, match=r"cuda:99.*not on this machine.*cuda:0"):
        pr.Communicator(["cuda:0", "cuda:99"])


# -- other libraries' arrays -----------------------------------------------------------------------


@gpu.only
def test_cupy_arrays(ranks_of):
    cupy = pytest.importorskip("cupy")
    for name in ("float64", "float32", "float16", "int8", "uint8", "int32", "int64"):
        parts = gpu.drawn(1009, getattr(torch, name), 3)
        for algorithm in NATIVE:
            arrays = [cupy.asarray(part.numpy()) for part in parts]
            ranks_of(3).all_reduce(arrays, algorithm=algorithm)
            got = [torch.from_numpy(cupy.asnumpy(array)) for array in arrays]
            gpu.assert_ranks(got, expected(parts, "sum", algorithm), f"{algorithm} {name}")


class Interface:
    def __init__(self, tensor):
        self._tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@gpu.only
def test_cuda_array_interface(ranks_of):
    parts = gpu.drawn(100, torch.float32, 2)
    tensors = gpu.placed(ranks_of(2), parts)
    ranks_of(2).all_reduce([Interface(tensor) for tensor in tensors])
    gpu.assert_ranks(tensors, reduced(parts, "sum"))


def test_compiled_calls_stay_in_one_graph(ranks_of):
    comm = ranks_of(2)
    parts = gpu.drawn(1000, torch.float32, 2)
    tensors = gpu.placed(comm, parts)

    def function(x, y):
        first, second = pr.ops.all_reduce(comm, [x * 2, y * 2])
        comm.all_reduce([x, y])
        return first + 1, second + 1

    results = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors)
    gpu.assert_ranks(tensors, reduced(parts, "sum"))
    doubled = reduced([2 * part for part in parts], "sum")
    gpu.assert_ranks(list(results), doubled + 1)
