"""Steps that break off: what they leave behind, and when that is cleared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from pyringar.comm.exits import empty_backward_at_exit
from pyringar.comm.work import Work
from pyringar.errors import RingarError

__all__ = ["BrokenStep", "settle"]

Place = tuple[int, int]  # rank, and index of a parameter


class BrokenStep:
    """Gradients that nobody can rely on: partial on some ranks, on others reduced already.

    One is cleared when it is None or all zeros, or when the user has put another tensor in its
    place. Scaling does not clear it, nor does a backward pass that adds to it, whether in place or
    not, counted or under ``no_sync()``: hooks look before such a pass does. Holds no tensor: what
    is cleared is freed.

    Args:
        grad_of: The gradient that a rank's parameter has now.

    Cost: nothing until a step breaks off; then each gradient is read once or twice.
    """

    def __init__(self, grad_of: Callable[[int, int], Tensor | None]) -> None:
        self._grad_of = grad_of
        self._reason = ""
        # What was left, or None where backward has added to it since, maybe in another tensor; and
        # the handle of the hook that sees that.
        self._left: dict[Place, tuple[TensorWeakRef | None, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, reason: str, params: Mapping[Place, Tensor]) -> None:
        """Remember gradients as they are now, when nothing writes to them any more.

        Args:
            reason: Why the step broke off.
            params: Their parameters, by rank and index.
        """
        empty_backward_at_exit()
        if not self._left:
            self._reason = reason  # what came later came of it
        for place, param in params.items():
            grad = self._grad_of(*place)
            if grad is None:
                continue
            _, handle = self._left.get(place, (None, None))
            if handle is None and param.requires_grad:
                look = partial(_look_before_backward_adds, weakref.ref(self), place)
                handle = param.register_hook(look)  # type: ignore[no-untyped-call]
            self._left[place] = (TensorWeakRef(grad), handle)

    def forget(self) -> None:
        """Drop what was noted: a later step is complete."""
        for place in list(self._left):
            self._drop(place)

    def check(self, places: Iterable[Place]) -> None:
        """Refuse to reduce what was not cleared.

        Args:
            places: What is about to be reduced.

        Raises:
            RingarError: Names the first parameter and rank.
        """
        for place in places:
            if self.is_left(place):
                rank, param = place
                raise RingarError(
                    f"{self._reason}, and the gradient of parameter {param} of rank {rank} still "
                    "is what that step left: clear the gradients of all ranks (zero_grad), and run "
                    "all backward passes of the step again"
                )

    def is_left(self, place: Place) -> bool:
        """Return whether the gradient there must still be cleared."""
        if place not in self._left:
            return False
        ref, handle = self._left[place]
        grad = self._grad_of(*place)
        if grad is None or (ref is not None and ref() is not grad) or not grad.any():
            self._drop(place)
            return False
        self._left[place] = (TensorWeakRef(grad), handle)
        return True

    def places(self) -> list[Place]:
        """Return all that were noted."""
        return list(self._left)

    def add(self, place: Place) -> None:
        """Note that backward is about to add to the gradient, which may make a new tensor."""
        if self.is_left(place):
            self._left[place] = (None, self._left[place][1])

    def _drop(self, place: Place) -> None:
        _, handle = self._left.pop(place, (None, None))
        if handle is not None:
            handle.remove()


def _look_before_backward_adds(this: weakref.ref[BrokenStep], place: Place, _: Tensor) -> None:
    broken = this()
    if broken is not None:
        broken.add(place)


def settle(
    works: Iterable[Work], devices: Iterable[torch.device], *, is_patient: bool
) -> BaseException | None:
    """Wait for what is under way, whatever becomes of it: the tensors are the user's again.

    Args:
        works: What is under way.
        devices: Where; GPUs are waited for too, since this may be another thread than the user's.
        is_patient: Go on waiting after an interrupt, instead of giving that work up.

    Returns:
        What a signal's handler has raised meanwhile, to be raised by the caller; None if nothing.
    """
    interrupt: BaseException | None = None
    for work in works:
        is_done = False
        while not is_done:
            try:
                is_done = work.wait()
            except BaseException as error:
                has_failed = work.exception() is not None
                # The first may be a handler's, the second says that it cannot be waited for.
                is_refused = isinstance(error, RingarError) and isinstance(interrupt, RingarError)
                is_done = has_failed or is_refused or not is_patient
                if not isinstance(error, RingarError) or not has_failed:
                    interrupt = error
    for device in devices:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    return interrupt
