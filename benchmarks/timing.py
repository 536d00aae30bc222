"""The timing loop: candidates take turns, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Sampler = Callable[[], Sequence[float]]  # takes one sample: the seconds of one call or of several

LEAST_ROUNDS = 5
MOST_REPEATS = 100  # a thousand launches fill a device's queue, and the host would wait
SAMPLE_S = 5e-3  # time that one sample on a device's clock should take


@dataclass(frozen=True)
class Effort:
    """Limits of one case: the most rounds, and the seconds after which no round begins."""

    rounds: int
    budget_s: float


@dataclass(frozen=True)
class Timing:
    """Seconds per call over all rounds: the median, the minimum and the quartiles."""

    median_s: float
    min_s: float
    q1_s: float
    q3_s: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float], rounds: int) -> Timing:
        """Summarize samples of seconds."""
        ordered = sorted(samples)
        q1_s = median_s = q3_s = ordered[0]
        if len(ordered) > 1:
            q1_s, median_s, q3_s = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(median_s, ordered[0], q1_s, q3_s, rounds)

    def divided_by(self, calls: float) -> Timing:
        """Return the timing of one of several calls that were timed together."""
        seconds = (self.median_s, self.min_s, self.q1_s, self.q3_s)
        return Timing(*(s / calls for s in seconds), self.rounds)


def in_turns(
    samplers: Mapping[str, Sampler],
    effort: Effort,
    *,
    least_rounds: int = LEAST_ROUNDS,
    agree: Callable[[float], float] = lambda spent_s: spent_s,
    reduce: Callable[[Sequence[float]], Sequence[float]] = lambda samples: samples,
) -> dict[str, Timing]:
    """Take a sample of every candidate once per round.

    The order of a round is drawn anew, with the same draws in every process: a candidate that
    always followed the same other one would always find the caches as that one leaves them.

    Args:
        samplers: Takes one sample, by candidate.
        effort: The most rounds and seconds.
        least_rounds: Rounds that run even when they outlast the seconds.
        agree: Maps the seconds spent here to those by which all ranks stop.
        reduce: Maps the samples of this rank to those of the slowest rank.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    draw, order = random.Random(0), list(samplers)
    begin, rounds = time.perf_counter(), 0
    while rounds < effort.rounds:
        if agree(time.perf_counter() - begin) > effort.budget_s and rounds >= least_rounds:
            break
        draw.shuffle(order)
        for name in order:
            samples[name] += samplers[name]()
        rounds += 1
    return {name: Timing.of(reduce(seconds), rounds) for name, seconds in samples.items()}


def host_s(call: Call, repeats: int = 1) -> float:
    """Return the seconds per call on the host's clock."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def after_operation(call: Call, prepare: Call = lambda: None) -> Sampler:
    """Return a sampler of single calls, each just after a small operation of torch.

    Calls come like this in training: the OpenMP threads of torch spin for milliseconds after an
    operation, and no call finds the caches as its own last call left them.

    Args:
        call: What is timed.
        prepare: Runs before the operation, untimed.
    """
    operand = torch.zeros(2**16)  # twice what torch gives to a single thread
    prepare()
    call()

    def sample() -> Sequence[float]:
        prepare()
        operand.mul_(1)
        return [host_s(call)]

    return sample


class Clock:
    """The clocks of one device. On the CPU all of them are the host's."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the current stream has finished."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def device_s(self, call: Call, repeats: int) -> float:
        """Return the seconds per call between two events on the stream."""
        if not self.is_cuda:
            return host_s(call, repeats)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def done_s(self, call: Call, repeats: int) -> float:
        """Return the median seconds from a call until the stream has finished."""

        def finish() -> None:
            call()
            self.synchronize()

        return statistics.median(host_s(finish) for _ in range(repeats))

    def enqueue_s(self, call: Call, repeats: int) -> float:
        """Return the seconds until a call has returned; the device may still be at work."""
        self.synchronize()
        seconds = host_s(call, repeats)
        self.synchronize()
        return seconds

    def sampler(self, call: Call, clock: str = "device") -> Sampler:
        """Return a sampler of as many calls as fill some milliseconds.

        Args:
            call: What is timed.
            clock: ``device``, ``done`` or ``enqueue``.
        """
        measure = {"device": self.device_s, "done": self.done_s, "enqueue": self.enqueue_s}[clock]
        measure(call, 2)
        repeats = max(1, round(SAMPLE_S / max(measure(call, 2), 1e-8)))
        repeats = min(repeats, MOST_REPEATS)

        def sample() -> Sequence[float]:
            measure(call, 1 + repeats // 4)
            return [measure(call, repeats)]

        return sample


def rotating(calls: Iterable[Call]) -> Call:
    """Return a function that makes one call after the other, so that no cache helps."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads inside the block; None keeps it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
