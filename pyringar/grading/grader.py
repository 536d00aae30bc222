"""A verdict per property for anybody's ``allreduce(data)``: does it do what the book asks for?

A function that passes the book's own example can still be wrong: the printed version rebinds list
items, so every replica but the first keeps its own gradient while the list looks right. Here every
property is tried by itself, and a failure names the smallest case that shows it.
"""

from __future__ import annotations

import queue
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pyringar.comm.threads import start_thread
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError
from pyringar.grading.checks import CHECKS, Check, Failure, Subject

__all__ = ["Property", "Report", "check_allreduce"]

_DEFAULT_RANKS = 8
# After this many properties that ran into their deadline the rest are not worth the wait.
_MAX_HANGS = 2

_T = TypeVar("_T")


@dataclass(frozen=True)
class Property:
    """One verdict.

    Attributes:
        name: What was tried, such as ``"in place"``.
        verdict: ``"pass"``, ``"fail"``, or ``"reported"`` for what is not required.
        detail: What was covered, or what went wrong, in words.
        case: For a failure the smallest case that shows it: ``k``, ``shape``, ``numel``, ``dtype``,
            ``layout``, ``values``, and where known ``rank``, ``index``, ``expected`` and ``got``.
    """

    name: str
    verdict: str
    detail: str
    case: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """All verdicts on one function; ``str(report)`` is a table.

    Attributes:
        function: The name of the function.
        devices: The device of every rank.
        properties: One :class:`Property` per thing tried.
    """

    function: str
    devices: tuple[str, ...]
    properties: tuple[Property, ...]

    @property
    def passed(self) -> bool:
        """Return whether nothing failed."""
        return all(p.verdict != "fail" for p in self.properties)

    def __getitem__(self, name: str) -> Property:
        """Return the property called ``name``."""
        for found in self.properties:
            if found.name == name:
                return found
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON knows."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        width = max(len(p.name) for p in self.properties)
        lines = [f"{self.function} on {_device_names(self.devices)}", ""]
        for p in self.properties:
            head = f"{p.name:<{width}}  {p.verdict:<8}  "
            lines += textwrap.wrap(head + p.detail, 100, subsequent_indent=" " * len(head))
        failed = [p.name for p in self.properties if p.verdict == "fail"]
        required = sum(p.verdict != "reported" for p in self.properties)
        if failed:
            last = f"FAILED: {len(failed)} of {required} required properties: {', '.join(failed)}"
        else:
            last = f"passed: all {required} required properties"
        return "\n".join([*lines, "", last])


def check_allreduce(
    fn: Callable[[list[Tensor]], Any],
    devices: Sequence[str | torch.device] | None = None,
    *,
    timeout_s: float = 60.0,
) -> Report:
    """Try a list-of-tensors allreduce, such as the book's ``allreduce(data)``.

    Sums of floats are compared with a float64 reference and the bound ``k * eps * sum(|x|)``,
    which any order of addition keeps, also one that rounds to 16 bits after every term. Integers,
    and floats that hold small integers, must be exact.

    Args:
        fn: Called as ``fn(data)`` with a list of equal-shaped tensors, one per rank. To pass, it
            leaves the sum of all in every one of them.
        devices: One per rank; every number of ranks up to theirs is tried. None: 8 CPU ranks.
        timeout_s: Seconds for each property. A call that takes longer is left behind in a daemon
            thread and fails; after two of those the rest fails without being run.

    Returns:
        A :class:`Report`. An exception raised by ``fn`` is a failed verdict, never an exception.

    Raises:
        ArgumentError: ``fn`` cannot be called, ``devices`` names one that is not there, or
            ``timeout_s`` is no positive number.

    Cost: about 180 calls, the largest with a million elements per rank.
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r}, expected a function of a list of tensors")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ArgumentError(f"timeout_s is {timeout_s!r}, expected a positive number of seconds")
    ranks = check_devices(["cpu"] * _DEFAULT_RANKS if devices is None else devices)
    verdicts = tuple(_verdicts(fn, ranks, timeout_s))
    return Report(_name_of(fn), tuple(str(device) for device in ranks), verdicts)


def _name_of(fn: Callable[..., Any]) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    module = getattr(fn, "__module__", None)
    return f"{module}.{name}" if module else name


def _device_names(devices: Sequence[str]) -> str:
    """``cpu x 8``, or all of them when they differ."""
    if len(set(devices)) == 1:
        return f"{devices[0]} x {len(devices)} ranks"
    return ", ".join(devices)


def _verdicts(
    fn: Callable[[list[Tensor]], Any], devices: tuple[torch.device, ...], timeout_s: float
) -> Iterator[Property]:
    hangs = 0
    for check in CHECKS:
        if hangs < _MAX_HANGS:
            verdict, is_late = _judge(check, Subject(fn, devices), timeout_s)
            hangs += is_late
            yield verdict
        else:
            detail = f"not run: {hangs} other properties did not finish"
            yield Property(check.name, check.verdict_on_failure, detail)


def _judge(check: Check, subject: Subject, timeout_s: float) -> tuple[Property, bool]:
    """Return the verdict of one check, and whether it ran into its deadline."""
    verdict, case, is_late = check.verdict_on_failure, None, False
    try:
        detail = _within(timeout_s, lambda: check.look(subject))
        if detail is None:
            verdict, detail = "pass", check.covers
    except Failure as failure:
        detail, case = str(failure), failure.case
    except TimeoutError:
        is_late, detail = True, f"no answer within {timeout_s:g} s"
        if subject.last_case is not None:
            late = Failure(subject.last_case, detail)
            detail, case = str(late), late.case
    return Property(check.name, verdict, detail, case), is_late


def _within(timeout_s: float, work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread of its own; TimeoutError when it is late, and it stays behind."""
    answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def target() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:  # raised again in the caller's thread, below
            answers.put((None, error))

    start_thread("grader", target)
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast("_T", answer)
