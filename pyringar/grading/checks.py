"""The properties that the grader checks, and the cases of each.

A check runs its cases from small to large and raises the first `Failure`. Only the cases of
``sizes`` have axes that the number of ranks does not divide, so a function that forgets the
remainder fails only ``sizes``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyringar.audit.probes import TargetError, dtype_name
from pyringar.audit.questions import order_of
from pyringar.grading.graded_calls import (
    FLOATS,
    INTEGERS,
    CallCase,
    Failure,
    GradedCall,
    ListAllreduce,
    OddResult,
    even_case,
)
from pyringar.grading.solution import call_words
from pyringar.parallel.shards import has_bits

_MANY_RANKS = (17, 33)  # more ranks than devices: ranks share devices
_MANY_ELEMENTS = 2**21 + 17


class Raised(Failure):
    """The function raised an exception; ``detail`` names the exception and the line."""


@dataclass(eq=False)
class Subject:
    """The graded function, called in this thread."""

    fn: Callable[[list[Tensor]], Any]
    devices: tuple[torch.device, ...]
    last_case: CallCase | None = None
    last_call_s: float = 0.0  # begin of the last call, by time.monotonic()

    def run(self, case: CallCase, inputs: Sequence[Tensor] | None = None) -> GradedCall:
        self.note(case)
        call = GradedCall(case, self.devices, inputs)
        call.returned = self.call(case, call.data)
        return call

    def note(self, case: CallCase) -> None:
        self.last_case, self.last_call_s = case, time.monotonic()

    def call(self, case: CallCase, data: list[Any]) -> str | None:
        try:
            returned = self.fn(data)
        except BaseException as error:  # includes SystemExit, which sys.exit() raises
            raise Raised(case, f"raises {call_words(error, self.fn)}") from error
        return None if returned is None else type(returned).__name__

    def few(self, *wanted: int) -> list[int]:
        """Return the wanted numbers of ranks in ascending order, each at most ``most``."""
        return sorted({min(k, self.most) for k in wanted})

    @property
    def most(self) -> int:
        """Number of devices: the most ranks in the cases of all properties except ``ranks``."""
        return len(self.devices)


def wrong_value(call: GradedCall, rank: int, found: Any) -> Failure | None:
    """Describe how ``found``, the result of ``rank``, differs from the sum; None if equal."""
    case = call.case
    if other := OddResult.of(found, case):
        return Failure(case, f"rank {rank} holds {other.words}", rank=rank)
    expected, bound = call.expected
    got = found.detach().cpu().reshape(-1).to(expected.dtype)
    right = _is_right(got, expected, bound)
    if bool(right.all()):
        return None
    index = int((~right).nonzero()[0])
    want, have = expected[index].item(), got[index].item()
    hint, is_like_sum = _hint(call, rank, got, right)
    failure = Failure(
        case,
        f"{hint}{': ' if hint else ''}rank {rank}, element {index}: expected {want}, got {have}",
        **{"rank": rank, "index": index, "expected": want, "got": have},
    )
    failure.is_like_sum = is_like_sum
    failure.is_near = is_like_sum or 2 * int(right.sum()) >= len(right)
    return failure


def _is_right(got: Tensor, expected: Tensor, bound: Tensor | float) -> Tensor:
    if not expected.dtype.is_floating_point:  # integers must be exact
        return got == expected
    near = (got - expected).abs() <= bound
    if bool(near.all()):
        return near
    return near | (got == expected) | (got.isnan() & expected.isnan())


def _hint(call: GradedCall, rank: int, got: Tensor, right: Tensor) -> tuple[str, bool]:
    """Return the likely mistake in words, and whether every rank's values are in the result."""
    expected, bound = call.expected
    inputs = [x.to(expected.dtype) for x in call.inputs]
    is_float = call.case.dtype.is_floating_point
    terms = torch.stack(inputs).double().abs().sum(0)

    def is_like(value: Tensor, bound: Tensor | float = bound) -> bool:
        return bool(_is_right(got, value, bound).all())

    if call.case.k == 1:
        return "", is_like(expected + inputs[0])
    mean = torch.div(expected, call.case.k, rounding_mode=None if is_float else "trunc")
    rounding = call.case.k * torch.finfo(call.case.dtype).eps * terms if is_float else 0.0
    is_mean = is_like(mean, rounding)
    if is_like(inputs[rank]):  # with three ranks, rank 1's positional values are also the mean
        returned = f"; the function returned a {call.returned} instead" if call.returned else ""
        return f"rank {rank} still holds its own values{returned}", is_mean
    if is_mean:
        return "this is the mean, not the sum", True
    for other, values in enumerate(inputs):
        if is_like(values):
            return f"rank {rank} holds the values of rank {other}", False
    for other, values in enumerate(inputs):
        if is_like(expected - values):
            return f"the values of rank {other} are missing", call.case.k > 2
        if is_like(expected + values):
            return f"rank {other} is counted twice", True
    num_right, num = int(right.sum()), len(right)
    if num_right and bool(right[:num_right].all()):
        return f"only the last {num - num_right} elements are wrong", False
    if num_right and bool(right[-num_right:].all()):
        return f"only the first {num - num_right} elements are wrong", False
    if bool(right[expected.isfinite()].all()):
        return "only NaN and infinities are wrong", False
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        near = call.case.k * torch.finfo(dtype).eps * terms
        if bool(((got.double() - expected.double()).abs() <= near).all()):
            return f"computed in {dtype_name(dtype)}?", True
    return "", False


