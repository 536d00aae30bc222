"""Find the order of an allreduce's additions, and the dtype of its partial sums.

Method: absorption, as in FPRev (Xie, Gao, Zhang, "FPRev: Revealing Floating-Point Accumulation
Orders", https://arxiv.org/abs/2411.00442); docs/audit.md explains it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pyringar.audit.trees import EXACT, Pair, Region, Tree, fold, rebuild
from pyringar.errors import RingarError
from pyringar.parallel.shards import has_bits


class TargetError(RingarError):
    """A call of the audited allreduce failed."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"{call}: {reason}")
        self.reason = reason


class AuditTarget(Protocol):
    """The allreduce under audit; a call has at most ``ranks`` ranks.

    ``ways`` are the supported ways to call: some of ``"in place"``, ``"unaligned"`` (tensors at
    unaligned addresses) and ``"async"``.
    """

    name: str
    ranks: int
    ways: tuple[str, ...]

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Allreduce copies of the inputs; return the result of each rank.

        Args:
            inputs: A flat tensor per rank.
            way: One of ``ways``. ``"async"`` starts all calls before it waits for the first.
            cuts: Element indices at which tensors are cut: each piece is reduced in a call.

        Raises:
            TargetError: A call failed, timed out, or changed the number, shape or dtype of tensors.
        """


class _Format(NamedTuple):
    """Exponents of two in the probes of a dtype; a probe is one input of the allreduce.

    Adding all units to 2^big loses them in rounding, even with partial sums in a wider format. The
    sum of all units alone is exact.
    """

    big: int
    unit: int  # exponent of the smallest unit
    units: int  # number of units in one probe
    reach: int  # random values lie between 2^-reach and 2^reach
    lowest: int  # exponent of the smallest subnormal number
    digits: int  # bits of the mantissa
    tail: int = 60  # sums near a rounding boundary lie at least 2^-tail beside it


_FORMATS = {
    torch.float32: _Format(120, 0, 22, 14, -149, 24),
    torch.float64: _Format(1000, 0, 50, 30, -1074, 53),
    torch.float16: _Format(15, -14, 4, 8, -24, 11, tail=18),
    torch.bfloat16: _Format(120, 0, 8, 14, -133, 8),
}
DTYPES = tuple(_FORMATS)
_MAX_EXACT = 1 << 12  # most elements for which exact sums, which are slow, are computed


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wide_values(k: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a flat tensor of random values per rank, whose sums reveal order and rounding.

    - Half of the elements have values of many magnitudes.
    - In a quarter one rank has the negative of another rank's value, so the sum consists of the
      rounding errors of partial sums.
    - In a quarter the exact sum lies close to the middle of two neighbouring numbers, so the dtype
      of partial sums decides how it is rounded.
    """
    generator = torch.Generator().manual_seed(31)
    form, shape = _FORMATS[dtype], (k, numel)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator).double()

    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= 2.0 ** integers(-form.reach, form.reach, *shape)
    if k == 1:
        return list(values.to(dtype))
    kinds = integers(0, 3, numel)
    first, second, *third = torch.rand(shape, generator=generator).argsort(0)[: min(k, 3), None]
    opposite = values.scatter(0, second, -values.gather(0, first))
    ones = (1 + torch.rand(1, numel, generator=generator)) * 2.0 ** integers(0, 5, 1, numel)
    ones = ones.to(dtype).double()
    halves = torch.ldexp(2 * integers(0, 1, 1, numel) - 1, ones.frexp().exponent - form.digits - 1)
    tails = halves * (2 * integers(0, 1, 1, numel) - 1)
    tails *= 2.0 ** -integers(2, form.tail, 1, numel)
    middle = torch.zeros_like(values).scatter(0, first, ones).scatter(0, second, halves)
    for ranks in third:
        middle = middle.scatter(0, ranks, tails)
    values = torch.where(kinds == 2, opposite, torch.where(kinds == 3, middle, values))
    return list(values.to(dtype))


def find_order(
    target: AuditTarget,
    k: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    way: str = "in place",
) -> list[list[Region]]:
    """Return, for each rank, the order in which the elements of its result were added.

    Cost: one call per pair of ranks; several calls per pair beyond 24 ranks (6 for float16, 10 for
    bfloat16).
    """
    pairs = list(itertools.combinations(range(k), 2))
    groups: list[list[Tensor]] = [[] for _ in range(k)]
    for pair in pairs:
        results = [target.reduce(inputs, way) for inputs in _probes(k, pair, numel, dtype)]
        for rank_groups, found in zip(groups, _groups(results, pair, dtype), strict=True):
            rank_groups.append(found)
    first = _regions(pairs, groups[0], k)
    # A rank with the results of rank 0 shares its tensors of groups: reuse rank 0's regions.
    same = [all(map(operator.is_, rank_groups, groups[0])) for rank_groups in groups]
    return [first if same[r] else _regions(pairs, groups[r], k) for r in range(k)]


