"""What a rank of a measured library does: fill, meet, time one call, check, and answer.

It needs only NumPy, so that it works in the environment of any peer. Between two requests a rank
waits in the kernel, and uses no processor. A request is a line of JSON, and so is its answer:

    {"candidate": NAME, "what": WHAT, "calls": NUMBER, "warm_up": NUMBER}
    {"wrong": NUMBER, "ns": [NUMBER, ...]}                     (or: {"error": TEXT})

``wrong`` counts the calls, warm-up included, after which the result was not what it must be.
"""

from __future__ import annotations

import json
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
        self.array, self.barrier, self.call = array, barrier, call
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


def serve(address: str, rank: int, version: str, prepare: Callable[[str, Any], Any]) -> None:
    """Answer requests until the benchmark closes the connection.

    Args:
        address: The benchmark's Unix socket.
        rank: The number of this rank.
        version: The name and version of the library.
        prepare: Maps a candidate, and a number of elements or a model, to an object with the four
            methods of `Sum`, which is kept until a request names another number or model.
    """
    ready: dict[tuple[str, Any], Any] = {}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)

        def answer(**values: Any) -> None:
            connection.sendall(f"{json.dumps(values)}\n".encode())

        answer(rank=rank, pid=os.getpid(), version=" ".join(version.split()))
        for line in connection.makefile("r"):
            request = json.loads(line)
            key = request["candidate"], request["what"]
            try:
                ready = {other: timed for other, timed in ready.items() if other[1] == key[1]}
                if key not in ready:
                    ready[key] = prepare(*key)
                wrong, times_ns = run(ready[key], request["calls"], request["warm_up"])
            except Exception as error:
                answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
                raise
            answer(wrong=wrong, ns=times_ns)


def run(timed: Any, calls: int, warm_up: int) -> tuple[int, list[int]]:
    """Make calls, each after a barrier; return the number of wrong results, and the timed ns."""
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
    return wrong, times_ns[warm_up:]
