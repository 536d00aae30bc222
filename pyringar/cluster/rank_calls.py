"""Calls and waits of ranks that are threads; match the calls of all ranks of a group."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from pyringar.errors import ArgumentError, CollectiveTimeout, RingarError

if TYPE_CHECKING:
    from pyringar.cluster.cluster import Cluster
    from pyringar.cluster.rank_threads import RankThread

# Packages whose frames are left out of a program's stack.
_INSIDE = {"pyringar", "torch", "typing_extensions"}
_LIBRARY = {"concurrent", "contextlib", "functools", "importlib", "runpy", "threading", "warnings"}
_MOST_VALUES = 3
_MOST_TEXT = 2000


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Disable gradients, dispatch modes and tensor subclasses in this thread."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


@dataclass(eq=False, repr=False)
class Wait:
    """A wait of one rank for other ranks."""

    rank: RankThread
    what: str
    limit_s: float | None = None  # seconds; None: until no rank can end the wait
    call: RankCall | None = None  # call that the wait waits for
    is_pause: bool = False  # True: the rank polls, so the wait is always done
    ends_s: float = math.inf  # deadline on the clock of the schedule
    error: BaseException | None = None
    _is_over: bool = False

    @property
    def is_done(self) -> bool:
        return self._is_over or self.is_pause or (self.call is not None and self.call.is_done)

    def missing(self) -> list[int]:
        return [] if self.call is None else self.call.missing()

    def finish(self, error: BaseException | None = None) -> None:
        if not self.is_done:
            self.error = error
            self._is_over = True

    def give_up(self) -> None:
        missing = self.missing()
        what = f": it waits for {names_of(missing)}" if missing else ""
        self.finish(CollectiveTimeout(f"{self.what} is not done after {self.limit_s:g} s{what}"))

    def raise_error(self) -> None:
        """Raise a copy of the error that ended the wait: ranks must not share exceptions."""
        if self.error is not None:
            raise copy_of(self.error)


class RankCall(Wait):
    """One rank's call of a collective, or one side of a message.

    The last rank to call runs ``act`` with the calls of all ranks; their ``details`` must be equal.
    ``peers``: ranks in the group that a message waits for; None: a collective waits for all ranks.
    """

    def __init__(
        self,
        meeting: GroupCalls,
        rank: RankThread,
        what: str,
        tensors: Sequence[Tensor],
        details: dict[str, Any],
        act: Callable[[Sequence[RankCall]], object] | None,
        args: Any = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, what)
        self.meeting = meeting
        self.details = details
        self.act = act
        self.args = args
        self.peers = peers
        self.number = 0
        self.are_alike = False  # True: sizes and dtypes must be equal on all ranks
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        self.line, _ = call_of_program()
        self.devices = devices_of(tensors)
        self._steps: list[Callable[[], object]] = []

    def wait(self, timeout: float | None = None, *, what: str = "") -> object:
        """Let other ranks run until the call is done; raise its error.

        CollectiveTimeout after ``timeout`` seconds. The call may still end later.
        """
        self.meeting.cluster.wait(Wait(self.rank, what or self.what, timeout, self))
        self.raise_error()
        return True

    def is_completed(self) -> bool:
        self.rank.check_thread()
        if not self.is_done:
            self.meeting.cluster.wait(Wait(self.rank, self.what, call=self, is_pause=True))
        return self.is_done

    def exception(self) -> BaseException | None:
        return self.error

    def then(self, step: Callable[[], object]) -> None:
        """Run ``step`` after the call succeeds, before this rank's next call can end."""
        self._steps.append(step)
        if self.is_done:
            self.run_steps()

    def run_steps(self) -> None:
        steps, self._steps = self._steps, []
        with plain_torch():
            for step in steps if self.error is None else ():
                step()

    def missing(self) -> list[int]:
        if self.is_done:
            return []
        ranks = self.meeting.ranks
        if self.peers is not None:
            return [ranks[i] for i in self.peers]
        calls = self.meeting.open.get(self.number, {})
        return [rank for i, rank in enumerate(ranks) if i not in calls]

    def signature(self, most_values: int) -> str:
        """Return the description that ranks compare, with at most ``most_values`` sizes."""
        pairs = zip(map(math.prod, self.shapes), self.dtypes, strict=True)
        sizes = some((f"{numel} {dtype}" for numel, dtype in pairs), most_values)
        return f"{self} of {sizes}" if self.are_alike and sizes else str(self)

    def __str__(self) -> str:
        details = ", ".join(self._detail(name, value) for name, value in self.details.items())
        return f"{self.what} ({details})" if details else self.what

    def _detail(self, name: str, value: Any) -> str:
        if name == "op":
            return str(value)
        if name in ("root", "to", "from"):  # a rank in the group: show its number in the cluster
            value = dict(enumerate(self.meeting.ranks)).get(value, value)
        return f"{name} {value}"


