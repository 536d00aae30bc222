"""However a signal splits a step: is every sum right, or an error, on all ranks?"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bucketing_nets import (
    EACH,
    Explode,
    Net,
    armed,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    clear,
    nets_of,
    summed,
    vectors,
)
from ranks import Crew
from torch import nn

import pyringar as pr
from pyringar.comm.work import Work

K = 2
OURS = str(Path(pr.__file__).parent)


class Interrupt:
    """A signal's handler that raises at the n-th line of pyringar that runs in the block."""

    def __init__(self, n: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.n, self.left, self.error, self.at = n, n, error, ""
        # Kept: Python 3.11 crashes if it is gone after a finalizer that ran while a frame was made.
        self.trace = lambda frame, *_: self.count if self.is_ours(frame) else None

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self.before)

    @staticmethod
    def is_ours(frame) -> bool:
        return frame.f_code.co_filename.startswith(OURS)

    def count(self, frame, event, _):
        if event == "line" and not self.at:
            self.left -= 1
            if self.left < 0:
                self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error
        return self.count


def at_every_line(error: type[BaseException], *, at_least: int) -> Iterator[Interrupt]:
    """Interrupts at the first line of a block, at the second, and so on to its last."""
    for n in range(1000):
        interrupt = Interrupt(n, error)
        yield interrupt
        if not interrupt.at:
            break
    assert at_least < n < 1000


# -- at every line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(
    ("overlap", "replaces", "at_least"),
    [
        (True, False, 100),
        pytest.param(False, False, 100, marks=pytest.mark.slow),
        pytest.param(True, True, 150, marks=pytest.mark.slow),
    ],
)
def test_wait_may_be_called_again_wherever_it_was_interrupted(overlap, replaces, at_least, error):
    """Nobody has counted the gradients of parameters that were replaced: wait() finds them."""
    xs = vectors(1, world_size=K)
    expected = summed(nets_of(world_size=K), xs)
    num_errors = 0
    for interrupt in at_every_line(error, at_least=at_least):
        nets = nets_of(world_size=K)
        with pr.GradientBucketer(nets, overlap=overlap, **EACH) as bucketer:
            for net in nets if replaces else ():
                net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
            backward_one_by_one(nets, xs)
            with contextlib.suppress(error), interrupt:
                bucketer.wait()
            refused = ""
            try:
                bucketer.wait()
                assert_reduced(nets, expected)
            except pr.RingarError as error_:
                refused = str(error_)
            if refused:
                num_errors += 1
                assert replaces or not overlap, interrupt.at
                assert "clear the gradients of all ranks" in refused, interrupt.at
            even = interrupt.n % 2 == 0
            assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=even)
    # Only where it came while a bucket was handed over.
    assert num_errors < interrupt.n / 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_backward_that_was_interrupted_anywhere_can_be_cleared_and_run_again(error):
    xs = vectors(1, world_size=K)
    expected = summed(nets_of(world_size=K), xs)
    for interrupt in at_every_line(error, at_least=50):
        nets = nets_of(world_size=K)
        with pr.GradientBucketer(nets, **EACH) as bucketer:
            with interrupt, contextlib.suppress(error):
                backward_one_by_one(nets, xs)
            if interrupt.at:
                with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
                    bucketer.wait()
                clear(nets, set_to_none=interrupt.n % 2 == 0)
                backward_one_by_one(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_pass_that_is_interrupted_while_it_is_settled(error):
    """It came while nobody could be told: it is raised once backward() has raised its own."""
    xs = vectors(1, world_size=K)
    expected = summed(nets_of(world_size=K), xs)
    for interrupt in at_every_line(error, at_least=50):
        nets = nets_of(world_size=K)
        with pr.GradientBucketer(nets, **EACH) as bucketer:
            nets[0](xs[0]).backward()
            with interrupt:
                Explode.armed = 1
                with contextlib.suppress(error):  # it may come out of the inner one's end
                    with contextlib.suppress(ValueError):
                        nets[1](xs[1]).backward()
                    time.sleep(0)
                Explode.armed = None
            with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
                bucketer.wait()
            assert_next_step_is_right(
                nets, xs, bucketer, expected, set_to_none=interrupt.n % 2 == 0
            )


# -- real signals ----------------------------------------------------------------------------------


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
def test_signals_that_raise_in_wait():
    runs = False

    def stop(*_):
        if runs:  # Python 3.11 may call a handler late
            raise Stop

    ranks = [[nn.Parameter(torch.zeros(4)) for _ in range(200)] for _ in range(K)]
    before = signal.signal(signal.SIGALRM, stop)
    rng, num_interrupts, usual_s = random.Random(0), 0, 2e-3
    try:
        with pr.GradientBucketer(ranks, **EACH) as bucketer:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                for params in ranks:
                    (torch.stack(params) * torch.arange(4)).sum().backward()
                is_done, runs = False, True
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.5 * usual_s))
                    began = time.perf_counter()
                    bucketer.wait()
                    is_done = True
                    usual_s = time.perf_counter() - began
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Stop:
                    num_interrupts += 1
                runs = False
                if not is_done:
                    bucketer.wait()
                for param in (param for params in ranks for param in params):
                    assert torch.equal(param.grad, K * torch.arange(4.0))
                    param.grad = None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts > 0


