"""Trees of additions: rebuild, name and print the order in which an allreduce adds ranks.

A `Tree` is a rank, or a pair of trees whose sums are added. Addition commutes, so the tree with the
lowest rank comes first. A message is a list of `Region`: runs of elements that are added in the
same order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pyringar.comm.sum_orders import tree as tree_of

Tree: TypeAlias = "int | tuple[Tree, Tree]"
Pair = tuple[int, int]
EXACT = "exact"  # replaces a tree if no partial sum is rounded
_MAX_SHOWN = 4  # most regions that a description lists


@dataclass(frozen=True)
class Region:
    """Elements ``start`` to ``stop - 1``; ``tree`` may be `EXACT`, or None if unknown."""

    start: int
    stop: int
    tree: Tree | str | None

    def as_dict(self) -> dict[str, object]:
        return {"start": self.start, "stop": self.stop, "sum": formula(self.tree)}


def join(a: Tree, b: Tree) -> Tree:
    return (a, b) if _lowest(a) < _lowest(b) else (b, a)


def _lowest(tree: Tree) -> int:
    while not isinstance(tree, int):
        tree = tree[0]
    return tree


def members(tree: Tree) -> int:
    return 1 << tree if isinstance(tree, int) else members(tree[0]) | members(tree[1])


def fold(terms: Sequence[Tree]) -> Tree:
    return functools.reduce(join, terms)


def balanced(terms: Sequence[Tree]) -> Tree:
    return tree_of(terms, join)


def _halving(terms: Sequence[Tree]) -> Tree:
    """Add partners half of the ranks apart, then a quarter, and so on."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [join(*pair) for pair in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def formula(tree: Tree | str | None) -> str:
    """Return a formula of ranks, such as ``"((0+1)+2)+3"``."""
    if tree is None or isinstance(tree, str):
        return tree or "unknown"
    if isinstance(tree, int):
        return str(tree)
    return "+".join(f"{t}" if isinstance(t, int) else f"({formula(t)})" for t in tree)


def same_trees(a: Sequence[Region], b: Sequence[Region]) -> bool:
    return [region.tree for region in a] == [region.tree for region in b]


def groups_of(tree: Tree) -> dict[Pair, int]:
    """Return, for each pair of ranks, the ranks of the smallest partial sum with both, as bits."""
    if isinstance(tree, int):
        return {}
    sides = [[r for r in range(members(t).bit_length()) if members(t) >> r & 1] for t in tree]
    across = {(min(p), max(p)): members(tree) for p in itertools.product(*sides)}
    return groups_of(tree[0]) | groups_of(tree[1]) | across


def rebuild(groups: Mapping[Pair, int], k: int) -> Tree | str | None:
    """Return the only tree whose `groups_of` are ``groups``; None if there is no such tree.

    Returns `EXACT` if every group is only the pair: then no addend was lost in rounding.
    """
    if k > 2 and all(group == 1 << i | 1 << j for (i, j), group in groups.items()):
        return EXACT
    tree = _rebuild(groups, (1 << k) - 1)
    return tree if tree is not None and groups_of(tree) == dict(groups) else None


def _rebuild(groups: Mapping[Pair, int], ranks: int) -> Tree | None:
    lowest = (ranks & -ranks).bit_length() - 1
    others = [r for r in range(lowest + 1, ranks.bit_length()) if ranks >> r & 1]
    if not others:
        return lowest
    far = sum(1 << r for r in others if groups[lowest, r] == ranks)
    if not far:
        return None
    near, far_tree = _rebuild(groups, ranks & ~far), _rebuild(groups, far)
    return None if near is None or far_tree is None else join(near, far_tree)


@functools.cache
def named_trees(k: int) -> dict[str, Tree]:
    """Return the trees of named orders; several names may have one tree."""
    power = 1 << k.bit_length() - 1
    extra = k - power
    # MPI libraries: if k is no power of two, the first 2 * extra ranks pair up in an extra step.
    paired = [join(2 * i, 2 * i + 1) for i in range(extra)] + list(range(2 * extra, k))
    folded = [join(i, power + i) if i < extra else i for i in range(power)]
    names: dict[str, Tree] = {
        "rank": fold(range(k)),
        "tree": balanced(range(k)),
        "rank, last first": fold(range(k)[::-1]),
        "recursive doubling": balanced(paired),
        "recursive halving": _halving(paired),
    }
    if extra:
        names["recursive doubling, last ranks first"] = balanced(folded)
        names["recursive halving, last ranks first"] = _halving(folded)
    return names


@functools.cache
def _starts(k: int, step: int) -> dict[Tree | str | None, int]:
    return {fold([(s + step * i) % k for i in range(k)]): s for s in reversed(range(k))}


def describe(regions: Sequence[Region], k: int) -> tuple[str, str]:
    """Return the name of a message's order, and its description.

    For example ``("ring", "chunk c adds ranks c+1, c+2, ..., c+4 (mod 4); 4 chunks of 250")``. The
    name is ``"unknown"`` if an element has no tree, ``"no name"`` for a tree without a name.
    """
    trees = [region.tree for region in regions]
    if None in trees:
        where = next(region for region in regions if region.tree is None)
        return "unknown", f"no order of additions fits element {where.start}"
    if len(set(trees)) == 1:
        tree = trees[0]
        if k == 2 or isinstance(tree, str):
            return (EXACT, "no partial sum is rounded") if k > 2 else ("rank", "0+1, in any order")
        known = _names(tree, k)
        also = f" (also {' and '.join(known[1:3])})" if known[1:] else ""
        return known[0], formula(tree) + also
    starts_of = {step: [_starts(k, step).get(tree, -1) for tree in trees] for step in (1, -1)}
    # For k = 3 both directions have the same trees, since the first two addends commute.
    rings = [_ring(starts, k, step) for step, starts in starts_of.items() if min(starts) >= 0]
    if rings:
        sizes = sorted(region.stop - region.start for region in regions)
        size = str(sizes[0]) if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
        return "ring", f"{', or '.join(rings)}; {len(sizes)} chunks of {size}"
    shown = [f"elements {r.start} to {r.stop - 1}: {formula(r.tree)}" for r in regions[:_MAX_SHOWN]]
    more = f"; {len(regions) - _MAX_SHOWN} more" if len(regions) > _MAX_SHOWN else ""
    names = {_names(tree, k)[0] for tree in set(trees)}
    return " and ".join(sorted(names)), "; ".join(shown) + more


def _names(tree: Tree | str | None, k: int) -> list[str]:
    known = [name for name, other in named_trees(k).items() if other == tree]
    ways = ((_starts(k, 1), "up"), (_starts(k, -1), "down"))
    around = [f"rank, {way} from {starts[tree]}" for starts, way in ways if tree in starts]
    return known or around or ["no name"]


def _ring(starts: Sequence[int], k: int, step: int) -> str:
    shift = starts[0]
    if len(starts) <= k and all(start == (c + shift) % k for c, start in enumerate(starts)):
        shift = shift if step > 0 or not shift else shift - k
        ranks = [f"c{d:+d}" if d else "c" for d in range(shift, shift + step * k, step)]
        shown = ranks if k == 3 else [*ranks[:2], "...", ranks[-1]]
        return f"chunk c adds ranks {', '.join(shown)} (mod {k})"
    listed = ", ".join(map(str, starts[: 2 * k])) + ", ..." * (len(starts) > 2 * k)
    return f"{'up' if step > 0 else 'down'} from rank {listed}"
