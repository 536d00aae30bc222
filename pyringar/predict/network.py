"""The machine to predict for: links, ranks in nodes, and the ports that a message passes.

The figures of named links are published ones, with their source; none was measured here. GB/s are
10**9 bytes a second in one direction; a link carries as much in the other at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError

__all__ = [
    "LINKS",
    "WIRINGS",
    "Hop",
    "Link",
    "Network",
    "Port",
    "check_count",
    "named_link",
]

WIRINGS = ("switch", "ring")


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        name: Shown in reports.
        bandwidth_gbps: GB/s (10**9 bytes a second) in each direction.
        latency_us: From the start of a message to its first byte's arrival.
        source: Where the figures come from.

    Raises:
        ArgumentError: The bandwidth is not positive, or the latency negative.
    """

    name: str
    bandwidth_gbps: float
    latency_us: float
    source: str

    def __post_init__(self) -> None:
        if not (_is_number(self.bandwidth_gbps) and self.bandwidth_gbps > 0):
            raise ArgumentError(
                f"bandwidth_gbps is {self.bandwidth_gbps!r}, expected a positive number of GB/s"
            )
        if not (_is_number(self.latency_us) and self.latency_us >= 0):
            raise ArgumentError(
                f"latency_us is {self.latency_us!r}, expected microseconds, 0 or more"
            )

    def __str__(self) -> str:
        figures = f"{self.bandwidth_gbps:g} GB/s each way, {self.latency_us:g} us"
        return f"{self.name}: {figures} ({self.source})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Bandwidths: PCIe's are line rates of 16 lanes after 128b/130b coding (GT/s * 16 / 8 * 128 / 130),
# Ethernet's the line rate; NVLink 4 has a line rate of 450 GB/s, of which 370 are left for data
# (NVIDIA/nccl-tests#212, H100 x 8). Copies reach 75 to 95 % of a line rate.
# Latencies: those of NCCL's own model (src/graph/tuning.cc, hwLat) for a ring's hop with its
# Simple protocol: 3.4 us over NVLink, 5.7 us over PCIe, 14 us over a network.
_NCCL_HOP = "latency: NCCL's model of a hop, tuning.cc"
LINKS = {
    name: Link(name, bandwidth_gbps, latency_us, f"{source}; {_NCCL_HOP}")
    for name, bandwidth_gbps, latency_us, source in (
        ("nvlink4", 370.0, 3.4, "450 GB/s, 370 for data: nccl-tests#212"),
        ("pcie3", 15.75, 5.7, "line rate of 16 lanes"),
        ("pcie4", 31.51, 5.7, "line rate of 16 lanes"),
        ("pcie5", 63.02, 5.7, "line rate of 16 lanes"),
        ("100gbe", 12.5, 14.0, "line rate of 100 Gbit/s"),
    )
}


def named_link(
    name: str,
    *,
    option: str = "link",
    bandwidth_gbps: float | None = None,
    latency_us: float | None = None,
) -> Link:
    """Look up a link, optionally overriding its figures.

    Args:
        name: A key of `LINKS`, or ``"custom"``, which needs a bandwidth.
        option: The argument that holds the name, for messages.
        bandwidth_gbps: GB/s in each direction.
        latency_us: Microseconds a message; 0 for a custom link by default.

    Raises:
        ArgumentError: Unknown name, or a custom link without a bandwidth.
    """
    if name == "custom":
        if bandwidth_gbps is None:
            raise ArgumentError(f"{option} is 'custom', which needs a bandwidth in GB/s")
        return Link(name, bandwidth_gbps, latency_us or 0.0, "given")
    check_choice(option, name, (*LINKS, "custom"))
    figures = {"bandwidth_gbps": bandwidth_gbps, "latency_us": latency_us}
    given = {figure: value for figure, value in figures.items() if value is not None}
    if not given:
        return LINKS[name]
    source = " and ".join(f"{figure.partition('_')[0]} given" for figure in given)
    return replace(LINKS[name], name=f"{name}, changed", source=source, **given)