@pytest.mark.parametrize("options", [{}, EACH])
def test_ctrl_c_while_torch_computes_leaves_no_pass_that_never_ends(options):
    """A signal that no Python code has seen yet when the first hook is called."""
    press = ctypes.PyDLL(None).PyErr_SetInterrupt
    press.argtypes, press.restype = [ctypes.py_object], None
    nets, xs = nets_of(world_size=K), vectors(1, world_size=K)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **options) as bucketer:
        handle = nets[1].late.register_hook(press)
        with pytest.raises(KeyboardInterrupt):
            backward_one_by_one(nets, xs)
        handle.remove()
        if options:  # it came out of a hook of ours
            with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
                bucketer.wait()
        for set_to_none in (True, False):
            clear(nets, set_to_none=set_to_none)
            bucketer.wait()
            backward_one_by_one(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


# -- wait() inside of wait() -----------------------------------------------------------------------


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_handler_that_calls_wait_while_it_waits(monkeypatch, is_caught):
    nets, xs = nets_of(world_size=K), vectors(1, world_size=K)
    expected = summed(nets, xs)
    plain, refused = Work.wait, []

    def handled(self, *arguments):
        if not refused:
            with pytest.raises(pr.RingarError, match="wait\\(\\) runs already") as caught:
                bucketer.wait()
            refused.append(caught.value)
            if not is_caught:
                raise caught.value
        return plain(self, *arguments)

    with pr.GradientBucketer(nets, **EACH) as bucketer:
        backward_one_by_one(nets, xs)
        monkeypatch.setattr(Work, "wait", handled)
        if not is_caught:
            with pytest.raises(pr.RingarError, match="runs already"):
                bucketer.wait()
        bucketer.wait()
        assert_reduced(nets, expected)
        assert len(refused) == 1


def test_a_handler_that_closes_the_bucketer_while_it_waits(monkeypatch):
    nets, xs = nets_of(world_size=K), vectors(1, world_size=K)
    plain = Work.wait
    with pr.GradientBucketer(nets, **EACH) as bucketer:

        def handled(self, *arguments):
            monkeypatch.setattr(Work, "wait", plain)
            bucketer.close()
            return plain(self, *arguments)

        backward_one_by_one(nets, xs)
        monkeypatch.setattr(Work, "wait", handled)
        for text in ("broken off while wait|closed", "closed in the middle of a step"):
            with pytest.raises(pr.RingarError, match=text):
                bucketer.wait()


# -- what still runs -------------------------------------------------------------------------------


def delayed(comm: pr.Communicator) -> pr.Communicator:
    comm._group.delay_rank(1, 0.5)
    return comm


def test_a_handler_that_fails_while_a_failed_pass_is_settled(monkeypatch):
    """An error of ours need not be the work's: that still writes to the gradients."""
    nets, xs, plain, seen = nets_of(world_size=K), vectors(1, world_size=K), Work.wait, []

    def handled(self, *arguments):
        monkeypatch.setattr(Work, "wait", plain)
        seen.append(self)
        raise pr.ArgumentError("a handler's")

    with (
        pr.Communicator(["cpu"] * K, algorithm="ring") as comm,
        pr.GradientBucketer(nets, comm=delayed(comm), **EACH),
    ):
        monkeypatch.setattr(Work, "wait", handled)
        monkeypatch.setattr(Explode, "armed", 1)
        with contextlib.suppress(pr.ArgumentError):  # it may come out of the inner one's end
            with contextlib.suppress(ValueError):
                backward_one_by_one(nets, xs)
            time.sleep(0)
        assert [work.is_completed() for work in seen] == [True]


def test_a_bucket_that_leaves_while_a_pass_of_another_thread_fails():
    ranks = [[nn.Parameter(torch.full((8,), 1.0 + rank)) for _ in range(3)] for rank in range(K)]
    with (
        pr.Communicator(["cpu"] * K, algorithm="ring") as comm,
        pr.GradientBucketer(ranks, comm=comm, **EACH) as bucketer,
    ):
        plain = comm.all_reduce_coalesced

        def fail() -> None:
            with armed(1):
                (Explode.apply(ranks[1][2], 1) * ranks[1][1]).sum().backward()

        def spy(*arguments, **options):
            comm.all_reduce_coalesced = plain
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join(60)
            return delayed(comm).all_reduce_coalesced(*arguments, **options)

        comm.all_reduce_coalesced = spy
        for params in ranks[::-1]:
            params[0].sum().backward()
        assert all(work.is_completed() for work in comm._in_flight)
        with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
            bucketer.wait()
        for param in (param for params in ranks for param in params if param.grad is not None):
            param.grad.zero_()
        for params in ranks:
            torch.stack(params).sum().backward()
        bucketer.wait()
        assert all(torch.equal(p.grad, torch.full((8,), 2.0)) for mine in ranks for p in mine)


# -- what counts as cleared ------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["no_sync", "clip", "clip and no_sync", "graph", "unused"])
def test_what_adds_to_or_scales_what_a_failed_pass_left_does_not_clear_it(how, set_to_none):
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EACH) as bucketer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a reference cycle
        with armed(1):
            backward_one_by_one(nets, xs)
        for _ in range(2):
            if "clip" in how:
                for net in nets:
                    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            if "no_sync" in how:
                with bucketer.no_sync():
                    backward_one_by_one(nets, xs)

            def go_on() -> None:
                if how == "unused":  # a pass that does not come to what was left
                    for net in nets:
                        net.early.sum().backward()
                else:
                    for net, x in zip(nets, xs, strict=True):
                        net(x).backward(create_graph=how == "graph")
                bucketer.wait()

            with pytest.raises(pr.RingarError, match="clear the gradients of all ranks"):
                go_on()
        clear(nets, set_to_none=set_to_none)
        with bucketer.no_sync():
            backward_one_by_one(nets, xs)
        assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=set_to_none)
        for net in nets:
            for param in net.parameters():
                assert not param._backward_hooks, "nothing is looked at any more"
    clear(nets, set_to_none=True)


