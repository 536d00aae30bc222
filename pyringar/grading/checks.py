"""Define the grader's cases, and the properties that it checks.

A property goes from small cases to large ones and raises the first :class:`Failure`, which is the
smallest one. Nothing here knows about deadlines or verdicts: ``pyringar.grading.grader``.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["CHECKS", "Check", "Failure", "Subject"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int32, torch.int64)


# -- cases: what the function is called with -------------------------------------------------------


class Layout(NamedTuple):
    """Describe how a tensor lies in a larger one: the larger one's shape, and the view of it."""

    base_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    view: Callable[[Tensor, tuple[int, ...]], Tensor]


_LAYOUTS = {
    # A view here too: the base must stay what it is when the tensor is made to point elsewhere.
    "contiguous": Layout(lambda s: s, lambda base, s: base.view(s)),
    "slice of a buffer": Layout(
        lambda s: (math.prod(s) + 12,), lambda base, s: base[7 : 7 + math.prod(s)].view(s)
    ),
    "every other element": Layout(lambda s: (2 * s[0],), lambda base, s: base[::2]),
    "inner columns": Layout(lambda s: (s[0], s[1] + 3), lambda base, s: base[:, 1 : 1 + s[1]]),
    "transposed": Layout(lambda s: (s[1], s[0]), lambda base, s: base.t()),
    "channels_last": Layout(
        lambda s: (s[0], s[2], s[3], s[1]), lambda base, s: base.permute(0, 3, 1, 2)
    ),
}

# Rank r has the layout r modulo how many there are.
_MIXES = {
    "contiguous beside transposed": ("contiguous", "transposed"),
    "contiguous beside channels_last": ("contiguous", "channels_last"),
    "inner columns beside contiguous": ("inner columns", "contiguous", "slice of a buffer"),
}


@dataclass(frozen=True)
class Case:
    """One call: ``positional`` values are small integers, ``random`` ones need all digits."""

    k: int
    shape: tuple[int, ...] = (1009,)
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    values: str = "positional"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        layout = "" if self.layout == "contiguous" else f", {self.layout} {list(self.shape)}"
        return f"k={self.k}, numel={self.numel}, {_name(self.dtype)}{layout}, {self.values} values"

    def as_dict(self) -> dict[str, Any]:
        exact = {"shape": list(self.shape), "numel": self.numel, "dtype": _name(self.dtype)}
        return {"k": self.k, **exact, "layout": self.layout, "values": self.values}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(case: Case, rank: int) -> Tensor:
    """Return what ``rank`` contributes, flat, on the CPU: different at every position and rank.

    Positional values are small enough for exact sums, see :func:`_is_exact`. Random integers use
    all bits that a sum of ``k`` of them leaves room for: floats cannot hold them.
    """
    if case.values == "positional":
        return (torch.arange(case.numel) % 17 + rank).to(case.dtype)
    generator = torch.Generator().manual_seed(1_000_003 * case.numel + rank)
    if case.dtype.is_floating_point:
        return torch.randn(case.numel, generator=generator, dtype=torch.float64).to(case.dtype)
    bound = torch.iinfo(case.dtype).max // case.k
    return torch.randint(-bound, bound, (case.numel,), generator=generator, dtype=case.dtype)


def _is_exact(case: Case) -> bool:
    """Return whether no order of addition rounds: all partial sums are integers the dtype holds.

    Positional values are at most ``16 + rank``. bfloat16 holds integers up to 256: 11 ranks.
    """
    if not case.dtype.is_floating_point:
        return True
    largest_sum = 16 * case.k + case.k * (case.k - 1) // 2
    return case.values == "positional" and largest_sum <= 2 / torch.finfo(case.dtype).eps


