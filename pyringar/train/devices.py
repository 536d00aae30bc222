"""Choose one device per rank from ``--ranks`` and ``--devices``, and describe devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

import torch

from pyringar.comm.communicator import Communicator
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError, RingarError

logger = logging.getLogger(__name__)


def choose_devices(
    ranks: int, devices: Sequence[str | torch.device] | None = None
) -> tuple[torch.device, ...]:
    """Return a device for every rank: ``devices``, else the GPUs, else the CPU.

    Consecutive ranks share a GPU if there are fewer GPUs than ranks. If the CUDA engine cannot be
    used, all ranks run on the CPU and a warning is logged.
    """
    if devices is not None:
        found = check_devices(devices)
        if len(found) != ranks:
            raise ArgumentError(
                f"ranks is {ranks}, but devices names {len(found)}: {describe_devices(found)}"
            )
        return found
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
        except RingarError as error:  # for example nvcc is missing, or the driver is too old
            logger.warning("the %d GPUs of this machine stay idle: %s", count, error)
            return 0
    return count


def describe_devices(devices: Sequence[torch.device]) -> str:
    """Format devices as ``[cpu x 4 ranks]`` or ``[cuda:0, cuda:1]``."""
    counts = [(device, len(list(same))) for device, same in groupby(devices)]
    parts = [str(d) if count == 1 else f"{d} x {count} ranks" for d, count in counts]
    return f"[{', '.join(parts)}]"


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)
