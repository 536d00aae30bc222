"""Say who meets whom between machines: pure functions of which ranks are on which.

Rank ``l`` of a machine is *carried*, on another of L ranks, by rank ``l mod L``. Machines of equal
numbers so have columns of ranks that meet each other alone; others work, too, with some ranks that
carry for more than one.
"""

from __future__ import annotations

from typing import NamedTuple

from pyringar.choices import ORDERS, check_choice
from pyringar.errors import ArgumentError

__all__ = ["Machines"]


class Machines(NamedTuple):
    """Say which ranks are on which machine, and which is this one's place.

    Attributes:
        nodes: The ranks of every machine, in the order in which they are added.
        node: This rank's machine.
        local_rank: Its place there.
    """

    nodes: list[list[int]]
    node: int
    local_rank: int

    @classmethod
    def of(cls, nodes: list[list[int]], rank: int) -> Machines:
        """Return the place of ``rank``."""
        node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
        return cls(nodes, node, nodes[node].index(rank))

    @property
    def here(self) -> list[int]:
        """The ranks of this machine."""
        return self.nodes[self.node]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.here[self.local_rank]

    @property
    def others(self) -> list[int]:
        """The other machines, in order."""
        return [node for node in range(len(self.nodes)) if node != self.node]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    def carrier(self, node: int) -> int:
        """Return who on another machine carries what is this rank's."""
        return self.nodes[node][self.local_rank % len(self.nodes[node])]

    def carried(self, node: int) -> list[int]:
        """Return the ranks of another machine for whom this one carries."""
        return self.nodes[node][self.local_rank :: len(self.here)]

    @property
    def peers(self) -> list[int]:
        """The ranks on other machines that this one meets: at least one on each."""
        met = [{self.carrier(node), *self.carried(node)} for node in self.others]
        return sorted(rank for ranks in met for rank in ranks)

    @property
    def are_equal(self) -> bool:
        """Whether all machines have the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @property
    def columns(self) -> list[list[int]]:
        """Groups of ranks that need no connections to others."""
        if self.are_equal:
            return [list(column) for column in zip(*self.nodes, strict=True)]
        return [[rank for ranks in self.nodes for rank in ranks]]

    def where(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)

    def num_slots(self, node: int) -> int:
        """Return for how many ranks of a machine one here carries, at most."""
        return -(-len(self.nodes[node]) // len(self.here))

    def is_even(self, node: int) -> bool:
        """Return whether ranks here carry for as many each, those that follow each other."""
        return len(self.here) in (1, len(self.nodes[node]))

    def check_order(self, order: str) -> None:
        """Refuse an order that sums of machines' sums do not have."""
        check_choice("order", order, ORDERS)
        flat = [rank for ranks in self.nodes for rank in ranks]
        each = len(self.here)
        is_tree = self.are_equal and each & (each - 1) == 0 and flat == sorted(flat)
        if order == "any" or len(self.nodes) == 1 or (order == "tree" and is_tree):
            return
        needs = (
            "equally many ranks on each, a power of two, that follow each other"
            if order == "tree"
            else "'any' or 'tree', for machines' sums are added to each other"
        )
        raise ArgumentError(
            f"order is {order!r} and the ranks are on {len(self.nodes)} machines: "
            f"{', '.join(map(str, self.nodes))}; expected {needs}"
        )

    def tree(self, root: int) -> tuple[list[int], int | None, list[int]]:
        """Say how machines pass on what rank ``root`` has, each to twice as many as before.

        Returns:
            Of each machine the rank that passes it on, the carrier of its parent's; and this
            machine's parent, None at the root, and its children.
        """
        first = self.where(root)
        num = len(self.nodes)
        heads = [root] * num
        for place in range(1, num):
            above, node = (place - (place & -place) + first) % num, (place + first) % num
            head = self.nodes[above].index(heads[above])
            heads[node] = Machines(self.nodes, above, head).carrier(node)
        place = (self.node - first) % num
        lowest = place & -place if place else num
        parent = (place - lowest + first) % num if place else None
        steps = [1 << i for i in range(num.bit_length()) if 1 << i < lowest]
        children = [(place + step + first) % num for step in reversed(steps) if place + step < num]
        return heads, parent, children

    def __str__(self) -> str:
        sizes = sorted({len(ranks) for ranks in self.nodes})
        each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{len(self.nodes)} machines of {each} ranks"
