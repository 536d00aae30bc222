"""Define the works and futures that the backend's collectives return to torch.

Three rules, since torch crashes or gives wrong results without them: ``wait`` raises by itself;
``get_future`` returns a ``then()`` child, because a future that fails by ``set_exception`` crashes
DistributedDataParallel; a future's value is a tensor or a list of tensors.

A work only looks: its call ends without it, in the engine's thread or gloo's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from pyringar.comm.jobs import Jobs
from pyringar.comm.threads import start_thread
from pyringar.errors import RingarError

_BaseWork: Any = dist.distributed_c10d.Work

# How long a callback may run before another thread runs the callbacks behind it, for each thread.
_PATIENCE_S = 0.01


class Threads:
    """Threads that make calls at once: as many threads as calls run at the same time.

    Each use is one step, so that a signal handler may come in between.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # One entry for each thread that no call was promised to.
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], object], patience_s: float = 0.0) -> None:
        """Make ``call``, which raises nothing, in an idle thread, or in a new one.

        Wait up to ``patience_s`` per thread for an idle one. RingarError if none can start.
        """
        try:
            self._idle.get(timeout=patience_s * len(self._threads))
        except queue.Empty:
            self._threads.append(start_thread(self._name, self._run))
        self._calls.put(call)

    def is_busy(self) -> bool:
        return self._idle.qsize() < len(self._threads)

    def close(self, seconds: float | None = None) -> None:
        """End the threads after all calls; wait at most so many seconds for each."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # releases its tensors
            self._idle.put(None)


class Completer:
    """Completes futures of works, in the order in which they were asked for.

    One thread, which the first future starts, waits for the works. Callbacks run in other threads,
    since they may wait for later futures.
    """

    def __init__(self, name: str) -> None:
        self._name = f"futures {name}"
        self._lock = threading.RLock()  # a signal handler may come in between
        self._waits: Jobs | None = None
        self._callbacks = Threads(self._name)
        self._is_closed = False

    def complete(self, future: Future[None], settle: Callable[[], object]) -> None:
        """Complete ``future`` when ``settle``, which waits for a work, has returned."""
        with self._lock:
            if not self._is_closed:
                self._waits = self._waits or Jobs(self._name)
                self._waits.submit(partial(self._complete, future, settle), self._name)
                return
        settle()
        future.set_result(None)

    def close(self) -> None:
        """Complete all futures, then end the threads. Call when the engine is closed."""
        with self._lock:
            self._is_closed = True
        if self._waits is not None:
            self._waits.close()
        self._callbacks.close()

    def _complete(self, future: Future[None], settle: Callable[[], object]) -> None:
        settle()
        run_callbacks = partial(future.set_result, None)
        try:
            self._callbacks.submit(run_callbacks, _PATIENCE_S)
        except RingarError:  # no thread is left: a callback that waits for a later future is stuck
            run_callbacks()


class BackgroundCall(Protocol):
    """One call of an engine that runs in the background."""

    def wait(self, timeout: float | None = None) -> object:
        """Block until it is done; raise what it failed with."""

    def is_completed(self) -> bool:
        """Return whether it is done. Never blocks."""


class DelegatedCall:
    """Wrap a work of torch.distributed's as a `BackgroundCall`."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> object:
        if timeout is None:
            return self._work.wait()
        return self._work.wait(timedelta(seconds=max(timeout, 0.001)))  # zero is torch's for none

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def one_or_all(rows: Sequence[Any]) -> Any:
    return rows[0] if len(rows) == 1 else rows


class PendingWork(_BaseWork):  # type: ignore[misc]
    """The work of a collective whose ``parts`` run in the background.

    ``results`` are the tensors with the results, or a function that returns them.
    """

    _devices: Sequence[torch.device] = ()  # GPUs on which there are results

    def __init__(self, completer: Completer, parts: Sequence[BackgroundCall], results: Any) -> None:
        super().__init__()
        self._completer = completer
        self._parts: Sequence[BackgroundCall] = parts
        self._results = results
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done; other Python threads run meanwhile.

        Without a ``timeout``, or with zero, the communicator's counts.
        CollectiveTimeout if the call is late; it goes on nevertheless.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + seconds
        for part in self._parts:
            part.wait(max(0.0, deadline - time.monotonic()) if seconds > 0 else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._error() if self.is_completed() else None

    def result(self) -> Any:
        self.wait()
        return self._results() if callable(self._results) else self._results

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors; it fails with what the collective failed with."""
        if self._future is None:
            base: Future[None] = Future(devices=list(self._devices))
            future = base.then(self._outcome)
            if self.is_completed():
                base.set_result(None)
            else:
                self._completer.complete(base, self._error)
            self._future = future
        return self._future

    def _source_rank(self) -> int:
        part: Any = self._parts[0]
        rank: int = part.work._source_rank()
        return rank

    def _error(self) -> Exception | None:
        for part in self._parts:
            try:
                part.wait()
            except Exception as error:
                return error
        return None

    def _outcome(self, _: Future[None]) -> Any:
        return self.result()