class GroupCalls:
    """The open calls of one group, matched by their number.

    ``ranks`` are the group's ranks, numbered as in the cluster. Tables show ``name``.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[int], name: str) -> None:
        self.cluster = cluster
        self.ranks = ranks
        self.name = name
        self._numbers = [-1] * len(ranks)  # call 0 makes the group
        self.open: dict[int, dict[int, RankCall]] = {}  # open[call number][rank in the group]
        self._messages: list[RankCall] = []  # sends and recvs without a partner

    def post(self, index: int, call: RankCall) -> None:
        """Add the call of the group's rank ``index``; run it if all ranks have called.

        ArgumentError if the ranks' calls differ.
        """
        with self.cluster.schedule.lock:
            self.cluster.check_told()
            self._numbers[index] += 1
            call.number = self._numbers[index]
            calls = self.open.setdefault(call.number, {})
            calls[index] = call
            if len(calls) < len(self.ranks):
                return
            self.compare(call.number)
            del self.open[call.number]
        self._act([calls[i] for i in range(len(calls))])

    def post_message(self, call: RankCall) -> None:
        with self.cluster.schedule.lock:
            self.cluster.check_told()
            other = next((each for each in self._messages if _belong_together(each, call)), None)
            if other is None:
                self._messages.append(call)
                return
            self._messages.remove(other)
        self._act([call, other] if call.what == "send" else [other, call])

    def fail(self, error: BaseException) -> None:
        calls = [*self._messages, *(c for by_rank in self.open.values() for c in by_rank.values())]
        self._messages, self.open = [], {}
        for call in calls:
            call.finish(error)

    def compare(self, *numbers: int) -> None:
        """Raise ArgumentError if ranks' calls with one of the numbers differ; default: all open."""
        for number in numbers or tuple(self.open):
            calls = self.open[number].values()
            kinds: dict[str, list[RankCall]] = {}
            for call in sorted(calls, key=lambda call: call.rank.index):
                kinds.setdefault(call.signature(len(call.shapes)), []).append(call)
            if len(kinds) > 1:
                shown = {each[0].signature(_MOST_VALUES): each for each in kinds.values()}
                shown = shown if len(shown) == len(kinds) else kinds
                what = "; ".join(
                    f"{names_of([call.rank.index for call in each])}: {kind}"
                    for kind, each in shown.items()
                )
                text = f"ranks call different things in call {number} of {self.name}: {what}"
                raise copy_of(self.cluster.fail(ArgumentError, text, calls))

    def _act(self, calls: Sequence[RankCall]) -> None:
        act = calls[0].act
        error: BaseException | None = None
        try:
            _wait_for_gpus(calls)
            if act is not None:
                with plain_torch():
                    act(calls)
            for call in calls:
                call.run_steps()
            _wait_for_gpus(calls)
        except Exception as caught:
            error = self.cluster.fail(type(caught), f"{calls[0]}: {caught}", calls)
        for call in calls:
            call.finish(error)
        self.cluster.schedule.look()


def _wait_for_gpus(calls: Sequence[RankCall]) -> None:
    """Synchronize the GPUs of these calls, because each rank uses its own stream."""
    for device in {device for call in calls for device in call.devices}:
        torch.cuda.synchronize(device)


def _belong_together(one: RankCall, other: RankCall) -> bool:
    send, receive = (one, other) if one.what == "send" else (other, one)
    if (send.what, receive.what) != ("send", "recv"):
        return False
    (sender, _), (receiver, _) = send.args, receive.args
    is_from_it = receive.details.get("from", sender) == sender
    has_its_tag = receive.details.get("tag") == send.details.get("tag")
    return send.details["to"] == receiver and is_from_it and has_its_tag


def some(values: Iterable[Any], most_values: int = _MOST_VALUES) -> str:
    shown = [str(value) for value in values]
    more = len(shown) - most_values
    return ", ".join(shown[:most_values]) + (f" and {more} more" if more > 0 else "")


def names_of(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def seconds_of(timeout: Any) -> float | None:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return float(timeout) if timeout is not None and timeout > 0 else None


def copy_of(error: BaseException) -> BaseException:
    try:
        copy = type(error)(*error.args)
    except Exception:  # the class may take other arguments
        copy = RingarError(text_of(error))
    copy.__cause__ = error.__cause__
    return copy


def text_of(error: BaseException) -> str:
    """Return an exception's class and shortened text, even if its ``__str__`` raises."""
    try:
        text = str(error)
    except BaseException as failure:
        text = f"(its text fails with {type(failure).__name__})"
    more = "..." if len(text) > _MOST_TEXT else ""
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}{more}"


def is_good_exit(error: BaseException) -> bool:
    code = error.code if isinstance(error, SystemExit) else 1
    return code is None or (isinstance(code, int) and code == 0)


def is_inside(module: str) -> bool:
    return module.partition(".")[0] in _INSIDE | _LIBRARY


def call_of_program() -> tuple[str, str]:
    """Return the line that the program runs now, and the torch function that it calls."""
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
