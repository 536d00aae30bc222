"""Find the mistake behind a failed property, so that a mark counts each mistake once.

The basic call has two ranks and contiguous float32 tensors with an even number of elements. A
failing call differs from it in several ways. The finder applies each difference alone to the basic
call. The first one that makes it fail is the mistake, and has the name of a property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from pyringar.grading.checks import Check, Subject, same_bits, wrong_value
from pyringar.grading.graded_calls import CallCase, Failure, even_case, layout_names

COSTS = {
    "no sum": 100,  # in the basic call, a rank's tensor is not even near the sum
    "wrong sum": 50,  # in the basic call, every rank has the mean, for example
    "unstable": 50,  # the sums are wrong in only some runs
    "digits": 40,  # sums of integers are right, other sums too inaccurate
    "ranks": 50,
    "in place": 40,
    "sizes": 30,
}
"""Points of 100 that a mistake costs; `OTHER_COST` if it is not named here."""
OTHER_COST = 10
LEAST_POINTS = 10  # least mark of a function without the mistake "no sum"
TOO_SLOW = "too slow"
_REPETITIONS = 3


class _Attempt(NamedTuple):
    """The outcome of one call. ``is_near``: wrong results are nearly sums, such as the mean."""

    is_right: bool
    is_near: bool = False
    results: Sequence[object] = ()


class CauseFinder:
    """Finds the mistake behind each failure of a function, and caches the results of calls."""

    def __init__(self) -> None:
        self._tried: dict[CallCase, list[_Attempt]] = {}

    def find(self, check: Check, failure: Failure, subject: Subject) -> str:
        """Return a key of `COSTS`, or the name of a property."""
        if cause := self._cause_in_basic_call(subject):
            return cause
        case = failure.tried
        attempts = self._attempts(subject, case)
        is_right_now = all(attempt.is_right for attempt in attempts)
        if not is_right_now and _is_unstable(attempts):
            return "unstable"
        if is_right_now:
            return "unstable" if failure.is_wrong_sum else check.name
        for cause, simple in _simpler_cases(case):
            if not all(attempt.is_right for attempt in self._attempts(subject, simple)):
                return cause
        return check.name

    def _cause_in_basic_call(self, subject: Subject) -> str:
        integers = self._attempts(subject, even_case(2))
        if not any(attempt.is_right for attempt in integers):
            return "wrong sum" if all(a.is_near for a in integers) else "no sum"
        digits = self._attempts(subject, even_case(2, values="random"))
        if all(attempt.is_right for attempt in (*integers, *digits)):
            return ""
        return "unstable" if _is_unstable(integers) or _is_unstable(digits) else "digits"

    def _attempts(self, subject: Subject, case: CallCase) -> list[_Attempt]:
        if case not in self._tried:
            attempts = self._tried[case] = []
            while len(attempts) < _REPETITIONS:
                attempts.append(_attempt(subject, case))
                if not attempts[-1].results:  # stop: the worker ended, and a restart is slow
                    break
        return self._tried[case]


def _attempt(subject: Subject, case: CallCase) -> _Attempt:
    try:
        call = subject.run(case)
    except (Failure, TimeoutError):
        return _Attempt(False)
    ranks = range(case.k)
    failures = [wrong_value(call, rank, call.given[rank]) for rank in ranks]
    is_right = not any(failures) and not any(wrong_value(call, r, call.result(r)) for r in ranks)
    is_near = all(failure is None or failure.is_near for failure in failures)
    return _Attempt(is_right, is_near, tuple(call.given))


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
            yield "ranks", even_case(case.k, values=values)
        if case.layout == "contiguous" and case.numel != even_case(case.k).numel:
            yield "sizes", CallCase(2, case.shape, values=values)
        yield "dtypes", even_case(2, dtype=case.dtype, values=values)
        for name in layout_names(case.layout):
            yield "strides", CallCase(2, case.shape, layout=name, values=values)
        yield "mixed strides", CallCase(2, case.shape, layout=case.layout, values=values)
    yield "nan and inf", even_case(2, values=case.values)


def points(failures: Iterable[tuple[str, str]]) -> int:
    """Return the mark, 0 to 100, for failures given as (property, cause)."""
    costs: dict[str, int] = {}
    for name, cause in failures:
        cost = COSTS.get(name if cause == TOO_SLOW else cause, OTHER_COST)
        costs[cause] = max(costs.get(cause, 0), cost)
    if "no sum" in costs:
        return 0
    return max(100 - sum(costs.values()), LEAST_POINTS)
