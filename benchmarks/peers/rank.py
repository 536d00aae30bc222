"""Be one rank of a library that is measured: fill, meet, time one call, check, and answer.

This is all that runs in a rank's process beside the library. It needs NumPy only, so that it works
in any peer's environment. Between two requests a rank waits in the kernel, and uses no processor.

A request is a line of text, and so is its answer:

    CALLS WARM_UP IDLE_US NUMEL[,NUMEL...] CANDIDATE
    WRONG CPU_BEGIN_NS CPU_END_NS NS NS ...             (or: error WHAT)

WRONG counts the calls, warm-up and all, after which a tensor was not exactly the sum.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

PERIOD, SHIFTS = 17, 8
ROW = PERIOD * 240  # elements that are written at a time: 16 KiB, which leaves the caches alone
PATTERN = (np.arange(ROW) % PERIOD).astype(np.float32)


class Call(Protocol):
    """Stand for what is timed, and make it ready and check it."""

    def fill(self, shift: int) -> None:
        """Write this rank's numbers, other ones for another shift."""

    def barrier(self) -> object:
        """Wait for all ranks, as the library does."""

    def call(self) -> object:
        """Do what is timed."""

    def is_right(self, shift: int) -> bool:
        """Say whether every element is what it must be."""


class Sum:
    """The sum over ranks of float32 tensors, in place.

    Element ``i`` of tensor ``t`` of rank ``r`` is ``i % 17 + (shift + t) % 8 + r``: whole numbers,
    so that every order of additions gives the same bits, and other ones in each call, rank and
    place, so that nothing old or misplaced passes for the sum.

    Args:
        arrays: One rank's tensors, flat.
        rank: This process's.
        world_size: Number of ranks; 1: the call leaves the values as they are.
        barrier: The library's own.
        call: Sums ``arrays`` over ranks.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        rank: int,
        world_size: int,
        barrier: Callable[[], object],
        call: Callable[[], object],
    ) -> None:
        self.barrier, self.call = barrier, call
        self._rank, self._world_size = rank, world_size
        self._base = PATTERN[: max(array.size for array in arrays)]
        self._parts = [_rows(array, self._base.size) for array in arrays]
        self._flags = np.empty(max(rows.size for rows, _ in self._parts), bool)

    def fill(self, shift: int) -> None:
        """Write row by row, with the values of a shift."""
        for t, (rows, rest) in enumerate(self._parts):
            row = self._base + np.float32(self._rank + (shift + t) % SHIFTS)
            rows[...] = row
            rest[...] = row[: rest.size]

    def is_right(self, shift: int) -> bool:
        """Compare row by row, with the sum of a shift."""
        k = self._world_size
        ranks = k * (k - 1) // 2 if k > 1 else self._rank
        for t, (rows, rest) in enumerate(self._parts):
            row = (self._base + np.float32((shift + t) % SHIFTS)) * np.float32(k)
            row += np.float32(ranks)
            flags = self._flags[: rows.size].reshape(rows.shape)
            np.equal(rows, row, out=flags)
            if not (flags.all() and np.array_equal(rest, row[: rest.size])):
                return False
        return True


def _rows(array: Any, width: int) -> tuple[Any, Any]:
    """Split a flat array into a view of whole rows and the rest."""
    whole = array.size // width * width
    return array[:whole].reshape(-1, width), array[whole:]


def serve(
    address: str,
    rank: int,
    version: str,
    prepare: Callable[[str, list[int]], Call],
) -> None:
    """Answer requests until the benchmark closes the connection.

    Args:
        address: Of the benchmark's Unix socket.
        rank: This process's.
        version: Names the library and its version.
        prepare: Maps a candidate and numbers of elements to what is timed. It is asked once, until
            other numbers come.
    """
    ready: dict[tuple[str, str], Call] = {}
    settle_s = float(os.environ.get("SETTLE_S", "0"))  # for threads that spin after their work
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(f"hello {rank} {os.getpid()} {' '.join(version.split())}\n".encode())
        for line in connection.makefile("r"):
            cpu_begin_ns = time.process_time_ns()
            calls, warm_up, idle_us, numels, candidate = line.rstrip("\n").split(" ", 4)
            try:
                for key in [key for key in ready if key[0] != numels]:
                    del ready[key]
                if (numels, candidate) not in ready:
                    sizes = [int(numel) for numel in numels.split(",")]
                    ready[numels, candidate] = prepare(candidate, sizes)
                timed = ready[numels, candidate]
                wrong, times = run(timed, int(calls), int(warm_up), int(idle_us) * 1e-6)
            except Exception as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())
                connection.sendall(f"error {what}\n".encode())
                raise
            time.sleep(settle_s)
            numbers = [wrong, cpu_begin_ns, time.process_time_ns(), *times]
            connection.sendall(f"{' '.join(map(str, numbers))}\n".encode())


def run(timed: Call, calls: int, warm_up: int, idle_s: float) -> tuple[int, list[int]]:
    """Make calls, each after a barrier; return how many were wrong, and the ns of those timed."""
    times_ns, wrong = [], 0
    time.sleep(idle_s)
    for shift in range(warm_up + calls):
        timed.fill(shift)
        timed.barrier()
        begin_ns = time.perf_counter_ns()
        timed.call()
        end_ns = time.perf_counter_ns()
        timed.barrier()  # a rank that has to share its core is not kept waiting by another's check
        times_ns.append(end_ns - begin_ns)
        wrong += not timed.is_right(shift)
    return wrong, times_ns[warm_up:]
