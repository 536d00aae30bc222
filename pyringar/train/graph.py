"""Capture a training step in a CUDA graph, and replay the graph for every batch.

For LeNet, launching the kernels of a step takes the host many times as long as the GPU needs to run
them; a replay is one call. The graph reads images, labels and step size from fixed tensors.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.errors import ArgumentError, CudaError, RingarError
from pyringar.train.devices import describe_devices
from pyringar.train.step import EagerStep, Score
from pyringar.train.step_trace import Trace

# Steps before a capture: the first plans the buckets, the second uses the plan. They also create
# library handles, streams and workspaces, which a capture does not allow.
_WARM_UP_STEPS = 3


def check_ranks(devices: Sequence[torch.device], trace: Trace | None) -> None:
    if len(set(devices)) > 1 or devices[0].type != "cuda":
        raise ArgumentError(
            f"cuda_graph is on and the ranks run on {describe_devices(devices)}, expected all "
            "ranks on one GPU, such as devices cuda:0 for one rank or cuda:0,cuda:0 for two"
        )
    if trace is not None:
        raise ArgumentError(
            "cuda_graph is on and trace is given, but the host sees one replay instead of the "
            "phases of a step: expected one of the two"
        )


class RankStreams:
    """One CUDA stream per rank on a shared GPU: the ranks become parallel branches of a CUDA graph.

    Rank 0 uses the current stream. Autograd runs backward on the stream of forward. ``run`` makes
    streams wait for each other at its start and end, so memory needs no ``record_stream``.
    """

    def __init__(self, device: torch.device, num_ranks: int, score: Score) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(1, num_ranks)]  # type: ignore[no-untyped-call]
        self.score = score

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        current = torch.cuda.current_stream(self._device)
        streams = [current, *self._streams]
        for stream in self._streams:
            stream.wait_stream(current)
        results = {}
        for rank, function in functions.items():
            with torch.cuda.stream(streams[rank]):
                results[rank] = function()
        for stream in self._streams:
            current.wait_stream(stream)
        return results


class CudaCapture:
    """Captures functions in CUDA graphs on a separate stream; replays use the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, function: Callable[[], None]) -> None:
        """Call a function several times on the capture stream; the current stream waits for it."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_STEPS):
                function()
        here.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function and return a function that replays it; CudaError if capture fails."""
        gc.collect()  # collect now: a capture fails if Python frees CUDA memory
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._device)
        try:
            with (
                torch.cuda.stream(here),  # restores the stream after a failed capture, too
                # thread_local: other threads may use the GPU during the capture.
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                function()
        except RingarError:
            raise
        except RuntimeError as error:
            # Ending a failed capture raises a second error; its __context__ is the first error.
            reason = error.__context__ or error
            raise CudaError(
                f"the training step cannot be captured in a CUDA graph on {self._device}: "
                f"{reason}; try it without cuda_graph"
            ) from error
        return graph.replay


class GraphStep:
    """A training step that replays CUDA graphs of an `EagerStep`, one graph per batch size.

    Results have the bits of the `EagerStep`. The constructor runs warm-up steps, restores the
    tensors, and captures; CudaError if the capture fails. ``batches`` holds a batch of each size.
    ``state`` holds the tensors that a step changes, except the tensors of ``eager``.
    """

    def __init__(
        self, eager: EagerStep, batches: Sequence[tuple[Tensor, Tensor]], state: Sequence[Tensor]
    ) -> None:
        self._eager = eager
        self.velocities, self.take_loss = eager.velocities, eager.take_loss
        self._step_size = torch.zeros((), dtype=state[0].dtype, device=state[0].device)
        self._changed = [*state, *eager.sums, *itertools.chain(*eager.velocities)]
        self._replays = {len(X): self._capture(X.clone(), y.clone()) for X, y in batches}

    def __call__(
        self, X: Tensor, y: Tensor, step_size: float, trace: Trace | None = None
    ) -> Sequence[Tensor]:
        """Replay the step on a batch of a captured size; the next call overwrites the result."""
        self._step_size.fill_(step_size)
        return self._replays[len(X)](X, y)

    def _capture(self, X: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
        flags: list[Tensor] = []

        def run() -> None:
            flags[:] = self._eager(X, y, self._step_size)

        def replay_with(images: Tensor, labels: Tensor) -> Sequence[Tensor]:
            # These copies run on the stream of the replays, so after the previous replay.
            X.copy_(images)
            y.copy_(labels)
            replay()
            return flags

        capture = CudaCapture(X.device)
        before = [tensor.detach().clone() for tensor in self._changed]
        capture.warm_up(run)
        with torch.no_grad():
            for tensor, then in zip(self._changed, before, strict=True):
                tensor.copy_(then)
        replay = capture.record(run)
        return replay_with
