"""Test cases of collective calls: tensors of every rank, and expected results.

Tests or Hypothesis create a `CallSpec`, and every transport (transports.py) runs it. A rank that
is a process receives the pickled case, and draws its tensors from the seed.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from oracle import FOLDS, KINDS, chunk, is_nan, negated, positional, random, words_of


@dataclass(frozen=True)
class Strides:
    """Memory layout of one rank's tensor. If ``strides`` is None, it is contiguous."""

    strides: tuple[int, ...] | None = None
    offset: int = 0
    is_negated: bool = False

    def strides_of(self, shape):
        if self.strides is not None:
            return self.strides
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


PLAIN = Strides()


@dataclass(frozen=True)
class Operand:
    """One tensor argument of a call, on all ranks.

    Attributes:
        layouts: Memory layouts of ranks 0, 1, ...; repeated if there are more ranks.
        draw: Kind of values: "random" (also infinities, NaN, subnormals), "positional" or "masked".
        given: Tensors of the ranks, used instead of drawn values.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: tuple[Strides, ...] = (PLAIN,)
    seed: int = 0
    draw: str = "random"
    given: tuple[torch.Tensor, ...] = ()

    @property
    def kind(self):
        return KINDS[self.dtype]

    @property
    def numel(self):
        return math.prod(self.shape)

    @property
    def has_negated(self):
        return any(layout.is_negated for layout in self.layouts)

    def layout(self, rank):
        return self.layouts[rank % len(self.layouts)]

    def values(self, rank, world_size):
        if self.given:
            return words_of(self.given[rank]).reshape(-1)
        if self.draw == "masked":
            return masked(self.numel, self.dtype, world_size)[rank]
        if self.draw == "positional":
            return words_of(positional(self.numel, self.dtype, rank))
        return drawn(self.numel, self.dtype, self.seed, rank)

    def is_permuted(self, rank):
        strides = self.layout(rank).strides_of(self.shape)
        used = [s for s, n in zip(strides, self.shape, strict=True) if n != 1]
        is_dense = lies_dense(self.shape, strides) and not self.layout(rank).is_negated
        return is_dense and self.numel > 1 and used != sorted(used, reverse=True)

    def strides_used(self, rank):
        """Return the strides of dimensions with more than one element."""
        strides = self.layout(rank).strides_of(self.shape)
        return tuple(s for s, n in zip(strides, self.shape, strict=True) if n != 1)


_POOL_ROWS, _POOL_ELEMS = 17, 20_011  # primes, so that repeated values do not align with blocks


@functools.cache
def _pool(dtype, row):
    """Return random elements. NaNs have random signs and payloads, and may be signaling."""
    kind, words = KINDS[dtype], words_of(random(_POOL_ELEMS, dtype, row))
    most, rng = np.iinfo(kind.word).max, np.random.default_rng(row)
    exponent = kind.word(((1 << kind.exponent_bits) - 1) << kind.fraction_bits)
    nans = rng.integers(1, most, _POOL_ELEMS, kind.word) | exponent | 1
    return np.where(is_nan(words, kind), nans, words)


def drawn(numel, dtype, seed, rank):
    """Return random elements from a cached pool, since the generator is slower than all_reduce."""
    row = _pool(dtype, rank % _POOL_ROWS)
    begin = 61 * seed % 9973 + 101 * (rank // _POOL_ROWS)
    end = begin + numel
    return row[begin:end] if end <= len(row) else np.resize(row[begin:], numel)


@functools.lru_cache(4)
def masked(numel, dtype, world_size):
    """Return small numbers; in each element two ranks have large numbers that cancel.

    The sum keeps only the small numbers that are added after both large ones, so it shows the
    order of additions.
    """
    rng = np.random.default_rng([numel, world_size])
    info = torch.finfo(dtype)
    small = info.smallest_normal if dtype == torch.float16 else 1.0
    rows = rng.uniform(1, 2, (numel, world_size)) * small
    for row in rows if world_size > 1 else ():
        i, j = rng.choice(world_size, 2, replace=False)
        row[i], row[j] = info.max / 4, -info.max / 4
    return [words_of(torch.from_numpy(row.copy()).to(dtype)) for row in rows.T]


def lies_dense(shape, strides):
    used = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1)
    return all(s == math.prod(n for _, n in used[:i]) for i, (s, _) in enumerate(used))


def reduction(part, world_size, op, order, *, by_index=False):
    """Return the reduction of a tensor over all ranks, flat, in index order.

    Args:
        order: One of `FOLDS`.
        by_index: If True, a ring splits tensors into chunks in index order. If False, it splits
            dense tensors with equal strides on all ranks in memory order.
    """
    values = [part.values(rank, world_size) for rank in range(world_size)]
    fold = FOLDS[order]
    alike = {(part.strides_used(r), part.is_permuted(r)) for r in range(world_size)}
    if order != "ring" or by_index or len(alike) > 1 or not part.is_permuted(0):
        return fold(values, op, part.kind)
    strides = part.layout(0).strides_of(part.shape)
    dims = sorted(range(len(part.shape)), key=lambda dim: -strides[dim])
    lying = [v.reshape(part.shape).transpose(dims) for v in values]
    total = fold([np.ascontiguousarray(v).reshape(-1) for v in lying], op, part.kind)
    result = np.empty(part.shape, part.kind.word)
    result.transpose(dims)[...] = total.reshape(lying[0].shape)
    return result.reshape(-1)


ALL_REDUCES = ("all_reduce", "async", "repeated", "bind")
LISTS = ("coalesced", "async coalesced", "bind_coalesced")
ROOTED = ("reduce", "reduce in place", "reduce_coalesced")
BROADCASTS = ("broadcast", "async broadcast", "broadcast_coalesced")
SHARES = ("reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Field:
    part: Operand
    rank: int  # rank of the values, and index of the layout
    is_read: bool = True
    is_written: bool = True
    source: Operand | None = None  # if given, the first values of `source` are used

    def values(self, world_size):
        return (self.source or self.part).values(self.rank, world_size)[: self.part.numel]


@dataclass(frozen=True)
class CallSpec:
    """One collective call of ``k`` ranks.

    Attributes:
        entry: The method and how it is called; see running.py.
        by_communicator: Set algorithm and order on the communicator, not in the call.
        holds: Type of the arguments: "tensors", "tuples" of tensors, or NumPy "arrays".
        flushes: Odd ranks flush denormals to zero, or the one process that drives all ranks.
    """

    entry: str
    k: int
    parts: tuple[Operand, ...]
    op: str = "sum"
    algorithm: str = "auto"
    order: str = "any"
    root: int = 0
    by_communicator: bool = False
    holds: str = "tensors"
    flushes: bool = False

    def fields(self, rank):
        if self.entry in BROADCASTS:
            return [Field(part, rank, is_written=rank != self.root) for part in self.parts]
        if self.entry in SHARES:
            return self._shares(rank)
        if self.entry not in ROOTED:
            return [Field(part, rank) for part in self.parts]
        is_root = rank == self.root
        inputs = [
            Field(part, rank, is_written=is_root and self.is_in_place(i))
            for i, part in enumerate(self.parts)
        ]
        outputs = [
            Field(part, rank + 1, is_read=False)
            for i, part in enumerate(self.parts)
            if is_root and not self.is_in_place(i)
        ]
        return inputs + outputs

    def is_in_place(self, i):
        return self.entry == "reduce in place" or (self.entry == "reduce_coalesced" and i % 2 == 1)

    def is_copy(self, field):
        return not field.is_written or self.entry in (*BROADCASTS, "all_gather")

    def _shares(self, rank):
        """Return the fields of reduce_scatter or all_gather."""
        [whole] = self.parts
        gaps = Strides((2,)) if whole.layout(rank).strides else PLAIN
        share = Operand(whole.dtype, (whole.numel // self.k,), (gaps,))
        if self.entry == "reduce_scatter":
            read, written = whole, share
        else:
            read, written = share, whole
        return [
            Field(read, rank, is_written=False, source=whole),
            Field(written, rank, is_read=False, source=whole),
        ]

    def wanted(self, rank, field, order, *, by_index=False):
        part = field.source or field.part
        if not field.is_written:
            return field.values(self.k)
        if self.entry in BROADCASTS:
            return part.values(self.root, self.k)
        if self.entry == "all_gather":
            n = part.numel // self.k
            return np.concatenate([part.values(r, self.k)[:n] for r in range(self.k)])
        if self.entry == "reduce_scatter":
            total = reduction(part, self.k, self.op, order, by_index=True)
            return total[chunk(part.numel, self.k, rank)]
        return reduction(part, self.k, self.op, order, by_index=by_index)


def _strided(base, shape, strides, offset):
    size = base.itemsize
    in_bytes = [s * size for s in strides]
    return np.ndarray(shape, base.dtype, base, offset * size, in_bytes)


@functools.lru_cache(32)
def _around(shape, strides, offset, word):
    """Return noise for a buffer, and a mask of the words between the elements."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    size = offset + (last + 1 if math.prod(shape) else 0) + 5
    is_gap = np.ones(size, dtype=bool)
    _strided(is_gap, shape, strides, offset)[...] = False
    return (np.arange(size) * 37 % 199).astype(word), is_gap


