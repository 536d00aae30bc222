"""Do ranks that are threads end, and say why, if programs poll, start threads, or break things?"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import programs, run_programs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr


def begin() -> int:
    dist.init_process_group()
    return dist.get_rank()


# -- asking again and again ------------------------------------------------------------------------


def asks_for_a_call() -> None:
    if begin() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()


def asks_the_store() -> None:
    if begin() == 0:
        store = dist.distributed_c10d._get_default_store()
        while not store.check(["flag"]):
            time.sleep(0.01)


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (asks_for_a_call, pr.PeerLostError, "which has ended"),
        (asks_the_store, pr.DeadlockError, "what nobody will do"),
    ],
)
def test_a_rank_that_asks_in_vain_is_told_after_the_timeout(program, kind, text, parallel):
    began_s = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        pr.launch(program, 2, timeout=0.5, parallel=parallel)
    assert "asks" in str(caught.value)
    assert 0.4 < time.monotonic() - began_s < 5


def test_a_wait_with_a_limit_ends_beside_one_that_asks():
    def program() -> str:
        rank = begin()
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            with pytest.raises(pr.CollectiveTimeout):
                store.wait(["never"], timedelta(seconds=0.2))
            store.set("go", "on")
        while not store.check(["go"]):
            pass
        return "done"

    assert pr.launch(program, 2) == ["done"] * 2


def test_limits_that_are_tried_again_add_up():
    def program() -> int:
        begin()
        work, tries = dist.barrier(async_op=True), 0
        while True:
            try:
                work.wait(timedelta(seconds=0.1))
            except pr.CollectiveTimeout:
                tries += 1
            else:
                return tries

    fault = pr.Fault("late", rank=1, call=1, late_s=0.55)
    assert pr.launch(program, 2, faults=[fault]) == [5, 0]


def test_ranks_that_all_ask_get_what_a_late_one_brings():
    def program() -> bool:
        begin()
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        return True

    fault = pr.Fault("late", rank=1, call=1, late_s=0.3)
    assert pr.launch(program, 3, faults=[fault]) == [True] * 3


# -- threads that a rank starts --------------------------------------------------------------------


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_thread_that_a_rank_waits_for_leaves_the_ranks_state_alone():
    def program(calls: bool) -> list[Any]:
        rank = begin()
        if rank == 0:
            torch.set_default_dtype(torch.float64)
        found = []
        for _ in range(4):
            found.append(torch.rand(1).item())
            if calls:
                in_thread(dist.barrier)
        return [*found, torch.ones(1).dtype]

    alone = pr.launch(program, 3, args=(False,))
    for seed in range(8):
        assert pr.launch(program, 3, args=(True,), seed=seed) == alone


def test_a_thread_that_calls_beside_its_rank_changes_no_random_number():
    def program() -> tuple[float, ...]:
        rank = begin()
        torch.manual_seed(rank)
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        found = [torch.rand(1).item() for _ in range(200)]
        thread.join()
        found += [torch.rand(1).item() for _ in range(3)]
        dist.barrier()
        return tuple(found)

    assert len({tuple(pr.launch(program, 3)) for _ in range(10)}) == 1


def test_a_checkpoint_in_the_background_leaves_training_alone(tmp_path):
    def program(saves: bool) -> bytes:
        rank = begin()
        group = dist.new_group([0, 1, 2])
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
        torch.manual_seed(rank + 1)
        optimizer, saved = torch.optim.SGD(net.parameters(), 0.1), None
        for step in range(12):
            if saves and step == 3:
                state = {"whole": torch.ones(3), f"of {rank}": torch.ones(3) * rank}
                saved = dcp.async_save(state, process_group=group, checkpoint_id=tmp_path)
            optimizer.zero_grad()
            net(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        if saved is not None:
            saved.result()
        return b"".join(p.detach().numpy().tobytes() for p in net.parameters())

    alone = pr.launch(program, 3, args=(False,))
    for seed in range(3):
        assert pr.launch(program, 3, args=(True,), seed=seed) == alone
    loaded = {"whole": torch.zeros(3), **{f"of {rank}": torch.zeros(3) for rank in range(3)}}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert [loaded[f"of {rank}"][0].item() for rank in range(3)] == [0.0, 1.0, 2.0]


def test_a_thread_that_waits_in_vain_is_told():
    """In the thread: its rank hears of it as the program has it."""
    told: list[str] = []

    def program() -> None:
        if begin() == 0:

            def call() -> None:
                with pytest.raises(pr.PeerLostError, match="rank 1, which has ended"):
                    dist.barrier()
                told.append("told")

            in_thread(call)

    pr.launch(program, 2, timeout=5)
    assert told == ["told"]


LEFT = """
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist, pyringar as pr
def program():
    dist.init_process_group()
    if dist.get_rank() == 0:
        ThreadPoolExecutor(1).submit(dist.barrier)
