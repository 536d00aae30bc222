"""The communicator of a bucketer: its ranks are in this process, or each in its own.

A rank does not see the gradients of ranks in other processes before the reduction. So each bucket
carries one small tensor more, with one flag per parameter: does this rank have a gradient?
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.communicator import Communicator
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError

if TYPE_CHECKING:
    from pyringar.parallel.bucketer import Launched

Comm = Communicator | RankCommunicator


def check_ranks(comm: Comm, op: str, by_rank: Sequence[Sequence[Tensor]], cap_bytes: int) -> None:
    """Raise unless the communicator fits the parameters, and all processes gave the same."""
    num_replicas = len(by_rank)
    if isinstance(comm, Communicator):
        if comm.world_size != num_replicas:
            raise ArgumentError(f"comm has {comm.world_size} ranks for {num_replicas} replicas")
        return
    if not isinstance(comm, RankCommunicator):
        raise ArgumentError(
            f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
        )
    if num_replicas != 1:
        raise ArgumentError(
            f"replicas has {num_replicas} entries, but comm is one rank of {comm.world_size}, "
            "each in a process of its own: expected one replica"
        )
    params = by_rank[0]
    device = params[0].device if params else torch.device("cpu")
    settings = [
        ("its number of parameters", len(params)),
        ("its bucket_cap_mb", cap_bytes),
        ("its op", op),
    ]
    for i, param in enumerate(params):
        kind = f"{tuple(param.shape)} {param.dtype}"
        settings.append((f"the shape or dtype of parameter {i}", kind))
    texts = texts_of_ranks(comm, "\n".join(f"{name}: {value}" for name, value in settings), device)
    for rank, text in enumerate(texts):
        for (name, ours), line in zip(settings, text.splitlines(), strict=False):
            theirs = line.removeprefix(f"{name}: ")
            if theirs != str(ours):
                raise ArgumentError(
                    f"rank {comm.rank} of the bucketer and rank {rank} differ in {name}: {ours} "
                    f"here, {theirs} there"
                )


def texts_of_ranks(comm: RankCommunicator, text: str, device: torch.device) -> list[str]:
    """Return the texts of all ranks, which are sent through memory of ``device``."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = torch.zeros(comm.world_size, dtype=torch.int64, device=device)
    lengths[comm.rank] = own.numel()
    comm.all_reduce_coalesced([lengths])
    rows = torch.zeros(comm.world_size, int(lengths.max()), dtype=torch.uint8, device=device)
    rows[comm.rank, : own.numel()] = own
    comm.all_reduce_coalesced([rows])
    return [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]


def launch(comm: Comm, op: str, bucket: Launched, ready: Any, index: int) -> Work | None:
    """Begin the reduction of a bucket; return None if there is nothing to reduce.

    ``ready``: the GPU events of its gradients. None: the current streams have the gradients.
    """
    lists = [[g.detach() if g.requires_grad else g for g in grads] for grads in bucket.lists]
    if isinstance(comm, Communicator):
        if not bucket.params:
            return None
        if ready is not None:
            return comm._begin_bucket(lists, op, (ready, index))
        return comm.all_reduce_coalesced(lists, op, async_op=True)
    if ready is not None:
        ready.make_wait(index, 0)
    first = lists[0][0]
    # Reduced by `op` too: sum and mean are > 0 if a rank has a gradient.
    bucket.flags = torch.tensor(bucket.used, dtype=first.dtype, device=first.device)
    return comm.all_reduce_coalesced([*lists[0], bucket.flags], op, async_op=True)


def agree_on_order(comm: Comm, order: list[int], device: torch.device) -> list[int]:
    """Return the order of gradients on rank 0."""
    if not isinstance(comm, Communicator):
        agreed = torch.tensor(order, device=device)
        comm.broadcast(agreed, 0)
        order = agreed.tolist()
    return order


def abort(comm: Comm) -> None:
    """Return when no reduction writes to a gradient. Over processes, abort the group."""
    if not isinstance(comm, Communicator):
        with contextlib.suppress(RingarError):
            comm.abort()
        return
    for work in list(comm._in_flight):
        with contextlib.suppress(RingarError):
            work.wait(math.inf)
    # The current streams are those of another thread.
    for device in {device for device in comm.devices if device.type == "cuda"}:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