class Placed:
    """The tensor of a field, in a buffer with noise around and between the elements."""

    def __init__(self, field, world_size, device="cpu"):
        self.field, self.part = field, field.part
        self._layout = self.part.layout(field.rank)
        shape, strides = self.part.shape, self._layout.strides_of(self.part.shape)
        self._strides = strides
        self._noise, self._is_gap = _around(
            shape, strides, self._layout.offset, self.part.kind.word
        )
        noise = self._noise.copy()
        if field.is_read:
            self._view(noise)[...] = self._signed(field.values(world_size)).reshape(shape)
        self._first = noise
        self._memory = torch.from_numpy(noise.view(f"i{noise.itemsize}").copy()).to(device)
        self.tensor = self._memory.view(self.part.dtype).as_strided(
            shape, strides, self._layout.offset
        )
        if self._layout.is_negated:
            self.tensor = torch._neg_view(self.tensor)
        self.first_version = self.tensor._version

    def _view(self, base):
        return _strided(base, self.part.shape, self._strides, self._layout.offset)

    def _signed(self, words):
        return negated(words, self.part.kind) if self._layout.is_negated else words

    @property
    def can_be_array(self):
        is_plain = self.part.dtype is not torch.bfloat16 and not self.part.has_negated
        return is_plain and self._memory.device.type == "cpu"

    def array(self):
        kind = self.part.kind
        name = np.float16 if self.part.dtype is torch.float16 else kind.wide
        return self._view(self._memory.numpy()).view(name)

    def rewrite(self):
        self._memory.copy_(torch.from_numpy(self._first.view(f"i{self._first.itemsize}")))

    def read(self):
        after = self._memory.cpu().numpy().view(self.part.kind.word)
        changed = (after != self._noise) & self._is_gap
        assert not changed.any(), "memory between the elements was written"
        return self._signed(np.ascontiguousarray(self._view(after)).reshape(-1))
