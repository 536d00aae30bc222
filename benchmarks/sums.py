"""Random inputs of the ranks, and expected sums, for the checks of all benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from benchmarks.bench import DTYPES, BenchmarkCase
from pyringar.comm.sum_orders import tree

NUM_EXACT = 1000  # number of elements that `is_nearest` compares


def random_lists(case: BenchmarkCase, device: str = "cpu") -> list[list[Tensor]]:
    """Return random tensors ``lists[rank][i]``; each rank has a different seed."""
    lists = []
    for rank in range(case.world_size):
        generator = torch.Generator(device).manual_seed(1000 + rank)
        lists.append(
            [
                torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])
                for shape in case.shapes
            ]
        )
    return lists


def rank_order(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum in rank order, in fp32 or wider, rounded once to the input dtype."""
    return functools.reduce(torch.add, _wide(terms)).to(terms[0].dtype)


def tree_order(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum in tree order, in fp32 or wider, rounded once to the input dtype."""
    return tree(_wide(terms), torch.add).to(terms[0].dtype)


def ring_order(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of flat tensors in ring order: chunk c begins with rank c + 1."""
    k = len(terms)
    chunks = zip(*(term.tensor_split(k) for term in terms), strict=True)
    return torch.cat(
        [
            rank_order([chunk[(number + 1 + i) % k] for i in range(k)])
            for number, chunk in enumerate(chunks)
        ]
    )


def _wide(terms: Sequence[Tensor]) -> list[Tensor]:
    dtype = torch.promote_types(terms[0].dtype, torch.float32)
    return [term.to(dtype) for term in terms]


def is_close(found: Tensor, want: Tensor) -> bool:
    """Return whether a peer's sum is right up to rounding.

    Peers add in any order, and may round 16-bit sums after every addition.
    """
    far = 0.1 if found.dtype.itemsize < 4 else 1e-5
    return torch.allclose(found.float(), want.float(), rtol=far, atol=far)


def is_nearest(found: Tensor, terms: Sequence[Tensor]) -> bool:
    """Return whether every sum is the floating-point number nearest to the exact sum."""
    above, below = (
        torch.nextafter(found, torch.full_like(found, e)) for e in (torch.inf, -torch.inf)
    )
    columns = [tensor[:NUM_EXACT].tolist() for tensor in (found, above, below, *terms)]
    for number, *neighbors_and_terms in zip(*columns, strict=True):
        total = sum(map(Fraction, neighbors_and_terms[2:]))
        error = abs(Fraction(number) - total)
        if any(abs(Fraction(n) - total) < error for n in neighbors_and_terms[:2]):
            return False
    return True
