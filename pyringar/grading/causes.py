"""Find the mistakes behind a failed property, so that a mark counts each mistake once.

The basic call has two ranks and contiguous float32 tensors with an even number of elements. A
failing call differs from it in several ways. The finder applies each difference alone to the basic
call. The first one that makes it fail is a mistake. Then the finder runs the property again without
the calls that have this difference, to find the other mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyringar.grading.checks import Check, Subject, same_bits, wrong_value
from pyringar.grading.graded_calls import (
    CallCase,
    Failure,
    GradedCall,
    OddResult,
    even_case,
    layout_names,
)

COSTS = {
    "rank without sum": 100,  # after the basic call, a rank's tensor is not even near the sum
    "some ranks without sum": 50,  # but after a call with eight ranks, most ranks have it
    "wrong sum": 50,  # after the basic call, every rank has the mean, for example
    "unstable": 50,  # the sums are wrong in only some runs
    "digits": 40,  # sums of integers are right, other sums too inaccurate
    "ranks": 50,
    "other memory": 40,
    "sizes": 30,
    "too slow": 30,
}
"""Points of 100 that a mistake costs; `OTHER_COST` if it is not named here."""
OTHER_COST = 10
LEAST_POINTS = 10  # least mark of a function without the mistake "rank without sum"
TOO_SLOW = "too slow"
ONE_RANK = "one rank"
_HIDING = ("rank without sum", "unstable")  # other mistakes are not charged beside these
_DIFFERENCES: dict[str, Callable[[CallCase], bool]] = {
    ONE_RANK: lambda case: case.k == 1,
    "ranks": lambda case: case.k != 2,
    "sizes": lambda case: case.layout == "contiguous" and case.numel != even_case(case.k).numel,
    "dtypes": lambda case: case.dtype != torch.float32,
    "strides": lambda case: case.layout != "contiguous",
    "mixed strides": lambda case: len(layout_names(case.layout)) > 1,
    "nan and inf": lambda case: case.values == "special",
}
_REPETITIONS = 3
_MOST_REPETITIONS = 20  # of the basic call, until a run is right


class _Attempt(NamedTuple):
    """The outcome of one call; ``failures`` has an entry per rank, and is empty if it raised."""

    is_right: bool
    results: Sequence[object] = ()
    failures: Sequence[Failure | None] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether every result has the case's shape and dtype."""
        return bool(self.results) and all(f is None or "got" in f.case for f in self.failures)

    @property
    def is_near(self) -> bool:
        """Return whether every rank is right, like a known mistake, or right in half of it."""
        return bool(self.results) and all(f is None or f.is_near for f in self.failures)

    @property
    def is_like_sum(self) -> bool:
        """Return whether every rank is right or like a known mistake, such as the mean."""
        return bool(self.results) and self.num_like_sum == len(self.failures)

    @property
    def num_like_sum(self) -> int:
        return sum(f is None or f.is_like_sum for f in self.failures)


class CauseFinder:
    """Finds the mistakes behind the failures of a function, and caches the results of calls."""

    def __init__(self) -> None:
        self._tried: dict[CallCase, list[_Attempt]] = {}

    def find(
        self, check: Check, failure: Failure, subject: Subject
    ) -> tuple[tuple[str, ...], Failure]:
        """Return the causes: keys of `COSTS`, or names of properties.

        Also return the failure whose cause is the property itself, or the given failure.
        """
        basic = self._cause_in_basic_call(subject)
        if basic in ("rank without sum", "unstable"):
            return (basic,), failure
        accepted = self._accepted(subject, basic)
        causes = [basic] if basic else []
        repaired = _Repaired(subject, accepted if basic else "")
        found: Failure | None = failure
        own = failure
        while len(repaired.differences) < len(_DIFFERENCES):
            if causes:
                found = _failure(check, repaired)
            if found is None:
                break
            cause = self._cause(check, found, subject, accepted)
            causes.append("other memory" if cause == "in place" else cause)
            own = found if cause == check.name else own
            # Stop after a mistake that is not a difference between calls.
            if cause not in _DIFFERENCES or not _DIFFERENCES[cause](found.tried):
                break
            repaired.differences.add(cause)
        return tuple(dict.fromkeys(causes)), own

    def _accepted(self, subject: Subject, basic: str) -> str:
        """Return the property of `_Attempt` that calls without further mistakes have."""
        if not basic:
            return "is_right"
        attempts = self._attempts(subject, even_case(2))
        is_known = all(a.is_right or (a.is_like_sum and all(a.failures)) for a in attempts)
        return "is_like_sum" if is_known else "is_complete"

    def _cause(self, check: Check, failure: Failure, subject: Subject, accepted: str) -> str:
        case = failure.tried
        attempts = self._attempts(subject, case)
        is_accepted_now = all(getattr(attempt, accepted) for attempt in attempts)
        if not is_accepted_now and _is_unstable(attempts):
            return "unstable"
        if is_accepted_now:
            return "unstable" if failure.is_wrong_sum else check.name
        for cause, simple in _simpler_cases(case):
            if not all(getattr(attempt, accepted) for attempt in self._attempts(subject, simple)):
                return cause
        return check.name

    def _cause_in_basic_call(self, subject: Subject) -> str:
        integers = self._attempts(subject, even_case(2))
        if all(not a.is_right and a.is_near for a in integers):
            return "wrong sum"
        while not any(a.is_right for a in integers):
            if len(integers) >= _MOST_REPETITIONS or not integers[-1].results:
                return self._cause_without_sum(subject)
            integers.append(_attempt(subject, even_case(2)))
        digits = self._attempts(subject, even_case(2, values="random"))
        if all(attempt.is_right for attempt in (*integers, *digits)):
            return ""
        return "unstable" if _is_unstable(integers) or _is_unstable(digits) else "digits"

    def _cause_without_sum(self, subject: Subject) -> str:
        """Try eight ranks: a loop that ends one rank too early leaves most of them right."""
        eight = self._attempts(subject, even_case(8))[0]
        is_mostly_right = eight.results and 2 * eight.num_like_sum >= len(eight.failures)
        return "some ranks without sum" if is_mostly_right else "rank without sum"

    def _attempts(self, subject: Subject, case: CallCase) -> list[_Attempt]:
        if case not in self._tried:
            attempts = self._tried[case] = []
            while len(attempts) < _REPETITIONS:
                attempts.append(_attempt(subject, case))
                if not attempts[-1].results:  # stop: the worker ended, and a restart is slow
                    break
        return self._tried[case]


