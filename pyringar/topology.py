"""Where ranks live: devices that exist, who shares a memory, and what a call would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyringar.errors import ArgumentError

__all__ = ["Plan", "Topology", "check_device", "check_devices", "choose_algorithm"]

# Between memories, below this many bytes a rank: two barriers beat 2 (k - 1) steps.
_DIRECT_BELOW_BYTES = 512 * 1024


@dataclass(frozen=True)
class Topology:
    """Which ranks share a memory.

    Attributes:
        devices: The device of every rank, as given.
        memories: For every memory ("host" or a GPU), the ranks whose tensors lie there.
    """

    devices: tuple[str, ...]
    memories: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> Topology:
        """The topology of a list with one device per rank."""
        memories: dict[str, tuple[int, ...]] = {}
        for rank, device in enumerate(devices):
            name = "host" if device.type == "cpu" else str(device)
            memories[name] = (*memories.get(name, ()), rank)
        return cls(tuple(str(device) for device in devices), memories)

    @property
    def is_one_memory(self) -> bool:
        """Whether all ranks share one."""
        return len(self.memories) == 1

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

    @classmethod
    def of(cls, algorithm: str, reason: str, world_size: int, nbytes: int) -> Plan:
        """What ``algorithm`` does with ``nbytes`` per rank."""
        k = world_size
        steps = {"fused": 0, "direct": 2}.get(algorithm, 2 * (k - 1))
        passes = 2 * k if algorithm in ("fused", "direct", "ring") else 6 * (k - 1)
        return cls(
            algorithm=algorithm,
            order="ring" if algorithm == "ring" and k > 1 else "rank",
            steps=steps if k > 1 else 0,
            traffic_bytes=passes * nbytes if k > 1 else 0,
            reason=reason,
        )

    def __str__(self) -> str:
        return (
            f"{self.algorithm}: {self.steps} steps, {self.traffic_bytes:,} bytes of memory traffic,"
            f" {self.order} order ({self.reason})"
        )


def choose_algorithm(topology: Topology, nbytes: int, order: str) -> tuple[str, str]:
    """What ``auto`` takes for ``nbytes`` per rank, and why.

    Args:
        topology: Which ranks share a memory.
        nbytes: Bytes of one rank's data.
        order: ``"any"`` or ``"rank"``.
    """
    if topology.is_one_memory:
        (memory,) = topology.memories
        where = "the host's memory" if memory == "host" else f"the memory of {memory}"
        return "fused", f"all ranks share {where}, where one pass is the least traffic"
    if "host" in topology.memories:
        return "direct", "ranks in the host's memory and on GPUs meet in staging buffers"
    if order == "rank":
        return "direct", "rank order between memories"
    if nbytes < _DIRECT_BELOW_BYTES:
        return "direct", f"below {_DIRECT_BELOW_BYTES} bytes, two barriers beat a ring's steps"
    return "ring", "between memories a ring moves the least over every link"


def check_device(given: Any, name: str) -> torch.device:
    """Turn what was passed as the argument ``name`` into a ``torch.device`` that exists.

    Raises:
        ArgumentError: It is no device, or not on this machine; names those that are.
    """
    num_gpus = torch.cuda.device_count()
    there = ["cpu", *(f"cuda:{i}" for i in range(num_gpus))]
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name} is {given!r}, expected one of {', '.join(there)}") from error
    is_there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < num_gpus)
    if not is_there:
        raise ArgumentError(
            f"{name} is {str(device)!r}, which is not on this machine; "
            f"there are: {', '.join(there)}"
        )
    if device == torch.device("cuda"):  # torch's current one; a name for every rank's memory
        device = torch.device("cuda", torch.cuda.current_device())
    return device


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
    return tuple(check_device(given, f"devices[{rank}]") for rank, given in enumerate(devices))
