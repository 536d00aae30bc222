"""Reductions of buckets over ranks in other processes.

A rank does not see the gradients of the other ranks before the reduction. So each bucket carries
one small tensor more, with one flag per parameter: does this rank have a gradient?
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.arguments import OPS, op_name
from pyringar.comm.base import RankCommunicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.parallel.bucket_step import Launched

__all__ = ["ProcessBuckets"]

# These reductions of flags are > 0 if and only if a rank set the flag.
_OPS = ("sum", "mean", "max")


class ProcessBuckets:
    """Reduces buckets of this rank with the buckets of the other processes.

    See `LocalBuckets` for the attributes and the methods that both have.

    Cost: two small collectives when it is made, one after the first step, and one element per
    parameter in every bucket.
    """

    in_order = is_overlapped = True
    advice = ", with a new communicator, on all ranks"

    def __init__(
        self, by_rank: Sequence[Sequence[Tensor]], comm: RankCommunicator, op: Any, cap_bytes: int
    ) -> None:
        self.op = op_name(op)
        if self.op not in _OPS:
            raise UnsupportedError(
                f"op is {self.op!r}, but over processes a GradientBucketer knows "
                f"{', '.join(_OPS)}: other reductions cannot tell that no rank used a parameter"
            )
        if len(by_rank) != 1:
            raise ArgumentError(
                f"replicas has {len(by_rank)} entries, but comm is one rank of {comm.world_size}, "
                "each in a process of its own: expected one replica"
            )
        params = by_rank[0]
        self.comm, self.first_rank = comm, comm.rank
        self._device = params[0].device if params else torch.device("cpu")
        self._text = f"rank {comm.rank} of {comm.world_size}, {len(params)} parameters"
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

    def __str__(self) -> str:
        return self._text

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket and its flags."""
        if after is not None:
            ready, index = after
            ready.make_wait(index, 0)
        (tensors,) = bucket.tensors()
        first = tensors[0]
        bucket.flags = torch.tensor(bucket.used, dtype=first.dtype, device=first.device)
        return self.comm.all_reduce_coalesced([*tensors, bucket.flags], self.op, async_op=True)

    def agree_on_order(self, order: list[int]) -> Any:
        """Return the order of gradients on rank 0."""
        agreed = torch.tensor(order, dtype=torch.int64, device=self._device)
        self.comm.broadcast(agreed, 0)
        return agreed.tolist()

    def abort(self) -> None:
        """Abort the group: no reduction writes to a gradient, and the other ranks are told."""
        with contextlib.suppress(RingarError):
            self.comm.abort()

    def close(self) -> None:
        """Do nothing: the communicator belongs to the caller."""

    def _compare(self, own: Mapping[str, int]) -> None:
        """Raise on every rank if ranks have different numbers; the error has the name."""
        rows = torch.zeros(self.comm.world_size, len(own), dtype=torch.int64, device=self._device)
        rows[self.comm.rank] = torch.tensor(list(own.values()), device=self._device)
        self.comm.all_reduce_coalesced([rows])
        for rank, row in enumerate(rows.tolist()):
            for (name, ours), theirs in zip(own.items(), row, strict=True):
                if ours != theirs:
                    raise ArgumentError(
                        f"rank {self.comm.rank} of the bucketer and rank {rank} differ in {name}"
                        + ("" if "dtype" in name else f": {ours} here, {theirs} there")
                    )
