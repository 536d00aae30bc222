"""What the backend's collectives return: works and futures as torch.distributed wants them.

Three rules, each bought with a crash or a wrong result in the versions of torch that we run on:
``wait`` raises by itself; ``get_future`` returns a ``then()`` child, because a future that fails by
``set_exception`` crashes DistributedDataParallel; a future's value is a tensor or a list of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.futures import Future

__all__ = ["Completer", "DoneWork", "Part", "PendingWork"]

# Parts end by the deadlines of the engines that run them; this one is for a bug.
_FOREVER_S = 1e8

_BaseWork: Any = dist.distributed_c10d.Work


class Part(Protocol):
    """One call of an engine that runs in the background."""

    def wait(self, timeout: float | None = None) -> object:
        """Block until it is done; raise what it failed with."""

    def is_completed(self) -> bool:
        """Whether it is done. Never blocks."""


class DoneWork(_BaseWork):  # type: ignore[misc]
    """The work of a collective that has run: nothing is left to wait for."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True, at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None: an error was raised by the collective itself."""
        return

    def result(self) -> Any:
        """The tensors that hold the result."""
        return self._results

    def synchronize(self) -> None:
        """Nothing to do."""

    def get_future(self) -> Future[Any]:
        """A completed future of the tensors."""
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


class PendingWork(_BaseWork):  # type: ignore[misc]
    """The work of a collective that runs in the background.

    Args:
        completer: Completes the future, if one is asked for.
        parts: What must end first.
        results: The tensors that hold the result in the end.
        finish: Called once, when all parts have ended well, by whoever notices first: copies what
            lies in temporary memory into ``results``.
    """

    def __init__(
        self,
        completer: Completer,
        parts: Sequence[Part],
        results: Any,
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._completer = completer
        self._parts = parts
        self._results = results
        self._finish = finish
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None

    def settle(self, timeout_s: float = _FOREVER_S) -> None:
        """Block until it is done, well or not; other Python threads run meanwhile.

        Raises:
            CollectiveTimeout: It is not done after ``timeout_s``; it goes on nevertheless.
        """
        if timeout_s < _FOREVER_S:
            for part in self._parts:
                _ended_by_itself(part, timeout_s)
        with self._lock:
            if self._is_settled:  # by another thread, meanwhile
                return
            try:
                for part in self._parts:
                    part.wait(_FOREVER_S)
                if self._finish is not None:
                    self._finish()
            except Exception as error:
                self._error = error
            finally:
                self._finish = None
                self._parts = ()
                self._is_settled = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done.

        Args:
            timeout: How long; none, or zero, is until the communicator's own deadline.

        Returns:
            True.

        Raises:
            RingarError: What the collective failed with.
            CollectiveTimeout: It is not done after ``timeout``; it goes on nevertheless.
        """
        seconds = timeout.total_seconds() if timeout else _FOREVER_S
        self.settle(seconds if seconds > 0 else _FOREVER_S)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """:meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""
        if not self._is_settled and all(part.is_completed() for part in self._parts):
            self.settle()
        return self._is_settled

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What it failed with; None while it runs and when all went well."""
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """The tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> Future[Any]:
        """A future of the tensors; it fails with what the collective failed with."""
        if self._future is None:
            self._future = self._completer.future_of(self)
        return self._future

    def outcome(self, _: Future[Any]) -> Any:
        """The future's value, or its error: raised here, it becomes the child's."""
        if self._error is not None:
            raise self._error
        return self._results


def _ended_by_itself(part: Part, timeout_s: float) -> None:
    try:
        part.wait(timeout_s)
    except RuntimeError:  # all of pyringar.errors, and what torch's own works raise
        # One that ended so keeps its error, which settle() collects; others are late.
        if not part.is_completed():
            raise


class Completer:
    """Completes futures of works, in the order in which they were asked for.

    Its thread starts with the first future: who only waits for works pays for none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[PendingWork, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def future_of(self, work: PendingWork) -> Future[Any]:
        """A future that is completed when ``work`` is done."""
        base: Future[Any] = Future()
        child: Future[Any] = base.then(work.outcome)
        with self._lock:
            if self._thread is None:
                # A daemon: at exit it is joined by close(), which ends what it waits for first.
                self._thread = threading.Thread(
                    target=self._run, name=f"pyringar futures {self._name}", daemon=True
                )
                self._thread.start()
        self._queue.put((work, base))
        return child

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, base = item
            work.settle()
            base.set_result(None)
            del item, work, base  # a waiting thread keeps no tensors

    def close(self) -> None:
        """Complete what was asked for, then end the thread. Call when the engine is closed."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join()
