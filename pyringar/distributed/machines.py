"""Say which ranks are on which machine, and which of them meet ranks of other machines."""

from __future__ import annotations

from typing import NamedTuple

from pyringar.choices import ORDERS, check_choice
from pyringar.errors import ArgumentError

__all__ = ["Machines"]


class Machines(NamedTuple):
    """The ranks of every machine, and the place of this process's rank.

    Where machines have equally many ranks, the ranks of one local rank form a column, and each
    column carries an equal part of the data. Else there is one column: the first rank of each
    machine.

    Attributes:
        nodes: The ranks of every machine, in the order in which machines are added.
        node: This rank's machine.
        local_rank: This rank's index on its machine.
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
    def others(self) -> list[int]:
        """The other machines, in order."""
        return [node for node in range(len(self.nodes)) if node != self.node]

    @property
    def are_equal(self) -> bool:
        """Whether all machines have the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self.here) if self.are_equal else 1

    @property
    def is_carrier(self) -> bool:
        """Whether this rank is in a column."""
        return self.local_rank < self.num_columns

    @property
    def column(self) -> list[int]:
        """The ranks of this rank's column, by machine; of the first one, if it is in none."""
        return [ranks[self.local_rank if self.is_carrier else 0] for ranks in self.nodes]

    @property
    def block_order(self) -> list[int]:
        """All ranks by column, then by machine: the order of their parts in flat data."""
        if self.are_equal:
            return [rank for column in zip(*self.nodes, strict=True) for rank in column]
        return [rank for ranks in self.nodes for rank in ranks]

    def where(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)

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

    def __str__(self) -> str:
        sizes = sorted({len(ranks) for ranks in self.nodes})
        each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"{len(self.nodes)} machines of {each} ranks"
