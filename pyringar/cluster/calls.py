"""Describe what ranks wait for: their calls, above all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from pyringar.cluster.streams import devices_of, follow, mark
from pyringar.errors import CollectiveTimeout, RingarError

if TYPE_CHECKING:
    from pyringar.cluster.meeting import Meeting
    from pyringar.cluster.ranks import Rank

__all__ = [
    "Call",
    "Limited",
    "Pause",
    "Wait",
    "call_of_program",
    "copy_of",
    "is_inside",
    "names_of",
    "plain_torch",
    "seconds_of",
    "some",
    "text_of",
]

_INSIDE = ("torch.", "pyringar.", "importlib.", "concurrent.")
_INSIDE_TOO = {
    "contextlib",
    "frozen_importlib",
    "frozen_importlib_external",
    "functools",
    "importlib",
    "runpy",
    "threading",
    "torch",
    "typing_extensions",
    "warnings",
}
_MOST_TEXT = 2000


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute as torch does by itself: without this thread's modes, subclasses and gradients."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Wait:
    """Something that a rank waits for.

    Args:
        rank: The rank that waits.
        what: In words: ``"the store's 'key'"``.
        limit_s: How long the program wants to wait; None: as long as another rank may act.
        call: The call that it is about, if it is none itself.
    """

    def __init__(
        self, rank: Rank, what: str, limit_s: float | None = None, call: Call | None = None
    ) -> None:
        self.rank = rank
        self.what = what
        self.limit_s = limit_s
        self.call = call
        self.ends_s = 0.0
        """When the limit is reached, by the schedule's clock."""
        self.is_done = False
        self.is_pause = False
        """Whether it only lets others run, in a loop that asks for something again and again."""
        self.error: BaseException | None = None

    def __str__(self) -> str:
        return self.what

    def missing(self) -> list[int]:
        """Return the ranks for whose part it waits, as far as that is known."""
        return [] if self.call is None else self.call.missing()

    def finish(self, error: BaseException | None = None) -> None:
        """End it, well or with an error."""
        if not self.is_done:
            self.error = error
            self.is_done = True

    def give_up(self) -> None:
        """End it: the program did not want to wait longer."""
        missing = self.missing()
        what = f": it waits for {names_of(missing)}" if missing else ""
        self.finish(CollectiveTimeout(f"{self.what} is not done after {self.limit_s:g} s{what}"))

    def raise_error(self) -> None:
        """Raise what it ended with: each time, and in each rank, an exception of its own."""
        if self.error is not None:
            raise copy_of(self.error)


class Call(Wait):
    """One call of one rank: its part of a collective, or one side of a message.

    Args:
        meeting: Of the group in which it is made.
        rank: Who calls.
        operation: torch's name for it.
        tensors: What tables show, and what is read or written on GPUs.
        details: What must be the same on all ranks, by name.
        act: Does what was asked for, given one call of each rank; None: nothing.
        args: This rank's, for ``act``.
        peers: The group's ranks without which it cannot end; None: all.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: Rank,
        operation: str,
        tensors: Sequence[Tensor],
        details: Mapping[str, Any],
        act: Callable[[Sequence[Call]], object] | None,
        args: Any = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, operation)
        self.meeting = meeting
        self.operation = operation
        self.details = dict(details)
        self.act = act
        self.args = args
        self.peers = peers
        self.number = 0
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        self.line, _ = call_of_program()
        self.begun = mark(devices_of(tensors))  # on GPUs: after what the rank had enqueued
        self.ended: Sequence[Any] = ()  # on GPUs: after what was done
        self._steps: list[tuple[Sequence[Any], Callable[[], object]]] = []
        self._was_awaited = False

    def wait(self, timeout: float | None = None) -> object:
        """Let others run until it is done; raise what it ended with.

        Raises:
            CollectiveTimeout: It is not done after ``timeout`` seconds; it goes on nevertheless.
        """
        self.rank.check_thread()
        if not (self.is_done and self._was_awaited):
            self._was_awaited = True
            self.meeting.cluster.wait(self if timeout is None else Limited(self, timeout))
        self.raise_error()
        follow(self.ended)
        return True

    def is_completed(self) -> bool:
        """Return whether it is done; let others run first if not: a program may ask in a loop."""
        self.rank.check_thread()
        if not self.is_done:
            self.meeting.cluster.pause(Pause(self.rank, str(self), self))
        return self.is_done

    def exception(self) -> BaseException | None:
        """Return the call's error; None while it runs and if it ended well."""
        return self.error

    def then(self, step: Callable[[], object]) -> None:
        """Run ``step`` when it has ended well, before this rank's next call can end."""
        begun = mark({event.device for event in self.begun})
        self._steps.append((begun, step))
        if self.is_done:
            follow(self.ended)
            self.run_steps()

    def run_steps(self) -> None:
        """Run what comes after it, if it has ended well."""
        steps, self._steps = self._steps, []
        with plain_torch():
            for begun, step in steps if self.error is None else ():
                follow(begun)
                step()

    def missing(self) -> list[int]:
        """Return the ranks, of the cluster, for whose part it waits."""
        return self.meeting.missing(self)

    def signature(self) -> str:
        """Return what must be the same on all ranks, in words."""
        if "sizes" not in self.details:
            return str(self)
        pairs = zip(self.details["sizes"], self.details["dtypes"], strict=True)
        return f"{self} of {some(f'{n} {dtype}' for n, dtype in pairs) or 'nothing'}"

    def __str__(self) -> str:
        shown = [f"{name} {value}" for name, value in self.details.items() if name not in _SHAPES]
        return f"{self.operation} ({', '.join(shown)})" if shown else self.operation