class Call:
    """One call of the function, and everything needed to judge it afterwards."""

    def __init__(self, case: Case, devices: Sequence[torch.device]) -> None:
        self.case = case
        names = _MIXES.get(case.layout, (case.layout,))
        self.layouts = [_LAYOUTS[names[rank % len(names)]] for rank in range(case.k)]
        self.inputs = [_values(case, rank) for rank in range(case.k)]
        self.bases: list[Tensor] = []
        self.given: list[Tensor] = []
        for rank, values in enumerate(self.inputs):
            # What lies around a view differs by rank too: copying it from another rank shows.
            layout = self.layouts[rank]
            shape = layout.base_shape(case.shape)
            base = torch.full(shape, -50 - rank, dtype=case.dtype, device=devices[rank])
            tensor = layout.view(base, case.shape)
            tensor.copy_(values.view(case.shape))
            self.bases.append(base)
            self.given.append(tensor)
        self.bases_before = [base.clone().cpu() for base in self.bases]
        self.data: list[Any] = list(self.given)
        self.returned: Any = None

    def expected(self) -> tuple[Tensor, Tensor | float]:
        """Return the sum, flat, and how far a result may be from it."""
        if not self.case.dtype.is_floating_point:
            return torch.stack(self.inputs).sum(0, dtype=torch.int64), 0.0
        terms = torch.stack(self.inputs).to(torch.float64)
        total = terms.sum(0)
        if _is_exact(self.case):
            return total, 0.0
        return total, self.case.k * torch.finfo(self.case.dtype).eps * terms.abs().sum(0)

    def result(self, rank: int) -> Any:
        """Return the tensor in the list at ``rank``, or the caller's own if the list changed."""
        return self.data[rank] if len(self.data) == self.case.k else self.given[rank]

    def own_memory(self, rank: int) -> Tensor:
        """Return the memory that the caller handed in, whatever the tensor object points to now."""
        return self.layouts[rank].view(self.bases[rank], self.case.shape)


class Failure(Exception):  # noqa: N818
    """A property does not hold: in words, and the case that shows it as a dict."""

    def __init__(self, case: Case, detail: str, **more: Any) -> None:
        super().__init__(f"{case}: {detail}")
        self.case = {**case.as_dict(), **more}


class Subject:
    """The function under test; remembers what it was last called with."""

    def __init__(
        self, fn: Callable[[list[Tensor]], Any], devices: tuple[torch.device, ...]
    ) -> None:
        self.fn = fn
        self.devices = devices
        self.last_case: Case | None = None

    def run(self, case: Case) -> Call:
        """Call the function with a case's tensors; if it raises, that is a failure."""
        self.last_case = case
        call = Call(case, self.devices)
        try:
            call.returned = self.fn(call.data)
        except BaseException as error:  # sys.exit() in a solution is a failed solution
            frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is ours
            where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            raise Failure(case, f"raises {type(error).__name__}: {error}{where}") from error
        return call

    def few(self, *wanted: int) -> list[int]:
        """Those of ``wanted`` that there are ranks for, at least one, in ascending order."""
        return sorted({min(k, len(self.devices)) for k in wanted})

    @property
    def most(self) -> int:
        """The largest number of ranks."""
        return len(self.devices)


# -- comparing -------------------------------------------------------------------------------------


def _wrong_value(call: Call, rank: int, found: Any) -> Failure | None:
    """Say how ``found``, the result of ``rank``, differs from the sum; None if it does not."""
    case = call.case
    if not isinstance(found, Tensor):
        return Failure(case, f"rank {rank} holds a {type(found).__name__}, not a tensor", rank=rank)
    is_dense = found.layout is torch.strided
    if found.shape != case.shape or found.dtype != case.dtype or not is_dense:
        return Failure(
            case,
            f"rank {rank} holds {'' if is_dense else 'sparse '}{_name(found.dtype)} of shape "
            f"{list(found.shape)}, not {_name(case.dtype)} of shape {list(case.shape)}",
            rank=rank,
        )
    expected, bound = call.expected()
    got = found.detach().cpu().reshape(-1).to(expected.dtype)
    # Written so that NaN is wrong. Integers stay integers: their difference has no rounding.
    right = (got - expected).abs() <= bound if case.dtype.is_floating_point else got == expected
    if bool(right.all()):
        return None
    index = int((~right).nonzero()[0])
    want, have = expected[index].item(), got[index].item()
    return Failure(
        case,
        f"rank {rank}, element {index}: expected {want}, got {have}{_guess(call, rank, got)}",
        **{"rank": rank, "index": index, "expected": want, "got": have},
    )


def _guess(call: Call, rank: int, got: Tensor) -> str:
    """Say which of the commonest mistakes a wrong result looks like."""
    expected, bound = call.expected()
    if call.case.k == 1:
        return ""

    def is_like(value: Tensor) -> bool:
        return bool(((got - value).abs() <= bound).all())

    inputs = [x.to(expected.dtype) for x in call.inputs]
    if is_like(inputs[rank]):
        if call.returned is None:
            return " (it still holds its own values)"
        kind = type(call.returned).__name__
        return f" (it still holds its own values; the function returned a {kind} instead)"
    if call.case.dtype.is_floating_point and is_like(expected / call.case.k):
        return " (this is the mean, not the sum)"
    for other, values in enumerate(inputs):
        if is_like(expected - values):
            return f" (what rank {other} had is missing)"
        if is_like(expected + values):
            return f" (what rank {other} had is in it twice)"
    return ""


