"""Failed steps in one process close the bucketer after its launched buckets have finished."""

import contextlib
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from bucketing_nets import (
    EARLY,
    Explode,
    armed,
    assert_closed,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    backward_together,
    clear,
    error_of,
    nets_of,
    summed,
    vectors,
)
from torch import nn

import pyringar as pr
from pyringar.comm.background_work import Work

K = 3
PACKAGE = str(Path(pr.__file__).parent)


def assert_new_bucketer_works(nets, xs, *, set_to_none: bool = True) -> None:
    clear(nets, set_to_none=set_to_none)
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        assert_next_step_is_right(nets, xs, bucketer, set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("victim", [0, K - 1])
@pytest.mark.parametrize("backward", [backward_together, backward_one_by_one])
def test_failed_backward_closes_bucketer(backward, victim, set_to_none):
    nets, xs = nets_of(), vectors(1)
    bucketer = pr.GradientBucketer(nets, **EARLY)
    backward(nets, vectors(2))
    bucketer.wait()
    clear(nets, set_to_none=set_to_none)
    with armed(victim):
        backward(nets, xs)
    assert_closed(bucketer, nets, "a backward pass failed")
    assert_new_bucketer_works(nets, xs, set_to_none=set_to_none)


@pytest.mark.parametrize("options", [{}, {"overlap": False}])
def test_failed_backward_without_launch_is_harmless(options):
    """If no bucket was launched, the next step with cleared gradients has the right result."""
    nets, xs = nets_of(), vectors(1)
    with pr.GradientBucketer(nets, **options) as bucketer:
        for set_to_none in (True, False, True):
            with armed(1):
                backward_one_by_one(nets, xs)
            assert_next_step_is_right(nets, xs, bucketer, set_to_none=set_to_none)


def slow_ring() -> pr.Communicator:
    comm = pr.Communicator(["cpu"] * 2, algorithm="ring")
    comm._group.delay_rank(1, 0.5)
    return comm


def works_of(comm: pr.Communicator) -> list[Work]:
    works, plain = [], comm.all_reduce_coalesced

    def recorded(*arguments, **options):
        works.append(plain(*arguments, **options))
        return works[-1]

    comm.all_reduce_coalesced = recorded
    return works


@pytest.mark.parametrize("how", ["failed backward", "close", "failed wait", "garbage"])
def test_failure_finishes_launched_buckets(how):
    nets, xs = nets_of(world_size=2), vectors(1, world_size=2)
    with slow_ring() as comm:
        works = works_of(comm)
        bucketer = pr.GradientBucketer(nets, comm=comm, **EARLY)
        if how == "failed backward":
            with armed(1):
                backward_one_by_one(nets, xs)
        else:
            backward_one_by_one(nets, xs)
        if how == "close":
            bucketer.close()
        if how == "failed wait":
            nets[0].zero_grad()
            with pytest.raises(pr.RingarError, match="call wait\\(\\) before clip_grad_norm_"):
                bucketer.wait()
        if how == "garbage":
            del bucketer
        assert [work.is_completed() for work in works] == [True] * (1 + (how != "failed backward"))


def test_failure_in_thread_finishes_bucket():
    """A backward pass fails in a thread while another thread launches a bucket."""
    ranks = [[nn.Parameter(torch.ones(8)) for _ in range(3)] for _ in range(2)]
    with slow_ring() as comm:
        works, plain = [], comm.all_reduce_coalesced

        def fail() -> None:
            with armed(0):
                (Explode.apply(ranks[0][1], 0) * ranks[0][2]).sum().backward()

        def launch(*arguments, **options):
            with ThreadPoolExecutor(1) as threads:
                threads.submit(fail).result(60)
            works.append(plain(*arguments, **options))
            return works[-1]

        bucketer = pr.GradientBucketer(ranks, comm=comm, **EARLY)
        ranks[0][0].sum().backward()
        comm.all_reduce_coalesced = launch
        ranks[1][0].sum().backward()
        assert [work.is_completed() for work in works] == [True]
        assert_closed(bucketer, [], "a backward pass failed")


@pytest.mark.parametrize("clears", [False, True])
def test_backward_after_launch_raises(clears):
    nets, xs = nets_of(), vectors(1)
    bucketer = pr.GradientBucketer(nets, **EARLY)
    backward_one_by_one(nets, xs)
    if clears:
        clear(nets)
    error = r"parameter 1 of rank 0 got a .*no_sync\(\)"
    with bucketer.no_sync(), pytest.raises(pr.RingarError, match=error):
        backward_one_by_one(nets, xs)
    with pytest.raises(pr.RingarError, match=error):
        backward_one_by_one(nets, xs)
    assert_closed(bucketer, nets, "a backward pass failed")
    assert_new_bucketer_works(nets, xs)


def test_wait_inside_backward_raises():
    nets, xs = nets_of(world_size=1), vectors(1, world_size=1)
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        errors = []
        handle = nets[0].early.register_hook(lambda _: errors.append(error_of(bucketer.wait)))
        backward_one_by_one(nets, xs)
        handle.remove()
        assert "a backward pass still runs" in errors[0][1]
        bucketer.wait()
        assert_reduced(nets, summed(nets, xs))


CHANGES = {
    "clear late": ({}, lambda net: net.zero_grad()),
    "clear early": (EARLY, lambda net: net.zero_grad()),
    "clear one bucket": ({"overlap": True}, lambda net: net.zero_grad()),
    "zero": (EARLY, lambda net: net.zero_grad(set_to_none=False)),
    "replace": (EARLY, lambda net: setattr(net.late, "grad", net.late.grad.clone())),
    "clip": (EARLY, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3)),
}


