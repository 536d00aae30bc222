"""Define the grader's cases, and the properties that it checks.

A property goes from small cases to large ones and raises the first `Failure`, the smallest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyringar.audit.probes import TargetError
from pyringar.audit.questions import order_of
from pyringar.grading.cases import FLOATS, INTEGERS, Call, Case, Failure, Lists, Other
from pyringar.grading.solution import call_words
from pyringar.parallel.shards import has_bits

_MANY_RANKS = (17, 33)  # also tried on fewer devices
_MANY_ELEMENTS = 2**21 + 17  # odd


class Raised(Failure):
    """The function raised an exception; ``detail`` says which, and in which line."""


@dataclass(eq=False)
class Subject:
    """The function under test, called in this thread."""

    fn: Callable[[list[Tensor]], Any]
    devices: tuple[torch.device, ...]
    last_case: Case | None = None

    def run(self, case: Case, inputs: Sequence[Tensor] | None = None) -> Call:
        self.last_case = case
        call = Call(case, self.devices, inputs)
        call.returned = self.call(case, call.data)
        return call

    def call(self, case: Case, data: list[Any]) -> str | None:
        try:
            returned = self.fn(data)
        except BaseException as error:  # sys.exit() in a solution is a failed solution
            raise Raised(case, f"raises {call_words(error, self.fn)}") from error
        return None if returned is None else type(returned).__name__

    def few(self, *wanted: int) -> list[int]:
        """Return the numbers of ranks in ``wanted``, limited to ``most``, in ascending order."""
        return sorted({min(k, self.most) for k in wanted})

    @property
    def most(self) -> int:
        """The number of devices: of ranks, in all properties but ``ranks``."""
        return len(self.devices)


def _wrong_value(call: Call, rank: int, found: Any) -> Failure | None:
    """Describe how ``found``, the result of ``rank``, differs from the sum; None if equal."""
    case = call.case
    if other := Other.of(found, case):
        return Failure(case, f"rank {rank} holds {other.words}", rank=rank)
    expected, bound = call.expected
    got = found.detach().cpu().reshape(-1).to(expected.dtype)
    right = _is_right(got, expected, bound)
    if bool(right.all()):
        return None
    index = int((~right).nonzero()[0])
    want, have = expected[index].item(), got[index].item()
    return Failure(
        case,
        f"rank {rank}, element {index}: expected {want}, got {have}"
        + _guess(call, rank, got, right),
        **{"rank": rank, "index": index, "expected": want, "got": have},
    )


def _is_right(got: Tensor, expected: Tensor, bound: Tensor | float) -> Tensor:
    if not expected.dtype.is_floating_point:  # their difference has no rounding
        return got == expected
    near = (got - expected).abs() <= bound
    if bool(near.all()):
        return near
    return near | (got == expected) | (got.isnan() & expected.isnan())


def _guess(call: Call, rank: int, got: Tensor, right: Tensor) -> str:
    expected, bound = call.expected
    if call.case.k == 1:
        return ""

    def is_like(value: Tensor) -> bool:
        return bool(_is_right(got, value, bound).all())

    inputs = [x.to(expected.dtype) for x in call.inputs]
    if is_like(inputs[rank]):
        if call.returned is None:
            return " (it still holds its own values)"
        return f" (it still holds its own values; the function returned a {call.returned} instead)"
    if call.case.dtype.is_floating_point and is_like(expected / call.case.k):
        return " (this is the mean, not the sum)"
    for other, values in enumerate(inputs):
        if is_like(expected - values):
            return f" (what rank {other} had is missing)"
        if is_like(expected + values):
            return f" (what rank {other} had is in it twice)"
    first_wrong = int((~right).nonzero()[0])
    if first_wrong and not bool(right[first_wrong:].any()):
        return f" (all before it are right, the {len(right) - first_wrong} from it on are not)"
    if bool(right[expected.isfinite()].all()):
        return " (only what is no finite number is wrong)"
    return ""


def _same_bits(a: Any, b: Any) -> bool:
    are_dense = all(isinstance(t, Tensor) and t.layout is torch.strided for t in (a, b))
    return are_dense and a.dtype == b.dtype and has_bits(a.cpu(), b.cpu())


def _check_value(call: Call, rank: int) -> None:
    if failure := _wrong_value(call, rank, call.result(rank)):
        raise failure


def _check_ranks(subject: Subject, cases: Iterable[Case]) -> None:
    for case in cases:
        call = subject.run(case)
        for rank in range(case.k):
            _check_value(call, rank)


def _both_values(ks: Iterable[int], **options: Any) -> Iterator[Case]:
    for k in ks:
        yield from (Case(k, values=values, **options) for values in ("positional", "random"))


def _sum(subject: Subject) -> None:
    for case in _both_values(subject.few(2, 4)):
        _check_value(subject.run(case), 0)


def _every_rank(subject: Subject) -> None:
    _check_ranks(subject, _both_values(subject.few(2, 4)))


def _in_place(subject: Subject) -> None:
    for k in subject.few(1, 2, 4):
        for dtype in (torch.float32, torch.float16):
            call = subject.run(Case(k, dtype=dtype))
            for rank in range(k):
                _check_in_place(call, rank)


def _check_in_place(call: Call, rank: int) -> None:
    mine = _wrong_value(call, rank, call.given[rank])
    if mine is None:
        if _wrong_value(call, rank, call.own_memory(rank)) is not None:
            raise Failure(
                call.case,
                f"rank {rank}'s tensor was made to point at other memory (t.data = ... or "
                "t.set_(...)) instead of written into: views of it do not see the sum",
                rank=rank,
            )
        return
    if call.result(rank) is call.given[rank]:
        raise mine
    is_unchanged = _same_bits(call.given[rank], call.inputs[rank])
    still = "still holds its own values" if is_unchanged else "does not hold the sum"
    raise Failure(
        call.case,
        f"rank {rank}'s own tensor {still}: the function rebinds list items (data[i] = ...) "
        "instead of writing into them (data[i][:] = ...)",
        **{key: mine.case[key] for key in ("rank", "index", "expected", "got") if key in mine.case},
    )


def _list_untouched(subject: Subject) -> None:
    for k in subject.few(1, 2, 4):
        call = subject.run(Case(k))
        if len(call.data) != k:
            raise Failure(call.case, f"the list had {k} items before and {len(call.data)} after")
        for rank in range(k):
            if call.data[rank] is not call.given[rank]:
                where = [r for r in range(k) if call.data[rank] is call.given[r]]
                what = f"the tensor of rank {where[0]}" if where else "another tensor than before"
                raise Failure(call.case, f"data[{rank}] is now {what}", rank=rank)


def _equal_bits(subject: Subject) -> None:
    for dtype in FLOATS:
        for k in subject.few(2, 3, subject.most):
            call = subject.run(Case(k, (4099,), dtype, values="random"))
            for rank in range(1, k):
                if not _same_bits(call.result(0), call.result(rank)):
                    detail = f"rank {rank} has other bits than rank 0"
                    raise Failure(call.case, detail, rank=rank)


def _repeatable(subject: Subject) -> None:
    for numel in (1009, 65_537):
        for k in subject.few(3, subject.most):
            case = Case(k, (numel,), values="random")
            first = subject.run(case)
            for repetition in range(2, 6):
                again = subject.run(case)
                for rank in range(k):
                    if not _same_bits(first.result(rank), again.result(rank)):
                        detail = f"rank {rank} has other bits in run {repetition} than in run 1"
                        raise Failure(case, detail, rank=rank)


def _rank_counts(subject: Subject) -> None:
    more = (k for k in _MANY_RANKS if k > subject.most)
    _check_ranks(subject, _both_values([*range(1, subject.most + 1), *more]))


def _sizes(subject: Subject) -> None:
    ks = subject.few(2, 3, subject.most)
    for numel in sorted({0, 1, *(k + d for k in ks for d in (-1, 0, 1)), 13, 127, 8191}):
        _check_ranks(subject, (Case(k, (numel,)) for k in ks))
    for numel in (65_536, 1_000_003):
        _check_ranks(subject, (Case(k, (numel,), values="random") for k in subject.few(3)))
    _check_ranks(subject, (Case(k, (_MANY_ELEMENTS,)) for k in subject.few(2)))


def _dtypes(subject: Subject) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        _check_ranks(subject, _both_values(subject.few(2, 3, subject.most), dtype=dtype))


def _special_values(subject: Subject) -> None:
    ks = subject.few(1, 2, 3)
    _check_ranks(subject, (Case(k, dtype=d, values="special") for d in FLOATS for k in ks))


def _strided_cases(subject: Subject) -> Iterator[Case]:
    for k in subject.few(2, 4):
        yield Case(k, (13,), layout="slice of a buffer")
        yield Case(k, (13,), layout="every other element")
        yield Case(k, (5, 7), layout="inner columns")
        yield Case(k, (5, 7), layout="transposed")
        yield Case(k, (2, 3, 5, 7), layout="channels_last")
        yield Case(k, (33, 130), layout="inner columns")
        yield Case(k, (3, 4, 14, 14), torch.float16, layout="channels_last")


def _mixed_cases(subject: Subject) -> Iterator[Case]:
    for k in subject.few(2, 3):
        yield Case(k, (5, 7), layout="contiguous beside transposed")
        yield Case(k, (5, 7), layout="inner columns beside contiguous")
        yield Case(k, (3, 4, 14, 14), torch.float16, "contiguous beside channels_last")


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
                    f"memory of rank {rank} that is not part of its tensor was written: {now} "
                    f"where {was} stood",
                    **{"rank": rank, "index": at, "expected": was, "got": now},
                )


def _returns(subject: Subject) -> str:
    returned = subject.run(Case(min(2, subject.most))).returned
    return "None" if returned is None else f"a {returned}; the book's returns None"


def _order(subject: Subject) -> str:
    k = min(4, subject.most)
    if k == 1:
        return "one rank adds nothing"
    try:
        _, found = order_of(Lists(subject.run, "", k), k, 1000)
    except TargetError as error:
        return f"not found: {error.reason}"
    return f"{found.verdict}, with {k} ranks and 1000 elements: {found.detail}"


class Check(NamedTuple):
    """A property: its name, the description of a pass, and the function that looks for a failure.

    ``{ranks}`` in ``covers`` stands for the numbers of ranks that were tried. ``look`` raises the
    first failure, or returns a sentence if the property is only reported.
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


# The first failure explains most of the others: if the sum is wrong, little else can be right.
CHECKS = (
    Check("sum", "rank 0 ends with the sum: exact integers, random floats", _sum),
    Check("every rank", "all other ranks end with it too", _every_rank),
    Check("in place", "the sum stands in the memory the caller handed in", _in_place),
    Check("list", "the list keeps its length and its tensors, in order", _list_untouched),
    Check("ranks", "{ranks} ranks", _rank_counts),
    Check("sizes", "0, 1, k-1, k, k+1, primes, up to 2,097,169 elements", _sizes),
    Check("dtypes", "float32, float64, float16, bfloat16, int32, int64", _dtypes),
    Check("nan and inf", "NaN, infinities and overflow end as in a plain sum", _special_values),
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
    Check("outside", "memory between and around strided views is left alone", _outside),
    Check("same bits", "all ranks hold identical bits", _equal_bits),
    Check("repeatable", "five runs give identical bits", _repeatable),
    Check("order", "", _order, "reported"),
    Check("returns", "", _returns, "reported"),
)
