"""Where ranks live: devices that exist, who shares a memory, and what a call would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyringar.errors import ArgumentError

__all__ = ["Plan", "Topology", "check_devices"]


@dataclass(frozen=True)
class Topology:
    """Which ranks share a memory.

    Attributes:
        devices: The device of every rank, as given.
        memories: For every memory ("host" or a GPU), the ranks whose tensors lie there.
    """

    devices: tuple[str, ...]
    memories: dict[str, tuple[int, ...]]

    def __str__(self) -> str:
        return ", ".join(f"{name}: ranks {list(ranks)}" for name, ranks in self.memories.items())


@dataclass(frozen=True)
class Plan:
    """What a call would do, and why.

    Attributes:
        algorithm: The algorithm that runs.
        order: ``"rank"`` or ``"ring"``: the order in which ranks are added.
        steps: Rounds in which ranks wait for each other; 0 for one pass without any.
        traffic_bytes: Memory traffic of the whole call, reads and writes of all ranks.
        reason: Why this algorithm.
    """

    algorithm: str
    order: str
    steps: int
    traffic_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.algorithm}: {self.steps} steps, {self.traffic_bytes:,} bytes of memory traffic,"
            f" {self.order} order ({self.reason})"
        )


def check_devices(devices: Any) -> tuple[torch.device, ...]:
    """Turn a list of devices, one per rank, into ``torch.device`` objects that exist.

    Args:
        devices: For example ``["cpu"] * 4`` or ``["cuda:0", "cuda:1"]``.

    Raises:
        ArgumentError: Not a non-empty list of devices, or one is not on this machine; names those
            that are.
    """
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise ArgumentError(
            f'devices is {devices!r}, expected a list with one device per rank, such as ["cpu"] * 4'
        )
    if not devices:
        raise ArgumentError("devices is empty, expected one device per rank")
    found = []
    num_gpus = torch.cuda.device_count()
    there = ["cpu", *(f"cuda:{i}" for i in range(num_gpus))]
    for rank, given in enumerate(devices):
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"devices[{rank}] is {given!r}, expected one of {', '.join(there)}"
            ) from error
        is_there = device.type == "cpu" or (
            device.type == "cuda" and (device.index or 0) < num_gpus
        )
        if not is_there:
            raise ArgumentError(
                f"devices[{rank}] is {str(device)!r}, which is not on this machine; "
                f"there are: {', '.join(there)}"
            )
        found.append(device)
    return tuple(found)
