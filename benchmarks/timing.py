"""The only clock of the benchmarks: candidates take turns, so that drift hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Timing", "interleaved"]


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over all rounds."""

    median_s: float
    min_s: float
    p95_s: float
    rounds: int
    calls_per_round: int


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 31,
    round_s: float = 2e-3,
    settle_s: float = 0.02,
    budget_s: float = 4.0,
) -> dict[str, Timing]:
    """Time functions against each other in one run.

    Every round calls each candidate once, a call being as many repetitions as fill ``round_s``,
    and starts with another one each time. Before each, the process sleeps for ``settle_s`` and the
    candidate warms up: OpenMP's threads spin for milliseconds after the last parallel loop, and
    would otherwise take a core from whoever comes next.

    Args:
        candidates: Name to function without arguments.
        rounds: Most rounds that count; fewer, but at least 5, when they outlast ``budget_s``.
        round_s: Shortest time to measure at once.
        settle_s: Sleep before every candidate's turn.
        budget_s: Time after which no further round begins.
    """
    repeats = {name: _repeats(function, round_s) for name, function in candidates.items()}
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for round_number in range(rounds):
        if round_number >= 5 and time.perf_counter() - start > budget_s:
            break
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(settle_s)
            _time(candidates[name], 1 + repeats[name] // 4)
            samples[name].append(_time(candidates[name], repeats[name]))
    return {name: _summary(samples[name], repeats[name]) for name in names}


def _time(function: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def _repeats(function: Callable[[], object], round_s: float) -> int:
    _time(function, 2)
    return max(1, round(round_s / max(_time(function, 2), 1e-8)))


def _summary(samples: list[float], repeats: int) -> Timing:
    ordered = sorted(samples)
    return Timing(
        median_s=statistics.median(ordered),
        min_s=ordered[0],
        p95_s=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        rounds=len(ordered),
        calls_per_round=repeats,
    )
