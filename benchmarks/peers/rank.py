"""Loop of a measured rank: write inputs, barrier, time a call, check the sum, answer.

The module needs only NumPy, so that it works in the environment of every library. A rank sleeps
between two requests. A request is a line of JSON, and so is its answer:

    {"candidate": NAME, "what": WHAT, "calls": NUMBER, "warm_up": NUMBER}
    {"wrong": NUMBER, "ns": [NUMBER, ...]}                     (or: {"error": TEXT})

``wrong`` is the number of calls with a wrong result, warm-up included.
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
ROW = PERIOD * 240  # elements per write: 16 KiB, small enough for the L1 cache
PATTERN = (np.arange(ROW) % PERIOD).astype(np.float32)


class CheckedSum:
    """The sum over ranks of one float32 tensor, in place.

    Element ``i`` of rank ``r`` is ``i % 17 + shift % 8 + r``. Sums of integers have the same bits
    in every order of addition. The values differ between calls, ranks and elements, so that the
    check detects old and misplaced sums.

    Args:
        array: This rank's tensor, flat.
        rank: The number of this rank.
        world_size: Number of ranks to sum over; 1 if the call does not change the array.
        barrier: Barrier of the library.
        call: Function that sums the array over ranks.
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
        """Write the inputs of this rank."""
        row = self._row + np.float32(self._rank + shift % SHIFTS)
        self._rows[...] = row
        self._rest[...] = row[: self._rest.size]

    def is_right(self, shift: int) -> bool:
        """Return whether every element is the sum of the inputs of all ranks."""
        k = self._world_size
        ranks = k * (k - 1) // 2 if k > 1 else self._rank
        row = (self._row + np.float32(shift % SHIFTS)) * np.float32(k) + np.float32(ranks)
        np.equal(self._rows, row, out=self._flags)
        return bool(self._flags.all()) and np.array_equal(self._rest, row[: self._rest.size])


def serve(address: str, rank: int, version: str, prepare: Callable[[str, Any], Any]) -> None:
    """Answer requests until the benchmark closes the connection.

    Args:
        address: Path of the benchmark's Unix socket.
        rank: The number of this rank.
        version: The name and version of the library.
        prepare: Maps a candidate, and a number of elements or the name of a model, to an object
            with the methods ``fill``, ``barrier``, ``call`` and ``is_right`` of `CheckedSum`. The
            object is kept until a request has another number or model.
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
                ready = {k: timed for k, timed in ready.items() if k[1] == key[1]}
                if key not in ready:
                    ready[key] = prepare(*key)
                wrong, times_ns = run(ready[key], request["calls"], request["warm_up"])
            except Exception as error:
                answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
                raise
            answer(wrong=wrong, ns=times_ns)


def run(timed: Any, calls: int, warm_up: int) -> tuple[int, list[int]]:
    """Run the calls; return the number of wrong results, and the ns of each timed call."""
    times_ns, wrong = [], 0
    for shift in range(warm_up + calls):
        timed.fill(shift)
        timed.barrier()
        begin_ns = time.perf_counter_ns()
        timed.call()
        end_ns = time.perf_counter_ns()
        timed.barrier()  # ranks may share cores: no rank checks while another rank sums
        times_ns.append(end_ns - begin_ns)
        wrong += not timed.is_right(shift)
    return wrong, times_ns[warm_up:]
