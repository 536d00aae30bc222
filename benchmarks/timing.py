"""Timing loop: each round samples all candidates, so that machine drift affects all alike."""

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
Sampler = Callable[
    [], Sequence[float]
]  # a Sampler times calls; it returns one or several values of seconds per call

LEAST_ROUNDS = 5
MOST_REPEATS = 100  # most calls of a sample: a full launch queue (about 1000) blocks the host
SAMPLE_S = 5e-3  # duration of one sample on a device clock


@dataclass(frozen=True)
class Effort:
    """Limits of one case: maximum rounds, and seconds after which no new round begins."""

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
        """Return the median, minimum and quartiles of samples in seconds."""
        ordered = sorted(samples)
        q1_s = median_s = q3_s = ordered[0]
        if len(ordered) > 1:
            q1_s, median_s, q3_s = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(median_s, ordered[0], q1_s, q3_s, rounds)

    def divided_by(self, calls: float) -> Timing:
        """Return the timing per call, of samples that each timed `calls` calls."""
        seconds = (self.median_s, self.min_s, self.q1_s, self.q3_s)
        return Timing(*(s / calls for s in seconds), self.rounds)


def in_turns(
    samplers: Mapping[str, Sampler],
    effort: Effort,
    *,
    least_rounds: int = LEAST_ROUNDS,
) -> dict[str, Timing]:
    """Sample every candidate once per round, in random order.

    In a fixed order each candidate would always start with the caches of the same predecessor.

    Args:
        samplers: Function that takes one sample, by candidate.
        effort: Maximum rounds and seconds.
        least_rounds: Rounds that run even if they take longer than the seconds of `effort`.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    draw, order = random.Random(0), list(samplers)
    begin, rounds = time.perf_counter(), 0
    while rounds < effort.rounds:
        if time.perf_counter() - begin > effort.budget_s and rounds >= least_rounds:
            break
        draw.shuffle(order)
        for name in order:
            samples[name] += samplers[name]()
        rounds += 1
    return {name: Timing.of(seconds, rounds) for name, seconds in samples.items()}


def host_s(call: Call, repeats: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def after_operation(call: Call, prepare: Call = lambda: None) -> Sampler:
    """Return a sampler of single calls, each right after a small torch operation.

    This is the state in training: torch's OpenMP threads spin for milliseconds after an operation,
    and the operation has replaced a part of the caches.

    Args:
        call: The timed call.
        prepare: Runs before the operation, untimed.
    """
    operand = torch.zeros(2**16)  # elements: enough that torch uses several threads
    prepare()
    call()

    def sample() -> Sequence[float]:
        prepare()
        operand.mul_(1)
        return [host_s(call)]

    return sample


class DeviceClock:
    """The clocks of one device. On the CPU, all of them are the host clock."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def device_s(self, call: Call, repeats: int) -> float:
        """Return the seconds per call between two CUDA events around `repeats` calls."""
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
        """Return the median seconds from a call to the end of its work on the stream."""

        def finish() -> None:
            call()
            self.synchronize()

        return statistics.median(host_s(finish) for _ in range(repeats))

    def enqueue_s(self, call: Call, repeats: int) -> float:
        """Return the host seconds until a call returns; its kernels may still run."""
        self.synchronize()
        seconds = host_s(call, repeats)
        self.synchronize()
        return seconds

    def sampler(self, call: Call, clock: str = "device") -> Sampler:
        """Return a sampler of several calls, which together take about 5 ms.

        Args:
            call: The timed call.
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
    """Return a function that cycles through the calls, so that their data are not cached."""
    cycle = itertools.cycle(calls)
    return lambda: next(cycle)()


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of torch threads inside the block; None keeps the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
