"""A thread that runs calls in order."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pyringar.comm.threads import Latch, start_thread
from pyringar.errors import RingarError


class Jobs:
    """A thread that runs calls in order until `end`. Raises RingarError if it cannot start."""

    def __init__(self, name: str) -> None:
        # Used without a lock, in atomic steps: a signal handler may interrupt any method.
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending: set[Job] = set()
        self._waiting: list[int] = []  # thread ids, one entry per wait
        self._thread = start_thread(name, self._run)

    def submit(self, call: Callable[[], object], what: str) -> Job:
        """Queue a call; ``what`` describes it in messages."""
        job = Job(self, call, what)
        self._pending.add(job)
        self._queue.put(job)
        return job

    def num_under_way(self) -> int:
        return len(self._pending)

    def is_awaited_here(self) -> bool:
        """Return whether this thread waits for a call: true only in signal handlers."""
        return threading.get_ident() in self._waiting

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        """End the thread after all queued calls. May be called again."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait for all queued calls, then end the thread. May be called again."""
        self.end()
        with self.awaited():
            self._thread.join()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        here = threading.get_ident()
        self._waiting.append(here)
        try:
            yield
        finally:
            self._waiting.remove(here)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            self._pending.discard(job)
            del job  # releases the tensors of the call


class Job:
    """A queued call of `Jobs`. `Work` waits for it."""

    def __init__(self, jobs: Jobs, call: Callable[[], object], what: str) -> None:
        self._jobs = jobs
        self._calls = [call]
        self._what = what
        self._end = Latch()
        self._error: BaseException | None = None
        self._finished_ns = 0
        self.result: Any = None  # return value of the call

    def run(self) -> None:
        try:
            self.result = self._calls.pop()()
        except BaseException as error:
            self._error = error
        self._finished_ns = time.perf_counter_ns()
        self._end.open()

    def is_completed(self) -> bool:
        return self._end.is_open

    def exception(self) -> BaseException | None:
        return self._error

    def finished_ns(self) -> int:
        """Return the end time; 0 while the call runs."""
        return self._finished_ns

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the call; return False after a timeout. Raises the error of the call.

        Raises RingarError if the thread ended before the call began.
        """
        ends = time.monotonic() + seconds
        with self._jobs.awaited():
            while not self._end.wait(min(1.0, left := ends - time.monotonic())) and left > 0:
                if self._jobs.is_over() and not self._end.is_open:
                    raise RingarError(f"this communicator was closed: {self._what} did not begin")
        if self._error is not None:
            raise self._error
        return self._end.is_open

    def describe(self) -> str:
        """Return the description and the state of the call."""
        return f"{self._what}, which {'waits for the calls before it' if self._calls else 'runs'}"