def same_bits(a: Any, b: Any) -> bool:
    are_dense = all(isinstance(t, Tensor) and t.layout is torch.strided for t in (a, b))
    return are_dense and a.dtype == b.dtype and has_bits(a.cpu(), b.cpu())


def _check_value(call: GradedCall, rank: int) -> None:
    if failure := wrong_value(call, rank, call.result(rank)):
        raise failure


def _check_ranks(subject: Subject, cases: Iterable[CallCase]) -> None:
    for case in cases:
        call = subject.run(case)
        for rank in range(case.k):
            _check_value(call, rank)


def _both_values(ks: Iterable[int], **options: Any) -> Iterator[CallCase]:
    for k in ks:
        yield from (even_case(k, values=values, **options) for values in ("positional", "random"))


def _sum(subject: Subject) -> None:
    for case in _both_values(subject.few(2, 4)):
        _check_value(subject.run(case), 0)


def _every_rank(subject: Subject) -> None:
    _check_ranks(subject, _both_values(subject.few(2, 4)))


def _in_place(subject: Subject) -> None:
    for k in subject.few(1, 2, 4):
        for dtype in (torch.float32, torch.float16):
            call = subject.run(even_case(k, dtype=dtype))
            for rank in range(k):
                _check_in_place(call, rank)


def _check_in_place(call: GradedCall, rank: int) -> None:
    mine = wrong_value(call, rank, call.given[rank])
    if mine is None:
        if wrong_value(call, rank, call.own_memory(rank)) is not None:
            raise Failure(
                call.case,
                f"rank {rank}'s tensor was made to point at other memory (t.data = ... or "
                "t.set_(...)) instead of written into: views of it do not see the sum",
                is_wrong_sum=False,
                rank=rank,
            )
        return
    if call.result(rank) is call.given[rank]:
        raise mine
    is_unchanged = same_bits(call.given[rank], call.inputs[rank])
    still = "still holds its own values" if is_unchanged else "does not hold the sum"
    raise Failure(
        call.case,
        "the function rebinds list items (data[i] = ...) instead of writing into them "
        f"(data[i][:] = ...): rank {rank}'s own tensor {still}",
        **{key: mine.case[key] for key in ("rank", "index", "expected", "got") if key in mine.case},
    )


def _list_untouched(subject: Subject) -> None:
    for k in subject.few(1, 2, 4):
        call = subject.run(even_case(k))
        if len(call.data) != k:
            detail = f"the list had {k} items before and {len(call.data)} after"
            raise Failure(call.case, detail, is_wrong_sum=False)
        for rank in range(k):
            if call.data[rank] is not call.given[rank]:
                where = [r for r in range(k) if call.data[rank] is call.given[r]]
                what = f"the tensor of rank {where[0]}" if where else "another tensor than before"
                detail = f"data[{rank}] is now {what}"
                raise Failure(call.case, detail, is_wrong_sum=False, rank=rank)


def _equal_bits(subject: Subject) -> None:
    for dtype in FLOATS:
        for k in subject.few(2, 3, subject.most):
            call = subject.run(CallCase(k, (math.lcm(4200, k),), dtype, values="random"))
            for rank in range(1, k):
                if not same_bits(call.result(0), call.result(rank)):
                    detail = f"rank {rank} has other bits than rank 0"
                    raise Failure(call.case, detail, is_wrong_sum=False, rank=rank)


def _repeatable(subject: Subject) -> None:
    for numel in (840, 65_520):
        for k in subject.few(3, subject.most):
            case = CallCase(k, (math.lcm(numel, k),), values="random")
            first = subject.run(case)
            for repetition in range(2, 6):
                again = subject.run(case)
                for rank in range(k):
                    if not same_bits(first.result(rank), again.result(rank)):
                        detail = f"rank {rank} has other bits in run {repetition} than in run 1"
                        raise Failure(case, detail, is_wrong_sum=False, rank=rank)


def _rank_counts(subject: Subject) -> None:
    more = (k for k in _MANY_RANKS if k > subject.most)
    _check_ranks(subject, _both_values([*range(1, subject.most + 1), *more]))


def _sizes(subject: Subject) -> None:
    ks = subject.few(2, 3, subject.most)
    for numel in sorted({0, 1, *(k + d for k in ks for d in (-1, 0, 1)), 13, 127, 8191}):
        _check_ranks(subject, (CallCase(k, (numel,)) for k in ks))
    for dtype in (*FLOATS[1:], *INTEGERS):
        _check_ranks(subject, (CallCase(k, (1009,), dtype) for k in ks))
    for numel in (65_536, 1_000_003):
        _check_ranks(subject, (CallCase(k, (numel,), values="random") for k in subject.few(3)))
    _check_ranks(subject, (CallCase(k, (_MANY_ELEMENTS,)) for k in subject.few(2)))


