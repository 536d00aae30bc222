"""Run calls in the background, one after the other in one thread."""

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
    """A thread that runs calls in order until `end`; RingarError if it cannot start."""

    def __init__(self, name: str) -> None:
        # Each use is one step, so that a signal handler may come in between.
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._under_way: set[Job] = set()
        self._waiting: list[int] = []  # threads, once for each of their waits
        self._thread = start_thread(name, self._run)

    def submit(self, call: Callable[[], object], what: str) -> Job:
        """Call ``call`` after all that came before; ``what`` says in words what it is."""
        job = Job(self, call, what)
        self._under_way.add(job)
        self._queue.put(job)
        return job

    def num_under_way(self) -> int:
        return len(self._under_way)

    def is_awaited_here(self) -> bool:
        """Return whether this thread waits: a signal handler asks, which interrupted the wait."""
        return threading.get_ident() in self._waiting

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> None:
        """Let the thread end after all calls. May be called again."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait for all calls, then end the thread. May be called again."""
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
            self._under_way.discard(job)
            del job  # releases its tensors


class Job:
    """A call of `Jobs`, which ``what`` names; `pyringar.comm.background_work.Work` waits for it."""

    def __init__(self, jobs: Jobs, call: Callable[[], object], what: str) -> None:
        self._jobs = jobs
        self._calls = [call]
        self._what = what
        self._end = Latch()
        self._error: BaseException | None = None
        self._finished_ns = 0
        self.result: Any = None  # of the call, when it has ended well

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
        """Return when it ended; 0 while it runs."""
        return self._finished_ns

    def wait(self, seconds: float = math.inf) -> bool:
        """Return False if it is not done in time; raise its error, or RingarError after a close."""
        ends = time.monotonic() + seconds
        with self._jobs.awaited():
            while not self._end.wait(min(1.0, left := ends - time.monotonic())) and left > 0:
                if self._jobs.is_over() and not self._end.is_open:
                    raise RingarError(f"this communicator was closed: {self._what} did not begin")
        if self._error is not None:
            raise self._error
        return self._end.is_open

    def describe(self) -> str:
        """Return what it is, and whether it has begun."""
        return f"{self._what}, which {'waits for the calls before it' if self._calls else 'runs'}"
