"""Random calls, and what they must give, worked out in NumPy: shared by the differential tests.

Nothing here computes with torch, with pyringar or with oracle.py. Tensors are views of NumPy's
memory, so that results are read there; 16-bit floats are widened and rounded bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

Bits = np.ndarray  # elements as unsigned integers, in the order of their index


class Kind(NamedTuple):
    """A dtype: torch's, the words its elements are kept in, and what they are added up in."""

    torch: torch.dtype
    word: type
    wide: type
    exponent_bits: int = 0  # 0: integers
    fraction_bits: int = 0

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0


KINDS = (
    Kind(torch.float64, np.uint64, np.float64, 11, 52),
    Kind(torch.float32, np.uint32, np.float32, 8, 23),
    Kind(torch.float16, np.uint16, np.float32, 5, 10),
    Kind(torch.bfloat16, np.uint16, np.float32, 8, 7),
    Kind(torch.int8, np.uint8, np.int8),
    Kind(torch.uint8, np.uint8, np.uint8),
    Kind(torch.int32, np.uint32, np.int32),
    Kind(torch.int64, np.uint64, np.int64),
)
OPS = ("sum", "mean", "max", "min", "prod")


# -- arithmetic ------------------------------------------------------------------------------------


def widened(bits: Bits, kind: Kind) -> np.ndarray:
    """The numbers, in the type they are added up in."""
    if kind.torch is torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kind.torch is torch.float16:
        return bits.view(np.float16).astype(np.float32)
    return bits.view(kind.wide)


def rounded(values: np.ndarray, kind: Kind) -> Bits:
    """To the nearest number of this kind, to the even one of two."""
    if kind.torch is torch.float16:
        return values.astype(np.float16).view(np.uint16)
    if kind.torch is torch.bfloat16:
        word = values.view(np.uint32).astype(np.uint64)
        nearest = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
    return np.ascontiguousarray(values).view(kind.word)


@np.errstate(all="ignore")
def folded(parts: Sequence[Bits], op: str, kind: Kind) -> Bits:
    """The reduction in the order of ``parts``: wrapping integers, NaN wins, one rounding."""
    terms = [widened(part, kind) for part in parts]
    total = terms[0].copy()
    for term in terms[1:]:
        if op in ("sum", "mean"):
            total = total + term
        elif op == "prod":
            total = total * term
        else:
            keep = total > term if op == "max" else total < term
            keep |= total != total
            total = np.where(keep, total, term)
    if op == "mean":
        total = _divided(total, len(parts), kind)
    return rounded(total.astype(kind.wide), kind)


def _divided(total: np.ndarray, count: int, kind: Kind) -> np.ndarray:
    if kind.is_float:
        return total / kind.wide(count)
    wide = total.astype(np.int64)
    quotient = wide // count  # towards minus infinity
    return quotient + ((wide < 0) & (quotient * count != wide))


def negated(bits: Bits, kind: Kind) -> Bits:
    if kind.is_float:
        return bits ^ kind.word(1 << (8 * bits.itemsize - 1))
    return (~bits + kind.word(1)).astype(kind.word)


def is_nan(bits: Bits, kind: Kind) -> np.ndarray:
    if not kind.is_float:
        return np.zeros(bits.shape, dtype=bool)
    infinity = ((1 << kind.exponent_bits) - 1) << kind.fraction_bits
    return (bits & kind.word((1 << (8 * bits.itemsize - 1)) - 1)) > kind.word(infinity)


