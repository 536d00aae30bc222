"""The clocks of a device, for benchmarks on a GPU; on the CPU all of them are the host's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.timing import Timing, turns

__all__ = ["ROTATED_BYTES", "Measure", "Place", "interleaved"]

Measure = Callable[[Callable[[], object], int], float]

ROTATED_BYTES = 256 * 2**20  # of all ranks together; the largest L2 has a quarter of it
MOST_REPEATS = 100  # a thousand launches fill the device's queue, and the host would wait


class Place:
    """Where the ranks are, and the clocks there. On the CPU all clocks are the host's."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_cuda = device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def device_s(self, function: Callable[[], object], repeats: int) -> float:
        """Seconds per call, between two events on the stream."""
        if not self.is_cuda:
            return self.enqueue_s(function, repeats)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def done_s(self, function: Callable[[], object], repeats: int) -> float:
        """Seconds from a call to its end on the device: the median of these calls."""
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            function()
            self.synchronize()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)

    def enqueue_s(self, function: Callable[[], object], repeats: int) -> float:
        """Seconds per call on the host; the device goes on by itself."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        seconds = (time.perf_counter() - begin) / repeats
        self.synchronize()
        return seconds


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    measure: Measure,
    *,
    rounds: int,
    budget_s: float,
    round_s: float = 5e-3,
) -> dict[str, Timing]:
    """Time functions against each other, in turns that start with another one each round.

    Args:
        candidates: Name to function without arguments.
        measure: Seconds per call of a function called so many times in a row.
        rounds: Most rounds; fewer, but at least 5, when they outlast ``budget_s``.
        budget_s: Time after which no further round begins.
        round_s: Shortest time to measure at once.
    """
    repeats = {}
    for name, function in candidates.items():
        measure(function, 3)
        repeats[name] = min(MOST_REPEATS, max(1, round(round_s / max(measure(function, 3), 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    begin = time.perf_counter()
    for number, names in enumerate(turns(candidates, rounds)):
        if number >= 5 and time.perf_counter() - begin > budget_s:
            break
        for name in names:
            measure(candidates[name], 1 + repeats[name] // 4)
            samples[name].append(measure(candidates[name], repeats[name]))
    return {name: Timing.of(samples[name], repeats[name]) for name in candidates}
