"""Reductions of buckets: over ranks in this process, or over ranks in other processes."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import OPS, op_name
from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.parallel.bucket_step import Launched

__all__ = ["LocalRanks", "ProcessRanks"]


class LocalRanks:
    """Reduces buckets over ranks that are all in this process.

    Attributes:
        comm: The communicator.
        op: The name of the reduction.
        first_rank: The rank of the first replica.
        are_remote: Whether there are ranks in other processes. Then buckets are launched in the
            order of the plan, also if this rank has added nothing to their gradients.
        advice: What else to make anew after a failure.
    """

    first_rank = 0
    are_remote = False
    advice = ""

    def __init__(self, by_rank: Sequence[Sequence[Tensor]], comm: Communicator, op: Any) -> None:
        self.op = op_name(op)
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
            )
        if comm.world_size != len(by_rank):
            raise ArgumentError(f"comm has {comm.world_size} ranks for {len(by_rank)} replicas")
        self.comm = comm

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


class ProcessRanks:
    """Reduces buckets of this rank with the buckets of the other processes.

    A rank does not see the gradients of the other ranks before the reduction. So each bucket
    carries one small tensor more, with one flag per parameter: does this rank have a gradient?
    See `LocalRanks` for the attributes and the methods that both have.

    Cost: two small collectives when it is made, one after the first step, and one element per
    parameter in every bucket.
    """

    are_remote = True
    advice = ", with a new communicator, on all ranks"

    def __init__(
        self, by_rank: Sequence[Sequence[Tensor]], comm: RankCommunicator, op: Any, cap_bytes: int
    ) -> None:
        self.op = op_name(op)
        ops = ("sum", "mean", "max")  # these reductions of flags are > 0 if a rank set the flag
        if self.op not in ops:
            raise UnsupportedError(
                f"op is {self.op!r}, but over processes a GradientBucketer knows "
                f"{', '.join(ops)}: other reductions cannot tell that no rank used a parameter"
            )
        if len(by_rank) != 1:
            raise ArgumentError(
                f"replicas has {len(by_rank)} entries, but comm is one rank of {comm.world_size}, "
                "each in a process of its own: expected one replica"
            )
        params = by_rank[0]
        self.comm, self.first_rank = comm, comm.rank
        self._device = params[0].device if params else torch.device("cpu")
        settings = {
            "its number of parameters": len(params),
            "its bucket_cap_mb": cap_bytes,
            "its op": OPS.index(self.op),
        }
        self._compare(settings)
        kinds = [f"{tuple(param.shape)} {param.dtype}" for param in params]
        hashes = {
            f"the shape or dtype of parameter {i} ({kind})": zlib.crc32(kind.encode())
            for i, kind in enumerate(kinds)
        }
        self._compare(hashes)

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket and its flags."""
        if after is not None:
            ready, index = after
            ready.make_wait(index, 0)
        (tensors,) = bucket.tensors()
        first = tensors[0]
        bucket.flags = torch.tensor(bucket.used, dtype=first.dtype, device=first.device)
        return self.comm.all_reduce_coalesced([*tensors, bucket.flags], self.op, async_op=True)

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return the order of gradients on rank 0."""
        agreed = torch.tensor(order, device=self._device)
        self.comm.broadcast(agreed, 0)
        first_order: list[int] = agreed.tolist()
        return first_order

    def abort(self) -> None:
        """Abort the group: no reduction writes to a gradient, and the other ranks are told."""
        with contextlib.suppress(RingarError):
            self.comm.abort()

    def _compare(self, own: Mapping[str, int]) -> None:
        """Raise on every rank if ranks have different numbers; the error has the name."""
        rows = torch.zeros(self.comm.world_size, len(own), dtype=torch.int64, device=self._device)
        rows[self.comm.rank] = torch.tensor(list(own.values()), device=self._device)
        self.comm.all_reduce_coalesced([rows])
        for rank, row in enumerate(rows.tolist()):
            for (name, ours), theirs in zip(own.items(), row, strict=True):
                if ours != theirs:
                    values = "" if "dtype" in name else f": {ours} here, {theirs} there"
                    raise ArgumentError(
                        f"rank {self.comm.rank} of the bucketer and rank {rank} differ in "
                        f"{name}{values}"
                    )
