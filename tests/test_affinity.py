"""Threads and waits follow the current CPU affinity of the process."""

from __future__ import annotations

import os
import sys

import pytest
from programs import run_fresh

CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs Linux and two cores")

PRELUDE = """
import os, torch, pyringar as pr
LARGE = 1 << 21
def threads():
    return {int(t) for t in os.listdir("/proc/self/task")}
def reduce(comm, beside_torch=False, **options):
    tensors = [torch.arange(LARGE) % 17 + rank for rank in range(comm.world_size)]
    want = tensors[0] * comm.world_size + sum(range(comm.world_size))
    for _ in range(2):
        given = [tensor.clone() for tensor in tensors]
        work = comm.all_reduce(given, **options, async_op=beside_torch)
        if beside_torch:
            work.wait()
        assert all(torch.equal(tensor, want) for tensor in given)
"""


def run(code: str, **environment: str) -> None:
    """Run code in a new process, because OpenMP reads its environment variables once."""
    done = run_fresh(PRELUDE + code, timeout_s=300, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start_helpers", [False, True])
def test_engine_threads_follow_cpu_affinity(start_helpers):
    run(
        f"""
torch.set_num_threads(1)
before = threads()
comm = pr.Communicator(["cpu"] * 3)
if {start_helpers}:
    reduce(comm, beside_torch=True, algorithm="fused")
    reduce(comm, algorithm="ring")
os.sched_setaffinity(0, {{{CORES[1]}}})
for algorithm in ("fused", "ring", "direct"):
    reduce(comm, algorithm=algorithm)
ranks = [os.sched_getaffinity(t) for t in sorted(threads() - before)][-2:]
assert ranks == [{{{CORES[1]}}}] * 2, ranks
os.sched_setaffinity(0, {set(CORES)})
for algorithm in ("fused", "ring"):
    reduce(comm, algorithm=algorithm)
assert any(os.sched_getaffinity(t) != {{{CORES[1]}}} for t in threads() - before)
"""
    )


@pytest.mark.slow
def test_helper_threads_start_despite_openmp_binding():
    run(
        """
torch.set_num_threads(2)
torch.ones(1 << 22).add_(1).sum()
assert len(os.sched_getaffinity(0)) == 1, "OpenMP did not bind the main thread"
comm = pr.Communicator(["cpu"] * 2)
before = threads()
reduce(comm, beside_torch=True, algorithm="fused")
assert len(threads() - before) >= 2, "no helper"
""",
        OMP_PROC_BIND="true",
        OMP_NUM_THREADS="2",
    )
