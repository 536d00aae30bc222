"""Reductions of buckets over ranks that are all in this process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import op_name
from pyringar.comm.communicator import Communicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_step import Launched

__all__ = ["LocalBuckets"]


class LocalBuckets:
    """Reduces buckets with a communicator that has all ranks.

    Attributes:
        comm: The communicator.
        op: The name of the reduction.
        first_rank: The rank of the first replica.
        in_order: Whether buckets must be launched in the order of the plan, also buckets to which
            this rank has added nothing.
        is_overlapped: Whether buckets are launched during backward by default.
        advice: What else to make anew after a failure.
    """

    first_rank = 0
    in_order = False
    advice = ""

    def __init__(
        self, by_rank: Sequence[Sequence[Tensor]], comm: Communicator | None, op: Any
    ) -> None:
        self.op = op_name(op)
        self._is_owner = comm is None
        if comm is None:
            devices = [params[0].device if params else "cpu" for params in by_rank]
            comm = Communicator(devices, order="rank")
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
            )
        if comm.world_size != len(by_rank):
            raise ArgumentError(f"comm has {comm.world_size} ranks for {len(by_rank)} replicas")
        self.comm = comm
        self.is_overlapped = any(device.type != "cpu" for device in comm.devices)
        self._text = f"{len(by_rank)} replicas with {len(by_rank[0])} parameters"

    def __str__(self) -> str:
        return self._text

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket; return None if there is nothing to reduce.

        ``after``: the GPU events of its gradients. None: the current streams have the gradients.
        """
        if not bucket.params:
            return None
        if after is None:
            return self.comm.all_reduce_coalesced(bucket.tensors(), self.op, async_op=True)
        return self.comm._begin_bucket(bucket.tensors(), self.op, after)

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return the order of gradients on rank 0."""
        return order

    def abort(self) -> None:
        """Wait until no reduction of the communicator writes to a gradient."""
        for work in list(self.comm._in_flight):
            with contextlib.suppress(RingarError):
                work.wait(math.inf)
        # The current streams are those of another thread.
        for device in {device for device in self.comm.devices if device.type == "cuda"}:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Close the communicator if the bucketer has made it."""
        if self._is_owner:
            self.comm.close()
