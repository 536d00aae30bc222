"""Shares for devices of unequal speed, so that they finish a step together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyringar.train.devices import synchronize
from pyringar.train.step import sum_loss

__all__ = ["measure_weights"]

_ROUNDS = 3


def measure_weights(
    make_model: Callable[[torch.device], Callable[[Tensor], Tensor]],
    devices: Sequence[torch.device],
    images: Tensor,
    labels: Tensor,
) -> tuple[float, ...]:
    """Time forward and backward on every device, and share a batch accordingly.

    Any shares give the same gradient, so a bad measurement costs time and nothing else. Ranks on
    one device share its speed.

    Args:
        make_model: Gives a model of its own on a device; it is thrown away.
        devices: One per rank.
        images: A rank's part of a batch, or something of its size.
        labels: Their classes.

    Returns:
        One weight per rank, to two digits; the slowest has 1.

    Cost: four steps of one rank on every device, one after the other.
    """
    ranks_on = Counter(devices)
    step_s = {
        device: _step_s(make_model(device), device, images.to(device), labels.to(device))
        for device in ranks_on
    }
    speeds = [1 / (step_s[device] * ranks_on[device]) for device in devices]
    return tuple(round(speed / min(speeds), 2) for speed in speeds)


def _step_s(
    model: Callable[[Tensor], Tensor], device: torch.device, images: Tensor, labels: Tensor
) -> float:
    """Time the fastest of some steps, after one that warms up."""
    times = []
    for _ in range(1 + _ROUNDS):
        synchronize([device])
        start = time.perf_counter()
        sum_loss(model(images), labels).backward()  # type: ignore[no-untyped-call]
        synchronize([device])
        times.append(time.perf_counter() - start)
    return min(times[1:])
