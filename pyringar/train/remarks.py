"""Warn once of choices and machines that make a run slower than it need be."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pyringar.parallel.shards import shard_sizes

__all__ = ["BusyCores", "tell_of_idle_ranks"]

logger = logging.getLogger(__name__)

_WINDOW_S = 5.0
# A thread that has a core to itself takes one second of it in a second; several take more.
_WALL_PER_PROCESSOR_TIME = 1.5


def tell_of_idle_ranks(
    batch_size: int, world_size: int, weights: Sequence[float] | None = None
) -> None:
    """Say how many ranks get no image, of those that should.

    Args:
        batch_size: Images a step.
        world_size: Number of ranks.
        weights: Their shares; a rank with the share 0 should get none.
    """
    shares = weights or [1.0] * world_size
    sizes = shard_sizes(batch_size, world_size, weights)
    idle = sum(size == 0 < share for size, share in zip(sizes, shares, strict=True))
    if idle:
        gets = "gets" if idle == 1 else "get"
        logger.warning(
            "%d of %d ranks %s no image of a batch of %d", idle, world_size, gets, batch_size
        )


class BusyCores:
    """Warn once when other programs take the cores that the torch threads of a step need.

    All torch threads of an operator wait for the last one. Where one of them waits for a core, so
    do the others, and a step takes many times as long as with one thread.

    A context manager, entered for every step: what is done between steps does not count. Nor does
    the first step, in which torch may compile, nor the longest one since the last comparison, in
    which the process may have been stopped.

    Args:
        is_on: False: never warn.
        num_threads: Torch threads of a step.
    """

    def __init__(self, is_on: bool, num_threads: int) -> None:
        self._num_threads = num_threads
        self._is_on = is_on and num_threads > 1
        self._is_first = True
        self._begin = self._total = self._longest = (0.0, 0.0)  # wall and processor time

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *exception: object) -> None:
        if self._is_on and not self._is_first:
            step = _difference(self._now(), self._begin)
            self._total = (self._total[0] + step[0], self._total[1] + step[1])
            self._longest = max(self._longest, step)
            self._compare()
        self._is_first = False

    def _compare(self) -> None:
        wall_s, processor_s = _difference(self._total, self._longest)
        if wall_s < _WINDOW_S:
            return
        self._total = self._longest = (0.0, 0.0)
        if wall_s > _WALL_PER_PROCESSOR_TIME * processor_s:
            self._is_on = False
            logger.warning(
                "%.0f s of training had %.0f s of processor time: this machine is busy, and %d "
                "torch threads wait for each other; try OMP_NUM_THREADS=1",
                wall_s,
                processor_s,
                self._num_threads,
            )

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def _difference(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] - b[0], a[1] - b[1]
