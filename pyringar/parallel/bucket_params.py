"""Argument checks of GradientBucketer, and the parameters whose gradients it reduces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import check_positive, kind_of
from pyringar.comm.communicator import Communicator
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import check_alike, check_each, check_tensor

Replica = nn.Module | Sequence[Tensor]
Comm = Communicator | RankCommunicator


def check_replicas(replicas: Any) -> list[Replica]:
    """Return one module or list of parameters per rank, or raise ArgumentError."""
    check_each(replicas, "a module or a list of parameters", _has_params)
    checked: list[Replica] = [r if isinstance(r, nn.Module) else list(r) for r in replicas]
    for rank, replica in enumerate(checked):
        for i, param in enumerate(() if isinstance(replica, nn.Module) else replica):
            check_tensor(f"replicas[{rank}][{i}]", param)
    return checked


def _has_params(replica: Any) -> bool:
    return isinstance(replica, (nn.Module, Iterable)) and not isinstance(replica, Tensor)


def cap_bytes(bucket_cap_mb: Any) -> int:
    """Return the cap of a bucket in bytes; raise ArgumentError unless it is positive."""
    check_positive("bucket_cap_mb", bucket_cap_mb, "number of megabytes")
    return max(1, int(min(bucket_cap_mb, 1e12) * 1e6))


def first_rank(comm: Any, num_replicas: int) -> int:
    """Return the lowest rank of this process; raise unless there is a replica per local rank."""
    if not isinstance(comm, (Communicator, RankCommunicator)):
        raise ArgumentError(
            f"comm is {kind_of(comm)}, expected a Communicator or a ProcessCommunicator"
        )
    rank, local = (comm.rank, 1) if isinstance(comm, RankCommunicator) else (0, comm.world_size)
    if num_replicas != local:
        raise ArgumentError(
            f"replicas has {num_replicas} entries, but comm has {local} of its {comm.world_size} "
            "ranks in this process: expected one replica per local rank"
        )
    return rank


def check_agreed(comm: Comm, settings: Sequence[str], device: torch.device) -> None:
    """Raise ArgumentError on all ranks if a setting differs from rank 0."""
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


class HookedParams:
    """The parameters that require grad, by rank, and the gradient hooks on them."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._handles: list[Any] = []
        self.by_rank = [_params_of(replica) for replica in replicas]
        check_alike(self.by_rank, "trained parameter")

    def items(self) -> list[tuple[int, int]]:
        """Return the bytes and a dtype number of each gradient: a bucket holds one dtype."""
        dtypes = [grad_dtype(param) for param in self.by_rank[0]]
        return [
            (param.numel() * dtype.itemsize, dtypes.index(dtype))
            for param, dtype in zip(self.by_rank[0], dtypes, strict=True)
        ]

    def add_hooks(self, native: Any, first_summed: int) -> None:
        """Add hooks that count gradients; from ``first_summed`` on, zero the last sum first."""
        for rank, params in enumerate(self.by_rank):
            for i, param in enumerate(params):
                tensor: Any = param  # torch's stubs have no types here
                hook = native.make_hook(rank, i, param, False)
                self._handles.append(tensor.register_post_accumulate_grad_hook(hook))
                if rank >= first_summed:
                    hook = native.make_hook(rank, i, param, True)
                    self._handles.append(tensor.register_hook(hook))

    def remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def check_same(self) -> None:
        """Raise ArgumentError if a parameter was replaced: the new one has no hooks."""
        for rank, (replica, params) in enumerate(zip(self._replicas, self.by_rank, strict=True)):
            now = _params_of(replica) if isinstance(replica, nn.Module) else params
            for i, (new, old) in enumerate(zip_longest(now, params)):
                if new is not old:
                    raise ArgumentError(
                        f"parameter {i} of replicas[{rank}] is another tensor than when the "
                        "bucketer was made (load_state_dict(assign=True) replaces parameters, and "
                        "requires_grad_() changes which are reduced); make a new GradientBucketer"
                    )


def grad_dtype(param: Tensor) -> torch.dtype:
    return getattr(param, "grad_dtype", None) or param.dtype  # exists in torch 2.14 and later


def is_accumulating(param: Tensor) -> bool:
    """Return True if the running backward pass adds to ``param.grad``; autograd.grad does not."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for an input of autograd.grad
        return False


def _params_of(replica: Replica) -> list[Tensor]:
    params = replica.parameters() if isinstance(replica, nn.Module) else replica
    return [param for param in params if param.requires_grad]


# A private torch function: tests/test_shared_gradients.py fails if a release changes it.
_count_users: Any = torch._C._storage_Use_Count
_ALONE = 2  # use count of unshared memory: the tensor, and this call's storage object


def give_own_memory(param: Tensor) -> None:
    """Copy a parameter's gradient if other tensors use its memory.

    Backward of ``p.view(...)`` stores a view as ``p.grad``, even if another ``grad`` uses that
    memory: a reduction in place would corrupt both. A gradient with ``_is_view()`` lies in a buffer
    of the user and stays there.
    """
    grad = param.grad
    if grad is None or grad.layout is not torch.strided or grad._is_view():
        return
    if _count_users(grad.untyped_storage()._cdata) > _ALONE:
        param.grad = grad.clone()
