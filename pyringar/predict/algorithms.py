"""The algorithms as programs of messages, out of the engine's own schedules.

Who sends which chunk at which step comes from the engine's ``ring_step``, how a buffer is cut from
its ``chunk_range``, who owns which parameter from :func:`pyringar.comm.reference.shard_owners`: the
functions that the collectives themselves run by. What a message waits for follows from them: a
rank sends a chunk on once the message that brought it has arrived.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyringar.comm.reference import shard_owners
from pyringar.engine import load
from pyringar.predict.events import Outcome, Program, simulate
from pyringar.predict.network import Network

__all__ = ["ALGORITHMS", "ITEM_BYTES", "Algorithm", "ring_in_memory", "run_all_reduce"]

ITEM_BYTES = 4  # of a float32


@dataclass(frozen=True)
class Algorithm:
    """One way to reduce.

    Attributes:
        name: The engine's, or for hierarchical ones ``inside/across``: what runs inside nodes,
            and across them for every shard.
        build: Makes the program for tensors, given as numbers of elements, on a network.
        is_in_engine: Whether ``Communicator`` has it; others are schedules only, made of its parts.
        takes_lists: Whether all tensors of a call go at once; else one after the other.
        needs_nodes: Whether it makes sense on several nodes only.
        needs_wires: Whether it makes sense with wires between neighbours only: at a switch, both
            ways share the one link of a rank.
    """

    name: str
    build: Callable[[Network, Sequence[int]], Program]
    is_in_engine: bool = True
    takes_lists: bool = False
    needs_nodes: bool = False
    needs_wires: bool = False

    def suits(self, network: Network) -> bool:
        """Return whether there is something to say about it there."""
        return not (
            (self.needs_nodes and network.nodes == 1)
            or (self.needs_wires and network.wiring == "switch")
        )


def run_all_reduce(algorithm: Algorithm, network: Network, tensors: Sequence[int]) -> Outcome:
    """Simulate one call for tensors of these numbers of elements.

    Tensors follow each other without overlap where the algorithm takes one at a time, as the
    engine's ring and the two algorithms in Python do.

    Args:
        algorithm: One of :data:`ALGORITHMS`.
        network: Where it runs.
        tensors: Numbers of elements of float32 tensors.

    Returns:
        What it takes.
    """
    if network.world_size == 1 or not any(tensors):
        return Outcome()
    if algorithm.takes_lists:
        return _run(algorithm, network, tuple(tensors))
    outcomes = (_run(algorithm, network, (numel,)) for numel in tensors if numel)
    return functools.reduce(Outcome.then, outcomes, Outcome())


@functools.lru_cache(maxsize=4096)
def _run(algorithm: Algorithm, network: Network, tensors: tuple[int, ...]) -> Outcome:
    with _without_collector():
        outcome = simulate(algorithm.build(network, tensors), network)
    return Outcome(outcome.time_s, outcome.nbytes)  # without the times of a million messages


@contextmanager
def _without_collector() -> Iterator[None]:
    """Messages hold no cycles; looking for some among a million takes as long as the simulation."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- collectives of a group of ranks ---------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Ranks that reduce together, by their positions.

    Attributes:
        ranks: The rank at every position.
        unit: How many of the first positions stand for all; only they send, or own.
        chunk_bytes: Size of the chunk that each position ends the reduction with.
    """

    ranks: Sequence[int]
    unit: int
    chunk_bytes: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.ranks)


def _cut(numel: int, parts: int) -> list[int]:
    """Numbers of elements of the chunks of a buffer."""
    chunk_range = load.engine().chunk_range
    ranges = (chunk_range(numel, parts, chunk) for chunk in range(parts))
    return [end - begin for begin, end in ranges]


def _chunk_bytes(tensors: Sequence[int], parts: int) -> list[int]:
    """Bytes of every chunk, where each tensor is cut by itself."""
    columns = zip(*(_cut(numel, parts) for numel in tensors), strict=True)
    return [sum(column) * ITEM_BYTES for column in columns]


# What a position has to wait for before the collective, or has brought about by its end: the place
# of a join in the program, by position below the unit.
Joins = dict[int, int]
Collective = Callable[[Program, _Group, Joins], Joins]


def _ring(program: Program, group: _Group, after: Joins, *, reduces: bool) -> Joins:
    """One phase of the ring, every step as the engine's schedule has it."""
    engine = load.engine()
    size, unit = group.size, group.unit
    sent: dict[tuple[int, int], int] = {}  # (position below unit, step) -> place
    brought: list[dict[int, int]] = [{} for _ in range(unit)]  # chunk -> step that brought it
    for step in range(engine.ring_num_steps(size)):
        for position in range(unit):
            send, recv, is_reduction = engine.ring_step(position, size, step)
            if is_reduction is not reduces:
                continue
            needs = [after[position]] if after else []
            if send in brought[position]:
                needs.append(sent[(position - 1) % unit, brought[position][send]])
            sent[position, step] = program.send(
                group.ranks[position],
                group.ranks[(position + 1) % size],
                group.chunk_bytes[send],
                needs,
            )
            brought[position][recv] = step
    arrived = [((position + 1) % unit, place) for (position, _), place in sent.items()]
    return _joined(program, group, after, arrived)


