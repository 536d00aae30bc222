"""The communicator of a bucketer: its ranks are in this process, or each in its own.

Between processes each bucket carries one more tensor, with a flag per parameter: does this rank
have a gradient?
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pyringar.choices import kind_of
from pyringar.comm.communicator import Communicator
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError

if TYPE_CHECKING:
    from pyringar.parallel.bucketer import Launched

Comm = Communicator | RankCommunicator


def first_rank(comm: Any, num_replicas: int) -> int:
    """Return the first rank of this process; raise unless the communicator fits the replicas."""
    if not isinstance(comm, (Communicator, RankCommunicator)):
        raise ArgumentError(
            f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
        )
    rank, here = (comm.rank, 1) if isinstance(comm, RankCommunicator) else (0, comm.world_size)
    if num_replicas != here:
        raise ArgumentError(
            f"replicas has {num_replicas} entries, but comm has {here} of its {comm.world_size} "
            "ranks in this process: expected one replica for each"
        )
    return rank


def check_agreed(comm: Comm, settings: Sequence[str], device: torch.device) -> None:
    """Raise on all ranks if a setting differs from rank 0; texts are sent through ``device``."""
    if isinstance(comm, Communicator):
        return
    text = "\n".join(settings).encode()
    lengths = torch.zeros(comm.world_size, dtype=torch.int64, device=device)
    lengths[comm.rank] = len(text)
    comm.all_reduce_coalesced([lengths])
    rows = torch.zeros(comm.world_size, int(lengths.max()), dtype=torch.uint8, device=device)
    rows[comm.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    comm.all_reduce_coalesced([rows])
    lines = [bytes(row).rstrip(b"\0").decode().splitlines() for row in rows.tolist()]
    for rank, mine in enumerate(lines):
        for first, other in zip(lines[0], mine, strict=False):
            if other != first:
                raise ArgumentError(
                    f"rank {rank} has {other}, but rank 0 has {first}: expected the same on all "
                    "ranks"
                )


def launch(comm: Comm, op: str, bucket: Launched, ready: Any, index: int) -> Work | None:
    """Begin the reduction of a bucket; return None if there is nothing to reduce.

    ``ready``: the GPU events of the gradients. None: they are on the current streams.
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
