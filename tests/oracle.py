"""What a collective must give, worked out in plain torch. The engine is asked for its sizes only.

Inputs that cannot lie (positional, or random and full of special values, another seed for every
rank), the promised order of additions, and comparison of bits instead of tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from pyringar.engine import load

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS)
OPS = ("sum", "mean", "max", "min", "prod")
NATIVE = ("fused", "direct", "ring")
RANK_ORDER = ("auto", "fused", "direct", "sharded", "naive")
ALGORITHMS = (*RANK_ORDER, "ring")

# A letter for each rank says on which machine it is; without them all are on one.
machines = ""

# Random values lie between 2^-reach and 2^reach, so that sums lose bits, another in every order.
_REACH = {torch.float64: 30, torch.float32: 14, torch.float16: 12, torch.bfloat16: 20}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, in the order of its index."""
    return tensor.detach().resolve_neg().contiguous().view(_BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def limit_bytes(name: str) -> int:
    """Size at which the CPU engine cuts buffers or changes what it does."""
    limits: dict[str, int] = load.engine().limits()
    return limits[name]


def piece_elems(dtype: torch.dtype, world_size: int = 2) -> int:
    """Elements of one message in a ring of so many ranks: 16-bit floats travel as fp32."""
    piece_bytes: int = load.engine().ring_slot_bytes(world_size)
    return piece_bytes // max(dtype.itemsize, 4 if dtype.is_floating_point else 1)


# -- inputs ----------------------------------------------------------------------------------------


def positional(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small integers that tell position and rank."""
    return (torch.arange(numel) % 17 + 3 * rank + 1).to(dtype)


def random(numel: int, dtype: torch.dtype, seed: int, *, specials: bool = True) -> Tensor:
    """Random values of magnitudes so different that the order of additions shows.

    With ``specials`` about a tenth are infinities, NaN, zeros of both signs, subnormals, and the
    largest and smallest numbers of the dtype. Integers fill their whole range.
    """
    generator = torch.Generator().manual_seed(7919 * seed + 13)
    if not dtype.is_floating_point:
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
        return raw.to(torch.uint8).view(dtype)
    reach = _REACH[dtype]
    exponents = torch.randint(-reach, reach + 1, (numel,), generator=generator).double()
    signed = torch.randn(numel, generator=generator, dtype=torch.float64)
    values = (signed * 2.0**exponents).to(dtype)
    if specials and numel:
        info = torch.finfo(dtype)
        tiny = info.smallest_normal * info.eps  # the smallest subnormal
        huge = (math.inf, -math.inf, math.nan, info.max, info.min, info.max / 2)
        small = (0.0, -0.0, info.smallest_normal, -info.smallest_normal)
        subnormal = (tiny, -tiny, 3 * tiny, 77 * tiny)
        special = torch.tensor((*huge, *small, *subnormal), dtype=torch.float64).to(dtype)
        which = torch.randint(0, len(special), (numel,), generator=generator)
        chosen = torch.rand(numel, generator=generator) < 0.1
        values = torch.where(chosen, special[which], values)
    return values


def inputs(numel: int, dtype: torch.dtype, world_size: int, seed: int = 0) -> list[Tensor]:
    """One flat random tensor per rank."""
    return [random(numel, dtype, 1000 * seed + rank) for rank in range(world_size)]


# -- the promised results --------------------------------------------------------------------------


def _fold(total: Tensor, part: Tensor, op: str) -> Tensor:
    if op in ("sum", "mean"):
        return total + part
    if op == "prod":
        return total * part
    # NaN wins; of two equal numbers (0 and -0) the later one.
    keep = total > part if op == "max" else total < part
    if total.is_floating_point():
        keep = keep | (total != total)
    return torch.where(keep, total, part)


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """``((x0 + x1) + x2) + ...`` in this order; 16-bit floats in fp32 with one rounding.

    On several machines so on each, and then the sums of the machines, in the order of their first
    ranks.
    """
    dtype = parts[0].dtype
    partial = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    places = machines if len(machines) == len(parts) else "a" * len(parts)
    sums: dict[str, Tensor] = {}
    for place, part in zip(places, parts, strict=True):
        part = part.to(partial)
        sums[place] = _fold(sums[place], part, op) if place in sums else part
    total, *others = sums.values()
    for other in others:
        total = _fold(total, other, op)
    return _finished(total, op, len(parts), dtype)


def _finished(total: Tensor, op: str, count: int, dtype: torch.dtype) -> Tensor:
    """A sum as elements; a mean divided before."""
    if op == "mean":
        if dtype.is_floating_point:
            total = total / torch.full_like(total, count)
        else:  # towards zero, in arithmetic wide enough for any divisor
            total = torch.div(total.long(), count, rounding_mode="trunc").to(dtype)
    return total.to(dtype)


def tree_reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """``T(lo, hi) = T(lo, mid) + T(mid, hi)``, ``mid - lo`` the largest power of two that fits."""
    dtype = parts[0].dtype
    partial = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def tree(lo: int, hi: int) -> Tensor:
        if hi - lo == 1:
            return parts[lo].to(partial)
        half = 1
        while half * 2 < hi - lo:
            half *= 2
        return _fold(tree(lo, lo + half), tree(lo + half, hi), op)

    return _finished(tree(0, len(parts)), op, len(parts), dtype)


def exact_reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """The sum as a fraction, rounded; a mean is rounded before it is divided, too."""
    dtype = parts[0].dtype
    if not dtype.is_floating_point:
        return reduced(parts, op)
    to = torch.float32 if op == "mean" and dtype.itemsize == 2 else dtype
    columns = zip(*[part.double().tolist() for part in parts], strict=True)
    sums = torch.tensor([exact_sum(column, to) for column in columns], dtype=torch.float64)
    return _finished(sums.to(to), op, len(parts), dtype)


def exact_sum(terms: Sequence[float], dtype: torch.dtype) -> float:
    """The number of ``dtype`` that is nearest to the sum; of two the even one."""
    if specials := [x for x in terms if not math.isfinite(x)]:
        return sum(specials)  # whatever the others come to
    total = sum(map(Fraction, terms))
    if total == 0:
        return -0.0 if all(math.copysign(1, x) < 0 for x in terms) else 0.0
    info = torch.finfo(dtype)
    digits = 1 - int(math.log2(info.eps))
    least = int(math.log2(info.smallest_normal)) - digits + 1
    exponent = abs(total.numerator).bit_length() - total.denominator.bit_length()
    exponent -= abs(total) < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - digits + 1, least)
    nearest = round(total / quantum) * quantum  # of two the even one
    size = math.inf if abs(nearest) > Fraction(info.max) else float(abs(nearest))
    return math.copysign(size, 1 if total > 0 else -1)


def chunk(numel: int, world_size: int, index: int) -> slice:
    """Chunks are contiguous; their sizes differ by at most one; the longer come first."""
    sizes = [numel // world_size + (i < numel % world_size) for i in range(world_size)]
    begin = sum(sizes[:index])
    return slice(begin, begin + sizes[index])


def ring_reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """Flat tensors; chunk ``c`` is added in the order of ranks c+1, c+2, ..., c+k (mod k)."""
    world_size = len(parts)
    pieces = []
    for c in range(world_size):
        order = [(c + 1 + i) % world_size for i in range(world_size)]
        where = chunk(len(parts[0]), world_size, c)
        pieces.append(reduced([parts[rank][where] for rank in order], op))
    return torch.cat(pieces)


def expected(parts: Sequence[Tensor], op: str, algorithm: str, order: str = "any") -> Tensor:
    """The result of an all_reduce over these flat tensors."""
    by_order = {"tree": tree_reduced, "exact": exact_reduced}
    if order in by_order:
        return by_order[order](parts, op)
    return ring_reduced(parts, op) if algorithm == "ring" else reduced(parts, op)


# -- comparison ------------------------------------------------------------------------------------


def assert_bits(actual: Tensor, wanted: Tensor, context: object = "") -> None:
    """Equal in every bit, but that one NaN is as good as another."""
    assert actual.dtype == wanted.dtype, context
    assert actual.shape == wanted.shape, context
    wrong = bits(actual) != bits(wanted)
    if wanted.is_floating_point():
        wrong &= ~(actual.isnan() & wanted.isnan())
    if wrong.any():
        flat = wrong.reshape(-1)
        at = int(flat.nonzero()[0])
        got, want = actual.reshape(-1)[at].item(), wanted.reshape(-1)[at].item()
        raise AssertionError(
            f"{context}: {int(flat.sum())} of {flat.numel()} elements differ, the first at {at}: "
            f"{got!r}, expected {want!r}"
        )


def assert_all_ranks(tensors: Sequence[Tensor], wanted: Tensor, context: object = "") -> None:
    """Rank 0 has what was promised, every other rank the very bits of rank 0."""
    assert_bits(tensors[0], wanted, context)
    for rank, tensor in enumerate(tensors[1:], 1):
        assert same_bits(tensor, tensors[0]), f"{context}: rank {rank} differs from rank 0"