def _direct_scatter(program: Program, group: _Group, after: Joins) -> Joins:
    """Every position reads its chunk from all others, its next first."""
    size, unit = group.size, group.unit
    arrived = []
    for distance in range(1, size):
        for owner in range(unit):
            peer = (owner + distance) % size
            needs = {after[owner], after[peer % unit]} if after else ()
            ends = group.ranks[peer], group.ranks[owner]
            arrived.append((owner, program.send(*ends, group.chunk_bytes[owner], needs)))
    return _joined(program, group, after, arrived)


def _direct_gather(program: Program, group: _Group, after: Joins) -> Joins:
    """Every position writes its chunk to all others, its next first."""
    size, unit = group.size, group.unit
    arrived = []
    for distance in range(1, size):
        for owner in range(unit):
            peer = (owner + distance) % size
            needs = [after[owner]] if after else []
            ends = group.ranks[owner], group.ranks[peer]
            place = program.send(*ends, group.chunk_bytes[owner], needs)
            arrived.append((peer % unit, place))
    return _joined(program, group, after, arrived)


def _joined(
    program: Program, group: _Group, after: Joins, arrived: Sequence[tuple[int, int]]
) -> Joins:
    """Return when everything has come to a position, for each that stands for others."""
    needs = {position: [after[position]] if after else [] for position in range(group.unit)}
    for position, place in arrived:
        needs[position].append(place)
    return {p: program.join(group.ranks[p], places) for p, places in needs.items()}


_SCATTER: dict[str, Collective] = {
    "ring": functools.partial(_ring, reduces=True),
    "direct": _direct_scatter,
}
_GATHER: dict[str, Collective] = {
    "ring": functools.partial(_ring, reduces=False),
    "direct": _direct_gather,
}


# -- algorithms ------------------------------------------------------------------------------------


def _flat(kind: str, network: Network, tensors: Sequence[int]) -> Program:
    """All ranks in one group, whatever lies between them."""
    program = Program(is_folded=True)
    k = network.world_size
    group = _Group(range(k), network.unit, _chunk_bytes(tensors, k))
    _GATHER[kind](program, group, _SCATTER[kind](program, group, {}))
    return program


def ring_in_memory(world_size: int, numel: int) -> Program:
    """The ring of ranks that share a memory: its messages are what they read and write there.

    To add a chunk, a rank reads what its neighbour left and its own part, and writes the sum: three
    times the chunk. To pass a result on, it reads and writes: twice.
    """
    program = Program()
    chunks = _chunk_bytes([numel], world_size)
    joins: Joins = {}
    for reduces, accesses in ((True, 3), (False, 2)):
        moved = [accesses * nbytes for nbytes in chunks]
        joins = _ring(program, _Group(range(world_size), world_size, moved), joins, reduces=reduces)
    return program


