"""Buckets of one rank whose other ranks are in other processes.

A rank does not see the gradients of the other ranks before the reduction. So each bucket carries
one small tensor more, with one flag per parameter: does this rank have a gradient?
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.arguments import OPS, op_name
from pyringar.comm.base import RankCommunicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.bucket_step import PART, SUM, Launched
from pyringar.parallel.local_buckets import cleared, run_to_the_end

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
        self, comm: RankCommunicator, op: Any, params: Sequence[Tensor], caps: dict[str, int]
    ) -> None:
        self._op = op_name(op)
        if self._op not in _OPS:
            raise UnsupportedError(
                f"op is {self._op!r}, but over processes a GradientBucketer knows "
                f"{', '.join(_OPS)}: other reductions cannot tell that no rank used a parameter"
            )
        self._comm, self._params = comm, params
        self._device = params[0].device if params else torch.device("cpu")
        settings = {"number of parameters": len(params), **caps, "op": OPS.index(self._op)}
        self._compare(list(settings.values()), [f"its {name}" for name in settings])
        kinds = [f"{tuple(param.shape)} {param.dtype}" for param in params]
        names = [f"the shape or dtype of parameter {i} ({kind})" for i, kind in enumerate(kinds)]
        self._compare([_digest(kind) for kind in kinds], names)
        self.first_rank = comm.rank
        self.first_summed = 0 if self._op == "sum" and comm.rank > 0 else 1

    def __str__(self) -> str:
        return f"rank {self._comm.rank} of {self._comm.world_size}, {len(self._params)} parameters"

    @property
    def make_ready(self) -> Any:
        """Return the factory of GPU events that follow gradients; None on the CPU."""
        inside = getattr(self._comm, "_intra", self._comm)  # the group inside this machine
        return getattr(getattr(inside, "_group", None), "make_ready", None)

    def pack(self, wanted: Sequence[int], native: Any, *, is_complete: bool) -> Launched:
        """Collect the gradients of a bucket; copies or zeros for those that no pass added to."""
        grads, used = [], []
        for i, held in zip(wanted, native.held(0, wanted), strict=True):
            grad, param = self._params[i].grad, self._params[i]
            if grad is None and is_complete:
                raise cleared(i, self._comm.rank)
            used.append(grad is not None and held == PART)
            if grad is None or (held == SUM and self.first_summed == 0):
                grad = torch.zeros_like(param)
            elif not used[-1]:
                grad = grad.detach().clone()
            grads.append(grad)
        first = self._params[wanted[0]]
        flags = torch.tensor(used, dtype=first.dtype, device=first.device)
        return Launched(list(wanted), [grads], flags, is_whole=all(used))

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket and its flags."""
        if after is not None:
            ready, index = after
            ready.make_wait(index, 0)
        (tensors,) = bucket.tensors()
        return self._comm.all_reduce_coalesced(tensors, self._op, async_op=True)

    def finish(self, bucket: Launched) -> list[int]:
        """Put results that are in other tensors into ``grad``; return the reduced parameters."""
        if bucket.is_whole or bucket.flags is None:
            return bucket.params  # reading flags would wait for a GPU
        reduced, flags = [], bucket.flags.tolist()
        for i, grad, flag in zip(bucket.params, bucket.lists[0], flags, strict=True):
            if not flag > 0:
                continue
            reduced.append(i)
            param = self._params[i]
            if param.grad is None:
                param.grad = grad
            elif param.grad is not grad:
                param.grad.detach().copy_(grad)
        return reduced

    def agree_on_order(self, order: list[int]) -> Any:
        """Return the order of gradients on rank 0."""
        agreed = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._comm.broadcast(agreed, 0)
        return agreed.tolist()

    def abort(self) -> None:
        """Abort the group: no reduction writes to a gradient, and the other ranks are told."""
        run_to_the_end(self._comm.abort)

    def close(self) -> None:
        """Do nothing: the communicator belongs to the caller."""

    def _compare(self, own: list[int], names: list[str]) -> None:
        """Raise on every rank if ranks have different numbers; the error has the name."""
        cpu = torch.device("cpu")  # whatever torch.set_default_device says
        rows = torch.zeros(self._comm.world_size, len(own), dtype=torch.int64, device=cpu)
        rows[self._comm.rank] = torch.tensor(own, dtype=torch.int64, device=cpu)
        rows = rows.to(self._device)
        self._comm.all_reduce_coalesced([rows])
        for rank, row in enumerate(rows.tolist()):
            for ours, theirs, name in zip(own, row, names, strict=True):
                if ours != theirs:
                    raise ArgumentError(
                        f"rank {self._comm.rank} of the bucketer and rank {rank} differ in {name}"
                        + ("" if "dtype" in name else f": {ours} here, {theirs} there")
                    )


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
