"""Works and futures of a cluster's calls: who waits for one lets other ranks run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from pyringar.cluster import internals
from pyringar.cluster.calls import Call, devices_of, seconds_of, text_of
from pyringar.cluster.ranks import Rank
from pyringar.distributed.work import PendingWork
from pyringar.errors import RingarError

__all__ = ["ThreadWork"]

_Future: Any = Future


class ThreadFuture(_Future):  # type: ignore[misc]
    """The future of a work that is not done. A wait for it lets other ranks run.

    The rank that began the work completes it in its next wait, so callbacks run in its thread.
    If the rank ends before, the future fails, and its callbacks do not run.
    """

    def __init__(self, work: ThreadWork) -> None:
        super().__init__(devices=work._devices)
        self._work, self._rank = work, work._of

    def complete(self, make_value: Callable[[], Any]) -> None:
        """Complete it with a value, or with the RuntimeError that torch makes of an exception."""
        try:
            if self._rank.is_gone:
                raise RingarError(f"{self._rank} has ended, and did not wait for this future")
            value = make_value()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._rank.pending_error = error  # the rank's next wait raises it, too
            # Not the exception: C++ would keep it for ever, with the frames in its traceback.
            self._set_unwrap_func(_raise)
            value = f"Got the following error when running the callback: {text_of(error)}"
        self.set_result(value)

    def done(self) -> bool:
        """Return whether it is complete; let others run first if not."""
        if not super().done():
            self._work.is_completed()
            self._rank.complete_futures()
        return bool(super().done())

    def wait(self) -> Any:
        """Let others run until it is complete; return its value, or raise its error."""
        self._work.settle()
        self._rank.complete_futures()  # this wait may be in a callback of another future
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what ``callback`` returns, which is called with this one."""
        child = ThreadFuture(self._work)
        super().add_done_callback(lambda done: child.complete(lambda: callback(done)))
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback`` with this one when it is complete, unless its rank has ended."""
        super().add_done_callback(lambda done: None if self._rank.is_gone else callback(done))


def _raise(text: str) -> None:
    raise RuntimeError(text)


class ThreadWork(PendingWork):
    """The work of calls that a rank has begun, and of steps that have ended."""

    def __init__(self, rank: Rank, parts: Sequence[Any], results: Any) -> None:
        self._calls = [part for part in parts if isinstance(part, Call)]
        super().__init__(None, self._calls, results)  # type: ignore[arg-type]  # needs no completer
        self._of = rank
        self._devices = devices_of(t for t in tree_leaves(results) if isinstance(t, Tensor))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until it is done. See `PendingWork.wait`."""
        for call in self._calls:
            call.wait(seconds_of(timeout))
        return True

    def get_future(self) -> Any:
        """Return a future of the tensors; it fails with what a call failed with.

        It is waited for here if torch goes on to wait in C++, where no other rank would be let run.
        """
        self._of.check_thread()
        if internals.is_future_for_reducer("get_future"):
            self.settle()
        if self._future is None and not self.is_over():
            self._future = ThreadFuture(self)
            self._of.unfinished.append(self)
        return self._future or super().get_future()

    def is_over(self) -> bool:
        """Return whether all calls are done."""
        return all(call.is_done for call in self._calls)

    def complete_future(self) -> None:
        """Complete the future: all calls are done, or the rank has ended."""
        future: Any = self._future
        future.complete(lambda: self._outcome(future))

    def settle(self) -> None:
        """Let other ranks run until all calls are done, well or not."""
        self._of.check_thread()  # its error is not suppressed
        for call in self._calls:
            with contextlib.suppress(Exception):
                call.wait()

    def _source_rank(self) -> int:
        return int(self._calls[0].details["from"])
