"""Calls in one process run on torch's OpenMP threads, unless these are not available."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from case_marks import mostly_slow
from oracle import DTYPES, assert_all_ranks, expected, inputs, limit_bytes
from programs import run_fresh

import pyringar as pr

ROOT = Path(__file__).resolve().parents[1]
RETRY_S = 40.0  # seconds of retries: on a busy machine torch's threads may miss a call
LARGE = 1 << 21  # elements per tensor: enough for a call to wake helper threads

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
pytestmark = pytest.mark.skipif(CORES < 2, reason="needs Linux and two cores")


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_torch_op() -> None:
    torch.ones(1 << 17).mul_(2)


THREAD_COUNT = (
    "#include <omp.h>\nnamespace at { int get_num_threads() { return omp_get_max_threads(); } }"
)
OPERATES = 'extern "C" void operate() {\n#pragma omp parallel\n  {}\n}'
FAKE_LIBRARIES = {
    "whole": f"{THREAD_COUNT}\n{OPERATES}",
    "two runtimes": f'{THREAD_COUNT}\n{OPERATES}\nextern "C" void __kmpc_fork_call() {{}}',
    "no runtime": "namespace at { int get_num_threads() { return 3; } }",
    "no count": f"#include <omp.h>\nint number() {{ return omp_get_max_threads(); }}\n{OPERATES}",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("name", FAKE_LIBRARIES)
def test_torch_threads_need_one_openmp_runtime(tmp_path, name):
    csrc, test = ROOT / "csrc", ROOT / "tests/cpp/team/team_test.cpp"
    library, program = tmp_path / "libtorch_cpu.so", tmp_path / "team_test"
    (tmp_path / "torch.cpp").write_text(FAKE_LIBRARIES[name])
    openmp = ["-fopenmp"] if name != "no runtime" else []
    shared = ["-shared", "-fPIC", *openmp, "-Wl,-soname,libtorch_cpu.so"]
    subprocess.run(["g++", *shared, tmp_path / "torch.cpp", "-o", library], check=True)
    sources = [test, csrc / "os/torch_team.cpp", csrc / "os/process.cpp"]
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{csrc}"]
    subprocess.run(["g++", *flags, *sources, "-ldl", "-o", program], check=True)
    command = [program, library, *(["alone"] if name != "whole" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_threads", mostly_slow([1, 2, 3, 5], 3))
def test_result_ignores_torch_thread_count(torch_threads, num_threads):
    torch_threads(num_threads)
    with pr.Communicator(["cpu"] * 3) as comm:
        for dtype in DTYPES:
            block = limit_bytes("fused_block") // dtype.itemsize
            for numel in (5 * block - 1, 8 * num_threads * block + 1):
                parts = inputs(numel, dtype, 3)
                wanted = expected(parts, "sum", "fused")
                for async_op in (False, True):
                    given = [part.clone() for part in parts]
                    run_torch_op()
                    work = comm.all_reduce(given, async_op=async_op)
                    if async_op:
                        work.wait()
                    assert_all_ranks(given, wanted, f"{dtype} {numel} {num_threads}")


def new_threads(comm: pr.Communicator, *, async_op: bool = False) -> int:
    tensors = [torch.ones(LARGE) for _ in range(2)]
    run_torch_op()
    before = threads()
    work = comm.all_reduce(tensors, async_op=async_op)
    if async_op:
        work.wait()
    return len(threads() - before)


def test_call_starts_no_new_thread(torch_threads):
    torch_threads(2)
    end = time.monotonic() + RETRY_S
    while time.monotonic() < end:
        with pr.Communicator(["cpu"] * 2) as comm:
            if new_threads(comm) == 0:
                return
        time.sleep(0.01)
    pytest.fail("every call started threads")


def start_ranks(comm: pr.Communicator, algorithm: str) -> int:
    parts = inputs(10_007, torch.float32, comm.world_size)
    given = [part.clone() for part in parts]
    run_torch_op()
    before = threads()
    comm.all_reduce(given, algorithm=algorithm)
    started = len(threads() - before)
    run_torch_op()
    assert_all_ranks(given, expected(parts, "sum", algorithm), algorithm)
    return started


def test_ranks_run_on_torch_threads(torch_threads):
    torch_threads(2)
    end = time.monotonic() + RETRY_S
    started = {2: 1}
    while started[2] and time.monotonic() < end:
        for k in (2, 3, 5):
            with pr.Communicator(["cpu"] * k) as comm:
                started[k] = start_ranks(comm, "ring")
    assert started == {2: 0, 3: 2, 5: 4}


@pytest.mark.parametrize("k", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_timeout_names_late_rank(torch_threads, k):
    torch_threads(2)
    with pr.Communicator(["cpu"] * k, timeout=0.3) as comm:
        comm._group.delay_rank(1, 1.5)
        run_torch_op()
        with pytest.raises(pr.CollectiveTimeout, match="for rank 1"):
            comm.all_reduce([torch.ones(100) for _ in range(k)], algorithm="ring")
        run_torch_op()


def test_async_call_starts_helper_threads(torch_threads):
    for count in (1, 2):
        torch_threads(count)
        with pr.Communicator(["cpu"] * 2) as comm:
            if count == 1:
                assert [new_threads(comm) for _ in range(3)] == [0, 0, 0]
            assert new_threads(comm, async_op=True) >= 2  # background and helper threads


def test_small_async_call_runs_in_caller():
    with pr.Communicator(["cpu"] * 2) as comm:
        tensors = [torch.full((1000,), rank + 1.0) for rank in range(2)]
        before = threads()
        work = comm.all_reduce(tensors, async_op=True)
        assert work.is_completed()
        assert work.finished_ns() > 0
        assert threads() == before
        assert all(bool((tensor == 3).all()) for tensor in tensors)
        comm._group.delay_rank(0, 30.0)
        first = comm.all_reduce(tensors, algorithm="ring", async_op=True)
        second = comm.all_reduce(tensors, "max", async_op=True)
        assert not second.is_completed()
        comm._group.end_delay()
        assert first.wait(30)
        assert second.wait(30)
        assert all(bool((tensor == 6).all()) for tensor in tensors)


def test_concurrent_calls_give_right_sums(torch_threads):
    torch_threads(2)
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        torch.set_num_threads(2)
        parts = inputs(300_001, torch.float32, 2, seed)
        wanted = expected(parts, "sum", "fused")
        with pr.Communicator(["cpu"] * 2) as comm:
            start.wait(30)
            for i in range(20):
                given = [part.clone() for part in parts]
                comm.all_reduce(given)
                assert_all_ranks(given, wanted, f"thread {seed}, call {i}")

    with ThreadPoolExecutor(4) as users:
        list(users.map(work, range(4)))


def test_call_in_openmp_region_is_right(torch_threads):
    torch_threads(2)
    run_torch_op()
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "GOMP_parallel"):
        pytest.skip("torch's OpenMP runtime is not a global symbol")
    comms = [pr.Communicator(["cpu"] * 2) for _ in range(2)]
    found: list[tuple[int, bool]] = []  # number of new threads, whether the sums are right

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def body(_: object) -> None:
        comm, before = comms[runtime.omp_get_thread_num()], threads()
        tensors = [torch.full((LARGE,), rank + 1.0) for rank in range(2)]
        comm.all_reduce(tensors)
        is_right = all(bool((tensor == 3).all()) for tensor in tensors)
        found.append((len(threads() - before), is_right))

    runtime.GOMP_parallel(body, None, 2, 0)
    assert found == [(0, True)] * 2
    for comm in comms:
        comm.close()


@pytest.mark.slow
def test_forked_child_gets_right_sums():
    done = run_fresh(
        """
