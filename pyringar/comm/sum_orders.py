"""Orders of addition, and the guarantees of each order.

``x[r]`` is the element of rank ``r``. 16-bit floats are widened to float32 and rounded once at the
end.

- ``rank``: ``((x[0] + x[1]) + x[2]) + ...``
- ``tree``: ``T(0, k)`` with ``T(lo, lo + 1) = x[lo]`` and ``T(lo, hi) = T(lo, mid) + T(mid, hi)``;
  ``mid - lo`` is the largest power of two below ``hi - lo``. If ``k`` ranks first add ``m`` terms
  each in this order, ``m`` a power of two, the result has the bits of ``k * m`` ranks.
- ``exact``: the real number ``x[0] + x[1] + ...``, rounded. It overflows only if the sum does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyringar.errors import ArgumentError, UnsupportedError

T = TypeVar("T")

# Algorithms that support only one order, and the reason in the error message.
_CANNOT = {
    "ring": "a ring adds in its own order",
    "naive": "it adds in rank order",
    "sharded": "it adds in rank order",
}


@dataclass(frozen=True)
class Guarantee:
    """The changes under which a sum keeps its bits.

    Bits are equal on all ranks with every order. Integer sums, maxima and minima are the same in
    every order. A NaN stays a NaN, but its bits may change.

    Attributes:
        order: The requested order: ``"any"``, ``"rank"``, ``"tree"`` or ``"exact"``.
        run_to_run: True if a repeated call on the same ranks keeps the bits.
        across_sizes: True if message size, split, bucket, algorithm, and kind of rank (thread,
            process or GPU) do not matter.
        across_rank_counts: True if ``k`` ranks that each add ``m`` terms as a tree, ``m`` a power
            of two, have the bits of ``k * m`` ranks, and machines with equally many ranks have the
            bits of one machine.
        across_orders: True if it does not matter which rank contributes which term.
    """

    order: str
    run_to_run: bool
    across_sizes: bool
    across_rank_counts: bool
    across_orders: bool

    @classmethod
    def of(cls, order: str) -> Guarantee:
        """Return the guarantee of ``"any"``, ``"rank"``, ``"tree"`` or ``"exact"``."""
        return cls(order, True, order != "any", order == "tree", order == "exact")

    def __str__(self) -> str:
        kept = {
            "runs": self.run_to_run,
            "sizes, splits and engines": self.across_sizes,
            "numbers of ranks": self.across_rank_counts,
            "orders of the ranks": self.across_orders,
        }
        names = ", ".join(name for name, is_kept in kept.items() if is_kept)
        return f"{self.order}: same bits across {names}"


def engine_order(algorithm: str, order: str, *, has_gpus: bool) -> str:
    """Return the order in which an engine adds for the requested ``order``.

    Raises:
        ArgumentError: The algorithm does not support the order.
        UnsupportedError: The order is exact and ranks are on GPUs.
    """
    cannot = _CANNOT.get(algorithm)
    if cannot and order != "any" and (algorithm == "ring" or order != "rank"):
        raise ArgumentError(
            f"algorithm is {algorithm!r} and order is {order!r}: {cannot}; take order='any', or "
            f"'auto' or 'direct' for {order} order"
        )
    if order == "exact" and has_gpus:
        raise UnsupportedError(
            "order is 'exact' and ranks are on GPUs: exact sums are added on the CPU only; take "
            "order='tree'"
        )
    return "rank" if order == "any" else order


def tree(terms: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add the terms, at least one, as the tree ``T(0, k)`` of this module's docstring."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return add(tree(terms[:half], add), tree(terms[half:], add))