class _Repaired(Subject):
    """A function whose known mistakes are repaired, so that a check finds the next mistake.

    Calls with one of ``differences`` get the right sums. If the basic call is wrong, results that
    are equally wrong (``accepted``) are replaced by the right sums. So are all calls with integers,
    which the mean of torch refuses.
    """

    def __init__(self, subject: Subject, accepted: str) -> None:
        super().__init__(subject.fn, subject.devices)
        self.differences: set[str] = set()
        self._subject, self._accepted = subject, accepted

    def run(self, case: CallCase, inputs: Sequence[Tensor] | None = None) -> GradedCall:
        is_known = any(_DIFFERENCES[name](case) for name in self.differences)
        is_float_sum = case.dtype.is_floating_point and case.values == "positional"
        if is_known or (self._accepted and not is_float_sum):
            return _with_sums(GradedCall(case, self.devices, inputs))
        call = self._subject.run(case, inputs)
        if self._accepted and getattr(_outcome(call), self._accepted):
            return _with_sums(call)
        return call


def _with_sums(call: GradedCall) -> GradedCall:
    total, _ = call.expected
    for rank in range(call.case.k):
        for found in (call.given[rank], call.result(rank)):
            if OddResult.of(found, call.case) is None:
                found.detach().copy_(total.view(call.case.shape))
    return call


def _failure(check: Check, subject: Subject) -> Failure | None:
    try:
        check.look(subject)
    except Failure as failure:
        return failure
    except TimeoutError:  # keep the causes found so far
        return None
    return None


def _attempt(subject: Subject, case: CallCase) -> _Attempt:
    try:
        return _outcome(subject.run(case))
    except (Failure, TimeoutError):
        return _Attempt(False)


def _outcome(call: GradedCall) -> _Attempt:
    ranks = range(call.case.k)
    failures = [wrong_value(call, rank, call.given[rank]) for rank in ranks]
    is_right = not any(failures) and not any(wrong_value(call, r, call.result(r)) for r in ranks)
    return _Attempt(is_right, tuple(call.given), failures)


def _is_unstable(attempts: Sequence[_Attempt]) -> bool:
    first, *others = attempts
    return any(
        other.is_right != first.is_right or any(map(_differ, first.results, other.results))
        for other in others
    )


def _differ(first: object, second: object) -> bool:
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return are_tensors and not same_bits(first, second)


def _simpler_cases(case: CallCase) -> Iterator[tuple[str, CallCase]]:
    """Yield calls with one difference from the basic call, and that difference's property."""
    for values in ("positional", "random"):
        if case.k != 2:
            yield ONE_RANK if case.k == 1 else "ranks", even_case(case.k, values=values)
        if case.layout == "contiguous" and case.numel != even_case(case.k).numel:
            yield "sizes", CallCase(2, case.shape, values=values)
        yield "dtypes", even_case(2, dtype=case.dtype, values=values)
        for name in layout_names(case.layout):
            yield "strides", CallCase(2, case.shape, layout=name, values=values)
        yield "mixed strides", CallCase(2, case.shape, layout=case.layout, values=values)
    yield "nan and inf", even_case(2, values=case.values)


def costs(causes: Iterable[str]) -> dict[str, int]:
    """Return the points that each mistake costs."""
    found = {cause: COSTS.get(cause, OTHER_COST) for cause in causes}
    for cause in _HIDING:
        if cause in found:
            return {cause: found[cause]}
    if "ranks" in found:
        found.pop(ONE_RANK, None)
    return found


def points(costs: dict[str, int]) -> int:
    """Return the mark, 0 to 100."""
    return 0 if "rank without sum" in costs else max(100 - sum(costs.values()), LEAST_POINTS)