def chunks(numel: int, k: int) -> list[slice]:
    """Contiguous, the longer ones first."""
    ends = [numel // k * (i + 1) + min(i + 1, numel % k) for i in range(k)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def ring_folded(parts: Sequence[Bits], op: str, kind: Kind) -> Bits:
    """Chunk ``c`` in the order of ranks c+1, c+2, ..., c+k (mod k)."""
    k = len(parts)
    order = [[(c + 1 + i) % k for i in range(k)] for c in range(k)]
    where = chunks(len(parts[0]), k)
    pieces = [folded([parts[rank][where[c]] for rank in order[c]], op, kind) for c in range(k)]
    return np.concatenate(pieces)


# -- inputs ----------------------------------------------------------------------------------------


def values(rng: np.random.Generator, numel: int, kind: Kind) -> Bits:
    """Random bits; of floats a part are NaN of any payload, infinities, zeros and denormals."""
    top = np.iinfo(kind.word).max
    bits = rng.integers(0, top, numel, dtype=kind.word, endpoint=True)
    if not kind.is_float:
        return bits
    # Exponents around 1, so that sums meet and products stay: one in the middle, or anything.
    bias = (1 << (kind.exponent_bits - 1)) - 1
    near = rng.integers(bias - 4, bias + 5, numel, dtype=np.int64).astype(kind.word)
    mask = kind.word(((1 << kind.exponent_bits) - 1) << kind.fraction_bits)
    tame = (bits & ~mask) | (near << kind.word(kind.fraction_bits))
    bits = np.where(rng.random(numel) < 0.85, tame, bits)
    sign = kind.word(1 << (8 * bits.itemsize - 1))
    fraction = kind.word((1 << kind.fraction_bits) - 1)
    special = rng.integers(0, 5, numel)
    made = np.select(
        [special == 0, special == 1, special == 2],
        [bits | mask, (bits & sign) | mask, bits & sign],  # NaN, infinity, zero
        bits & (sign | fraction),  # denormal
    ).astype(kind.word)
    return np.where(rng.random(numel) < rng.choice([0.0, 0.05, 0.3]), made, bits)


def shape_of(rng: np.random.Generator, most: int = 60_000) -> tuple[int, ...]:
    """Often at or beside a border: of pieces, blocks, vectors, ranks."""
    if rng.random() < 0.5:
        border = int(rng.choice([0, 1, 2, 3, 7, 16, 64, 1024, 4096, 8192, 16_384, 32_768]))
        return (max(0, min(most, border + int(rng.integers(-2, 3)))),)
    shape = [int(n) for n in rng.integers(1, 9, int(rng.integers(0, 5)))]
    if shape and rng.random() < 0.1:
        shape[int(rng.integers(len(shape)))] = int(rng.integers(0, 600))
    return tuple(shape)


class Layout(NamedTuple):
    strides: tuple[int, ...]
    offset: int


def layout_of(rng: np.random.Generator, shape: Sequence[int]) -> Layout:
    """Any order of dimensions, with or without gaps; nothing overlaps."""
    dims = list(range(len(shape)))[::-1]
    if rng.random() < 0.6:
        rng.shuffle(dims)
    has_gaps = rng.random() < 0.4
    strides = [0] * len(shape)
    reach = 1
    for dim in dims:
        strides[dim] = reach * (int(rng.integers(1, 4)) if has_gaps else 1)
        reach = strides[dim] * max(1, shape[dim])
        if shape[dim] == 1 and rng.random() < 0.5:
            strides[dim] = int(rng.integers(0, 50))  # means nothing
    return Layout(tuple(strides), int(rng.integers(0, 4)))


def lies_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    used = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1)
    expected = 1
    for stride, size in used:
        if stride != expected:
            return False
        expected *= size
    return True


def lie_alike(shape: Sequence[int], layouts: Sequence[Layout]) -> bool:
    used = [dim for dim, n in enumerate(shape) if n != 1]
    first = layouts[0].strides
    return all(layout.strides[d] == first[d] for layout in layouts for d in used)


class Placed:
    """One rank's tensor in memory of NumPy's, with something else around it."""

    def __init__(
        self,
        rng: np.random.Generator,
        kind: Kind,
        shape: Sequence[int],
        layout: Layout,
        *,
        is_negated: bool = False,
    ) -> None:
        self.kind, self.shape, self.layout, self.is_negated = kind, tuple(shape), layout, is_negated
        last = sum((n - 1) * s for n, s in zip(shape, layout.strides, strict=True))
        numel = 0 if 0 in shape else max(0, last) + 1
        size = layout.offset + numel + 5
        self.base = rng.integers(0, 200, size).astype(kind.word)
        item = self.base.itemsize
        self.view = np.lib.stride_tricks.as_strided(
            self.base[layout.offset :], self.shape, [s * item for s in layout.strides]
        )
        mine = np.zeros(size, dtype=bool)
        own = np.lib.stride_tricks.as_strided(mine[layout.offset :], self.shape, layout.strides)
        own[...] = True
        self._noise, self._around = self.base.copy(), ~mine
        signed = self.base.view(f"i{item}")
        self.tensor = (
            torch.from_numpy(signed)
            .view(kind.torch)
            .as_strided(self.shape, layout.strides, layout.offset)
        )
        if is_negated:
            self.tensor = torch._neg_view(self.tensor)

    def write(self, bits: Bits) -> None:
        bits = negated(bits, self.kind) if self.is_negated else bits
        self.view[...] = bits.reshape(self.shape)

    def read(self) -> Bits:
        bits = np.ascontiguousarray(self.view).reshape(-1)
        return negated(bits, self.kind) if self.is_negated else bits

    def check_around(self, context: object) -> None:
        changed = (self.base != self._noise) & self._around
        assert not changed.any(), f"{context}: memory between the elements was written"