@pytest.mark.parametrize("rank", range(K))
@pytest.mark.parametrize(("options", "change"), CHANGES.values(), ids=CHANGES)
def test_changed_gradient_closes_bucketer(options, change, rank):
    nets, xs = nets_of(), vectors(1)
    bucketer = pr.GradientBucketer(nets, **options)
    backward_one_by_one(nets, xs)
    change(nets[rank])
    with pytest.raises(pr.RingarError, match=rf"of rank {rank} was.*wait\(\) before clip_grad"):
        bucketer.wait()
    assert_closed(bucketer, nets, "cleared")
    assert_new_bucketer_works(nets, xs)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th executed line of the package."""

    def __init__(self, n: int) -> None:
        self.left = n
        # Keep a reference: Python 3.11 crashes if a finalizer frees the function during a call.
        self.trace = lambda frame, *_: self.count if PACKAGE in frame.f_code.co_filename else None

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def count(self, frame, event, _):
        self.left -= event == "line"
        if event == "line" and self.left == -1:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.count


@pytest.mark.parametrize(
    ("where", "options", "victim", "num_lines"),
    [
        ("wait", {}, None, 70),
        ("wait", EARLY, None, 70),
        ("backward", EARLY, None, 30),
        ("backward", EARLY, 1, 30),  # the signal interrupts the wait for launched buckets
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_at_any_line_closes_bucketer(where, options, victim, num_lines):
    xs, num_closed, interrupt = vectors(1, world_size=2), 0, Interrupt(0)
    with pr.Communicator(["cpu"] * 2, order="rank") as comm:
        works = works_of(comm)
        for line in range(1000):
            nets = nets_of(world_size=2)
            bucketer, interrupt = pr.GradientBucketer(nets, comm=comm, **options), Interrupt(line)
            Explode.armed = victim
            if where == "wait":
                backward_one_by_one(nets, xs)
            with contextlib.suppress(KeyboardInterrupt, ValueError), interrupt:
                bucketer.wait() if where == "wait" else backward_one_by_one(nets, xs)
            Explode.armed = None
            if bucketer._closed:
                num_closed += 1
                assert all(work.is_completed() for work in works)
                assert_closed(bucketer, nets, "failed")
                assert_new_bucketer_works(nets, xs)
            else:
                bucketer.wait()
                assert_reduced(nets, summed(nets, xs))
                bucketer.close()
            if interrupt.left >= 0:
                break
    assert num_closed > num_lines - 10
    assert num_lines < line < 999


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_signals_in_wait_close_bucketer(kind):
    """The second signal arrives while wait() finishes launched buckets after the first signal."""
    handled = []

    def stop(*_) -> None:
        handled.append(1)
        signal.setitimer(signal.ITIMER_REAL, 0.1 if len(handled) == 1 else 0)
        raise kind

    nets, xs = nets_of(world_size=2), vectors(1, world_size=2)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with slow_ring() as comm:
            works = works_of(comm)
            bucketer = pr.GradientBucketer(nets, comm=comm)
            backward_one_by_one(nets, xs)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(kind):
                bucketer.wait()
            assert len(handled) == 2
            assert [work.is_completed() for work in works] == [True]
            assert_closed(bucketer, nets, kind.__name__)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", ["wait", "close"])
def test_signal_handler_may_wait_or_close(monkeypatch, method):
    nets, xs = nets_of(world_size=2), vectors(1, world_size=2)
    plain, errors = Work.wait, []
    bucketer = pr.GradientBucketer(nets, **EARLY)
    backward_one_by_one(nets, xs)

    def handled(self, *arguments):
        monkeypatch.setattr(Work, "wait", plain)
        if method == "close":
            bucketer.close()
        else:
            errors.append(error_of(bucketer.wait)[1])
        return plain(self, *arguments)

    monkeypatch.setattr(Work, "wait", handled)
    if method == "close":
        with pytest.raises(pr.RingarError, match=r"is closed: close\(\) was called"):
            bucketer.wait()
    else:
        bucketer.wait()
        assert "wait() runs already" in errors[0]
        assert_reduced(nets, summed(nets, xs))


def test_bucketer_survives_deletion_in_hook(monkeypatch):
    """The garbage collector may delete the bucketer at any line, also inside a hook."""
    nets = [[torch.ones(4, requires_grad=True) for _ in range(2)] for _ in range(2)]
    held = [pr.GradientBucketer(nets, **EARLY)]
    losses = [(a * b).sum() for a, b in nets]
    losses[0].backward()
    reduce = pr.Communicator.all_reduce_coalesced

    def drop_and_reduce(*args, **options):
        held.clear()
        return reduce(*args, **options)

    monkeypatch.setattr(pr.Communicator, "all_reduce_coalesced", drop_and_reduce)
    losses[1].backward()
    assert not held
