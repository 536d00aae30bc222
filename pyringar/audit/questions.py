"""Audit an allreduce: each question is a set of calls, each answer a `Finding`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyringar.audit.findings import AuditReport, Finding, Section
from pyringar.audit.probes import (
    DTYPES,
    AuditTarget,
    TargetError,
    dtype_name,
    find_order,
    partial_type,
    wide_values,
)
from pyringar.audit.trees import EXACT, Region, describe, same_trees
from pyringar.parallel.shards import bits_of

SIZES = (1, 8, 1000, 16_384, 262_144, 1_048_576)
_FEW = 4096  # largest number of elements in the messages of most questions
_MIN_VALUES = 1000  # values compared per question; short messages are repeated to reach it
_MAX_GROWTH = 64  # largest ratio of two sizes whose results are compared
_RUNS = 8
_MAX_FAILURES = 4  # failed questions after which the audit stops asking
_MAX_STEPS = 64  # bisection steps for the sizes at which the order changes
_MAX_REGIONS = 64  # most regions of a message in the JSON report


# Random messages and their results: a tensor per rank, a message per row.
_Draw: TypeAlias = "tuple[list[Tensor], list[Tensor]]"
_Order: TypeAlias = "tuple[list[Region], Finding]"
_Row: TypeAlias = "tuple[int, Finding]"  # size of a message, Finding about its order


class _Differ(Exception):  # noqa: N818
    """Two results that should have the same bits differ."""

    def __init__(self, detail: str, case: dict[str, Any]) -> None:
        super().__init__(detail)
        self.case = case


def audit(target: AuditTarget, sizes: Sequence[int] = SIZES) -> AuditReport:
    """Report the order, rounding, repeatability and special values of an allreduce.

    A call that raises is a finding. Cost: ``k (k - 1) / 2`` calls per size, and some thousand calls
    with short messages.
    """
    return _Audit(target, sorted(set(sizes))).report()


def order_of(
    target: AuditTarget,
    k: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    way: str = "in place",
    draw: _Draw | None = None,
) -> _Order:
    """Return the order of addition on rank 0, if random values confirm its bits.

    ``draw``: random messages and their results, instead of a new call. The finding's case names the
    dtype of ``partial_sums``. Raises TargetError if a call failed.
    """
    inputs, result = draw or _drawn(target, k, numel, dtype, way)
    regions, *others = find_order(target, k, numel, dtype, way)
    name, detail = describe(regions, k)
    shown = [region.as_dict() for region in regions[:_MAX_REGIONS]]
    case: dict[str, Any] = {"k": k, "numel": numel, "num_regions": len(regions), "regions": shown}
    partial_sums = partial_type(regions, inputs, result[0])
    case["partial_sums"] = partial_sums and dtype_name(partial_sums)
    if partial_sums is None:
        again = _reduce(target, inputs, way)[0]
        if _difference(result[0], again) is not None:
            return regions, Finding("", "changes", "from run to run", case)
    for rank, other in enumerate(others, 1):
        if other != regions or _difference(result[0], result[rank]) is not None:
            theirs = "other bits of random values" if other == regions else describe(other, k)[1]
            detail = f"rank 0: {detail}; rank {rank}: {theirs}"
            return regions, Finding("", "differs from rank to rank", detail, case)
    if name != "unknown" and partial_sums is None:
        detail = f"looks like {name}, {detail}, but random values give other bits than this order"
        return regions, Finding("", "unknown", detail, case)
    if partial_sums == torch.float64 != dtype:
        name += ", in float64"
    return regions, Finding("", name, detail, case)


def _drawn(target: AuditTarget, k: int, numel: int, dtype: torch.dtype, way: str) -> _Draw:
    inputs = _values(k, numel, dtype)
    return inputs, _reduce(target, inputs, way)


def _values(k: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random messages per rank, one per row, with at least `_MIN_VALUES` values."""
    num_messages = -(-_MIN_VALUES // numel) | 1  # odd, to notice results that alternate
    return [x.view(-1, numel) for x in wide_values(k, num_messages * numel, dtype)]


def _reduce(target: AuditTarget, inputs: Sequence[Tensor], way: str = "in place") -> list[Tensor]:
    """Allreduce each row in a separate call; return the results by rank."""
    num_messages, numel = inputs[0].shape
    cuts = range(numel, num_messages * numel, numel)
    results = target.reduce([x.reshape(-1) for x in inputs], way, cuts)
    return [result.view(-1, numel) for result in results]


class _Audit:
    """All questions about one target, and results that several questions use."""

    def __init__(self, target: AuditTarget, sizes: Sequence[int]) -> None:
        self.target, self.k, self.sizes = target, target.ranks, sizes
        # Number of elements in the messages of most questions.
        self.few = max([n for n in sizes if n <= _FEW], default=sizes[0])
        self.dtypes: list[torch.dtype] = []  # dtypes that the target supports
        self._failures = self._steps = 0
        self._draws: dict[tuple[torch.dtype, int], _Draw] = {}  # short messages, by dtype and size
        self._found: dict[int, _Order] = {}  # float32 orders, by message size

    def report(self) -> AuditReport:
        *short, few = self._two_sizes()
        two_sizes = " and ".join([*map(str, short), _elements(few)])
        asked = {
            "the sum": [self._ask("is right", self._sum)],
            "order of addition, float32": self._orders(),
            f"order of addition on fewer ranks, {_elements(self.few)}": (
                self._ask(f"{k} ranks", partial(self._order, k, self.few)) for k in range(3, self.k)
            ),
            f"where it rounds, {two_sizes}": self._roundings(),
            "the same bits": self._same_bits(),
            "special values": (
                self._ask(name, partial(self._special, columns))
                for name, columns in _SPECIALS.items()
            ),
        }
        sections = [Section(title, tuple(findings)) for title, findings in asked.items()]
        name, ranks = self.target.name, self.k
        return AuditReport(name, ranks, tuple(s for s in sections if s.findings))

    def _ask(self, name: str, question: Callable[[], str | Finding]) -> Finding:
        if self._failures == _MAX_FAILURES:
            return Finding(name, "failed", f"not asked: {self._failures} other questions failed")
        try:
            found = question()
        except _Differ as difference:
            return Finding(name, "no", str(difference), difference.case)
        except TargetError as error:
            self._failures += 1
            return Finding(name, "failed", str(error))
        if isinstance(found, Finding):
            return Finding(name, found.verdict, found.detail, found.case)
        return Finding(name, "yes", found)

    def _sum(self) -> str:
        """Compare sums of small whole numbers, which are exact in every order."""
        for numel in self.sizes:
            places = torch.arange(-(-_MIN_VALUES // numel) * numel).view(-1, numel)
            inputs = [(places % 17 + r).float() for r in range(self.k)]
            want = torch.stack(inputs).sum(0)
            for rank, got in enumerate(_reduce(self.target, inputs)):
                where = f"on rank {rank}"
                if _difference(inputs[rank], got) is None:
                    where += (
                        ", whose tensor is unchanged (data[i] = ... replaces an item of the "
                        "list; data[i][:] = ... writes into the tensor)"
                    )
                _compare(want, got, "in the sum", where)
        return f"whole numbers, {_span(self.sizes)}"

    def _orders(self) -> Iterator[Finding]:
        # Libraries switch algorithms at powers of two, so ask at a size between each two.
        between = [3 << n for n in range(24) if self.sizes[0] < 3 << n < self.sizes[-1]]
        rows = [self._row(numel) for numel in sorted({*self.sizes, *between})]
        found = rows[:1]
        for row in rows[1:]:
            found += self._between(found[-1], row)
        for _, same in itertools.groupby(found, lambda row: _form(row[1])):
            alike = list(same)
            last = alike[-1][1]
            cases = {key: value for _, one in alike for key, value in one.case.items()}
            detail = last.detail if len(alike) == 1 else _form(last)[1] or f"last: {last.detail}"
            yield Finding(_span([numel for numel, _ in alike]), last.verdict, detail, cases)

    def _row(self, numel: int) -> _Row:
        return numel, self._ask("", partial(self._order, self.k, numel))

    def _between(self, low: _Row, high: _Row) -> list[_Row]:
        has_order = not {low[1].verdict, high[1].verdict} & {"failed", "changes"}
        is_found = _form(low[1]) == _form(high[1]) or high[0] - low[0] == 1
        if not has_order or is_found or self._steps == _MAX_STEPS:
            return [high]
        self._steps += 1
        middle = self._row((low[0] + high[0]) // 2)
        return [*self._between(low, middle), *self._between(middle, high)]

    def _order(self, k: int, numel: int) -> Finding:
        _, found = self._own_order(numel) if k == self.k else order_of(self.target, k, numel)
        return Finding("", found.verdict, found.detail, {_elements(numel): found.case})

    def _own_order(self, numel: int, dtype: torch.dtype = torch.float32) -> _Order:
        if dtype == torch.float32 and numel in self._found:
            return self._found[numel]
        found = order_of(self.target, self.k, numel, dtype, draw=self._drawn(numel, dtype))
        if dtype == torch.float32:
            self._found[numel] = found
        return found

    def _drawn(self, numel: int, dtype: torch.dtype = torch.float32) -> _Draw:
        """Return random messages and their results; short messages are cached."""
        if (dtype, numel) in self._draws:
            return self._draws[dtype, numel]
        draw = _drawn(self.target, self.k, numel, dtype, "in place")
        if numel <= _FEW:
            self._draws[dtype, numel] = draw
        return draw

    def _roundings(self) -> Iterator[Finding]:
        for dtype in DTYPES:
            row = self._ask(dtype_name(dtype), partial(self._rounding, dtype))
            if row.verdict not in ("-", "failed"):
                self.dtypes.append(dtype)
            yield row

    def _two_sizes(self) -> list[int]:
        return sorted({self.sizes[0], self.few})

    def _rounding(self, dtype: torch.dtype) -> Finding:
        try:
            self._drawn(self.few, dtype)
        except TargetError as error:
            return Finding("", "-", f"not offered: {error.reason}")
        found = {numel: self._rounding_of(dtype, numel) for numel in self._two_sizes()}
        *others, last = found.values()
        if all((one.verdict, one.detail) == (last.verdict, last.detail) for one in others):
            return last
        words = [f"{_elements(n)}: {one.verdict}, {one.detail}" for n, one in found.items()]
        return Finding("", "depends on the size", "; ".join(words), last.case)

    def _rounding_of(self, dtype: torch.dtype, numel: int) -> Finding:
        regions, order = self._own_order(numel, dtype)
        plain = self._found.get(numel, (regions, order))[0]
        said = "" if same_trees(regions, plain) else f"; order: {order.verdict}, {order.detail}"
        if order.verdict in ("unknown", "changes"):
            return Finding("", "unknown", order.detail, order.case)
        if order.verdict == EXACT:
            return Finding("", "once", "the correctly rounded sum of all ranks", order.case)
        if self.k == 2:
            return Finding("", "once", f"there is only one add{said}", order.case)
        name = order.case["partial_sums"]
        if name == dtype_name(dtype):
            return Finding("", "each add", f"to {name}{said}", order.case)
        return Finding("", "once", f"in the end; partial sums are {name}{said}", order.case)

    def _same_bits(self) -> Iterator[Finding]:
        yield self._ask("on every rank", self._every_rank)
        yield self._ask("in every run", self._every_run)
        yield self._ask("at every size", self._every_size)
        yield self._ask("in several calls", self._split)
        address, several = "7 elements after a multiple of 64 bytes", "one call and several at once"
        yield self._ask("at every address", partial(self._as_in_place, "unaligned", address))
        yield self._ask("async", partial(self._as_in_place, "async", f"as in place, {several}"))
        yield self._ask("ranks renumbered", self._renumbered)

    def _every_rank(self) -> str:
        for dtype, numel in self._messages():
            first, *others = self._drawn(numel, dtype)[1]
            for rank, other in enumerate(others, 1):
                _compare(first, other, "on rank 0", f"on rank {rank}")
        return f"float32 of {_span(self.sizes)}, other types of {self.few}"

    def _messages(self) -> list[tuple[torch.dtype, int]]:
        others = [(dtype, self.few) for dtype in self.dtypes if dtype != torch.float32]
        return [(torch.float32, numel) for numel in self.sizes] + others

    def _every_run(self) -> str:
        sizes = sorted({self.few, self.sizes[-1]})
        for numel in sizes:
            inputs = _values(self.k, numel, torch.float32)
            first = _reduce(self.target, inputs)
            for run in range(2, _RUNS + 1):
                for rank, again in enumerate(_reduce(self.target, inputs)):
                    _compare(first[rank], again, f"in run 1 on rank {rank}", f"in run {run}")
        return f"{_RUNS} runs with {_listed(sizes)} elements"

    def _every_size(self) -> str | Finding:
        if len(self.sizes) == 1:
            return Finding("", "-", f"only {_elements(self.few)} asked for")
        for short, long in itertools.pairwise(_steps(self.sizes)):
            num_messages = -(-_MIN_VALUES // short)
            values = wide_values(self.k, num_messages * long, torch.float32)
            inputs = [x.view(-1, long) for x in values]
            whole = _reduce(self.target, inputs)[0]
            part = _reduce(self.target, [x[:, :short] for x in inputs])[0]
            _compare(whole[:, :short], part, f"in a message of {long}", f"in one of {short}")
        found = sorted(self._found.items())
        for (short, (one, low)), (long, (other, high)) in itertools.pairwise(found):
            first = [Region(r.start, min(r.stop, short), r.tree) for r in other if r.start < short]
            if first != one or low.case["partial_sums"] != high.case["partial_sums"]:
                words = (f"{_elements(n)}: {f.verdict}" for n, f in ((short, low), (long, high)))
                return Finding("", "no", f"float32, {'; '.join(words)}", high.case)
        return f"first elements of longer messages, {_span(self.sizes)}"

    def _split(self) -> str:
        for numel in sorted({self.few, self.sizes[-1]}):
            inputs, cuts = wide_values(self.k, numel, torch.float32), _cuts(numel)
            whole = self.target.reduce(inputs)[0]
            parts = self.target.reduce(inputs, "in place", cuts)[0]
            _compare(whole, parts, "in one call", f"in calls cut at {_listed(cuts)}")
        return f"{len(_cuts(self.few)) + 1} calls instead of one"

    def _as_in_place(self, way: str, detail: str) -> str | Finding:
        if way not in self.target.ways:
            return Finding("", "-", "not offered")
        for numel in self.sizes:
            self._compare_ways(numel, way)
            if way == "async":
                self._compare_ways(numel, way, _cuts(numel))
        return f"{detail}, {_span(self.sizes)}"

    def _compare_ways(self, numel: int, way: str, cuts: Sequence[int] = ()) -> None:
        """Raise unless calls by ``way`` give the bits of in-place calls; ``cuts`` cut messages."""
        inputs, plain = self._drawn(numel)
        if cuts:
            one = [x[0] for x in inputs]
            plain, got = (self.target.reduce(one, w, cuts) for w in ("in place", way))
        else:
            got = _reduce(self.target, inputs, way)
        try:
            for rank in range(self.k):
                _compare(plain[rank], got[rank], f"in place on rank {rank}", way)
        except _Differ as difference:
            order = order_of(self.target, self.k, numel, way=way)[1]
            words = f"{difference}; {way}: {order.verdict}, {order.detail}"
            raise _Differ(words, difference.case) from None

    def _renumbered(self) -> str:
        inputs = _values(self.k, self.few, torch.float32)
        plain, ranks = _reduce(self.target, inputs)[0], range(self.k)
        rotations = [[(r + shift) % self.k for r in ranks] for shift in ranks]
        for order in rotations[1:] + [numbers[::-1] for numbers in rotations]:
            got = _reduce(self.target, [inputs[r] for r in order])[0]
            _compare(plain, got, "as they are", f"if ranks have the values of {_listed(order)}")
        return f"{2 * self.k - 1} permutations of the inputs"

    def _special(self, columns: Callable[[torch.finfo, int], list[_Column]]) -> str:
        for dtype, numel in self._messages():
            for column, total in columns(torch.finfo(dtype), self.k):
                # Rotate the column over the elements, so that each rank contributes each value.
                values = torch.tensor(column, dtype=torch.float64).to(dtype)
                places = torch.arange(-(-self.k // numel) * numel).view(-1, numel)
                inputs = [values[(places + r) % self.k] for r in range(self.k)]
                want = torch.full(places.shape, total, dtype=torch.float64).to(dtype)
                for rank, got in enumerate(_reduce(self.target, inputs)):
                    _compare(want, got, "expected", f"on rank {rank}")
        return ", ".join(dtype_name(dtype) for dtype in self.dtypes)


_Column = tuple[list[float], float]  # a value per rank, and their sum


def _column(rest: float, k: int, *values: float) -> list[float]:
    return [*values, *[rest] * (k - len(values))]


_SPECIALS: dict[str, Callable[[torch.finfo, int], list[_Column]]] = {
    "NaN stays": lambda info, k: [(_column(1, k, math.nan), math.nan)],
    "infinity stays": lambda info, k: [
        (_column(1, k, math.inf), math.inf),
        (_column(1, k, -math.inf), -math.inf),
    ],
    "inf - inf is NaN": lambda info, k: [(_column(1, k, math.inf, -math.inf), math.nan)],
    "overflow is inf": lambda info, k: [(_column(0, k, info.max, info.max), math.inf)],
    "-0 - 0 is -0": lambda info, k: [([-0.0] * k, -0.0), (_column(-0.0, k, 0.0), 0.0)],
    "subnormals stay": lambda info, k: [
        (_column(0, k, info.tiny * info.eps), info.tiny * info.eps),
        ([info.tiny * info.eps * 3] * k, info.tiny * info.eps * 3 * k),
        (_column(0, k, 1.5 * info.tiny, -info.tiny), info.tiny / 2),
    ],
}


def _difference(want: Tensor, got: Tensor) -> Tensor | None:
    """Return a mask of elements whose bits differ, or None. All NaNs are equal."""
    differ = (bits_of(want) != bits_of(got)) & ~(want.isnan() & got.isnan())
    return differ if bool(differ.any()) else None


def _compare(want: Tensor, got: Tensor, where: str, where_got: str) -> None:
    """Raise _Differ if two results differ; the last dimension is the message."""
    differ = _difference(want, got)
    if differ is None:
        return
    first = tuple(differ.nonzero()[0].tolist())
    index, numel, dtype = first[-1], want.shape[-1], dtype_name(want.dtype)
    one, other = _hex(want[first]), _hex(got[first])
    raise _Differ(
        f"{dtype}, element {index} of {numel}: {one} {where}, {other} {where_got}",
        {
            "dtype": dtype,
            "numel": numel,
            "index": index,
            "differing": int(differ[first[:-1]].sum()),
            "expected": one,
            "got": other,
            "expected_where": where,
            "got_where": where_got,
        },
    )


def _hex(value: Tensor) -> str:
    bits = int(bits_of(value.reshape(1))) & (1 << 8 * value.element_size()) - 1
    return f"0x{bits:0{2 * value.element_size()}x} ({value.item():.9g})"


def _cuts(numel: int) -> list[int]:
    """Return the cuts for one short and three longer pieces, as far as the message allows."""
    return sorted({min(8, numel // 4), numel // 3, numel - numel // 5} - {0, numel})


def _steps(sizes: Sequence[int]) -> list[int]:
    steps = [sizes[0]]
    for numel in sizes[1:]:
        while steps[-1] * _MAX_GROWTH < numel:
            steps.append(steps[-1] * _MAX_GROWTH)
        steps.append(numel)
    return steps


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low} to {high} elements" if low < high else _elements(low)


def _elements(numel: int) -> str:
    return f"{numel} element{'s' * (numel != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _form(row: Finding) -> tuple[str, str]:
    """Return a finding's verdict and the part of its detail that is the same for all sizes."""
    lists_elements = row.detail.startswith("elements")
    return row.verdict, "" if lists_elements else re.split("; | from rank", row.detail)[0]
