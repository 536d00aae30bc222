"""Grade any ``allreduce(data)``, property by property."""

from __future__ import annotations

import contextlib
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import check_positive
from pyringar.comm.jobs import Jobs
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError
from pyringar.grading.causes import ONE_RANK, TOO_SLOW, CauseFinder, costs, points
from pyringar.grading.checks import CHECKS, Check, Subject
from pyringar.grading.graded_calls import Failure
from pyringar.grading.solution import function_name

Work = Callable[[Subject], str | None]
_DEFAULT_RANKS = 8
_SMALL_NUMEL = 10_000
_MAX_HANGS = 3  # after this many time-outs the other properties are not run


@dataclass(frozen=True)
class Property:
    """The verdict on one property.

    Attributes:
        name: Name of the property, such as ``"in place"``.
        verdict: ``"pass"``, ``"fail"``, ``"unstable"`` if the result differs between runs,
            ``"timeout"``, or ``"reported"`` if the property is not required.
        detail: The description of the pass or the failure.
        case: The smallest case that shows a failure: ``k``, ``shape``, ``numel``, ``dtype``,
            ``layout``, ``values``, and if known ``rank``, ``index``, ``expected`` and ``got``.
        causes: The mistakes that made the property fail, such as ``"wrong sum"`` or ``"sizes"``. A
            mistake costs marks once, even if it is the cause of several failures.
    """

    name: str
    verdict: str
    detail: str
    case: dict[str, Any] | None = None
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradeReport:
    """All verdicts on one function; ``str(report)`` is a table.

    Attributes:
        function: The name of the function.
        devices: The device of every rank.
        properties: One `Property` per check.
        remark: An error of the file after it defined the function, or "".
    """

    function: str
    devices: tuple[str, ...]
    properties: tuple[Property, ...]
    remark: str = ""

    @property
    def passed(self) -> bool:
        """Return whether every required property passed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Property, ...]:
        """Return the required properties that did not pass; the first explains most others."""
        return tuple(p for p in self.properties if p.verdict not in ("pass", "reported"))

    @property
    def required(self) -> tuple[Property, ...]:
        """Return the properties that affect the mark, without the properties only reported."""
        return tuple(p for p in self.properties if p.verdict != "reported")

    @property
    def first_look_at(self) -> Property | None:
        """Return the failure that explains most others; None if all passed.

        It is the first failure, or the property of the mistake behind the first failure.
        """
        if not self.failed:
            return None
        first = self.failed[0]
        cause = next(iter(first.causes), first.name)
        name = "ranks" if cause == ONE_RANK else cause
        return next((p for p in self.failed if p.name == name), first)

    @property
    def costs(self) -> dict[str, int]:
        """Return the points that each mistake costs."""
        return costs(cause for p in self.failed for cause in p.causes or (p.name,))

    @property
    def points(self) -> int:
        """Return the mark, 0 to 100: 100 minus the cost of each mistake."""
        return points(self.costs)

    def __getitem__(self, name: str) -> Property:
        return {found.name: found for found in self.properties}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        first = self.first_look_at
        summary = {"passed": self.passed, "marks": self.points, "costs": self.costs}
        return {**summary, "first_look_at": first and first.name, **asdict(self)}

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)

    def text(self, columns: int) -> str:
        """Return the table, of at most ``columns`` columns."""
        width = max(len(p.name) for p in self.properties)
        names = ", ".join(self.devices)
        if len(set(self.devices)) == 1:
            names = f"{self.devices[0]} x {len(self.devices)} ranks"
        lines = [f"{self.function} on {names}", ""]
        for p in self.properties:
            head = f"{p.name:<{width}}  {p.verdict:<8}  "
            lines += textwrap.wrap(head + p.detail, columns, subsequent_indent=" " * len(head))
        remark = textwrap.wrap(f"remark: {self.remark}", columns) if self.remark else []
        required, failed = len(self.required), self.failed
        if not failed:
            return "\n".join([*lines, "", *remark, f"passed: all {required} required properties"])
        names = ", ".join(p.name for p in failed)
        last = f"FAILED: {len(failed)} of {required} required properties: {names}"
        costs = ", ".join(f"{cause} -{cost}" for cause, cost in self.costs.items())
        lines += ["", *remark, *textwrap.wrap(last, columns)]
        lines.append(f"mark: {self.points} of 100 ({costs})")
        if len(failed) > 1 and self.first_look_at:
            lines.append(f"first look at: {self.first_look_at.name}")
        return "\n".join(lines)


def check_allreduce(
    fn: Callable[[list[Tensor]], Any],
    devices: Sequence[str | torch.device] | None = None,
    *,
    timeout_s: float = 60.0,
) -> GradeReport:
    """Grade a list-of-tensors allreduce, such as the book's ``allreduce(data)``.

    Float sums are compared with a float64 reference. The bound ``k * eps * sum(|x|)`` allows any
    order of addition, and 16-bit rounding after every term. Integers must be exact, also in floats.

    Args:
        fn: Called as ``fn(data)`` with a list of equal-shaped tensors, one per rank. To pass, it
            writes the sum into every tensor.
        devices: One per rank. All numbers of ranks up to ``len(devices)`` are tried. 17 and 33
            ranks are tried too and share devices. None: 8 CPU ranks.
        timeout_s: Seconds for each property. A call that takes longer stays behind in a daemon
            thread, and its property fails. After three time-outs the rest fails without a run.

    Returns:
        A `GradeReport`. An exception raised by ``fn`` is a failed property.

    Raises:
        ArgumentError: ``fn`` cannot be called, a device is missing, or ``timeout_s`` is not a
            positive number.

    Cost: about 200 calls, half a second on a CPU. The largest call has two ranks with two million
    elements each, 17 MB. ``fn`` runs in this process, and can end the process or fill its memory.
    ``pyringar check`` runs ``fn`` in a separate process.
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r}, expected a function of a list of tensors")
    check_positive("timeout_s", timeout_s, "number of seconds")
    ranks = check_devices(["cpu"] * _DEFAULT_RANKS if devices is None else devices)

    def within_limit(work: Work, subject: Subject) -> str | None:
        return _within(timeout_s, lambda: work(subject))

    verdicts = judge_all(within_limit, lambda: Subject(fn, ranks), timeout_s)
    return GradeReport(function_name(fn), tuple(str(device) for device in ranks), verdicts)


