"""Works and futures that the collectives of the backend return to torch.

Three rules prevent crashes or wrong results in torch. ``wait`` raises the error itself.
``get_future`` returns a ``then()`` child: a future that fails by ``set_exception`` crashes
DistributedDataParallel. The value of a future is a tensor or a list of tensors.

A call ends in a thread of the engine or of gloo, even if the program deletes its work.
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

# Seconds, times the number of threads, that a callback waits for an idle thread. Then it gets a new
# thread, since running callbacks may wait for later futures.
_PATIENCE_S = 0.01


class Threads:
    """Thread pool that starts a new thread for a call if no thread is idle.

    A signal handler may interrupt any method, so each access to shared state is one atomic step.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Holds one None for each idle thread.
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], object], patience_s: float = 0.0) -> None:
        """Run ``call``, which must not raise, in an idle thread or a new thread.

        First wait up to ``patience_s`` times the number of threads for an idle thread. RingarError
        if no thread can start.
        """
        try:
            self._idle.get(timeout=patience_s * len(self._threads))
        except queue.Empty:
            self._threads.append(start_thread(self._name, self._run))
        self._calls.put(call)

    def is_busy(self) -> bool:
        return self._idle.qsize() < len(self._threads)

    def close(self, seconds: float | None = None) -> None:
        """End the threads after all calls; wait at most ``seconds`` for each thread."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # release the tensors that the call references
            self._idle.put(None)


class Completer:
    """Completes the futures of works, in the order in which the futures were created.

    One thread, started by the first future, waits for the works. Callbacks run in other threads,
    since they may wait for later futures.
    """

    def __init__(self, name: str) -> None:
        self._name = f"futures {name}"
        self._lock = threading.RLock()  # reentrant: a signal handler may lock it again
        self._waits: Jobs | None = None
        self._callbacks = Threads(self._name)
        self._is_closed = False

    def complete(self, future: Future[None], settle: Callable[[], object]) -> None:
        """Queue ``settle``, which waits for a work; after it returns, complete ``future``."""
        with self._lock:
            if not self._is_closed:
                self._waits = self._waits or Jobs(self._name)
                self._waits.submit(partial(self._complete, future, settle), self._name)
                return
        settle()
        future.set_result(None)

    def close(self) -> None:
        """Complete all futures, then end the threads. Call after the engine is closed."""
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
        except RingarError:  # out of threads: run here, where waiting for a later future hangs
            run_callbacks()


class BackgroundCall(Protocol):
    """A call of the engine or of gloo that runs in the background."""

    def wait(self, timeout: float | None = None) -> object:
        """Block until the call is done; raise its error."""

    def is_completed(self) -> bool:
        """Return True if the call is done. Never blocks."""


class DelegatedCall:
    """A work of torch.distributed as a `BackgroundCall`."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> object:
        if timeout is None:
            return self._work.wait()
        return self._work.wait(timedelta(seconds=max(timeout, 0.001)))  # torch takes 0 as no limit

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def one_or_all(rows: Sequence[Any]) -> Any:
    return rows[0] if len(rows) == 1 else rows


class PendingWork(_BaseWork):  # type: ignore[misc]
    """The torch work of a collective that consists of several background calls.

    ``results`` are the result tensors, or a function that returns them.
    """

    _devices: Sequence[torch.device] = ()  # GPUs that hold results

    def __init__(self, completer: Completer, parts: Sequence[BackgroundCall], results: Any) -> None:
        super().__init__()
        self._completer = completer
        self._parts: Sequence[BackgroundCall] = parts
        self._results = results
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective is done; other Python threads run meanwhile.

        None or zero means the timeout of the communicator. A shorter ``timeout`` raises
        CollectiveTimeout, but the call keeps running.
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
        """Return a future of the result tensors; it has the error of the collective."""
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