import os, numpy, torch, pyringar as pr
def in_child(name):
    pid, code = os.fork(), 1
    if pid == 0:
        try:
            for numel in (1 << 18, 1 << 21):
                parts = [numpy.full(numel, rank + 1.0) for rank in range(2)]
                pr.allreduce([torch.from_numpy(part) for part in parts])
                assert all((part == 3).all() for part in parts)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name
torch.set_num_threads(2)
torch.ones(1 << 20).mul_(2)
in_child("before the engine was loaded")
pr.allreduce([torch.ones(1 << 21), torch.ones(1 << 21)])
in_child("after the engine was loaded")
""",
        timeout_s=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_torch_threads_keep_denormals():
    """Torch threads inherit flush-to-zero from their creator, but sums must keep denormals."""
    done = run_fresh(
        """
import torch, pyringar as pr
torch.set_num_threads(2)
assert torch.set_flush_denormal(True)
with pr.Communicator(["cpu"] * 2) as comm:
    for _ in range(20):
        tensors = [torch.full((1 << 20,), 70_000, dtype=torch.int32) for _ in range(2)]
        torch.ones(1 << 17).mul_(2)
        comm.all_reduce([tensor.view(torch.float32) for tensor in tensors])
        assert all((tensor == 140_000).all() for tensor in tensors)
""",
        timeout_s=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OMP_THREAD_LIMIT", "1"),
        ("OMP_THREAD_LIMIT", "2"),
        ("OMP_MAX_ACTIVE_LEVELS", "0"),
        ("OMP_DYNAMIC", "true"),
    ],
)
def test_openmp_limits_keep_sums_right(variable, value):
    done = run_fresh(
        """
import torch, pyringar as pr
torch.set_num_threads(4)
for k in (2, 4):
    with pr.Communicator(["cpu"] * k, timeout=20) as comm:
        for algorithm in ("fused", "ring") * 2:
            tensors = [torch.full((300_001,), rank + 1.0) for rank in range(k)]
            torch.ones(1 << 17).mul_(2)
            comm.all_reduce(tensors, algorithm=algorithm)
            assert all(bool((t == k * (k + 1) // 2).all()) for t in tensors), (algorithm, k)
""",
        timeout_s=60,
        **{variable: value},
    )
    assert done.returncode == 0, done.stdout + done.stderr