def _two_way_ring(network: Network, tensors: Sequence[int]) -> Program:
    """Half of every tensor one way round, half the other."""
    program = Program(is_folded=True)
    k = network.world_size
    for half, ranks in enumerate((range(k), range(k - 1, -1, -1))):
        halves = [_cut(numel, 2)[half] for numel in tensors]
        group = _Group(ranks, network.unit, _chunk_bytes(halves, k))
        _ring(program, group, _ring(program, group, {}, reduces=True), reduces=False)
    return program


def _hierarchical(inside: str, across: str, network: Network, tensors: Sequence[int]) -> Program:
    """Reduce to shards inside every node, all-reduce each shard across, gather inside.

    Local rank j ends the first phase with shard j, and meets the ranks j of all other nodes in a
    group of their own. One node stands for all.
    """
    program = Program(is_folded=True)
    local_ranks = network.ranks_per_node
    node = _Group(range(local_ranks), local_ranks, _chunk_bytes(tensors, local_ranks))
    scattered = _SCATTER[inside](program, node, {})
    shards = list(zip(*(_cut(numel, local_ranks) for numel in tensors), strict=True))
    reduced: Joins = {}
    for local in range(local_ranks):
        ranks = range(local, network.world_size, local_ranks)
        group = _Group(ranks, 1, _chunk_bytes(shards[local], network.nodes))
        halfway = _SCATTER[across](program, group, {0: scattered[local]})
        reduced[local] = _GATHER[across](program, group, halfway)[0]
    _GATHER[inside](program, node, reduced)
    return program


def _naive(network: Network, tensors: Sequence[int]) -> Program:
    """Everything to rank 0 and back, copy by copy, as the book's loop does."""
    program = Program()
    needs: tuple[int, ...] = ()
    for numel in tensors:
        peers = range(1, network.world_size)
        for src, dst in [(peer, 0) for peer in peers] + [(0, peer) for peer in peers]:
            needs = (program.send(src, dst, numel * ITEM_BYTES, needs),)
    return program


def _sharded(network: Network, tensors: Sequence[int]) -> Program:
    """Whole tensors to their owners and back; owners work at once, each from its next rank on.

    An owner sends nothing back before it has all: what comes and what goes take turns, as copies
    on one stream do.
    """
    program = Program()
    k = network.world_size
    owners = shard_owners([numel * ITEM_BYTES for numel in tensors], k)
    largest_first = sorted(range(len(tensors)), key=lambda i: -tensors[i])
    trips = [(i, owners[i], distance) for distance in range(1, k) for i in largest_first]
    arrived: dict[int, list[int]] = {owner: [] for owner in owners}
    for i, owner, distance in trips:
        place = program.send((owner + distance) % k, owner, tensors[i] * ITEM_BYTES)
        arrived[owner].append(place)
    sums = {owner: program.join(owner, places) for owner, places in arrived.items()}
    for i, owner, distance in trips:
        program.send(owner, (owner + distance) % k, tensors[i] * ITEM_BYTES, [sums[owner]])
    return program


def _hierarchical_row(inside: str, across: str) -> Algorithm:
    build = functools.partial(_hierarchical, inside, across)
    return Algorithm(f"{inside}/{across}", build, is_in_engine=False, needs_nodes=True)


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("naive", _naive),
        Algorithm("sharded", _sharded, takes_lists=True),
        Algorithm("direct", functools.partial(_flat, "direct"), takes_lists=True),
        Algorithm("ring", functools.partial(_flat, "ring")),
        Algorithm("two-way ring", _two_way_ring, is_in_engine=False, needs_wires=True),
        _hierarchical_row("ring", "ring"),
        _hierarchical_row("direct", "ring"),
        _hierarchical_row("direct", "direct"),
    )
}
