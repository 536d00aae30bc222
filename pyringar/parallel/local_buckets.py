"""Buckets of ranks that are all in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import op_name
from pyringar.comm.communicator import Communicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_step import PART, SUM, Launched

__all__ = ["LocalBuckets", "cleared", "run_to_the_end"]


class LocalBuckets:
    """Reduces buckets with a communicator that has all ranks.

    Attributes:
        first_rank: The rank of the first replica.
        first_summed: The first replica whose sums are set to zero before a pass adds to them.
        in_order: Whether buckets must be launched in the order of the plan.
        is_overlapped: Whether buckets are launched during backward by default.
        advice: What else to make anew after a failure.
    """

    first_rank = 0
    in_order = False
    advice = ""

    def __init__(
        self, params: Sequence[Sequence[Tensor]], comm: Communicator | None, op: Any
    ) -> None:
        self._params = params
        self._op = op_name(op)
        self._owned: Communicator | None = None
        if comm is None:
            devices = [mine[0].device if mine else "cpu" for mine in params]
            comm = self._owned = Communicator(devices, order="rank")
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
            )
        if comm.world_size != len(params):
            raise ArgumentError(f"comm has {comm.world_size} ranks for {len(params)} replicas")
        self._comm = comm
        self.first_summed = 1 if self._op == "sum" else len(params)
        self.is_overlapped = any(device.type != "cpu" for device in comm.devices)

    def __str__(self) -> str:
        return f"{len(self._params)} replicas with {len(self._params[0])} parameters"

    @property
    def make_ready(self) -> Any:
        """Return the factory of GPU events that follow gradients; None without GPUs."""
        return getattr(self._comm._group, "make_ready", None)

    def pack(self, wanted: Sequence[int], native: Any, *, is_complete: bool) -> Launched:
        """Collect the gradients of a bucket.

        ``is_complete``: every rank has a new gradient for each parameter. Else, parameters to which
        no pass has added are left out, and missing gradients become zeros.
        """
        held = [native.held(rank, wanted) for rank in range(len(self._params))]
        bucket = Launched([], [[] for _ in self._params])
        for at, i in enumerate(wanted):
            parts = zip(held, self._params, strict=True)
            has_part = any(row[at] == PART and mine[i].grad is not None for row, mine in parts)
            if not (is_complete or has_part):
                continue
            bucket.params.append(i)
            for rank, mine in enumerate(self._params):
                grad = mine[i].grad
                if grad is None and is_complete:
                    raise cleared(i, rank)
                if grad is None:
                    grad = mine[i].grad = torch.zeros_like(mine[i])
                elif rank >= self.first_summed and held[rank][at] == SUM:
                    grad.detach().zero_()
                bucket.lists[rank].append(grad)
        return bucket

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket; return None if there is nothing to reduce.

        ``after``: the GPU events of its gradients. None: the current streams have the gradients.
        """
        if not bucket.params:
            return None
        if after is None:
            return self._comm.all_reduce_coalesced(bucket.tensors(), self._op, async_op=True)
        return self._comm._begin_bucket(bucket.tensors(), self._op, after)

    def finish(self, bucket: Launched) -> list[int]:
        """Return the parameters that hold the sum, once the work is done."""
        return bucket.params

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return the order of gradients on rank 0."""
        return order

    def abort(self) -> None:
        """Wait until no reduction of the communicator writes to a gradient."""
        works = list(self._comm._in_flight)
        run_to_the_end(*(lambda work=work: work.wait(math.inf) for work in works))
        # The current streams are those of another thread.
        for device in {device for device in self._comm.devices if device.type == "cuda"}:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Close the communicator if it is owned."""
        if self._owned is not None:
            self._owned.close()


def run_to_the_end(*calls: Callable[[], object]) -> None:
    """Run all calls. Repeat a call that a signal interrupts; raise the last signal at the end.

    A `RingarError` ends a call, and is ignored.
    """
    interrupt: BaseException | None = None
    for call in calls:
        is_done = False
        while not is_done:
            try:
                call()
                is_done = True
            except RingarError:
                is_done = True
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def cleared(param: int, rank: int) -> RingarError:
    """Return the error for a gradient that was cleared before it was reduced."""
    return RingarError(
        f"the gradient of parameter {param} of rank {rank} was cleared after its backward pass and "
        "before it was reduced: call wait() before zero_grad, and let no hook set a gradient to "
        "None"
    )
