"""What a rank of a measured library does: fill, meet, time one call, check, and answer.

It needs only NumPy, so that it works in the environment of any peer. Between two requests a rank
waits in the kernel, and uses no processor. A request is a line of text, and so is its answer:

    CALLS WARM_UP NUMEL CANDIDATE
    WRONG NS NS ...                 (or: error WHAT)

WRONG counts the calls, warm-up included, after which the tensor was not exactly the sum.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PERIOD, SHIFTS = 17, 8
ROW = PERIOD * 240  # elements that are written at a time: 16 KiB, which leaves the caches alone
PATTERN = (np.arange(ROW) % PERIOD).astype(np.float32)


class Sum:
    """The sum over ranks of one float32 tensor, in place.

    Element ``i`` of rank ``r`` is ``i % 17 + shift % 8 + r``: integers, so that every order of
    additions gives the same bits. They differ between calls, ranks and places, so that no old or
    misplaced number passes for the sum.

    Args:
        array: This rank's tensor, flat.
        rank: The number of this rank.
        world_size: Number of ranks; 1: the call leaves the values as they are.
        barrier: The library's own.
        call: Sums the array over ranks.
    """

    def __init__(
        self,
        array: Any,
        rank: int,
        world_size: int,
        barrier: Callable[[], object],
        call: Callable[[], object],
    ) -> None:
        self.barrier, self.call = barrier, call
        self._rank, self._world_size = rank, world_size
        self._row = PATTERN[: array.size]
        whole = array.size // self._row.size * self._row.size
        self._rows, self._rest = array[:whole].reshape(-1, self._row.size), array[whole:]
        self._flags = np.empty(self._rows.shape, bool)

    def fill(self, shift: int) -> None:
        """Write this rank's numbers."""
        row = self._row + np.float32(self._rank + shift % SHIFTS)
        self._rows[...] = row
        self._rest[...] = row[: self._rest.size]

    def is_right(self, shift: int) -> bool:
        """Return whether every element is the sum of what the ranks wrote."""
        k = self._world_size
        ranks = k * (k - 1) // 2 if k > 1 else self._rank
        row = (self._row + np.float32(shift % SHIFTS)) * np.float32(k) + np.float32(ranks)
        np.equal(self._rows, row, out=self._flags)
        return bool(self._flags.all()) and np.array_equal(self._rest, row[: self._rest.size])


def serve(address: str, rank: int, version: str, prepare: Callable[[str, int], Sum]) -> None:
    """Answer requests until the benchmark closes the connection.

    Args:
        address: The benchmark's Unix socket.
        rank: The number of this rank.
        version: The name and version of the library.
        prepare: Maps a candidate and a number of elements to what is timed. It is called again
            only for another number of elements.
    """
    ready: dict[tuple[int, str], Sum] = {}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(f"hello {rank} {os.getpid()} {' '.join(version.split())}\n".encode())
        for line in connection.makefile("r"):
            calls, warm_up, count, candidate = line.rstrip("\n").split(" ", 3)
            numel = int(count)
            try:
                ready = {key: timed for key, timed in ready.items() if key[0] == numel}
                if (numel, candidate) not in ready:
                    ready[numel, candidate] = prepare(candidate, numel)
                numbers = run(ready[numel, candidate], int(calls), int(warm_up))
            except Exception as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                connection.sendall(f"error {what}\n".encode())
                raise
            connection.sendall(f"{' '.join(map(str, numbers))}\n".encode())


def run(timed: Sum, calls: int, warm_up: int) -> list[int]:
    """Make calls, each after a barrier; return the number of wrong sums, then the timed ns."""
    times_ns, wrong = [], 0
    for shift in range(warm_up + calls):
        timed.fill(shift)
        timed.barrier()
        begin_ns = time.perf_counter_ns()
        timed.call()
        end_ns = time.perf_counter_ns()
        timed.barrier()  # a rank that shares its core does not wait for another rank's check
        times_ns.append(end_ns - begin_ns)
        wrong += not timed.is_right(shift)
    return [wrong, *times_ns[warm_up:]]
