"""Do threads and waits follow the cores that a process may use now, and not when it began?"""

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
    """In a process of its own: masks are inherited, and OpenMP reads its variables once."""
    done = run_fresh(PRELUDE + code, timeout_s=300, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("has_helpers", [False, True])
def test_threads_stay_on_the_cores_that_are_left(has_helpers):
    run(
        f"""
torch.set_num_threads(1)
before = threads()
comm = pr.Communicator(["cpu"] * 3)
if {has_helpers}:
    reduce(comm, beside_torch=True, algorithm="fused")
    reduce(comm, algorithm="ring")
os.sched_setaffinity(0, {{{CORES[1]}}})
for algorithm in ("fused", "ring"):
    reduce(comm, algorithm=algorithm)
ranks = [os.sched_getaffinity(t) for t in sorted(threads() - before)][-2:]
assert ranks == [{{{CORES[1]}}}] * 2, ranks
os.sched_setaffinity(0, {set(CORES)})
for algorithm in ("fused", "ring"):
    reduce(comm, algorithm=algorithm)
assert any(os.sched_getaffinity(t) != {{{CORES[1]}}} for t in threads() - before)
"""
    )
