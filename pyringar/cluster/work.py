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
from pyringar.cluster.calls import Call, seconds_of, text_of
from pyringar.cluster.streams import devices_of
from pyringar.distributed.work import PendingWork
from pyringar.errors import RingarError

__all__ = ["ThreadWork"]

_Future: Any = Future


class ThreadFuture(_Future):  # type: ignore[misc]
    """The future of a work that is not done: whoever waits for it lets other ranks run.

    It is completed in its rank's thread, in one of the rank's waits: so its callbacks run there.

    Args:
        work: What it stands for, or its parent does.
    """

    def __init__(self, work: ThreadWork) -> None:
        super().__init__(devices=work._devices)
        self._work = work

    def is_over(self) -> bool:
        """Return whether the work is done."""
        return self._work._is_over()

    def complete(self) -> None:
        """Complete it: the work is done."""
        self._follow(lambda: self._work._outcome(self))

    def _follow(self, make_value: Callable[[], Any]) -> None:
        """Complete it with a value, or with what making it raises; all that is no Exception, too.

        Torch lets nothing through that a callback raises: the rank raises that in its next wait.
        """
        try:
            value = make_value()
        except Exception as error:
            self.set_exception(error)
        except BaseException as error:
            self._work._calls()[0].rank.pending_error = error
            self.set_exception(RingarError(text_of(error)))
        else:
            self.set_result(value)

    def done(self) -> bool:
        """Return whether it is complete; let others run first if not."""
        if not super().done():
            self._work.is_completed()
            self._complete_root()
        return bool(super().done())

    def wait(self) -> Any:
        """Let others run until it is complete; return its value, or raise its error."""
        self.settle()
        return super().wait()

    def settle(self) -> None:
        """Let others run until it is complete."""
        self._work._settle()
        self._complete_root()

    def _complete_root(self) -> None:
        """Complete the work's own future, also inside a callback of another."""
        self._work._calls()[0].rank.complete_futures()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of what ``callback`` returns, which is called with this one."""
        child = ThreadFuture(self._work)
        self.add_done_callback(lambda done: child._follow(lambda: callback(done)))
        return child


class ThreadWork(PendingWork):
    """The work of calls that this rank has begun.

    Args:
        calls: What must end.
        results: See `PendingWork`.
    """

    def __init__(self, calls: Sequence[Call], results: Any) -> None:
        super().__init__(None, calls, results)  # type: ignore[arg-type]  # nothing is left to others
        self._devices = devices_of(t for t in tree_leaves(results) if isinstance(t, Tensor))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until it is done. See `PendingWork.wait`."""
        for call in self._parts:
            call.wait(seconds_of(timeout))
        return True

    def get_future(self) -> Any:
        """Return a future of the tensors; it fails with what a call failed with.

        It is waited for here if torch goes on to wait in C++, where no other rank would be let run.
        """
        if internals.is_future_for_reducer("get_future"):
            self._settle()
        if self._future is None and not self._is_over():
            rank = self._calls()[0].rank
            self._future = future = ThreadFuture(self)
            rank.futures.append(future)
        return self._future or super().get_future()

    def _is_over(self) -> bool:
        return all(call.is_done for call in self._calls())

    def _calls(self) -> list[Call]:
        calls: Any = self._parts
        return list(calls)

    def _settle(self) -> None:
        for call in self._calls():
            with contextlib.suppress(Exception):
                call.wait()

    def _source_rank(self) -> int:
        return int(self._calls()[0].args.sender)