def _same_bits(a: Any, b: Any) -> bool:
    """Return whether two results are tensors of one kind with the same bytes, NaNs too."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


# -- properties ------------------------------------------------------------------------------------
#
# Each goes from small cases to large ones and raises the first failure; what is only reported
# returns a sentence.


def _check_value(call: Call, rank: int) -> None:
    failure = _wrong_value(call, rank, call.result(rank))
    if failure:
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
    for dtype in _FLOATS:
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
    _check_ranks(subject, _both_values(range(1, subject.most + 1)))


def _sizes(subject: Subject) -> None:
    ks = subject.few(2, 3, subject.most)
    for numel in sorted({0, 1, *(k + d for k in ks for d in (-1, 0, 1)), 13, 127, 8191}):
        _check_ranks(subject, (Case(k, (numel,)) for k in ks))
    for numel in (65_536, 1_000_003):
        _check_ranks(subject, (Case(k, (numel,), values="random") for k in subject.few(3)))


def _dtypes(subject: Subject) -> None:
    for dtype in (*_FLOATS, *_INTEGERS):
        _check_ranks(subject, _both_values(subject.few(2, 3, subject.most), dtype=dtype))


def _strided_cases(subject: Subject) -> Iterator[Case]:
    for k in subject.few(2, 4):
        yield Case(k, (13,), layout="slice of a buffer")
        yield Case(k, (13,), layout="every other element")
        yield Case(k, (5, 7), layout="inner columns")
        yield Case(k, (5, 7), layout="transposed")
        yield Case(k, (2, 3, 5, 7), layout="channels_last")
        yield Case(k, (33, 130), layout="inner columns")
        yield Case(k, (3, 4, 14, 14), torch.float16, layout="channels_last")


def _strides(subject: Subject) -> None:
    _check_ranks(subject, _strided_cases(subject))


def _mixed_strides(subject: Subject) -> None:
    for k in subject.few(2, 3):
        cases = (
            Case(k, (5, 7), layout="contiguous beside transposed"),
            Case(k, (5, 7), layout="inner columns beside contiguous"),
            Case(k, (3, 4, 14, 14), torch.float16, "contiguous beside channels_last"),
        )
        _check_ranks(subject, cases)


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
    return "None" if returned is None else f"a {type(returned).__name__}; the book's returns None"


def _aliased(subject: Subject) -> str:
    tensor = (torch.arange(13) % 17 + 1.0).to(subject.devices[0])
    before = tensor.clone()
    try:
        subject.fn([tensor, tensor, tensor])
    except BaseException as error:  # whatever it says is what gets reported
        return f"refused: {type(error).__name__}: {error}"
    ratio = tensor / before
    factor = f"{ratio[0].item():g} x" if bool((ratio == ratio[0]).all()) else "no multiple of"
    return f"accepted: [t, t, t] leaves in t {factor} what it held (three separate tensors: 3 x)"


class Check(NamedTuple):
    """A property: its name, what a pass covers, and the function that looks for a failure."""

    name: str
    covers: str
    look: Callable[[Subject], str | None]
    verdict_on_failure: str = "fail"


CHECKS = (
    Check("sum", "rank 0 ends with the sum: exact integers, random floats", _sum),
    Check("every rank", "all other ranks end with it too", _every_rank),
    Check("in place", "the sum stands in the memory the caller handed in", _in_place),
    Check("list", "the list keeps its length and its tensors, in order", _list_untouched),
    Check("same bits", "all ranks hold identical bits", _equal_bits),
    Check("repeatable", "five runs give identical bits", _repeatable),
    Check("ranks", "every number of ranks there is, from 1", _rank_counts),
    Check("sizes", "0, 1, k-1, k, k+1, primes, 65,536 and 1,000,003 elements", _sizes),
    Check("dtypes", "float32, float64, float16, bfloat16, int32, int64", _dtypes),
    Check("strides", "slices, every other element, columns, transposed, channels_last", _strides),
    Check("mixed strides", "equal shapes that lie otherwise on every rank", _mixed_strides),
    Check("outside", "memory between and around strided views is left alone", _outside),
    Check("returns", "", _returns, "reported"),
    Check("aliased", "", _aliased, "reported"),
)
