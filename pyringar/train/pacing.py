"""Limit how far the host runs ahead of the GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["StepWindow"]

RetireStep = Callable[[int, Sequence[Tensor]], None]


class StepWindow:
    """Keeps the number of steps that are queued but not done at ``limit`` or below.

    Without a bound the host would queue a whole epoch within moments and fill the GPUs' memory
    with batches that wait; with a wait after every step the GPUs would idle while the next is
    prepared. What is computed is the same either way.

    Args:
        devices: The ranks' devices. On CPUs a step is done when the call returns, so there every
            step retires at once.
        limit: Steps the host may be ahead.
        retire: Called with a step's number and flags when it is done, in the order of steps.
        make_event: Makes what marks a device's queue; for tests.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        limit: int,
        retire: RetireStep,
        make_event: Callable[[torch.device], torch.cuda.Event] | None = None,
    ) -> None:
        self._gpus = sorted({d for d in devices if d.type == "cuda"}, key=str)
        self._limit = limit if self._gpus else 0
        self._retire = retire
        self._make_event = make_event or _record_event
        self._queued: deque[tuple[int, list[torch.cuda.Event], Sequence[Tensor]]] = deque()

    def push(self, step: int, flags: Sequence[Tensor]) -> None:
        """Note that a step is queued; waits for the oldest ones if too many are.

        Args:
            step: Its number.
            flags: Tensors to look at once it is done.
        """
        events = [self._make_event(gpu) for gpu in self._gpus]
        self._queued.append((step, events, flags))
        while len(self._queued) > self._limit:
            self._retire_oldest()

    def drain(self) -> None:
        """Wait for all queued steps."""
        while self._queued:
            self._retire_oldest()

    def __len__(self) -> int:
        """Count the steps queued and not yet known to be done."""
        return len(self._queued)

    def _retire_oldest(self) -> None:
        step, events, flags = self._queued.popleft()
        for event in events:
            event.synchronize()
        self._retire(step, flags)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
