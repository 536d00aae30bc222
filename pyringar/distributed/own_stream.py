"""Run a communicator's calls on a GPU: on a stream of its own, in order with the callers' streams.

The communicator's thread enqueues; it waits for the GPU only where another than the GPU reads what
is there. Callers' streams wait for events, their threads until all is enqueued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyringar.comm.jobs import Job, Jobs
from pyringar.errors import UnsupportedError

__all__ = ["OwnStream", "StreamJob"]


class OwnStream:
    """A stream on which a thread of the communicator's enqueues what callers ask for.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def refuse_capture(self, what: str) -> None:
        """Refuse a current stream that is captured in a CUDA graph.

        Raises:
            UnsupportedError: It is; ``what`` is the call's name.
        """
        _refuse_capture(self._device, what)

    def submit(
        self, jobs: Jobs, call: Callable[[], object], tensors: Sequence[Tensor], what: str
    ) -> StreamJob:
        """Let ``call`` enqueue its work after what is on the current stream now.

        Args:
            jobs: The thread that calls.
            call: Enqueues on the current stream.
            tensors: What it reads and writes. Their memory is not given to others before its end,
                even if nobody waits for it.
            what: The call in words, for messages.
        """
        before = torch.cuda.current_stream(self._device).record_event()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor.record_stream(self._stream)

        def run() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                try:
                    call()
                finally:  # a call that fails has read, and may have written
                    done.record(self._stream)

        return StreamJob(jobs.submit(run, what), self._device, done)

    def finish(self) -> None:
        """Wait, on the host, until the GPU has done what is on this stream."""
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(self._stream)
        end.synchronize()


class StreamJob:
    """A call of `OwnStream`; `pyringar.Work` waits for it.

    Attributes:
        host: The host's part: to enqueue it.
    """

    def __init__(self, host: Job, device: torch.device, done: torch.cuda.Event) -> None:
        self.host = host
        self._device = device
        self._done = done

    def is_completed(self) -> bool:
        """Return whether the GPU, too, is done with it. Never blocks."""
        # While a stream is captured nobody may ask an event: not yet, then.
        is_enqueued = self.host.is_completed() and not _is_capturing(self._device)
        return is_enqueued and bool(self._done.query())  # type: ignore[no-untyped-call]

    def exception(self) -> BaseException | None:
        """Return the error that it ended with, or None."""
        return self.host.exception()

    def finished_ns(self) -> int:
        """Return 0: nobody on the host waits for its end."""
        return 0

    def wait(self, seconds: float = math.inf) -> bool:
        """Return False if it is not enqueued in time; else order the current stream after it.

        Raises what it ended with, and UnsupportedError while the current stream is captured.
        """
        _refuse_capture(self._device, "wait")
        try:
            return self.host.wait(seconds)
        finally:
            if self.host.is_completed():
                torch.cuda.current_stream(self._device).wait_event(self._done)

    def describe(self) -> str:
        """Return what it is, and whether it has begun."""
        return self.host.describe()


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _refuse_capture(device: torch.device, what: str) -> None:
    if _is_capturing(device):
        raise UnsupportedError(
            f"{what}: ranks on several machines meet on the host in every call, which a CUDA graph "
            "cannot capture; call it outside of the graph"
        )
