"""The algorithms as programs of messages, made from the engine's own schedules.

Which rank sends which chunk at which step comes from the engine's ``ring_step``, how a buffer is
cut from its ``chunk_range``, and who owns which parameter from
`pyringar.comm.reference.shard_owners`: the functions that the collectives themselves run by.
A rank sends a chunk on once the message that brought it has arrived.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyringar.comm.reference import shard_owners
from pyringar.engine import load
from pyringar.predict.events import Outcome, Program, simulate
from pyringar.predict.network import Network

__all__ = ["ALGORITHMS", "ITEM_BYTES", "Algorithm", "run_all_reduce"]

ITEM_BYTES = 4  # of a float32


@dataclass(frozen=True)
class Algorithm:
    """One way to reduce.

    Attributes:
        name: The engine's, or ``inside/across`` for hierarchical ones: the algorithm inside nodes,
            and the one that runs across them for every shard.
        build: Makes the program for tensors, given as numbers of elements, on a network.
        is_in_engine: Whether ``Communicator`` has it; else it is a schedule made of its parts.
        takes_lists: Whether all tensors of a call go at once, instead of one after the other.
        needs_nodes: Whether it makes sense on several nodes only.
        needs_wires: Whether it makes sense with wires between neighbours only: at a switch, both
            directions would share a rank's one link.
    """

    name: str
    build: Callable[[Network, Sequence[int]], Program]
    is_in_engine: bool = True
    takes_lists: bool = False
    needs_nodes: bool = False
    needs_wires: bool = False

    def suits(self, network: Network) -> bool:
        """Return whether it makes sense there."""
        return (network.nodes > 1 or not self.needs_nodes) and (
            network.wiring != "switch" or not self.needs_wires
        )


def run_all_reduce(algorithm: Algorithm, network: Network, tensors: Sequence[int]) -> Outcome:
    """Simulate one call.

    Args:
        algorithm: One of `ALGORITHMS`. If it takes one tensor at a time, they follow each
            other without overlap, as in the engine.
        network: Where it runs.
        tensors: Numbers of elements of float32 tensors.
    """
    if network.world_size == 1 or not any(tensors):
        return Outcome()
    if algorithm.takes_lists:
        return _run(algorithm, network, tuple(tensors))
    outcomes = (_run(algorithm, network, (numel,)) for numel in tensors if numel)
    return functools.reduce(Outcome.then, outcomes, Outcome())


@functools.lru_cache(maxsize=4096)
def _run(algorithm: Algorithm, network: Network, tensors: tuple[int, ...]) -> Outcome:
    # Messages hold no cycles; searching a million of them takes as long as the simulation.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        outcome = simulate(algorithm.build(network, tensors), network)
    finally:
        if was_enabled:
            gc.enable()
    return Outcome(outcome.time_s, outcome.nbytes)  # without the times of a million messages


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


# By position below the unit, the message (a join) that it waits for before a collective, or that
# ends the collective there. Empty before the first collective.
Joins = dict[int, int]


def _cut(numel: int, parts: int) -> list[int]:
    """Return the numbers of elements of a buffer's chunks."""
    chunk_range = load.engine().chunk_range
    ranges = (chunk_range(numel, parts, chunk) for chunk in range(parts))
    return [end - begin for begin, end in ranges]


def _chunk_bytes(tensors: Sequence[int], parts: int) -> list[int]:
    """Return the bytes of every chunk, where each tensor is cut by itself."""
    columns = zip(*(_cut(numel, parts) for numel in tensors), strict=True)
    return [sum(column) * ITEM_BYTES for column in columns]


def _ring(program: Program, group: _Group, after: Joins, *, reduces: bool) -> Joins:
    """Add one phase of the ring: the steps of the engine's schedule that reduce, or the others."""
    engine = load.engine()
    size, unit = len(group.ranks), group.unit
    sent: dict[tuple[int, int], int] = {}  # message by (position below unit, step)
    brought: list[dict[int, int]] = [{} for _ in range(unit)]  # step that brought each chunk
    for step in range(engine.ring_num_steps(size)):
        for position in range(unit):
            send, recv, is_reduction = engine.ring_step(position, size, step)
            if is_reduction is not reduces:
                continue
            needs = _at(after, position)
            if send in brought[position]:
                needs.add(sent[(position - 1) % unit, brought[position][send]])
            ends = group.ranks[position], group.ranks[(position + 1) % size]
            sent[position, step] = program.send(*ends, group.chunk_bytes[send], needs)
            brought[position][recv] = step
    arrived = [((position + 1) % unit, message) for (position, _), message in sent.items()]
    return _joined(program, group, after, arrived)


def _direct(program: Program, group: _Group, after: Joins, *, reduces: bool) -> Joins:
    """Add one phase: every position reads its chunk from all others, or writes it to them.

    Each begins with the position after its own.
    """
    size, unit = len(group.ranks), group.unit
    arrived = []
    for distance in range(1, size):
        for owner in range(unit):
            peer = (owner + distance) % size
            src, dst = (peer, owner) if reduces else (owner, peer)
            needs = _at(after, owner, peer % unit) if reduces else _at(after, owner)
            ends = group.ranks[src], group.ranks[dst]
            message = program.send(*ends, group.chunk_bytes[owner], needs)
            arrived.append((dst % unit, message))
    return _joined(program, group, after, arrived)


