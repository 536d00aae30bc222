"""Choose the ranks' devices from ``--ranks`` and ``--devices``, and describe them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import groupby

import torch

from pyringar.comm.communicator import Communicator
from pyringar.comm.topology import check_devices
from pyringar.engine.toolchain import read_cpu
from pyringar.errors import ArgumentError, RingarError

__all__ = ["choose_devices", "describe_devices", "describe_ranks", "synchronize"]

logger = logging.getLogger(__name__)

_SHORTEST_RANGE = 3  # GPUs that are named by the first and the last of them


def choose_devices(
    ranks: int, devices: Sequence[str | torch.device] | None = None
) -> tuple[torch.device, ...]:
    """Give every rank a device.

    With ``devices`` that is what runs, one rank each. Without, the ranks are spread over the GPUs
    of this machine, neighbouring ranks on one GPU where there are fewer GPUs than ranks. They all
    run on the CPU on a machine without GPUs, and where the CUDA engine cannot be built or used,
    which is then logged as a warning.

    Args:
        ranks: Number of ranks, 1 or more.
        devices: The device of every rank.

    Raises:
        ArgumentError: A device is not there (names those that are), or the two disagree.
    """
    if devices is not None:
        found = check_devices(devices)
        if len(found) != ranks:
            raise ArgumentError(
                f"ranks is {ranks}, but devices names {len(found)}: {describe_devices(found)}"
            )
        return found
    if ranks < 1:
        raise ArgumentError(f"ranks is {ranks}, expected 1 or more")
    num_gpus = _count_usable_gpus()
    if num_gpus == 0:
        return (torch.device("cpu"),) * ranks
    used = min(ranks, num_gpus)
    return tuple(torch.device("cuda", rank * used // ranks) for rank in range(ranks))


def _count_usable_gpus() -> int:
    count = torch.cuda.device_count()
    if count:
        try:
            Communicator(["cuda:0"]).close()
        except RingarError as error:  # no nvcc, a driver that is too old
            logger.warning("the %d GPUs of this machine stay idle: %s", count, error)
            return 0
    return count


def describe_devices(devices: Sequence[torch.device]) -> str:
    """Say what runs where: ``[cpu x 4 ranks]``, ``[cuda:0, cuda:1]``, ``[cuda:0 to cuda:7]``."""
    parts: list[str] = []
    counts = [(device, len(list(same))) for device, same in groupby(devices)]
    while counts:
        first, count = counts[0]
        length = 1
        while length < len(counts) and counts[length] == (_neighbour(first, length), count):
            length += 1
        if length < _SHORTEST_RANGE:
            length = 1
        name = str(first) if length == 1 else f"{first} to {counts[length - 1][0]}"
        each = "" if length == 1 else " each"
        parts.append(name if count == 1 else f"{name} x {count} ranks{each}")
        counts = counts[length:]
    return f"[{', '.join(parts)}]"


def _neighbour(device: torch.device, distance: int) -> torch.device | None:
    return None if device.index is None else torch.device(device.type, device.index + distance)


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until every GPU among ``devices`` is idle, not only the current one."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def describe_ranks(here: Sequence[torch.device], everywhere: Sequence[torch.device]) -> str:
    """Say how many ranks there are, how they run and on what, such as ``2 ranks in turns on ...``.

    Args:
        here: The devices of this process's ranks.
        everywhere: The devices of all ranks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{read_cpu().name}, {cores} cores"
    gpus = sorted({device for device in here if device.type == "cuda"}, key=str)
    if gpus:
        machine = ", ".join(torch.cuda.get_device_name(device) for device in gpus)
    count = f"{len(everywhere)} rank{'s' if len(everywhere) > 1 else ''}"
    if len(here) < len(everywhere):
        count += ", a process each"
    elif len(here) > 1 and len(set(here)) == 1:
        count += " in turns"
    return f"{count} on {machine}"