def _dtypes(subject: Subject) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        _check_ranks(subject, _both_values(subject.few(2, 3, subject.most), dtype=dtype))


def _special_values(subject: Subject) -> None:
    ks = subject.few(1, 2, 3)
    _check_ranks(subject, (even_case(k, dtype=d, values="special") for d in FLOATS for k in ks))


# The tried numbers of ranks divide every axis, so that a cut along an axis leaves no remainder.
def _strided_cases(subject: Subject) -> Iterator[CallCase]:
    for k in subject.few(2, 4):
        yield CallCase(k, (24,), layout="slice of a buffer")
        yield CallCase(k, (24,), layout="every other element")
        yield CallCase(k, (12, 24), layout="inner columns")
        yield CallCase(k, (12, 24), layout="transposed")
        yield CallCase(k, (12, 12, 12, 24), layout="channels_last")
        yield CallCase(k, (36, 132), layout="inner columns")
        yield CallCase(k, (12, 12, 24, 12), torch.float16, layout="channels_last")


def _mixed_cases(subject: Subject) -> Iterator[CallCase]:
    for k in subject.few(2, 3):
        yield CallCase(k, (6, 12), layout="contiguous beside transposed")
        yield CallCase(k, (6, 12), layout="inner columns beside contiguous")
        yield CallCase(k, (6, 6, 12, 18), torch.float16, "contiguous beside channels_last")


def _outside(subject: Subject) -> None:
    for case in _strided_cases(subject):
        call = subject.run(case)
        outside = torch.ones(call.bases[0].shape, dtype=torch.bool)
        call.layouts[0].view(outside, case.shape).fill_(False)
        for rank, (base, before) in enumerate(zip(call.bases, call.bases_before, strict=True)):
            after = base.cpu()
            changed = ((after != before) & outside).reshape(-1).nonzero()
            if changed.numel():
                at = int(changed[0])
                was, now = before.reshape(-1)[at].item(), after.reshape(-1)[at].item()
                raise Failure(
                    case,
                    f"memory of rank {rank} that is not part of its tensor was written: {was} "
                    f"became {now}",
                    is_wrong_sum=False,
                    **{"rank": rank, "index": at, "expected": was, "got": now},
                )


def _returns(subject: Subject) -> str:
    returned = subject.run(even_case(min(2, subject.most))).returned
    return "None" if returned is None else f"a {returned}; the book's returns None"


def _order(subject: Subject) -> str:
    k = min(4, subject.most)
    if k == 1:
        return "one rank adds nothing"
    try:
        _, found = order_of(ListAllreduce(subject.run, "", k), k, 1000)
    except TargetError as error:
        return f"not found: {error.reason}"
    return f"{found.verdict}, with {k} ranks and 1000 elements: {found.detail}"


class Check(NamedTuple):
    """A property: its name, the description of a pass, and the function that checks it.

    In ``covers``, ``{ranks}`` stands for the tried numbers of ranks. ``look`` raises the first
    failure. For a property that is only reported, it returns the sentence to report.
    """

    name: str
    covers: str
    look: Callable[[Subject], str | None]
    verdict_on_failure: str = "fail"

    def covered(self, subject: Subject) -> str:
        most = subject.most
        counts = [f"1 to {most}" if most > 1 else "1", *(str(k) for k in _MANY_RANKS if k > most)]
        *first, last = counts
        ranks = f"{', '.join(first)} and {last}" if first else last
        return self.covers.format(ranks=ranks)


# In this order the first failure, such as a wrong sum, explains most of the later failures.
CHECKS = (
    Check("sum", "data[0] is the sum: exact integers, random floats", _sum),
    Check("every rank", "data[1], data[2], ... are the sum, too", _every_rank),
    Check("in place", "the sum is in the memory that the caller passed", _in_place),
    Check("list", "the list keeps its length and its tensors, in order", _list_untouched),
    Check("ranks", "{ranks} ranks", _rank_counts),
    Check("sizes", "0, 1, k-1, k, k+1, primes, up to 2,097,169 elements", _sizes),
    Check("dtypes", "float32, float64, float16, bfloat16, int32, int64", _dtypes),
    Check(
        "nan and inf", "NaN, infinities and overflow give what a plain sum gives", _special_values
    ),
    Check(
        "strides",
        "slices, every other, columns, transposed, channels_last",
        lambda subject: _check_ranks(subject, _strided_cases(subject)),
    ),
    Check(
        "mixed strides",
        "contiguous beside transposed, channels_last, columns",
        lambda subject: _check_ranks(subject, _mixed_cases(subject)),
    ),
    Check("outside", "memory between and around strided views is unchanged", _outside),
    Check("same bits", "all items of data have identical bits", _equal_bits),
    Check("repeatable", "five runs give identical bits", _repeatable),
    Check("order", "", _order, "reported"),
    Check("returns", "", _returns, "reported"),
)