def _at(joins: Joins, *positions: int) -> set[int]:
    return {joins[position] for position in positions if position in joins}


def _joined(
    program: Program, group: _Group, after: Joins, arrived: Sequence[tuple[int, int]]
) -> Joins:
    """Add the ends of a collective: when everything has come to each position below the unit."""
    needs = {position: [*_at(after, position)] for position in range(group.unit)}
    for position, message in arrived:
        needs[position].append(message)
    return {p: program.join(group.ranks[p], messages) for p, messages in needs.items()}


_PHASES = {"ring": _ring, "direct": _direct}


def _add_all_reduce(program: Program, kind: str, group: _Group, after: Joins) -> Joins:
    phase = _PHASES[kind]
    return phase(program, group, phase(program, group, after, reduces=True), reduces=False)


# -- algorithms ------------------------------------------------------------------------------------


def _flat(kind: str, network: Network, tensors: Sequence[int]) -> Program:
    """Reduce in one group of all ranks, whatever lies between them."""
    program = Program(is_folded=True)
    k = network.world_size
    _add_all_reduce(program, kind, _Group(range(k), network.unit, _chunk_bytes(tensors, k)), {})
    return program


def _two_way_ring(network: Network, tensors: Sequence[int]) -> Program:
    """Send half of every tensor one way round, half the other."""
    program = Program(is_folded=True)
    k = network.world_size
    for half, ranks in enumerate((range(k), range(k - 1, -1, -1))):
        chunks = _chunk_bytes([_cut(numel, 2)[half] for numel in tensors], k)
        _add_all_reduce(program, "ring", _Group(ranks, network.unit, chunks), {})
    return program


def _hierarchical(inside: str, across: str, network: Network, tensors: Sequence[int]) -> Program:
    """Reduce to shards inside every node, all-reduce each shard across, gather inside.

    Local rank j ends the first phase with shard j, and meets the ranks j of all other nodes in a
    group of their own. One node stands for all.
    """
    program = Program(is_folded=True)
    local_ranks = network.ranks_per_node
    node = _Group(range(local_ranks), local_ranks, _chunk_bytes(tensors, local_ranks))
    scattered = _PHASES[inside](program, node, {}, reduces=True)
    shards = list(zip(*(_cut(numel, local_ranks) for numel in tensors), strict=True))
    reduced: Joins = {}
    for local in range(local_ranks):
        ranks = range(local, network.world_size, local_ranks)
        group = _Group(ranks, 1, _chunk_bytes(shards[local], network.nodes))
        reduced[local] = _add_all_reduce(program, across, group, {0: scattered[local]})[0]
    _PHASES[inside](program, node, reduced, reduces=False)
    return program


def _naive(network: Network, tensors: Sequence[int]) -> Program:
    """Copy everything to rank 0 and back, one after the other, as the book's loop does."""
    program = Program()
    needs: tuple[int, ...] = ()
    for numel in tensors:
        peers = range(1, network.world_size)
        for src, dst in [(peer, 0) for peer in peers] + [(0, peer) for peer in peers]:
            needs = (program.send(src, dst, numel * ITEM_BYTES, needs),)
    return program


def _sharded(network: Network, tensors: Sequence[int]) -> Program:
    """Copy whole tensors to their owners and back; each owner begins with the rank after its own.

    An owner sends nothing back before it has received all: copies on one stream take turns.
    """
    program = Program()
    k = network.world_size
    owners = shard_owners([numel * ITEM_BYTES for numel in tensors], k)
    largest_first = sorted(range(len(tensors)), key=lambda i: -tensors[i])
    trips = [(i, owners[i], distance) for distance in range(1, k) for i in largest_first]
    arrived: dict[int, list[int]] = {owner: [] for owner in owners}
    for i, owner, distance in trips:
        message = program.send((owner + distance) % k, owner, tensors[i] * ITEM_BYTES)
        arrived[owner].append(message)
    sums = {owner: program.join(owner, messages) for owner, messages in arrived.items()}
    for i, owner, distance in trips:
        program.send(owner, (owner + distance) % k, tensors[i] * ITEM_BYTES, [sums[owner]])
    return program


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("naive", _naive),
        Algorithm("sharded", _sharded, takes_lists=True),
        Algorithm("direct", functools.partial(_flat, "direct"), takes_lists=True),
        Algorithm("ring", functools.partial(_flat, "ring")),
        Algorithm("two-way ring", _two_way_ring, is_in_engine=False, needs_wires=True),
        *(
            Algorithm(
                f"{inside}/{across}",
                functools.partial(_hierarchical, inside, across),
                is_in_engine=False,
                needs_nodes=True,
            )
            for inside, across in (("ring", "ring"), ("direct", "ring"), ("direct", "direct"))
        ),
    )
}
