"""Devices of the ranks, the algorithm of ``auto``, and the cost of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyringar.choices import did_you_mean
from pyringar.errors import ArgumentError


@dataclass(frozen=True)
class Topology:
    """The devices of all ranks, and the ranks that share each memory."""

    devices: tuple[str, ...]  # by rank
    memories: dict[str, tuple[int, ...]]  # ranks by memory; keys: "host" or a GPU

    @classmethod
    def of(cls, devices: Sequence[torch.device]) -> Topology:
        memories: dict[str, tuple[int, ...]] = {}
        for rank, device in enumerate(devices):
            name = "host" if device.type == "cpu" else str(device)
            memories[name] = (*memories.get(name, ()), rank)
        return cls(tuple(str(device) for device in devices), memories)

    @property
    def is_one_memory(self) -> bool:
        return len(self.memories) == 1

    @property
    def place(self) -> str:
        """``"host"``, ``"gpu"`` (one for all ranks), ``"gpus"`` or ``"mixed"`` (host and GPUs)."""
        if "host" in self.memories:
            return "host" if self.is_one_memory else "mixed"
        return "gpu" if self.is_one_memory else "gpus"

    def __str__(self) -> str:
        return ", ".join(f"{name}: ranks {list(ranks)}" for name, ranks in self.memories.items())


_ONE_PASS = "all ranks share {}, where one pass is the least traffic"
# On CPUs ``fused`` was the fastest or within 6 % in every measurement, and for processes a ring was
# never faster (docs/report.md). Between GPUs nothing was measured.
_TABLE = {
    "host": ("fused", _ONE_PASS.format("the host's memory")),
    "gpu": ("fused", _ONE_PASS.format("the memory of one GPU")),
    "gpus": (
        "direct",
        "each GPU reduces a slice: as many bytes as a ring, and no kernel waits for another",
    ),
    "mixed": ("direct", "ranks in the host's memory and on GPUs meet in staging buffers"),
    "processes": (
        "direct",
        "processes that share slots of memory: each rank reduces a slice, or small messages whole",
    ),
}


def choose(place: str) -> tuple[str, str]:
    """Return the algorithm of ``auto`` and the reason. It adds in rank order.

    ``place``: `Topology.place`, or ``"processes"`` for one rank per process.
    """
    return _TABLE[place]


@dataclass(frozen=True)
class Plan:
    """Algorithm, order and cost of an all_reduce.

    Attributes:
        algorithm: The algorithm that runs.
        order: The order of additions: ``"rank"``, ``"ring"``, ``"tree"`` or ``"exact"``.
        steps: Number of times that ranks wait for each other.
        traffic_bytes: Bytes that all ranks read and write, in memory or caches.
        reason: The reason for the algorithm.
    """

    algorithm: str
    order: str
    steps: int
    traffic_bytes: int
    reason: str

    @classmethod
    def of(
        cls, algorithm: str, reason: str, topology: Topology, nbytes: int, order: str = "rank"
    ) -> Plan:
        """Return the plan for ``nbytes`` per rank if one process drives all ranks."""
        k = len(topology.devices)
        steps = 2 * (k - 1)
        if k == 1:
            return cls(algorithm, order, 0, 0, reason)
        if algorithm in ("fused", "direct"):
            steps, passes = 0 if topology.is_one_memory else 2, 2 * k
        elif algorithm == "ring":
            order = "ring"
            # CPU ranks read each other's tensors; only partial sums go through slots. GPUs send
            # everything through slots.
            passes = 5 * (k - 1) if topology.place == "host" else 6 * k - 4
        else:
            passes = 6 * (k - 1)
        return cls(algorithm, order, steps, passes * nbytes, reason)

    @classmethod
    def in_processes(
        cls, algorithm: str, num_pieces: int, reason: str, world_size: int, nbytes: int, order: str
    ) -> Plan:
        """Return the plan of ``"exchange"`` or ``"direct"`` for ``nbytes`` per process."""
        k = world_size
        if k == 1:
            return cls(algorithm, order, 0, 0, reason)
        if algorithm == "exchange":  # copy in, read all slots, write the result
            steps, passes = num_pieces, k * (k + 3)
        else:  # direct: copy in, reduce a slice, copy out; a rank skips its own slice in copies
            steps, passes = 2 * num_pieces, 5 * k - 2
        return cls(algorithm, order, steps, passes * nbytes, reason)

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"{self.algorithm}: {steps}, {self.traffic_bytes:,} bytes of memory traffic, "
            f"{self.order} order ({self.reason})"
        )


def check_device(given: Any, name: str) -> torch.device:
    """Return argument ``name`` as a torch.device. ArgumentError lists this machine's devices."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        there = _devices_here()
        known = ["cpu", *(["cuda"] if there[1:] else []), *there[1:]]
        raise ArgumentError(
            f"{name} is {given!r}, expected a device such as 'cpu' or 'cuda:0'; on this machine "
            f"there are: {', '.join(there)}{did_you_mean(given, known)}"
        ) from error
    if device.type == "cpu":  # skip the count of GPUs, which takes 0.1 ms
        return torch.device("cpu")
    there = _devices_here()
    if device.type != "cuda" or (device.index or 0) >= len(there) - 1:
        raise ArgumentError(
            f"{name} is {str(device)!r}, which is not on this machine; "
            f"there are: {', '.join(there)}"
        )
    if device == torch.device("cuda"):  # give the current GPU its index
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _devices_here() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def check_devices(devices: Any, name: str = "devices") -> tuple[torch.device, ...]:
    """Return a list with one device per rank as torch.devices; see `check_device`."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise ArgumentError(
            f'{name} is {devices!r}, expected a list with one device per rank, such as ["cpu"] * 4'
        )
    if not devices:
        raise ArgumentError(f"{name} is empty, expected one device per rank")
    return tuple(check_device(device, f"{name}[{rank}]") for rank, device in enumerate(devices))
