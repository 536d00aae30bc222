"""Threads that wait for gloo's calls, and threads that complete futures.

Gloo lets a message be waited for once: a second wait is for another message. Its wait hears of no
signal, and a wait that times out closes all connections. So a thread of ours waits once, and other
threads wait for that thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

from torch.futures import Future

from pyringar.comm.jobs import Jobs
from pyringar.comm.threads import Latch, start_thread
from pyringar.errors import RingarError

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
        """Make ``call``, which raises nothing, in a thread that runs nothing else.

        Wait up to ``patience_s`` per thread for an idle thread, before another thread starts. Raise
        RingarError if it cannot start.
        """
        try:
            self._idle.get(timeout=patience_s * len(self._threads))
        except queue.Empty:
            self._threads.append(start_thread(self._name, self._run))
        self._calls.put(call)

    def is_busy(self) -> bool:
        """Return whether a call runs."""
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
            del call  # its tensor is let go
            self._idle.put(None)


class End:
    """A call's end, for any number of threads, and handlers that interrupt them, to wait for.

    ``wait`` blocks until the call has ended, or raises its error. One of ``waiters`` calls it,
    when a thread waits here.
    """

    def __init__(self, waiters: Threads, wait: Callable[[], object]) -> None:
        self._waiters = waiters
        self._waits = [wait]  # taken by the one thread that waits, however often it was asked to
        self._is_asked_for = False
        self._end = Latch()
        self.error: Exception | None = None

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after at most so many seconds."""
        if not self._is_asked_for:
            self._waiters.submit(self._run)
            self._is_asked_for = True
        return self._end.wait(seconds)

    def _run(self) -> None:
        try:
            wait = self._waits.pop()
        except IndexError:
            return
        try:
            wait()
        except Exception as error:
            self.error = error.with_traceback(None)  # which would hold this, and this the error
        self._end.open()


class Completer:
    """Completes futures of works, in the order in which they were asked for.

    One thread waits for the works. The callbacks of a future run in other threads, for they may
    wait for later futures. The first future starts the threads, `close` ends them.
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
