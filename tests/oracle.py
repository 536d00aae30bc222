"""Expected bits of reductions, computed in NumPy. Any NaN equals any other NaN."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyringar.engine import load

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS)
OPS = ("sum", "mean", "max", "min", "prod")
NATIVE = ("fused", "direct", "ring")
ALGORITHMS = ("auto", "fused", "direct", "sharded", "naive", "ring")

# One letter per rank: the name of the rank's machine. Empty: all ranks run on one machine.
machines = ""

Words = np.ndarray  # tensor elements as unsigned integers, in any shape


class Kind(NamedTuple):
    torch: torch.dtype
    word: type
    wide: type
    exponent_bits: int = 0  # 0 for integer dtypes
    fraction_bits: int = 0

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0


KINDS = {
    kind.torch: kind
    for kind in (
        Kind(torch.float64, np.uint64, np.float64, 11, 52),
        Kind(torch.float32, np.uint32, np.float32, 8, 23),
        Kind(torch.float16, np.uint16, np.float32, 5, 10),
        Kind(torch.bfloat16, np.uint16, np.float32, 8, 7),
        Kind(torch.int8, np.uint8, np.int8),
        Kind(torch.uint8, np.uint8, np.uint8),
        Kind(torch.int32, np.uint32, np.int32),
        Kind(torch.int64, np.uint64, np.int64),
    )
}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words_of(tensor: Tensor) -> Words:
    return bits(tensor).numpy().view(KINDS[tensor.dtype].word)


def tensor_of(words: Words, dtype: torch.dtype) -> Tensor:
    signed = np.array(words).view(f"i{dtype.itemsize}")
    return torch.from_numpy(signed).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().contiguous().view(_SIGNED[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def limit_bytes(name: str) -> int:
    """Return the size limit ``name`` of the CPU engine, in bytes."""
    limits: dict[str, int] = load.engine().limits()
    return limits[name]


def piece_elems(dtype: torch.dtype, world_size: int = 2) -> int:
    piece_bytes: int = load.engine().ring_slot_bytes(world_size)
    return piece_bytes // max(dtype.itemsize, 4 if dtype.is_floating_point else 1)


def widened(words: Words, kind: Kind) -> np.ndarray:
    if kind.torch is torch.bfloat16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    if kind.torch is torch.float16:
        return words.view(np.float16).astype(np.float32)
    return words.view(kind.wide)


def rounded(values: np.ndarray, kind: Kind) -> Words:
    """Round partial sums to the nearest value of the dtype, ties to even."""
    if kind.torch is torch.float16:
        return values.astype(np.float16).view(np.uint16)
    if kind.torch is torch.bfloat16:
        word = values.view(np.uint32).astype(np.uint64)
        nearest = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
    return np.asarray(values, order="C").view(kind.word)


def is_nan(words: Words, kind: Kind) -> np.ndarray:
    if not kind.is_float:
        return np.zeros(words.shape, dtype=bool)
    infinity = ((1 << kind.exponent_bits) - 1) << kind.fraction_bits
    return (words & kind.word((1 << (8 * words.itemsize - 1)) - 1)) > kind.word(infinity)


def negated(words: Words, kind: Kind) -> Words:
    if kind.is_float:
        return words ^ kind.word(1 << (8 * words.itemsize - 1))
    return (~words + kind.word(1)).astype(kind.word)


def _combined(total: np.ndarray, term: np.ndarray, op: str) -> np.ndarray:
    if op in ("sum", "mean"):
        return total + term
    if op == "prod":
        return total * term
    # Return NaN if an input is NaN. Of two equal numbers (0 and -0), return the later number.
    keep = total > term if op == "max" else total < term
    keep |= total != total
    return np.where(keep, total, term)


def _divided(total: np.ndarray, count: int, kind: Kind) -> np.ndarray:
    if kind.is_float:
        return total / kind.wide(count)
    wide = total.astype(np.int64)
    quotient = wide // count  # rounds towards minus infinity
    return (quotient + ((wide < 0) & (quotient * count != wide))).astype(kind.wide)


def _finished(total: np.ndarray, op: str, count: int, kind: Kind) -> Words:
    return rounded(_divided(total, count, kind) if op == "mean" else total, kind)


@np.errstate(all="ignore")
def in_rank_order(parts: Sequence[Words], op: str, kind: Kind) -> Words:
    """Return ``((x0 + x1) + x2) + ...``; with several machines, first add within each machine."""
    places = machines if len(machines) == len(parts) else "a" * len(parts)
    sums: dict[str, np.ndarray] = {}
    for place, part in zip(places, parts, strict=True):
        term = widened(part, kind)
        sums[place] = _combined(sums[place], term, op) if place in sums else term
    total, *others = sums.values()
    for other in others:
        total = _combined(total, other, op)
    return _finished(total, op, len(parts), kind)


@np.errstate(all="ignore")
def in_tree_order(parts: Sequence[Words], op: str, kind: Kind) -> Words:
    """Add ``T(lo, mid) + T(mid, hi)``; ``mid - lo``: largest power of two below ``hi - lo``."""

    def tree(lo: int, hi: int) -> np.ndarray:
        if hi - lo == 1:
            return widened(parts[lo], kind)
        half = 1
        while half * 2 < hi - lo:
            half *= 2
        return _combined(tree(lo, lo + half), tree(lo + half, hi), op)

    return _finished(tree(0, len(parts)), op, len(parts), kind)


@np.errstate(all="ignore")
def exactly(parts: Sequence[Words], op: str, kind: Kind) -> Words:
    """Return exact sums, rounded once; a mean of 16-bit floats is divided in float32."""
    if not kind.is_float:
        return in_rank_order(parts, op, kind)
    to = KINDS[torch.float32] if op == "mean" and kind.fraction_bits < 23 else kind
    columns = zip(*[widened(part, kind).ravel().tolist() for part in parts], strict=True)
    sums = np.array([exact_sum(column, to) for column in columns], dtype=np.float64)
    return _finished(sums.astype(kind.wide).reshape(parts[0].shape), op, len(parts), kind)


_UNIT = 1074  # every float64 is a multiple of 2^-1074


def exact_sum(terms: Sequence[float], kind: Kind) -> float:
    """Return the exact sum, rounded once to nearest, ties to even."""
    total = 0
    for term in terms:
        if not math.isfinite(term):
            return sum(x for x in terms if not math.isfinite(x))
        numerator, denominator = term.as_integer_ratio()
        total += numerator << (_UNIT + 1 - denominator.bit_length())
    if total == 0:
        return -0.0 if all(math.copysign(1, x) < 0 for x in terms) else 0.0
    bias = (1 << (kind.exponent_bits - 1)) - 1
    least = _UNIT + 1 - bias - kind.fraction_bits  # log2 of the smallest subnormal / 2^-_UNIT
    quantum = max(abs(total).bit_length() - 1 - kind.fraction_bits, least, 0)
    count, rest = divmod(abs(total), 1 << quantum)
    count += 2 * rest > 1 << quantum or (2 * rest == 1 << quantum and count % 2)
    nearest = count << quantum
    too_large = 1 << (_UNIT + bias + 1)
    size = math.inf if nearest >= too_large else math.ldexp(count, quantum - _UNIT)
    return math.copysign(size, 1 if total > 0 else -1)


def chunk(numel: int, world_size: int, index: int) -> slice:
    sizes = [numel // world_size + (i < numel % world_size) for i in range(world_size)]
    begin = sum(sizes[:index])
    return slice(begin, begin + sizes[index])


def in_ring_order(parts: Sequence[Words], op: str, kind: Kind) -> Words:
    """Add chunk ``c`` in the order of ranks c+1, c+2, ..., c+k (mod k)."""
    k = len(parts)
    pieces = []
    for c in range(k):
        order = [(c + 1 + i) % k for i in range(k)]
        where = chunk(len(parts[0]), k, c)
        pieces.append(in_rank_order([parts[rank][where] for rank in order], op, kind))
    return np.concatenate(pieces)


Fold = Callable[[Sequence[Words], str, Kind], Words]
FOLDS: dict[str, Fold] = {
    "rank": in_rank_order,
    "tree": in_tree_order,
    "exact": exactly,
    "ring": in_ring_order,
}


def folded(parts: Sequence[Tensor], op: str, order: str) -> Tensor:
    kind = KINDS[parts[0].dtype]
    words = FOLDS[order]([words_of(part) for part in parts], op, kind)
    return tensor_of(words, kind.torch)


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    return folded(parts, op, "rank")


def tree_reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    return folded(parts, op, "tree")


def expected(parts: Sequence[Tensor], op: str, algorithm: str, order: str = "any") -> Tensor:
    if order in ("tree", "exact"):
        return folded(parts, op, order)
    return folded(parts, op, "ring" if algorithm == "ring" else "rank")


# Random values have exponents from -reach to reach: each order of addition rounds differently.
_REACH = {torch.float64: 30, torch.float32: 14, torch.float16: 12, torch.bfloat16: 20}


def positional(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    return (torch.arange(numel) % 17 + 3 * rank + 1).to(dtype)


def random(numel: int, dtype: torch.dtype, seed: int, *, specials: bool = True) -> Tensor:
    """Return values of so different magnitudes that the order of addition changes bits.

    With ``specials``, about a tenth of the values are infinities, NaN, zeros of both signs,
    subnormals, and the largest and smallest numbers of the dtype. Integers fill their whole range.
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
    return [random(numel, dtype, 1000 * seed + rank) for rank in range(world_size)]


def assert_words(found: Words, wanted: Words, kind: Kind, context: object = "") -> None:
    wrong = (found != wanted) & ~(is_nan(found, kind) & is_nan(wanted, kind))
    if wrong.any():
        at = int(wrong.reshape(-1).nonzero()[0][0])
        got, want = (widened(words, kind).reshape(-1)[at] for words in (found, wanted))
        raise AssertionError(
            f"{context}: {int(wrong.sum())} of {wrong.size} elements differ, the first at {at}: "
            f"{got!r}, expected {want!r}"
        )


def assert_bits(actual: Tensor, wanted: Tensor, context: object = "") -> None:
    assert actual.dtype == wanted.dtype, context
    assert actual.shape == wanted.shape, context
    if wanted.dtype in KINDS:
        assert_words(words_of(actual), words_of(wanted), KINDS[wanted.dtype], context)
    else:
        assert same_bits(actual, wanted), context


def assert_all_ranks(tensors: Sequence[Tensor], wanted: Tensor, context: object = "") -> None:
    assert_bits(tensors[0], wanted, context)
    for rank, tensor in enumerate(tensors[1:], 1):
        assert same_bits(tensor, tensors[0]), f"{context}: rank {rank} differs from rank 0"
