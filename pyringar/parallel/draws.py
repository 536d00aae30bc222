"""Random numbers that modules draw, which all threads take from the same generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """Of the generators that all threads share: torch's for the CPU, Python's and NumPy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: tuple[Any, ...] = ()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            parts = numpy.get_state(legacy=False)["state"].values()
            self._numpy = tuple(p.tobytes() if hasattr(p, "tobytes") else p for p in parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        is_same = self._python == other._python and self._numpy == other._numpy
        return is_same and self.is_torch_as(other)

    __hash__ = None  # type: ignore[assignment]

    def is_torch_as(self, other: RandomState) -> bool:
        """Return whether torch's generator is the same, whatever the others are."""
        return torch.equal(self._torch, other._torch)

    def restore(self) -> None:
        """Give torch's generator this state."""
        torch.set_rng_state(self._torch)