def _probes(k: int, pair: Pair, numel: int, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Yield probes: the pair has 2^big and -2^big, some ranks have units, the others zeros."""
    probe = _FORMATS[dtype]
    others = [r for r in range(k) if r not in pair]
    for first in range(0, max(1, len(others)), probe.units):
        exponents = {r: probe.unit + i for i, r in enumerate(others[first : first + probe.units])}
        values = [2.0 ** exponents[r] if r in exponents else 0.0 for r in range(k)]
        values[pair[0]], values[pair[1]] = 2.0**probe.big, -(2.0**probe.big)
        yield [torch.full((numel,), value, dtype=dtype) for value in values]


def _groups(results: Sequence[Sequence[Tensor]], pair: Pair, dtype: torch.dtype) -> list[Tensor]:
    """Return, for each rank, the ranks in the smallest partial sum with both ranks of a pair.

    A tensor holds, for each element, ranks as bits, or -1 if the result is not a sum of units.
    Ranks with equal results share a tensor. ``results[probe][rank]`` are the results.
    """
    groups: list[Tensor] = []
    others = [r for r in range(len(results[0])) if r not in pair]
    for rank, own in enumerate(zip(*results, strict=True)):
        same = (r for r in range(rank) if all(map(has_bits, own, (x[r] for x in results))))
        twin = next(same, None)
        lost = _lost(own, pair, others, _FORMATS[dtype]) if twin is None else groups[twin]
        groups.append(lost)
    return groups


def _lost(results: Sequence[Tensor], pair: Pair, others: Sequence[int], probe: _Format) -> Tensor:
    """Return the pair and all ranks with lost units, as bits; -1 if a result is no sum."""
    lost = torch.full_like(results[0], 1 << pair[0] | 1 << pair[1], dtype=torch.int32)
    for number, result in enumerate(results):
        units = others[number * probe.units : (number + 1) * probe.units]
        counts = result.double() / 2.0**probe.unit
        is_sum = (counts >= 0) & (counts < 1 << len(units)) & (counts == counts.floor())
        kept = torch.where(is_sum, counts, 0).long()
        for position, rank in enumerate(units):
            lost |= ((1 - (kept >> position & 1)) << rank).int()
        lost[~is_sum] = -1
    return lost


def _regions(pairs: Sequence[Pair], groups: Sequence[Tensor], k: int) -> list[Region]:
    """Split a message where the groups of any pair change; rebuild the tree of each part."""
    changes = torch.zeros(len(groups[0]) - 1, dtype=torch.bool)
    for group in groups:
        changes |= group[1:] != group[:-1]
    starts = [0, *(changes.nonzero().flatten() + 1).tolist()]
    columns = torch.stack([group[starts] for group in groups], 1).tolist()
    trees: dict[tuple[int, ...], Tree | str | None] = {}
    regions = []
    for start, stop, column in zip(starts, [*starts[1:], len(groups[0])], columns, strict=True):
        key = tuple(column)
        if key not in trees:
            is_sum = min(key) >= 0
            trees[key] = rebuild(dict(zip(pairs, key, strict=True)), k) if is_sum else None
        regions.append(Region(start, stop, trees[key]))
    return regions


def evaluate(
    regions: Sequence[Region], inputs: Sequence[Tensor], partial: torch.dtype | None = None
) -> Tensor:
    """Add inputs in the order of the regions, bit for bit.

    The last dimension of the inputs is the message. ``partial``: the dtype of partial sums; the
    final sum is then rounded once. Default: the dtype of the inputs.
    """
    dtype = inputs[0].dtype
    terms = [x.to(partial or dtype) for x in inputs]
    results: dict[Tree, Tensor] = {}
    total = torch.empty_like(inputs[0])
    for region in regions:
        tree, here = region.tree, (..., slice(region.start, region.stop))
        if tree is None:
            raise ValueError(f"there is no tree at element {region.start}")
        if isinstance(tree, str):
            if partial in (None, dtype):
                total[here] = exact_sum([x[here] for x in inputs])
                continue
            tree = fold(range(len(terms)))  # any order: partial sums are exact in `partial`
        if tree not in results:
            results[tree] = _partial(tree, terms)
        total[here] = results[tree][here].to(dtype)
    return total


def _partial(tree: Tree, terms: Sequence[Tensor]) -> Tensor:
    if isinstance(tree, int):
        return terms[tree]
    return _partial(tree[0], terms) + _partial(tree[1], terms)


def partial_type(
    regions: Sequence[Region], inputs: Sequence[Tensor], result: Tensor
) -> torch.dtype | None:
    """Return the dtype of partial sums with which the regions give this result, or None.

    Of exact sums, which are slow, only the first 4096 elements are compared.
    """
    if any(region.tree is None for region in regions):
        return None
    dtype = result.dtype
    wider = [w for w in (torch.float32, torch.float64) if w.itemsize > dtype.itemsize]
    if any(region.tree == EXACT for region in regions):
        wider = wider[-1:]  # float32 cannot hold all exact sums of float16
        ends = [Region(r.start, min(r.stop, _MAX_EXACT), r.tree) for r in regions]
        regions = [region for region in ends if region.start < region.stop]
        inputs, result = [x[..., :_MAX_EXACT] for x in inputs], result[..., :_MAX_EXACT]
    for partial in (dtype, *wider):
        if has_bits(evaluate(regions, inputs, partial), result):
            return partial
    return None


def exact_sum(inputs: Sequence[Tensor]) -> Tensor:
    """Return the correctly rounded sum of each element of finite inputs."""
    dtype = inputs[0].dtype
    rows = zip(*(x.reshape(-1).tolist() for x in inputs), strict=True)
    sums = [_rounded(sum(map(Fraction, row), Fraction(0)), dtype) for row in rows]
    return torch.tensor(sums, dtype=torch.float64).to(dtype).view(inputs[0].shape)


def _rounded(value: Fraction, dtype: torch.dtype) -> float:
    form = _FORMATS[dtype]
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - form.digits + 1, form.lowest)
    nearest = round(value / quantum) * quantum
    is_finite = abs(nearest) <= Fraction(torch.finfo(dtype).max)
    return float(nearest) if is_finite else math.inf if value > 0 else -math.inf