# -- over processes --------------------------------------------------------------------------------


def test_two_threads_send_every_bucket_once():
    """While one bucket is handed over, another thread's pass completes the next ones."""
    comm = pr.ProcessCommunicator(dist.HashStore(), 0, 1)
    params = [nn.Parameter(torch.zeros(8)) for _ in range(8)]
    plain, sizes = comm.all_reduce_coalesced, []

    def spy(tensors, *arguments, **options):
        sizes.append(len(tensors))
        if len(sizes) == 1:
            thread = threading.Thread(target=lambda: torch.stack(params[:4]).sum().backward())
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        return plain(tensors, *arguments, **options)

    with comm, pr.GradientBucketer([params], comm=comm, **EACH) as bucketer:
        comm.all_reduce_coalesced = spy
        torch.stack(params[4:]).sum().backward()
        assert len(sizes) == len(bucketer.buckets) - 1, "all but the last, which is wait()'s"
        bucketer.wait()
        assert len(sizes) == len(bucketer.buckets)
        assert all(torch.equal(param.grad, torch.ones(8)) for param in params)


def interrupt_as_rank(rank, world_size, store, where, error, places):
    """Rank 0 is interrupted in its second step; both go on as the errors and docstrings say."""
    torch.set_num_threads(1)
    answers = []
    for n in places:
        net, said = Net(rank), []
        comm = pr.ProcessCommunicator(
            store, rank, world_size, name=f"{where}{n}", timeout=20.0, order="rank"
        )
        bucketer = pr.GradientBucketer([net], comm=comm, **EACH)
        try:
            for step in range(4):
                x = vectors(step, world_size=K)[rank]
                for is_last_try in (False, True):
                    net.zero_grad()
                    is_victim = rank == 0 and step == n % 2 and not is_last_try
                    try:
                        run_step(
                            net, bucketer, x, Interrupt(n, error) if is_victim else None, where
                        )
                        break
                    except pr.RingarError as refused:
                        said.append(str(refused))
                        if is_last_try:
                            raise
                said.append([param.grad.clone() for param in net.parameters()])
        except pr.RingarError:
            pass
        bucketer.close()
        comm.close()
        answers.append(said)
    return answers


def run_step(net, bucketer, x, interrupt, where):
    if interrupt is not None and where == "backward":
        with interrupt, contextlib.suppress(interrupt.error):
            net(x).backward()
    else:
        net(x).backward()
    if interrupt is not None and where == "wait":
        try:
            with interrupt:
                bucketer.wait()
        except interrupt.error:
            pass
        else:
            return
    bucketer.wait()


@pytest.mark.parametrize(
    ("where", "error", "places"),
    [
        ("wait", KeyboardInterrupt, range(0, 270, 9)),
        ("wait", TimeoutError, range(5, 270, 18)),
        ("backward", KeyboardInterrupt, range(0, 150, 11)),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_rank_loses_a_step_when_one_is_interrupted(where, error, places):
    expected = [
        summed([Net(rank) for rank in range(K)], vectors(step, world_size=K)) for step in range(4)
    ]
    pool = Crew(K)
    try:
        answers = pool.check(interrupt_as_rank, where, error, places)
    finally:
        pool.close()
    for n, *said in zip(places, *answers, strict=True):
        sums = [[grads for grads in mine if not isinstance(grads, str)] for mine in said]
        for mine in sums:
            for grads, want in zip(mine, expected, strict=False):
                assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True)), n
        is_left = any("has left the group" in text for text in said[0] if isinstance(text, str))
        assert is_left or all(len(mine) == 4 for mine in sums), (n, said)
