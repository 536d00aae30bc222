"""The only clock of the benchmarks: candidates take turns, so that drift hits all alike."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["SETTLE_S", "Timing", "interleaved", "torch_threads", "turns"]

_Candidate = TypeVar("_Candidate")

SETTLE_S = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over all rounds: the median, the quartiles and the ends."""

    median_s: float
    min_s: float
    q1_s: float
    q3_s: float
    max_s: float
    rounds: int
    calls_per_round: int

    @classmethod
    def of(cls, samples: Iterable[float], calls_per_round: int = 1) -> Timing:
        """What samples of seconds per call say."""
        ordered = sorted(samples)
        q1_s, median_s, q3_s = (
            statistics.quantiles(ordered, n=4, method="inclusive")
            if len(ordered) > 1
            else ordered * 3
        )
        return cls(median_s, ordered[0], q1_s, q3_s, ordered[-1], len(ordered), calls_per_round)

    def of_each(self, calls: int) -> Timing:
        """The timing of one of the calls that were timed together."""
        seconds = (self.median_s, self.min_s, self.q1_s, self.q3_s, self.max_s)
        return Timing(*(s / calls for s in seconds), self.rounds, self.calls_per_round * calls)

    def spread(self, unit: str) -> dict[str, float]:
        """Median, quartiles and ends as the fields of a row; ``unit`` is ``us`` or ``ms``."""
        scale = {"us": 1e6, "ms": 1e3}[unit]
        names = ("median", "min", "q1", "q3", "max")
        return {f"{name}_{unit}": getattr(self, f"{name}_s") * scale for name in names}


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many threads of torch's own while the block runs; as many as there are for None."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def turns(candidates: Iterable[_Candidate], rounds: int) -> Iterator[list[_Candidate]]:
    """The order of every round: drawn anew, and the same draws in every process.

    Whoever always came after the same one would always find the caches as that one leaves them.
    """
    draw = random.Random(0)
    order = list(candidates)
    for _ in range(rounds):
        draw.shuffle(order)
        yield list(order)


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 31,
    round_s: float = 2e-3,
    settle_s: float = SETTLE_S,
    budget_s: float = 4.0,
) -> dict[str, Timing]:
    """Time functions against each other in one run.

    Every round calls each candidate once, a call being as many repetitions as fill ``round_s``.
    Before each, the process sleeps for ``settle_s`` and the candidate warms up: OpenMP's threads
    spin for milliseconds after the last parallel loop, and would otherwise take a core from whoever
    comes next.

    Args:
        candidates: Name to function without arguments.
        rounds: Most rounds that count; fewer, but at least 5, when they outlast ``budget_s``.
        round_s: Shortest time to measure at once.
        settle_s: Sleep before every candidate's turn.
        budget_s: Time after which no further round begins.
    """
    repeats = {name: _repeats(function, round_s) for name, function in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for round_number, names in enumerate(turns(candidates, rounds)):
        if round_number >= 5 and time.perf_counter() - start > budget_s:
            break
        for name in names:
            time.sleep(settle_s)
            _time(candidates[name], 1 + repeats[name] // 4)
            samples[name].append(_time(candidates[name], repeats[name]))
    return {name: Timing.of(samples[name], repeats[name]) for name in candidates}


def _time(function: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def _repeats(function: Callable[[], object], round_s: float) -> int:
    _time(function, 2)
    return max(1, round(round_s / max(_time(function, 2), 1e-8)))
