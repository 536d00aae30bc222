"""The machine that is described: links, who shares them, and which ones a message takes.

Figures of named links are other people's, with their source; nothing here was measured. Bandwidths
are in GB/s, 10**9 bytes a second, in one direction; every link carries as much the other way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyringar.errors import ArgumentError

__all__ = [
    "LINKS",
    "WIRINGS",
    "Hop",
    "Link",
    "Memory",
    "Network",
    "Port",
    "check_count",
    "named_link",
]

WIRINGS = ("switch", "ring")

# Bandwidths: PCIe's are line rates of 16 lanes after 128b/130b coding (GT/s * 16 / 8 * 128 / 130),
# Ethernet's the line rate; NVLink 4 has a line rate of 450 GB/s, of which 370 are left for data
# (NVIDIA/nccl-tests#212, H100 x 8). Copies reach 75 to 95 % of a line rate.
# Latencies: what NCCL's own model (src/graph/tuning.cc, hwLat) takes for a ring's hop with its
# Simple protocol: 3.4 us over NVLink, 5.7 us over PCIe, 14 us over a network.
_NCCL_HOP = "latency: NCCL's model of a hop, tuning.cc"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        name: For people.
        bandwidth_gbps: GB/s (10**9 bytes a second) in each direction.
        latency_us: From the start of a message to its first byte's arrival.
        source: Where the figures come from.

    Raises:
        ArgumentError: No positive bandwidth, or a negative latency.
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
        return (
            f"{self.name}: {self.bandwidth_gbps:g} GB/s each way, {self.latency_us:g} us "
            f"({self.source})"
        )


LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 370.0, 3.4, f"450 GB/s, 370 for data: nccl-tests#212; {_NCCL_HOP}"),
        Link("pcie3", 15.75, 5.7, f"line rate of 16 lanes; {_NCCL_HOP}"),
        Link("pcie4", 31.51, 5.7, f"line rate of 16 lanes; {_NCCL_HOP}"),
        Link("pcie5", 63.02, 5.7, f"line rate of 16 lanes; {_NCCL_HOP}"),
        Link("100gbe", 12.5, 14.0, f"line rate of 100 Gbit/s; {_NCCL_HOP}"),
    )
}


class Port(NamedTuple):
    """One direction of one link: what messages queue for.

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
        nodes: How many nodes share the ranks evenly.
        node_link: Between nodes; needed where there are several. A message between nodes occupies
            it alone: a rank's way to its network card is taken to be no slower.
        nics_per_node: Network cards of a node: local rank j uses card j mod ``nics_per_node``.
        wiring: ``"switch"``: every rank has one link to a switch that never is the bottleneck.
            ``"ring"``: a wire to each of two neighbours, and no others; messages to the rest go
            through them, the shorter way.

    Raises:
        ArgumentError: Counts that do not fit; names them.
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
        if self.wiring not in WIRINGS:
            raise ArgumentError(f"wiring is {self.wiring!r}, expected one of {', '.join(WIRINGS)}")

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.nodes

    @property
    def unit(self) -> int:
        """Return how many ranks stand for all: turning the ranks by this many changes nothing.

        One rank where there is one node, one node's ranks where there are several.
        """
        return 1 if self.nodes == 1 else self.ranks_per_node

    def route(self, src: int, dst: int) -> tuple[Hop, ...]:
        """The ports that a message from rank ``src`` to rank ``dst`` passes, in order.

        Args:
            src: The rank that sends.
            dst: The rank that receives; a message to oneself passes none.
        """
        if src == dst:
            return ()
        if src // self.ranks_per_node != dst // self.ranks_per_node:
            return self._hops["node out"][src], self._hops["node in"][dst]
        if self.wiring == "switch":
            return self._hops["rank out"][src], self._hops["rank in"][dst]
        return self._wires(src, dst)

    @functools.cached_property
    def _hops(self) -> dict[str, list[Hop]]:
        """By kind of port, the hop that belongs to every rank."""
        ranks, cards = range(self.world_size), self.nics_per_node
        nodes_and_locals = [divmod(rank, self.ranks_per_node) for rank in ranks]
        card_of = [node * cards + local % cards for node, local in nodes_and_locals]
        places: dict[str, Sequence[int]] = {"node out": card_of, "node in": card_of}
        hops = {}
        for kind in ("rank out", "rank in", "wire next", "wire prev", "node out", "node in"):
            link = self.node_link if kind.startswith("node") else self.link
            if link is None:
                continue
            # Out and in are the ends of one link, whose latency counts once.
            latency_s = 0.0 if kind.endswith(" in") else link.latency_us * 1e-6
            s_per_byte = 1e-9 / link.bandwidth_gbps
            hops[kind] = [
                Hop(Port(kind, at), s_per_byte, latency_s) for at in places.get(kind, ranks)
            ]
        return hops

    def representative(self, port: Port) -> Port:
        """The port that stands for this one where :attr:`unit` ranks stand for all.

        Args:
            port: Any port of this network.
        """
        period = self.nics_per_node if port.kind.startswith("node") else self.unit
        return Port(port.kind, port.place % period)

    def _wires(self, src: int, dst: int) -> tuple[Hop, ...]:
        """The wires between two ranks of a node, the shorter way round."""
        size = self.ranks_per_node
        first = src - src % size
        forward, backward = (dst - src) % size, (src - dst) % size
        if forward <= backward:
            kind, on_the_way = "wire next", [first + (src + i) % size for i in range(forward)]
        else:
            kind, on_the_way = "wire prev", [first + (src - i) % size for i in range(backward)]
        return tuple(self._hops[kind][rank] for rank in on_the_way)


