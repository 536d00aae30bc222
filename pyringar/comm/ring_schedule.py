"""The messages of the ring algorithm: source, destination and chunk of every step.

The values come from the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from pyringar.engine import load
from pyringar.errors import ArgumentError

__all__ = ["RingMove", "chunk_slices", "ring_schedule"]


class RingMove(NamedTuple):
    """One message of the ring.

    Attributes:
        src: The source rank.
        dst: The destination rank, ``src + 1`` modulo the world size.
        chunk: Index into `chunk_slices`.
        is_reduction: True if ``dst`` adds its elements to the chunk. False if the chunk is final.
    """

    src: int
    dst: int
    chunk: int
    is_reduction: bool


def ring_schedule(world_size: int) -> list[list[RingMove]]:
    """Return the messages of an all-reduce over a ring.

    Args:
        world_size: Number of ranks k, 1 or more.

    Returns:
        A list of messages, one per rank, for each of the ``2 (k - 1)`` steps. A message holds
        ``1 / k`` of the elements.

    Raises:
        ArgumentError: ``world_size`` is below 1.
    """
    _check_world_size(world_size)
    engine = load.engine()

    def move(rank: int, step: int) -> RingMove:
        chunk, _, is_reduction = engine.ring_step(rank, world_size, step)
        return RingMove(rank, (rank + 1) % world_size, chunk, is_reduction)

    steps = range(engine.ring_num_steps(world_size))
    return [[move(rank, step) for rank in range(world_size)] for step in steps]


def chunk_slices(numel: int, world_size: int) -> list[slice]:
    """Return the slices of a flat tensor's chunks: contiguous, longer chunks first.

    Args:
        numel: Number of elements, 0 or more.
        world_size: Number of ranks, and of chunks.

    Raises:
        ArgumentError: ``numel`` is negative or ``world_size`` below 1.
    """
    _check_world_size(world_size)
    if numel < 0:
        raise ArgumentError(f"numel is {numel}, expected 0 or more elements")
    chunk_range = load.engine().chunk_range
    return [slice(*chunk_range(numel, world_size, chunk)) for chunk in range(world_size)]


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise ArgumentError(f"world_size is {world_size}, expected 1 or more ranks")
