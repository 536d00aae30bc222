"""Steps that break off: how a backward pass that fails is noticed, and what it leaves behind."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from pyringar.call import Work
from pyringar.errors import RingarError

__all__ = ["BrokenStep", "PassEnd", "are_changed", "in_compiled_autograd", "settle"]

Place = tuple[int, int]  # rank, and index of a parameter


class BrokenStep:
    """Gradients that nobody can rely on: partial on some ranks, on others reduced already.

    One is cleared when another tensor, or none, has taken its place, or when it was changed in
    place since (torch counts these changes). Holds no tensor: what is cleared is freed.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._left: dict[Place, tuple[TensorWeakRef, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, reason: str, grads: Mapping[Place, Tensor | None]) -> None:
        """Remember gradients as they are now, when nothing writes to them any more.

        Args:
            reason: Why the step broke off.
            grads: By rank and index of the parameter.
        """
        if not self._left:
            self._reason = reason  # what came later came of it
        for place, grad in grads.items():
            if grad is not None:
                self._left[place] = (TensorWeakRef(grad), grad._version)

    def forget(self) -> None:
        """A later step is complete."""
        self._left.clear()

    def check(
        self,
        places: Iterable[Place],
        grad_of: Callable[[int, int], Tensor | None],
        is_marked: Callable[[int, int], bool],
    ) -> None:
        """Refuse to reduce what was not cleared.

        Args:
            places: What is about to be reduced.
            grad_of: The gradient that a rank's parameter has now.
            is_marked: Whether a backward pass has added to it since.

        Raises:
            RingarError: Names the first parameter and rank.
        """
        for rank, param in places:
            ref, version = self._left.get((rank, param), (None, 0))
            grad = grad_of(rank, param)
            if ref is None or grad is None or ref() is not grad:
                continue
            # To add to it is a change as well, but does not clear it.
            if grad._version <= version + is_marked(rank, param):
                raise RingarError(
                    f"{self._reason}, and the gradient of parameter {param} of rank {rank} still "
                    "is what that step left: clear the gradients of all ranks (zero_grad), and run "
                    "all backward passes of the step again"
                )

    def places(self) -> list[Place]:
        """All that were noted."""
        return list(self._left)


def are_changed(grads: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Say whether gradients were changed in place since torch's counts were ``versions``.

    All parts of one storage have one count, which backward advances when it adds to any of them: a
    flat buffer of the user's, or what backward leaves for parameters that forward concatenates. Of
    these it says nothing, and they count as unchanged.
    """
    return any(
        grad._version != version and grad.untyped_storage().nbytes() == grad.nbytes
        for grad, version in zip(grads, versions, strict=True)
    )


def settle(works: Iterable[Work], devices: Iterable[torch.device], *, is_patient: bool) -> None:
    """Wait for what is under way, whatever becomes of it: the tensors are the user's again.

    Args:
        works: What is under way.
        devices: Where; GPUs are waited for too, since this may be another thread than the user's.
        is_patient: An interrupt is raised once all is done, not before.

    Raises:
        KeyboardInterrupt: It was interrupted.
    """
    interrupt: KeyboardInterrupt | None = None
    for work in works:
        is_done = False
        while not is_done:
            try:
                is_done = work.wait()
            except RingarError:
                is_done = True
            except KeyboardInterrupt as error:
                interrupt = error
                is_done = not is_patient
    for device in devices:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    if interrupt is not None:
        raise interrupt


class PassEnd:
    """Tells how a backward pass has ended, once it is given to torch as the pass's callback.

    Torch calls it after a pass that went well. One that failed only drops it, together with all
    else that belongs to the pass: before ``backward()`` raises, save that a thread of a GPU that
    still works for the pass may be a little late.

    Args:
        on_end: Called as ``on_end(number, is_failed)``.
        number: The pass.
    """

    def __init__(self, on_end: WeakMethod[Callable[[int, bool], None]], number: int) -> None:
        self._on_end = on_end
        self._number = number
        self._is_called = False

    def __call__(self) -> None:
        """The pass went well."""
        self._end(is_failed=False)

    def __del__(self) -> None:
        if not self._is_called:
            try:
                self._end(is_failed=True)
            except KeyboardInterrupt:
                # Nothing can be raised in here: once this has returned.
                threading.Timer(0.01, _thread.interrupt_main).start()

    def _end(self, *, is_failed: bool) -> None:
        self._is_called = True
        on_end = self._on_end()
        if on_end is not None:
            on_end(self._number, is_failed)


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward pass, which never calls a :class:`PassEnd`."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)