# -- calls -----------------------------------------------------------------------------------------


class Parameter:
    """One tensor over all ranks, and what an all_reduce of it must give."""

    def __init__(self, rng: np.random.Generator, k: int, most: int = 60_000) -> None:
        self.kind = KINDS[int(rng.integers(len(KINDS)))]
        self.shape = shape_of(rng, most)
        self.numel = math.prod(self.shape)
        first = layout_of(rng, self.shape)
        alike = rng.random() < 0.5
        self.layouts = [first if alike else layout_of(rng, self.shape) for _ in range(k)]
        self.are_negated = [bool(rng.random() < 0.04) for _ in range(k)]
        self.inputs = [values(rng, self.numel, self.kind) for _ in range(k)]

    def place(self, rng: np.random.Generator, rank: int) -> Placed:
        layout, is_negated = self.layouts[rank], self.are_negated[rank]
        placed = Placed(rng, self.kind, self.shape, layout, is_negated=is_negated)
        placed.write(self.inputs[rank])
        return placed

    def in_other_order(self, rank: int) -> tuple[int, ...]:
        """Strides of a dense tensor that is not in the order of its index; else nothing."""
        strides = self.layouts[rank].strides
        used = [s for s, n in zip(strides, self.shape, strict=True) if n != 1]
        is_permuted = lies_dense(self.shape, strides) and used != sorted(used, reverse=True)
        return tuple(used) if is_permuted and self.numel > 1 and not self.are_negated[rank] else ()

    def expected(self, op: str, algorithm: str, *, by_index: bool = False) -> Bits:
        """In the order of the index. A ring cuts dense tensors that lie alike as they lie."""
        if algorithm != "ring":
            return folded(self.inputs, op, self.kind)
        strides = self.layouts[0].strides
        is_cut_by_index = (
            by_index
            or self.numel <= 1
            or any(self.are_negated)
            or not lies_dense(self.shape, strides)
            or not lie_alike(self.shape, self.layouts)
        )
        if is_cut_by_index:
            return ring_folded(self.inputs, op, self.kind)
        dims = sorted(range(len(self.shape)), key=lambda d: -strides[d])
        lying = [x.reshape(self.shape).transpose(dims) for x in self.inputs]
        total = ring_folded([np.ascontiguousarray(x).reshape(-1) for x in lying], op, self.kind)
        result = np.empty(self.shape, self.kind.word)
        result.transpose(dims)[...] = total.reshape(lying[0].shape)
        return result.reshape(-1)

    def __str__(self) -> str:
        return f"{self.kind.torch} {self.shape} {self.layouts} negated {self.are_negated}"


def check(found: Bits, wanted: Bits, kind: Kind, context: object) -> None:
    """Equal bits, but that one NaN is as good as another."""
    wrong = (found != wanted) & ~(is_nan(found, kind) & is_nan(wanted, kind))
    if wrong.any():
        at = int(wrong.nonzero()[0][0])
        raise AssertionError(
            f"{context}: {int(wrong.sum())} of {wrong.size} elements differ, the first at {at}: "
            f"{int(found[at]):#x}, expected {int(wanted[at]):#x}"
        )


def check_ranks(results: Sequence[Bits], wanted: Bits, kind: Kind, context: object) -> None:
    """Rank 0 has what was promised, the others its very bits."""
    check(results[0], wanted, kind, context)
    for rank, found in enumerate(results):
        assert (found == results[0]).all(), f"{context}: rank {rank} has other bits than rank 0"


def one_nan(bits: Bits, kind: Kind) -> Bits:
    """With one NaN for all of them."""
    return np.where(is_nan(bits, kind), kind.word(np.iinfo(kind.word).max >> 1), bits)
