"""Random numbers that modules draw, which all threads take from the same generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RandomState", "SeesDraws"]


class SeesDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what one thread draws from any generator of torch's, also where it is set back after.

    Attributes:
        has_drawn: Whether something was drawn.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first call would import torch._dynamo, which takes a second

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave functions compiled that are."""
        return True

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function does, once that was seen."""
        with self:
            return function()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        # Some have the tag and draw nothing: attention on CPUs, dropout in evaluation.
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        generators = given or [torch.default_generator]
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        after = [generator.get_state() for generator in generators]
        self.has_drawn |= not all(map(torch.equal, before, after))
        return result


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
        # One is empty where NumPy was imported in between, as the first call of a function may do.
        is_numpy_same = self._numpy == other._numpy or not (self._numpy and other._numpy)
        return self._python == other._python and is_numpy_same and self.is_torch_as(other)

    __hash__ = None  # type: ignore[assignment]

    def is_torch_as(self, other: RandomState) -> bool:
        """Return whether torch's generator is the same, whatever the others are."""
        return torch.equal(self._torch, other._torch)

    def restore(self) -> None:
        """Give torch's generator this state."""
        torch.set_rng_state(self._torch)
