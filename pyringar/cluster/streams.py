"""Order the work of ranks on GPUs: each rank has its current streams, one rank acts for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["devices_of", "follow", "mark"]


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the GPUs on which there is a tensor."""
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


def mark(devices: Iterable[torch.device]) -> list[Any]:
    """Return events after all that is on this thread's current streams of these GPUs."""
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def follow(events: Sequence[Any]) -> None:
    """Let this thread's current streams go on after events on their GPUs."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)