pr.launch(program, 2)
print("end")
"""


def test_a_thread_that_a_program_has_left_waiting_lets_the_interpreter_end():
    (done,) = run_programs(LEFT, [], timeout_s=30)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_pool_of_threads_may_call():
    def program() -> float:
        begin()
        with ThreadPoolExecutor(2) as pool:
            mine = torch.ones(2)
            pool.submit(dist.all_reduce, mine).result()
        return float(mine[0])

    assert pr.launch(program, 3) == [3.0] * 3


# -- callbacks and exceptions ----------------------------------------------------------------------


def test_a_callback_may_wait_for_another_future():
    def program() -> float:
        begin()
        first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        second = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        return float(first.then(lambda f: second.wait()[0] + f.value()[0]).wait()[0])

    for seed in range(4):
        assert pr.launch(program, 2, seed=seed, timeout=5) == [4.0] * 2


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_what_a_callback_raises_is_the_ranks(kind):
    def program() -> None:
        rank = begin()

        def callback(_: Any) -> None:
            if rank == 1:
                raise kind(4)

        dist.all_reduce(torch.ones(2), async_op=True).get_future().then(callback).wait()
        dist.barrier()

    began_s = time.monotonic()
    with pytest.raises(kind if kind is not ValueError else Exception, match="4"):
        pr.launch(program, 3, timeout=5)
    assert time.monotonic() - began_s < 3
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NeedyError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    "make",
    [
        NoTextError,
        lambda: NeedyError(1, 2),
        lambda: ValueError("x" * 10**6),
        StopIteration,
        GeneratorExit,
        lambda: SystemExit(3),
        KeyboardInterrupt,
    ],
    ids=["no text", "two arguments", "long", "stop", "generator", "exit", "interrupt"],
)
def test_any_exception_is_raised_as_it_is(make):
    error = make()
    heard: list[int] = []

    def program() -> None:
        if begin() == 1:
            raise error
        try:
            dist.barrier()
        except pr.PeerLostError as told:
            heard.append(len(str(told)))
            raise

    with pytest.raises(type(error)) as caught:
        pr.launch(program, 3)
    assert caught.value is error
    assert all(length < 3000 for length in heard)


def test_a_rank_that_catches_everything_is_ended():
    def program() -> None:
        rank = begin()
        if rank == 1:
            raise KeyError("gone")
        while True:
            with contextlib.suppress(Exception):
                dist.barrier()

    began_s = time.monotonic()
    with pytest.raises(KeyError):
        pr.launch(program, 3, timeout=0.5)
    assert time.monotonic() - began_s < 8
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_a_dead_rank_calls_nothing_more():
    def program() -> str:
        begin()
        try:
            dist.barrier()
            dist.barrier()
        except pr.PeerLostError:
            return "lost"
        finally:
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(1))
        return "fine"

    fault = pr.Fault("dies", rank=1, call=2)
    assert pr.launch(program, 3, faults=[fault]) == ["lost", None, "lost"]


def test_a_destroyed_group_is_refused():
    def program() -> None:
        begin()
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        group.allreduce([torch.ones(1)])

    with pytest.raises(pr.RingarError, match="was destroyed"):
        pr.launch(program, 2)


def test_slow_programs_in_which_nobody_waits_are_left_alone():
    assert pr.launch(lambda: time.sleep(0.5) or 1, 3, timeout=0.2) == [1] * 3


# -- Ctrl-C ----------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist, pyringar as pr
begun, ended = [], []
def program():
    begun.append(os.environ["RANK"])
    if len(begun) == 1:
        print("runs", flush=True)
    try:
        while True:
            sum(range(1000))
    finally:
        ended.append(os.environ["RANK"])
try:
    pr.launch(program, 3)
except KeyboardInterrupt:
    print("interrupted", begun == ended, len(begun), threading.active_count())
"""