class Port(NamedTuple):
    """One direction of one link; messages queue for it.

    Attributes:
        kind: ``"rank out"``, ``"rank in"``, ``"node out"``, ``"node in"``; with wires between
            neighbours ``"wire next"`` and ``"wire prev"`` instead of the first two.
        place: The rank, the network card, or the rank at which a wire begins.
    """

    kind: str
    place: int


class Hop(NamedTuple):
    """A message's way through one port: seconds per byte, and before its first byte is through."""

    port: Port
    s_per_byte: float
    latency_s: float


@dataclass(frozen=True)
class Network:
    """Ranks in nodes, and the links between them.

    Attributes:
        world_size: Number of ranks, numbered node by node.
        link: Between ranks of a node.
        nodes: Number of nodes, which share the ranks evenly.
        node_link: Between nodes; needed if there are several. It alone limits a message between
            nodes: a rank reaches its network card at least as fast.
        nics_per_node: Network cards of a node: local rank j uses card j mod ``nics_per_node``.
        wiring: ``"switch"``: every rank has one link to a switch that never is the bottleneck.
            ``"ring"``: a wire to each of two neighbours; messages to other ranks pass through
            them, the shorter way.

    Raises:
        ArgumentError: Names the count that does not fit.
    """

    world_size: int
    link: Link
    nodes: int = 1
    node_link: Link | None = None
    nics_per_node: int = 1
    wiring: str = "switch"

    def __post_init__(self) -> None:
        for name in ("world_size", "nodes", "nics_per_node"):
            check_count(name, getattr(self, name))
        if self.world_size % self.nodes:
            raise ArgumentError(
                f"world_size is {self.world_size}, expected a multiple of the {self.nodes} nodes"
            )
        if self.nodes > 1 and self.node_link is None:
            raise ArgumentError(
                f"node_link is None, expected a Link between the {self.nodes} nodes"
            )
        check_choice("wiring", self.wiring, WIRINGS)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.nodes

    @property
    def unit(self) -> int:
        """Number of ranks that stand for all: one, or with several nodes the ranks of one node.

        Turning the ranks by this many changes nothing.
        """
        return 1 if self.nodes == 1 else self.ranks_per_node

    def route(self, src: int, dst: int) -> tuple[Hop, ...]:
        """Return the ports that a message passes, in order.

        Args:
            src: The rank that sends.
            dst: The rank that receives; a message to itself passes none.
        """
        if src == dst:
            return ()
        if src // self.ranks_per_node != dst // self.ranks_per_node:
            return self._hop("node out", self._card(src)), self._hop("node in", self._card(dst))
        if self.wiring == "switch":
            return self._hop("rank out", src), self._hop("rank in", dst)
        size = self.ranks_per_node
        first = src - src % size
        forward, backward = (dst - src) % size, (src - dst) % size
        if forward <= backward:
            kind, passed = "wire next", [(src + i) % size for i in range(forward)]
        else:
            kind, passed = "wire prev", [(src - i) % size for i in range(backward)]
        return tuple(self._hop(kind, first + rank) for rank in passed)

    def _card(self, rank: int) -> int:
        """Return the network card of a rank, counted through all nodes."""
        node, local = divmod(rank, self.ranks_per_node)
        return node * self.nics_per_node + local % self.nics_per_node

    def _hop(self, kind: str, place: int) -> Hop:
        link = self.node_link if kind.startswith("node") and self.node_link else self.link
        # Out and in are the ends of one link, whose latency counts once.
        latency_s = 0.0 if kind.endswith(" in") else link.latency_us * 1e-6
        return Hop(Port(kind, place), 1e-9 / link.bandwidth_gbps, latency_s)

    def representative(self, port: Port) -> Port:
        """Return the port that stands for this one where `unit` ranks stand for all.

        Args:
            port: Any port of this network.
        """
        period = self.nics_per_node if port.kind.startswith("node") else self.unit
        return Port(port.kind, port.place % period)


def check_count(name: str, value: Any) -> int:
    """Return a whole number, 1 or more.

    Raises:
        ArgumentError: It is not one; names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number, 1 or more")
    return value
