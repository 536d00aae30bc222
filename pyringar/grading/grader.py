"""Grade any ``allreduce(data)``, property by property.

A function that passes the book's own example can still be wrong: the printed version rebinds list
items, so every replica but the first keeps its own gradient while the list looks right.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import check_positive
from pyringar.comm.jobs import Jobs
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError
from pyringar.grading.cases import Failure
from pyringar.grading.checks import CHECKS, Check, Subject
from pyringar.grading.solution import function_name

_DEFAULT_RANKS = 8
_MAX_HANGS = 3  # late properties, after which the rest is not run
_WIDTH = 80  # of a terminal


@dataclass(frozen=True)
class Property:
    """One verdict.

    Attributes:
        name: Of the property, such as ``"in place"``.
        verdict: ``"pass"``, ``"fail"``, ``"timeout"``, or ``"reported"`` if it is not required.
        detail: The description of the pass or the failure.
        case: The smallest case that shows a failure: ``k``, ``shape``, ``numel``, ``dtype``,
            ``layout``, ``values``, and if known ``rank``, ``index``, ``expected`` and ``got``.
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
        properties: One `Property` per thing tried.
    """

    function: str
    devices: tuple[str, ...]
    properties: tuple[Property, ...]

    @property
    def passed(self) -> bool:
        """Return whether nothing failed, nor ran into its deadline."""
        return not self.failed

    @property
    def failed(self) -> tuple[Property, ...]:
        """Return what failed or ran into its deadline, what explains most first."""
        return tuple(p for p in self.properties if p.verdict in ("fail", "timeout"))

    @property
    def required(self) -> tuple[Property, ...]:
        """Return the properties that count, without what is only reported."""
        return tuple(p for p in self.properties if p.verdict != "reported")

    @property
    def first_look_at(self) -> Property | None:
        """Return the failure that explains most of the others; None if nothing failed."""
        return self.failed[0] if self.failed else None

    def __getitem__(self, name: str) -> Property:
        return {found.name: found for found in self.properties}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        first = self.first_look_at
        return {"passed": self.passed, "first_look_at": first and first.name, **asdict(self)}

    def __str__(self) -> str:
        width = max(len(p.name) for p in self.properties)
        names = ", ".join(self.devices)
        if len(set(self.devices)) == 1:
            names = f"{self.devices[0]} x {len(self.devices)} ranks"
        lines = [f"{self.function} on {names}", ""]
        for p in self.properties:
            head = f"{p.name:<{width}}  {p.verdict:<8}  "
            lines += textwrap.wrap(head + p.detail, _WIDTH, subsequent_indent=" " * len(head))
        required, failed = len(self.required), self.failed
        if not failed:
            return "\n".join([*lines, "", f"passed: all {required} required properties"])
        names = ", ".join(p.name for p in failed)
        last = f"FAILED: {len(failed)} of {required} required properties: {names}"
        lines += ["", *textwrap.wrap(last, _WIDTH)]
        if len(failed) > 1:
            lines.append(f"first look at: {failed[0].name}")
        return "\n".join(lines)


def check_allreduce(
    fn: Callable[[list[Tensor]], Any],
    devices: Sequence[str | torch.device] | None = None,
    *,
    timeout_s: float = 60.0,
) -> Report:
    """Grade a list-of-tensors allreduce, such as the book's ``allreduce(data)``.

    Sums of floats are compared with a float64 reference and the bound ``k * eps * sum(|x|)``, which
    any order of addition keeps, even if it rounds to 16 bits after every term. Integers, and floats
    that hold small integers, must be exact.

    Args:
        fn: Called as ``fn(data)`` with a list of equal-shaped tensors, one per rank. To pass, it
            leaves the sum of all in every one of them.
        devices: One per rank. Every number of ranks up to theirs is tried, and 17 and 33 ranks,
            several to a device. None: 8 CPU ranks.
        timeout_s: Seconds for each property. A call that takes longer stays behind in a daemon
            thread and fails; after three late properties the rest fails without being run.

    Returns:
        A `Report`. An exception raised by ``fn`` is a failed verdict, never an exception.

    Raises:
        ArgumentError: ``fn`` cannot be called, a device is missing, or ``timeout_s`` is not a
            positive number.

    Cost: about 200 calls, the largest with two million elements per rank, 17 MB for two: half a
    second on a CPU. ``fn`` runs in this process, and can end it or fill its memory. ``pyringar
    check`` runs it in a process of its own.
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r}, expected a function of a list of tensors")
    check_positive("timeout_s", timeout_s, "number of seconds")
    ranks = check_devices(["cpu"] * _DEFAULT_RANKS if devices is None else devices)

    def look(check: Check, subject: Subject) -> str | None:
        return _within(timeout_s, lambda: check.look(subject))

    verdicts = judge_all(look, lambda: Subject(fn, ranks), timeout_s)
    return Report(function_name(fn), tuple(str(device) for device in ranks), verdicts)


def judge_all(
    look: Callable[[Check, Subject], str | None], subject: Callable[[], Subject], timeout_s: float
) -> tuple[Property, ...]:
    """Return a verdict per property.

    ``look`` raises `Failure`, or TimeoutError after ``timeout_s``. ``subject`` returns a new
    subject for each property, since a hung property may still call the last one.
    """
    verdicts: list[Property] = []
    hangs = 0
    for check in CHECKS:
        verdict, case = check.verdict_on_failure, None
        detail: str | None
        if hangs == _MAX_HANGS:
            detail = f"not run: {hangs} other properties did not finish"
            verdicts.append(Property(check.name, verdict, detail))
            continue
        tested = subject()
        try:
            detail = look(check, tested)
            if detail is None:
                verdict, detail = "pass", check.covered(tested)
        except Failure as failure:
            detail, case = str(failure), failure.case
        except TimeoutError:
            hangs += 1
            detail = f"no answer within {timeout_s:g} s"
            if tested.last_case is not None:
                late = Failure(tested.last_case, detail)
                detail, case = str(late), late.case
            verdict = "timeout" if verdict == "fail" else verdict
        verdicts.append(Property(check.name, verdict, detail, case))
    return tuple(verdicts)


def _within(timeout_s: float, work: Callable[[], str | None]) -> str | None:
    """Run ``work`` in its own thread; TimeoutError if it is late, and the thread stays behind."""
    jobs = Jobs("grader")
    job = jobs.submit(work, "grading")
    jobs.end()
    if not job.wait(timeout_s):
        raise TimeoutError
    answer: str | None = job.result
    return answer