# Details that have columns of their own in a table.
_SHAPES = ("dtypes", "sizes")
_MOST = 3


def some(values: Iterable[Any]) -> str:
    """Return the first of several values, in words."""
    shown = [str(value) for value in values]
    more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    return ", ".join(shown[:_MOST]) + more


def names_of(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``"rank 1"``, ``"ranks 0, 2"``."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


class Pause(Wait):
    """Lets others run, for a program that may ask for ``what`` in a loop."""

    def __init__(self, rank: Rank, what: str, call: Call | None = None) -> None:
        super().__init__(rank, what, call=call)
        self.is_done = self.is_pause = True


class Limited(Wait):
    """A wait for a call that lasts so many seconds at most."""

    def __init__(self, call: Call, limit_s: float) -> None:
        super().__init__(call.rank, call.what, limit_s, call)
        self._of = call

    @property
    def is_done(self) -> bool:
        """Whether the call is done, or given up."""
        return self._is_over or self._of.is_done

    @is_done.setter
    def is_done(self, value: bool) -> None:
        self._is_over = value


def seconds_of(timeout: Any) -> float | None:
    """Return a limit of torch in seconds; None if torch means no limit."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return float(timeout) if timeout is not None and timeout > 0 else None


def copy_of(error: BaseException) -> BaseException:
    """Return an exception like this one, to be raised in another thread."""
    try:
        copy = type(error)(*error.args)
    except Exception:  # a program's class may want other arguments, and raise what it likes
        copy = RingarError(text_of(error))
    copy.__cause__ = error.__cause__
    return copy


def text_of(error: BaseException) -> str:
    """Return an exception's class and text, which may be endless, or fail."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text fails with {type(failure).__name__})"
    more = "..." if len(text) > _MOST_TEXT else ""
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}{more}"


def is_inside(module: str) -> bool:
    """Return whether a module is torch's or ours, and not the program's."""
    return module.startswith(_INSIDE) or module.lstrip("_") in _INSIDE_TOO


def call_of_program() -> tuple[str, str]:
    """Return where the program makes this call, and the function of torch.distributed it calls."""
    frame: Any = sys._getframe(2)
    function = ""
    while frame is not None and is_inside(module := frame.f_globals.get("__name__", "")):
        function = frame.f_code.co_name if module == distributed_c10d.__name__ else function
        frame = frame.f_back
    if frame is None:
        return "", function
    folder, name = os.path.split(frame.f_code.co_filename)
    is_cell = "ipykernel_" in folder or name.startswith("<ipython-")
    return f"{'cell' if is_cell else name}:{frame.f_lineno}", function
