"""The communicator behind a process group or a hook: chosen here, in one place."""

from __future__ import annotations

from typing import Any

from pyringar.comm.process_communicator import ProcessCommunicator

__all__ = ["make_communicator"]


def make_communicator(
    store: Any, rank: int, size: int, timeout: float, name: str
) -> ProcessCommunicator:
    """This rank's communicator; all ranks of the group call it.

    Tensors correspond by the index of their elements, as torch.distributed has it.

    Args:
        store: A torch.distributed store that all ranks share.
        rank: This process's rank.
        size: Number of ranks.
        timeout: Seconds that a call waits for a rank which makes no progress, and this one for all.
        name: Tells groups on one store apart.

    Raises:
        ArgumentError: The ranks are on several machines.
        PeerLostError, CollectiveTimeout, RingarError: As :class:`ProcessCommunicator`.
    """
    return ProcessCommunicator(store, rank, size, name=name, timeout=timeout, compares_shapes=False)
