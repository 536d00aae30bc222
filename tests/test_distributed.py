"""torch.distributed and DistributedDataParallel on the backend `ringar`."""

import functools
import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import distributed_cases
import distributed_training
import distributed_works
import pytest
import torch
import torch.distributed as dist
from case_marks import mostly_slow
from process_checks import error_of
from programs import run_fresh
from rank_processes import Died, Failed, run_cases, run_group
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pyringar.distributed
from pyringar.distributed.torch_works import Completer

ROOT = Path(__file__).resolve().parents[1]
IS_BACKEND_IN_PYTHON = torch.__version__.split(".")[:2] >= ["2", "14"]


@functools.cache
def verdicts(
    cases: str, size: int, backend: str = "ringar", debug: str = "", machines: str = ""
) -> list[Any]:
    env = {"TORCH_DISTRIBUTED_DEBUG": debug} if debug else None
    work = list(importlib.import_module(f"distributed_{cases}").CASES.items())
    return run_group(run_cases, size, work, backend=backend, env=env, machines=machines)


def check(results: list[Any], case: str) -> None:
    assert all(isinstance(verdict, dict) for verdict in results), results
    failures = [verdict[case] for verdict in results if verdict[case] is not None]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("size", mostly_slow([2, 3, 4], 2))
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives_have_promised_bits(case, size):
    check(verdicts("cases", size), case)


IN_DETAIL, BESIDE = (2, "ringar", "DETAIL"), (2, "cpu:ringar", "")


@pytest.mark.parametrize(
    ("size", "backend", "debug"),
    mostly_slow(
        [(2, "ringar", ""), (4, "ringar", ""), IN_DETAIL, BESIDE],
        (2, "ringar", ""),
        (4, "ringar", ""),
    ),
)
@pytest.mark.parametrize("case", distributed_training.CASES)
def test_training_matches_reference(case, size, backend, debug):
    check(verdicts("training", size, backend, debug), case)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_hook_works_with_gloo(size):
    case = distributed_training.data_parallel_hook
    results = run_group(run_cases, size, [("hook", case)], backend="gloo")
    check(results, "hook")


def compiled_calls(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0, async_op=True).wait()
    rows = [torch.zeros(3, dtype=torch.int16) for _ in range(2)]
    dist.all_gather(rows, (x + dist.get_rank()).to(torch.int16))
    return torch.stack(rows)


def compiled(rank: int, size: int) -> Any:
    program = torch.compile(compiled_calls, backend="eager")
    return program(torch.arange(3.0) + 10 * rank).tolist()


@pytest.mark.slow
def test_compiled_distributed_calls_run():
    assert run_group(compiled, 2, timeout_s=60, limit_s=120) == [[[0, 1, 2], [1, 2, 3]]] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", distributed_works.CASES)
def test_work_objects_finish_correctly(case, size):
    check(verdicts("works", size), case)


def threads_of(name: str) -> int:
    return sum(name in thread.name for thread in threading.enumerate())


def test_slow_callbacks_start_few_threads():
    completer = Completer("of test_few_threads")
    futures: list[Future[None]] = [Future() for _ in range(100)]
    for future in futures:
        future.add_done_callback(lambda _: time.sleep(0.005))
        completer.complete(future, lambda: None)
    torch.futures.wait_all(futures)
    assert threads_of("of test_few_threads") <= 12
    completer.close()
    assert threads_of("of test_few_threads") == 0


def test_future_after_close_is_done():
    completer = Completer("of test_future_after_the_end")
    completer.close()
    future: Future[None] = Future()
    completer.complete(future, lambda: None)
    assert future.done()


def test_power_sgd_matches_gloo():
    check(run_group(run_cases, 2, [("hook", distributed_works.power_sgd)]), "hook")


def test_killed_peer_fails_work_objects():
    survivor, dead = run_group(distributed_works.peer_killed, 2)
    assert dead == Died(-9)
    assert not isinstance(survivor, Failed), survivor
    answers, rows = survivor
    assert [is_success for is_success, _ in answers] == [False, False]
    assert answers[0][1] == "PeerLostError"
    assert rows == [[0.0] * distributed_works.N] * 2, "a failed call copies nothing"


def lose_peer(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait())


def test_future_error_names_peer():
    """tests/conformance/test_faults.py tests the other ways to wait."""
    (_, bases, text, seconds), other = run_group(lose_peer, 2)
    assert "PeerLostError" in text
    assert "RuntimeError" in bases
    assert "rank 1" in text
    assert seconds < 5, "the deadline is 30 s"
    assert other == Died(-9)


def data_parallel_peer(rank: int, size: int, what: str) -> Any:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)))
    if dist.get_backend() == "gloo":
        state = pyringar.distributed.HookState(timeout=2.0)
        ddp.register_comm_hook(state, pyringar.distributed.ddp_hook)
    for step in range(3):
        loss = ddp(torch.randn(4, 100)).sum()
        if rank == 1 and step == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4.5)
            return None
        error = error_of(loss.backward)
        if error[0] != "none":
            return error
    return "no error"


def hook_on_rank_0(rank: int, size: int) -> Any:
    ddp = DistributedDataParallel(nn.Linear(100, 10))
    if rank == 1:
        return None
    state = pyringar.distributed.HookState(timeout=1.0)
    ddp.register_comm_hook(state, pyringar.distributed.ddp_hook)
    return error_of(ddp(torch.randn(4, 100)).sum().backward)


def test_hook_on_one_rank_names_cause():
    (_, _, text, _), _ = run_group(hook_on_rank_0, 2, backend="gloo")
    assert "waited 1 s for ranks [1] to join in group ddp_hook" in text
    assert "did every rank register the hook before its first backward?" in text


@pytest.mark.parametrize("backend", ["ringar", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", mostly_slow(["killed", "sleeping"], "killed"))
def test_data_parallel_names_failed_rank(what, backend):
    survivor, other = run_group(data_parallel_peer, 2, what, backend=backend, timeout_s=2.0)
    assert not isinstance(survivor, (Failed, Died, str)), survivor
    kind, bases, text, seconds = survivor
    assert "RuntimeError" in bases
    assert ("PeerLostError" if what == "killed" else "CollectiveTimeout") in kind + text
    assert "rank 1" in text
    assert seconds < 5
    assert what == "sleeping" or other == Died(-9)


START = """
import sys
sys.path.insert(0, sys.argv[2])
import torch.distributed as dist
dist.init_process_group("ringar", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_BACKEND_IN_PYTHON, reason="torch looks for entry points from 2.14 on")
def test_installed_backend_needs_no_import(tmp_path):
    folder = tmp_path / "pyringar-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pyringar\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('entry-points."torch.distributed.backends"]\n')[1].split("\n\n")[0]
    entry = section.replace('"', "").strip()
    (folder / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{entry}\n")
    done = run_fresh(START, 0, tmp_path)
    assert done.stdout == "ringar\n", done