def judge_all(
    within_limit: Callable[[Work, Subject], str | None],
    subject: Callable[[], Subject],
    timeout_s: float,
) -> tuple[Property, ...]:
    """Return a verdict per property.

    ``within_limit`` runs a check with a subject, and raises TimeoutError after ``timeout_s``.
    ``subject`` returns a new subject for each run, since a hung run may still use the old subject.
    """
    verdicts: list[Property] = []
    finder = CauseFinder()
    late: list[Property] = []
    for check in CHECKS:
        if len(late) == _MAX_HANGS:
            detail = f"not run: {len(late)} other properties timed out"
            causes = late[-1].causes
            verdicts.append(Property(check.name, check.verdict_on_failure, detail, causes=causes))
            continue
        tested = subject()
        try:
            found = within_limit(check.look, tested)
        except Failure as failure:
            verdicts.append(
                _failed(check, failure, finder, lambda work: within_limit(work, subject()))
            )
        except TimeoutError:
            late.append(_timed_out(check, tested, timeout_s))
            verdicts.append(late[-1])
        else:
            verdict = "pass" if found is None else check.verdict_on_failure
            verdicts.append(Property(check.name, verdict, found or check.covered(tested)))
    return tuple(verdicts)


def _failed(
    check: Check, failure: Failure, finder: CauseFinder, within_limit: Callable[[Work], str | None]
) -> Property:
    verdict, detail = check.verdict_on_failure, str(failure)
    if verdict == "reported":
        return Property(check.name, verdict, detail, failure.case)
    causes: tuple[str, ...] = ("rank without sum" if check is CHECKS[0] else check.name,)

    def find(subject: Subject) -> None:
        nonlocal causes, detail
        causes, own = finder.find(check, failure, subject)
        detail += f"; also: {own}" if str(own) != detail else ""

    with contextlib.suppress(TimeoutError):
        within_limit(find)
    if "unstable" in causes:
        if detail.startswith("computed in "):  # this hint is no explanation of a race
            detail = detail.partition(": ")[2]
        detail = f"looks like a race: results differ between runs: {detail}"
    if "unstable" in causes or (check.name == "repeatable" and not failure.is_wrong_sum):
        verdict = "unstable"
    return Property(check.name, verdict, detail, failure.case, causes)


def _timed_out(check: Check, subject: Subject, timeout_s: float) -> Property:
    verdict = "timeout" if check.verdict_on_failure == "fail" else check.verdict_on_failure
    cause, case = "rank without sum" if check is CHECKS[0] else TOO_SLOW, subject.last_case
    detail = f"no answer within {timeout_s:g} s"
    if case is None:
        return Property(check.name, verdict, detail, causes=(cause,))
    took_s = time.monotonic() - subject.last_call_s
    if case.k > 2 and case.numel <= _SMALL_NUMEL and took_s > timeout_s / 2:
        cause = "ranks"  # a single small call did not end
    late = Failure(case, detail)
    return Property(check.name, verdict, str(late), late.case, (cause,))


def _within(timeout_s: float, work: Callable[[], str | None]) -> str | None:
    """Run ``work`` in a new thread, which keeps running after a TimeoutError."""
    jobs = Jobs("grader")
    job = jobs.submit(work, "grading")
    jobs.end()
    if not job.wait(timeout_s):
        raise TimeoutError
    answer: str | None = job.result
    return answer
