"""Time candidates against each other: they take turns, so that drift hits all of them alike."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")
Call = Callable[[], object]
Measure = Callable[[Call, int], float]  # seconds per call of so many calls in a row

LEAST_ROUNDS = 5
ROTATED_BYTES = 256 * 2**20  # of all ranks together; the largest L2 has a quarter of it
MOST_REPEATS = 100  # a thousand launches fill a device's queue, and the host would wait


@dataclass(frozen=True)
class Timing:
    """Seconds per call over all rounds: the median, the quartiles and the ends."""

    median_s: float
    min_s: float
    q1_s: float
    q3_s: float
    max_s: float
    rounds: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Timing:
        """Summarize samples of seconds."""
        ordered = sorted(samples)
        q1_s, median_s, q3_s = (
            statistics.quantiles(ordered, n=4, method="inclusive")
            if len(ordered) > 1
            else ordered * 3
        )
        return cls(median_s, ordered[0], q1_s, q3_s, ordered[-1], len(ordered))

    def of_each(self, calls: int) -> Timing:
        """Return the timing of one of the calls that were timed together."""
        seconds = (self.median_s, self.min_s, self.q1_s, self.q3_s, self.max_s)
        return Timing(*(s / calls for s in seconds), self.rounds)


# -- taking turns ----------------------------------------------------------------------------------


def turns(candidates: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """Yield the order of every round: drawn anew, with the same draws in every process.

    A candidate that always followed the same other one would always find the caches as that one
    leaves them.
    """
    draw = random.Random(0)
    order = list(candidates)
    for _ in range(rounds):
        draw.shuffle(order)
        yield list(order)


def in_turns(
    candidates: Mapping[K, Callable[[], T]],
    *,
    rounds: int,
    budget_s: float,
    least_rounds: int = LEAST_ROUNDS,
    most_s: float = float("inf"),
    agree: Callable[[float], float] = lambda spent_s: spent_s,
    look: Callable[[Mapping[K, list[T]]], object] = lambda samples: None,
) -> dict[K, list[T]]:
    """Call every candidate once a round, and collect what each returns.

    Args:
        candidates: Name to a function that takes one sample.
        rounds: Most rounds.
        budget_s: Seconds after which no round begins, once there were ``least_rounds``.
        least_rounds: Rounds that run even when they outlast ``budget_s``.
        most_s: Seconds after which no round begins at all.
        agree: Maps the seconds spent to those that all ranks stop by.
        look: Is shown all samples after each one; its time is nobody's sample.
    """
    samples: dict[K, list[T]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for number, names in enumerate(turns(candidates, rounds)):
        spent_s = agree(time.perf_counter() - start)
        if spent_s > budget_s and (number >= least_rounds or spent_s > most_s):
            break
        for name in names:
            samples[name].append(candidates[name]())
            look(samples)
    return samples


def host_s(function: Call, repeats: int) -> float:
    """Return the seconds per call on the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def after_operations(
    candidates: Mapping[str, Call], *, rounds: int, budget_s: float
) -> dict[str, Timing]:
    """Time single calls, each just after a small operation of torch's on all its threads.

    That is how calls come in training. Its OpenMP threads then spin for milliseconds, whoever wants
    their cores; and no call finds the caches as one of its own has left them.

    Args:
        candidates: Name to function without arguments, each with buffers of its own.
        rounds: Most rounds; fewer, but at least 5, when they outlast ``budget_s``.
        budget_s: Seconds after which no further round begins.
    """
    operand = torch.zeros(2**16)  # twice what torch gives a single thread at most

    def sampler(function: Call) -> Callable[[], float]:
        function()

        def sample() -> float:
            operand.mul_(1)
            return host_s(function, 1)

        return sample

    samplers = {name: sampler(function) for name, function in candidates.items()}
    samples = in_turns(samplers, rounds=rounds, budget_s=budget_s)
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


def interleaved(
    candidates: Mapping[str, Call],
    measure: Measure,
    *,
    rounds: int,
    budget_s: float,
    round_s: float,
    most_repeats: int,
) -> dict[str, Timing]:
    """Time functions against each other; one sample is as many calls as fill ``round_s``.

    Args:
        candidates: Name to function without arguments.
        measure: One of a `Clock`.
        rounds: Most rounds; fewer, but at least 5, when they outlast ``budget_s``.
        budget_s: Seconds after which no further round begins.
        round_s: Shortest time to measure at once.
        most_repeats: Most calls of one sample.
    """

    def sampler(function: Call) -> Callable[[], float]:
        measure(function, 2)
        repeats = max(1, round(round_s / max(measure(function, 2), 1e-8)))
        repeats = min(repeats, most_repeats)

        def sample() -> float:
            measure(function, 1 + repeats // 4)
            return measure(function, repeats)

        return sample

    samplers = {name: sampler(function) for name, function in candidates.items()}
    samples = in_turns(samplers, rounds=rounds, budget_s=budget_s)
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


# -- clocks of a device ----------------------------------------------------------------------------


class Clock:
    """The clocks of one device. On the CPU all of them are the host's."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_cuda = device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def device_s(self, function: Call, repeats: int) -> float:
        """Return the seconds per call between two events on the stream."""
        if not self.is_cuda:
            return host_s(function, repeats)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def done_s(self, function: Call, repeats: int) -> float:
        """Return the seconds from a call to its end on the device: the median of these calls."""

        def call() -> None:
            function()
            self.synchronize()

        return statistics.median(host_s(call, 1) for _ in range(repeats))

    def enqueue_s(self, function: Call, repeats: int) -> float:
        """Return the seconds per call on the host, while the device goes on by itself."""
        self.synchronize()
        seconds = host_s(function, repeats)
        self.synchronize()
        return seconds

    def interleaved(
        self, candidates: Mapping[str, Call], clock: str = "device", *, rounds: int, budget_s: float
    ) -> dict[str, Timing]:
        """Time functions on one of these clocks: ``device``, ``done`` or ``enqueue``."""
        return interleaved(
            candidates,
            getattr(self, f"{clock}_s"),
            rounds=rounds,
            budget_s=budget_s,
            round_s=5e-3,
            most_repeats=MOST_REPEATS,
        )


def rotating(calls: Iterable[Call]) -> Call:
    """Return a function that makes one of these calls after the other, so that no cache helps."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Give torch so many threads while the block runs; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
