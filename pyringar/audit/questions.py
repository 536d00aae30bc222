"""Ask an allreduce what it computes: one question after the other, each answered by experiment."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyringar.audit.probes import (
    DTYPES,
    Target,
    TargetError,
    bits_of,
    dtype_name,
    find_order,
    has_bits,
    rounding_of,
    wide_values,
    wider,
)
from pyringar.audit.report import Finding, Report, Section
from pyringar.audit.trees import EXACT, Region, describe, same_trees

__all__ = ["SIZES", "audit", "order_of"]

SIZES = (1, 8, 1000, 16_384, 262_144, 1_048_576)
_FEW = 4096  # elements that are enough for most questions
_RUNS = 8
_MAX_FAILURES = 4  # after which a target that hangs is asked no more
_MAX_STEPS = 64  # to find the sizes at which orders change
_MAX_REGIONS = 64  # of a message, in a document


class _Differ(Exception):  # noqa: N818
    """Two results that should have the same bits do not; says where."""

    def __init__(self, detail: str, case: dict[str, Any]) -> None:
        super().__init__(detail)
        self.case = case


def audit(target: Target, sizes: Sequence[int] = SIZES) -> Report:
    """Find out what an allreduce computes, and which bits can be relied on.

    Args:
        target: What to call.
        sizes: Elements of messages.

    Returns:
        A `Report`. What a call raises is a finding.

    Cost: some hundreds of calls, ``k (k - 1) / 2`` of them for each size.
    """
    return _Audit(target, sorted(set(sizes))).report()


def order_of(
    target: Target,
    k: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    way: str = "in place",
) -> tuple[list[Region], Finding]:
    """Return the order in which a message is added, confirmed by the bits of random values.

    Returns:
        The order on rank 0, and a finding about it.

    Raises:
        TargetError: A call failed.
    """
    inputs = wide_values(k, numel, dtype)
    result = target.reduce(inputs, way)[0]
    regions, *others = find_order(target, k, numel, dtype, way)
    name, detail = describe(regions, k)
    shown = [region.as_dict() for region in regions[:_MAX_REGIONS]]
    case = {"k": k, "numel": numel, "num_regions": len(regions), "regions": shown}
    if not has_bits(result, target.reduce(inputs, way)[0]):
        return regions, Finding("", "changes", "from run to run", case)
    for rank, other in enumerate(others, 1):
        if other != regions:
            detail = f"rank 0: {detail}; rank {rank}: {describe(other, k)[1]}"
            return regions, Finding("", "differs from rank to rank", detail, case)
    if name != "unknown" and rounding_of(regions, inputs, result) is None:
        detail = f"looks like {name}, {detail}, but random values do not have the bits of that"
        return regions, Finding("", "unknown", detail, case)
    return regions, Finding("", name, detail, case)


class _Audit:
    """The questions about one target.

    Attributes:
        few: Elements of the messages with which most is asked.
        dtypes: What it takes.
    """

    def __init__(self, target: Target, sizes: Sequence[int]) -> None:
        self.target, self.k, self.sizes = target, target.ranks, sizes
        self.few = max([n for n in sizes if n <= _FEW], default=sizes[0])
        self.dtypes: list[torch.dtype] = []
        self._failures = self._steps = 0

    def report(self) -> Report:
        """Ask everything."""
        asked = {
            "the sum": [self._ask("is right", self._sum)],
            "order of addition, float32": self._orders(),
            f"order of addition on fewer ranks, {self.few} elements": self._worlds(),
            f"where it rounds, {self.few} elements": self._roundings(),
            "the same bits": self._same_bits(),
            "special values": self._specials(),
        }
        sections = [Section(title, tuple(findings)) for title, findings in asked.items()]
        name, ranks = self.target.name, self.k
        return Report(name, ranks, tuple(s for s in sections if s.findings))

    def _ask(self, name: str, question: Callable[[], str | Finding]) -> Finding:
        if self._failures == _MAX_FAILURES:
            return Finding(name, "failed", f"not asked: {self._failures} others had no answer")
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
        """Small whole numbers, other ones at every rank and place: every order is exact."""
        for numel in self.sizes:
            inputs = [(torch.arange(numel) % 17 + r).float() for r in range(self.k)]
            want = torch.stack(inputs).sum(0)
            for rank, got in enumerate(self.target.reduce(inputs)):
                _compare(want, got, "in the sum", f"on rank {rank}")
        return f"whole numbers, {_span(self.sizes)}"

    # -- order and rounding ------------------------------------------------------------------------

    def _orders(self) -> Iterator[Finding]:
        # Libraries choose by powers of two: there is a size between any two of them.
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

    def _row(self, numel: int) -> tuple[int, Finding]:
        return numel, self._ask("", partial(self._order, self.k, numel))

    def _between(
        self, low: tuple[int, Finding], high: tuple[int, Finding]
    ) -> list[tuple[int, Finding]]:
        has_order = not {low[1].verdict, high[1].verdict} & {"failed", "changes", "unknown"}
        if not has_order or _form(low[1]) == _form(high[1]) or high[0] - low[0] == 1:
            return [high]
        if self._steps == _MAX_STEPS:
            return [high]
        self._steps += 1
        middle = self._row((low[0] + high[0]) // 2)
        return [*self._between(low, middle), *self._between(middle, high)]

    def _order(self, k: int, numel: int) -> Finding:
        found = order_of(self.target, k, numel)[1]
        return Finding("", found.verdict, found.detail, {_elements(numel): found.case})

    def _worlds(self) -> Iterator[Finding]:
        for k in range(3, self.k):
            yield self._ask(f"{k} ranks", partial(self._order, k, self.few))

    def _roundings(self) -> Iterator[Finding]:
        plain: list[Region] = []
        for dtype in DTYPES:
            row = self._ask(dtype_name(dtype), partial(self._rounding, dtype, plain))
            if row.verdict not in ("-", "failed"):
                self.dtypes.append(dtype)
            yield row

    def _rounding(self, dtype: torch.dtype, plain: list[Region]) -> Finding:
        """Find out where sums of a type are rounded; ``plain`` is the order in float32."""
        inputs = wide_values(self.k, self.few, dtype)
        try:
            result = self.target.reduce(inputs)[0]
        except TargetError as error:
            return Finding("", "-", f"not offered: {error.why}")
        regions, order = order_of(self.target, self.k, self.few, dtype)
        plain[:] = plain or regions
        said = "" if same_trees(regions, plain) else f"; order: {order.verdict}, {order.detail}"
        if order.verdict in ("unknown", "changes"):
            return Finding("", "unknown", order.detail, order.case)
        if order.verdict == EXACT:
            return Finding("", "once", "the correctly rounded sum of all ranks")
        if self.k == 2:
            return Finding("", "once", f"there is only one add{said}")
        if rounding_of(regions, inputs, result) == "each add":
            return Finding("", "each add", f"to {dtype_name(dtype)}{said}")
        wide = dtype_name(wider(dtype) or dtype)
        return Finding("", "once", f"in the end; partial sums are {wide}{said}")

    # -- the same bits -----------------------------------------------------------------------------

    def _same_bits(self) -> Iterator[Finding]:
        yield self._ask("on every rank", self._every_rank)
        yield self._ask("in every run", self._every_run)
        yield self._ask("at every size", self._every_size)
        yield self._ask("in several calls", self._split)
        yield self._ask("async", self._async)
        yield self._ask("ranks renumbered", self._renumbered)

    def _every_rank(self) -> str:
        for dtype, numel in self._messages():
            first, *others = self.target.reduce(wide_values(self.k, numel, dtype))
            for rank, other in enumerate(others, 1):
                _compare(first, other, "on rank 0", f"on rank {rank}")
        return f"float32 of {_span(self.sizes)}, other types of {self.few}"

    def _messages(self) -> list[tuple[torch.dtype, int]]:
        """Return all sizes in float32, and one in the other types."""
        others = [(dtype, self.few) for dtype in self.dtypes if dtype != torch.float32]
        return [(torch.float32, numel) for numel in self.sizes] + others

    def _every_run(self) -> str:
        sizes = sorted({self.few, self.sizes[-1]})
        for numel in sizes:
            inputs = wide_values(self.k, numel, torch.float32)
            first = self.target.reduce(inputs)
            for run in range(2, _RUNS + 1):
                for rank, again in enumerate(self.target.reduce(inputs)):
                    _compare(first[rank], again, f"in run 1 on rank {rank}", f"in run {run}")
        return f"{_RUNS} runs with {_listed(sizes)} elements"

    def _every_size(self) -> str | Finding:
        *sizes, most = self.sizes
        if not sizes:
            return Finding("", "-", f"only {most} elements were asked for")
        inputs = wide_values(self.k, most, torch.float32)
        whole = self.target.reduce(inputs)[0]
        for numel in sizes:
            part = self.target.reduce([x[:numel] for x in inputs])[0]
            _compare(whole[:numel], part, f"in a message of {most}", f"in one of {numel}")
        return f"as the first of {most}: {_span(sizes)}"

    def _split(self) -> str:
        for numel in sorted({self.few, self.sizes[-1]}):
            inputs, cuts = wide_values(self.k, numel, torch.float32), _cuts(numel)
            whole = self.target.reduce(inputs)[0]
            parts = self.target.reduce(inputs, "in place", cuts)[0]
            _compare(whole, parts, "in one call", f"in calls cut at {_listed(cuts)}")
        return f"{len(_cuts(self.few)) + 1} calls instead of one"

    def _async(self) -> str | Finding:
        if "async" not in self.target.ways:
            return Finding("", "-", "not offered")
        for numel in self.sizes:
            inputs = wide_values(self.k, numel, torch.float32)
            for cuts in ([], _cuts(numel)):
                plain = self.target.reduce(inputs, "in place", cuts)
                try:
                    for rank, got in enumerate(self.target.reduce(inputs, "async", cuts)):
                        _compare(plain[rank], got, f"in place on rank {rank}", "async")
                except _Differ as difference:
                    order = order_of(self.target, self.k, numel, way="async")[1]
                    words = f"{difference}; async: {order.verdict}, {order.detail}"
                    raise _Differ(words, difference.case) from None
        return f"as in place, one call and several at once, {_span(self.sizes)}"

    def _renumbered(self) -> str:
        inputs = wide_values(self.k, self.few, torch.float32)
        plain, ranks = self.target.reduce(inputs)[0], range(self.k)
        turned = [[(r + turn) % self.k for r in ranks] for turn in ranks]
        for order in turned[1:] + [numbers[::-1] for numbers in turned]:
            got = self.target.reduce([inputs[r] for r in order])[0]
            _compare(plain, got, "as they are", f"if ranks have the values of {_listed(order)}")
        return f"{2 * self.k - 1} permutations of the inputs"

    # -- special values ----------------------------------------------------------------------------

    def _specials(self) -> Iterator[Finding]:
        for name, columns in _SPECIALS.items():
            yield self._ask(name, partial(self._special, columns))

    def _special(self, columns: Callable[[torch.finfo, int], list[_Column]]) -> str:
        for dtype, numel in self._messages():
            for column, total in columns(torch.finfo(dtype), self.k):
                # Every rank has its turn with every value, in every part of the message.
                values = torch.tensor(column, dtype=torch.float64).to(dtype)
                places = torch.arange(numel)
                inputs = [values[(places + r) % self.k] for r in range(self.k)]
                want = torch.full((numel,), total, dtype=torch.float64).to(dtype)
                for rank, got in enumerate(self.target.reduce(inputs)):
                    _compare(want, got, "expected", f"on rank {rank}")
        return ", ".join(dtype_name(dtype) for dtype in self.dtypes)


_Column = tuple[list[float], float]  # a value per rank, and their sum


def _one(value: float, rest: float, k: int) -> list[float]:
    return [value] + [rest] * (k - 1)


def _two(a: float, b: float, rest: float, k: int) -> list[float]:
    return [a, b] + [rest] * (k - 2)


_SPECIALS: dict[str, Callable[[torch.finfo, int], list[_Column]]] = {
    "NaN stays": lambda info, k: [(_one(math.nan, 1, k), math.nan)],
    "infinity stays": lambda info, k: [
        (_one(math.inf, 1, k), math.inf),
        (_one(-math.inf, 1, k), -math.inf),
    ],
    "inf - inf is NaN": lambda info, k: [(_two(math.inf, -math.inf, 1, k), math.nan)],
    "overflow is inf": lambda info, k: [(_two(info.max, info.max, 0, k), math.inf)],
    "-0 - 0 is -0": lambda info, k: [([-0.0] * k, -0.0), (_one(0.0, -0.0, k), 0.0)],
    "subnormals stay": lambda info, k: [
        (_one(info.tiny * info.eps, 0, k), info.tiny * info.eps),
        ([info.tiny * info.eps * 3] * k, info.tiny * info.eps * 3 * k),
        (_two(1.5 * info.tiny, -info.tiny, 0, k), info.tiny / 2),
    ],
}


# -- comparing -------------------------------------------------------------------------------------


def _compare(want: Tensor, got: Tensor, where: str, where_got: str) -> None:
    differ = (bits_of(want) != bits_of(got)) & ~(want.isnan() & got.isnan())  # a NaN is a NaN
    if not bool(differ.any()):
        return
    index = int(differ.nonzero()[0])
    dtype, numel = dtype_name(want.dtype), want.numel()
    one, other = _hex(want[index]), _hex(got[index])
    raise _Differ(
        f"{dtype}, element {index} of {numel}: {one} {where}, {other} {where_got}",
        {
            "dtype": dtype,
            "numel": numel,
            "index": index,
            "differing": int(differ.sum()),
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
    """Return where a message is cut into a short piece and three longer ones, if it has so many."""
    return sorted({min(8, numel // 4), numel // 3, numel - numel // 5} - {0, numel})


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low} to {high} elements" if low < high else _elements(low)


def _elements(numel: int) -> str:
    return f"{numel} element{'s' * (numel != 1)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _form(row: Finding) -> tuple[str, str]:
    """Return what messages have in common that are added alike, whatever their chunks' sizes."""
    is_of_parts = row.detail.startswith("elements")
    return row.verdict, "" if is_of_parts else re.split("; | from rank", row.detail)[0]
