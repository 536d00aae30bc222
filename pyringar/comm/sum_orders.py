"""Name the orders in which sums are added, and say what each of them promises.

With ``x[r]`` the element of rank ``r``, 16-bit floats widened to float32 and the result rounded
once:

- ``rank``: ``((x[0] + x[1]) + x[2]) + ...``
- ``tree``: ``T(0, k)``, where ``T(lo, lo + 1) = x[lo]`` and else
  ``T(lo, hi) = T(lo, mid) + T(mid, hi)`` with ``mid - lo`` the largest power of two below
  ``hi - lo``. A tree is made of trees: ranks that each add ``m`` terms so, ``m`` a power of two,
  have the bits of ``m`` times as many ranks.
- ``exact``: the real number ``x[0] + x[1] + ...``, rounded. It overflows only if the sum does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyringar.errors import ArgumentError, UnsupportedError

T = TypeVar("T")

# Why an algorithm cannot promise an order.
_CANNOT = {
    "ring": "a ring adds in its own order",
    "naive": "it adds in rank order",
    "sharded": "it adds in rank order",
}


@dataclass(frozen=True)
class Guarantee:
    """Say what may change without changing a bit of a sum.

    Results have the same bits on all ranks, whatever is promised. Sums of integers, maxima and
    minima are the same in every order. NaNs are NaNs; their bits are promised by nobody.

    Attributes:
        order: What was asked for: ``"any"``, ``"rank"``, ``"tree"`` or ``"exact"``.
        run_to_run: The same call again, on the same ranks.
        across_sizes: Other sizes, splits, buckets, algorithms; threads, processes or GPUs as ranks.
        across_rank_counts: ``k`` ranks that each add ``m`` terms as a tree, ``m`` a power of two,
            in place of ``k * m`` ranks; machines of equally many ranks in place of one.
        across_orders: The same terms given by other ranks.
    """

    order: str
    run_to_run: bool
    across_sizes: bool
    across_rank_counts: bool
    across_orders: bool

    @classmethod
    def of(cls, order: str) -> Guarantee:
        """Return what an order promises: ``"any"``, ``"rank"``, ``"tree"`` or ``"exact"``."""
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
    """Return the order in which an engine adds if a caller asks for ``order``.

    Raises:
        ArgumentError: The algorithm cannot promise it.
        UnsupportedError: Exact sums of ranks on GPUs.
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
    """Return ``T(0, k)`` of ``k`` terms, at least one; ``add`` takes the smaller indices first."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return add(tree(terms[:half], add), tree(terms[half:], add))