@dataclass(frozen=True)
class Memory:
    """One memory that all ranks share, as a machine whose only link it is.

    Attributes:
        bandwidth_gbps: Reads and writes together, GB/s.
    """

    bandwidth_gbps: float

    def route(self, src: int, dst: int) -> tuple[Hop, ...]:
        """Everything passes the memory, also what a rank does with its own."""
        return (Hop(Port("memory", 0), 1e-9 / self.bandwidth_gbps, 0.0),)

    def representative(self, port: Port) -> Port:
        """There is but one."""
        return port


def named_link(
    name: str,
    *,
    option: str = "link",
    bandwidth_gbps: float | None = None,
    latency_us: float | None = None,
) -> Link:
    """A link by name, with figures of one's own in place of its own.

    Args:
        name: A key of :data:`LINKS`, or ``"custom"``, which needs a bandwidth.
        option: What the name was given as, for messages.
        bandwidth_gbps: GB/s in each direction.
        latency_us: Microseconds a message; 0 for a custom link that names none.

    Raises:
        ArgumentError: Unknown name, or a custom link without a bandwidth.
    """
    if name not in LINKS and name != "custom":
        raise ArgumentError(f"{option} is {name!r}, expected one of {', '.join(LINKS)}, custom")
    if name == "custom":
        if bandwidth_gbps is None:
            raise ArgumentError(f"{option} is 'custom', which needs a bandwidth in GB/s")
        return Link("custom", bandwidth_gbps, latency_us or 0.0, "given")
    known = LINKS[name]
    if bandwidth_gbps is None and latency_us is None:
        return known
    return Link(
        f"{name}, changed",
        known.bandwidth_gbps if bandwidth_gbps is None else bandwidth_gbps,
        known.latency_us if latency_us is None else latency_us,
        " and ".join(
            [
                f"{what} given"
                for what, value in (("bandwidth", bandwidth_gbps), ("latency", latency_us))
                if value is not None
            ]
        ),
    )


def check_count(name: str, value: Any) -> int:
    """Check that a value is a whole number, 1 or more.

    Raises:
        ArgumentError: It is not; names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number, 1 or more")
    return value