def test_ctrl_c_begins_no_rank():
    with programs(INTERRUPTED, []) as (program,):
        assert program.stdout.readline() == "runs\n"
        time.sleep(0.2)
        os.kill(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=20)
    assert out == "interrupted True 1 1\n", err


# -- tensors that are parts of each other ----------------------------------------------------------


def test_tensors_may_be_given_and_taken():
    def program() -> list[list[float]]:
        rank = begin()
        mine = torch.full((1,), float(rank))
        every = [mine, torch.zeros(1), torch.zeros(1)]
        dist.all_gather(every, mine)
        own = torch.full((1,), float(rank))
        at_root = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
        at_root[0] = own
        dist.gather(own, at_root if rank == 1 else None, dst=1)
        whole = torch.full((3,), float(rank))
        dist.all_gather_into_tensor(whole, whole[:1])
        found = [[t.item() for t in every], whole.tolist()]
        return [*found, [t.item() for t in at_root]] if rank == 1 else found

    for rank, found in enumerate(pr.launch(program, 3)):
        assert found == [[0.0, 1.0, 2.0]] * (3 if rank == 1 else 2)


def test_a_list_that_is_too_short_is_refused_by_name():
    def program() -> None:
        rank = begin()
        dist.scatter(torch.ones(1), [torch.ones(1)] if rank == 0 else None)

    with pytest.raises(ValueError, match="scatter"):
        pr.launch(program, 2)


def test_an_expanded_tensor_to_receive_into_is_the_receivers_mistake():
    def program() -> None:
        if begin() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(1).expand(4), 0)

    with pytest.raises(pr.ArgumentError, match="overlaps itself") as caught:
        pr.launch(program, 2)
    if sys.version_info >= (3, 11):
        assert "raised by rank 1 of 2" in caught.value.__notes__[0]


# -- the process -----------------------------------------------------------------------------------


def test_filters_of_warnings_are_the_ranks():
    def program() -> str:
        if begin() == 0:
            warnings.simplefilter("error", UserWarning)
        dist.barrier()
        try:
            warnings.warn("look", UserWarning, stacklevel=1)
        except UserWarning:
            return "raised"
        return "shown"

    before = list(warnings.filters)
    for seed in range(3):
        with pytest.warns(UserWarning, match="look"):
            assert pr.launch(program, 2, seed=seed) == ["raised", "shown"]
    assert list(warnings.filters) == before


def test_processes_that_a_rank_starts_have_its_environment():
    def program() -> str:
        rank = begin()
        os.environ["PYRINGAR_NEW"] = f"of {rank}"
        dist.barrier()
        code = "import os; print(os.environ['RANK'], os.environ['PYRINGAR_NEW'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return done.stdout.strip()

    assert pr.launch(program, 2) == ["0 of 0", "1 of 1"]
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"PYRINGAR_NEW") is None, "also where C looks"


def test_an_operator_that_two_ranks_define_is_refused():
    """Torch would crash."""

    def program() -> None:
        begin()

        @torch.library.custom_op("pyringar_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        dist.barrier()

    with pytest.raises(pr.UnsupportedError, match="pyringar_test::twice is defined by rank"):
        pr.launch(program, 2)


def test_anomaly_mode_is_the_ranks():
    def program() -> bool:
        begin()
        with torch.autograd.set_detect_anomaly(True):
            dist.barrier()
        dist.barrier()
        return torch.is_anomaly_enabled()

    for seed in range(3):
        assert pr.launch(program, 3, seed=seed) == [False] * 3
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("name", ["missing/t.json", ""], ids=["no folder", "a folder"])
def test_a_trace_that_cannot_be_written_is_refused_at_once(name, tmp_path):
    with pytest.raises(pr.ArgumentError, match="expected a file in a folder that exists"):
        pr.launch(lambda: pytest.fail("it ran"), 2, trace=tmp_path / name)
