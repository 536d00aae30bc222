"""The registry of candidates, ours and peers: a name, how it looks in pictures, and what it calls.

A peer is one entry here: see README.md beside this file. A candidate of a row that has no entry is
a peer too, and looks plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from benchmarks.peers.registry import PEERS

Call = Callable[[], object]
Lists = list[list[Tensor]]  # lists[rank][i]


@dataclass(frozen=True)
class Candidate:
    """One way to do a section's task.

    ``calls`` maps a section to the function that makes the call which is timed:

        allreduce   (comm, lists) -> call; also on GPUs
        lists       (comm, lists) -> call, in a process that is all ranks
        processes   (worker, tensors) -> call, in every rank's process
        lists, processes  of a peer with an environment of its own: (k) -> its ranks; see peers/
        ddp         (module, worker's group of backend "ringar") -> module
        machines    (worker, tensor) -> call, in every rank's process
        peers_cuda  (worker, numel) -> (tensor, call), in every rank's process

    ``extra`` names the sections in which only some cases have it, and the grid does not.
    """

    name: str
    label: str = ""
    color: str = "#8c8c8c"
    marker: str = "o"
    is_ours: bool = False
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


# -- plain torch -----------------------------------------------------------------------------------


def naive(lists: Sequence[Sequence[Tensor]]) -> None:
    """Sum like the book with its bug mended, tensor by tensor, as lean as Python gets."""
    for data in zip(*lists, strict=True):
        first = data[0]
        for other in data[1:]:
            first.add_(other)
        for other in data[1:]:
            other.copy_(first)


def stack_and_sum(lists: Sequence[Sequence[Tensor]]) -> None:
    """Sum by one line of torch, and copy the sum back to every rank."""
    for data in zip(*lists, strict=True):
        total = torch.stack(data).sum(0)
        for tensor in data:
            tensor.copy_(total)


def touch_once(lists: Sequence[Sequence[Tensor]]) -> None:
    """Read and write every buffer once: the least traffic that an all_reduce can have."""
    for tensors in lists:
        for tensor in tensors:
            tensor.mul_(1)


def flatten_and_reduce(tensors: Sequence[Tensor]) -> None:
    """Reduce many tensors as users of gloo do: in one flat one."""
    flat = torch.cat([t.view(-1) for t in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def each(reduce: Callable[[Tensor], object], tensors: Sequence[Tensor]) -> Call:
    """Reduce tensor by tensor; of one, nothing else is timed."""
    if len(tensors) == 1:
        return functools.partial(reduce, tensors[0])
    return lambda: [reduce(tensor) for tensor in tensors]


def with_ddp(module: torch.nn.Module, group: Any) -> torch.nn.Module:
    """Wrap a module in DDP over this process group."""
    return DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)


# -- ours ------------------------------------------------------------------------------------------


def column(lists: Lists) -> list[Tensor]:
    """Return the first tensor of every rank."""
    return [tensors[0] for tensors in lists]


def local_call(algorithm: str) -> Callable[[pr.Communicator, Lists], Call]:
    """Make the call of an algorithm over the ranks of one process."""

    def make(comm: pr.Communicator, lists: Lists) -> Call:
        if len(lists[0]) > 1:
            return lambda: comm.all_reduce_coalesced(lists, algorithm=algorithm)
        data = column(lists)
        return lambda: comm.all_reduce(data, algorithm=algorithm)

    return make


def local_auto(comm: pr.Communicator, lists: Lists) -> Call:
    """Make the call that names no algorithm."""
    if len(lists[0]) > 1:
        return lambda: comm.all_reduce_coalesced(lists)
    return local_call("auto")(comm, lists)


def local_bound(comm: pr.Communicator, lists: Lists) -> Call:
    """Check the call that names no algorithm, once."""
    return comm.bind_coalesced(lists) if len(lists[0]) > 1 else comm.bind(column(lists))


def rank_call(algorithm: str) -> Callable[[Any, list[Tensor]], Call]:
    """Make the call of an algorithm in one rank's process."""
    return lambda worker, tensors: lambda: worker.comm.all_reduce(tensors, algorithm=algorithm)


def rank_auto(worker: Any, tensors: list[Tensor]) -> Call:
    """Make the call that names no algorithm."""
    if len(tensors) == 1:
        return lambda: worker.comm.all_reduce(tensors[0])
    return lambda: worker.comm.all_reduce_coalesced(tensors)


# -- peers on GPUs ---------------------------------------------------------------------------------


def torch_collective(worker: Any, numel: int) -> tuple[Tensor, Call]:
    """Call torch.distributed with NCCL."""
    tensor = torch.zeros(numel, device=worker.device)
    return tensor, lambda: dist.all_reduce(tensor)


def gloo_over_host(worker: Any, numel: int) -> tuple[Tensor, Call]:
    """Call gloo, which copies tensors of a GPU through the host's memory."""
    tensor, group = torch.zeros(numel, device=worker.device), dist.new_group(backend="gloo")
    return tensor, lambda: dist.all_reduce(tensor, group=group)


def torch_symmetric_memory(worker: Any, numel: int) -> tuple[Tensor, Call]:
    """Call torch's two-shot all_reduce over symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    tensor = symm_mem.empty(numel, dtype=torch.float32, device=worker.device)
    group = dist.group.WORLD
    symm_mem.rendezvous(tensor, group=group)
    reduce = torch.ops.symm_mem.two_shot_all_reduce_
    return tensor, lambda: reduce(tensor, "sum", group.group_name)


# -- the registry ----------------------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind can tell apart.
_GREY, _BLACK, _ORANGE, _SKY = "#8c8c8c", "#000000", "#e69f00", "#56b4e9"
_GREEN, _YELLOW, _BLUE, _RED, _PINK = "#009e73", "#d9c400", "#0072b2", "#d55e00", "#cc79a7"


def _ours(name: str, label: str, color: str, marker: str, **more: Any) -> Candidate:
    return Candidate(name, label, color, marker, is_ours=True, **more)


_ALL = (
    Candidate(
        *("naive", "naive (the book's loop)", _GREY, "s"),
        calls=dict.fromkeys(("allreduce", "lists"), lambda comm, lists: lambda: naive(lists)),
    ),
    Candidate(
        *("stack", "torch.stack().sum()", _PINK, "v"),
        calls={"allreduce": lambda comm, lists: lambda: stack_and_sum(lists)},
    ),
    Candidate(
        *("bare", "no DDP: no communication (limit)", _BLACK),
        calls={"ddp": lambda module, ours: module},
    ),
    Candidate(
        *("gloo", "gloo", _GREY, "s"),
        calls={
            "processes": lambda worker, tensors: each(dist.all_reduce, tensors),
            "ddp": lambda module, ours: with_ddp(module, dist.group.WORLD),
            "machines": lambda worker, tensor: lambda: dist.all_reduce(tensor),
            "peers_cuda": gloo_over_host,
        },
    ),
    *(
        Candidate(peer.name, peer.label, *peer.look, calls={peer.section: peer.start})
        for peer in PEERS.values()
    ),
    Candidate(
        *("gloo flattened", "gloo, flattened", _YELLOW, "X"),
        calls={"processes": lambda worker, tensors: lambda: flatten_and_reduce(tensors)},
        extra=("processes",),
    ),
    Candidate(
        *("limit", "limit: each byte read, written once", _BLACK, ""),
        calls={
            "lists": lambda comm, lists: lambda: touch_once(lists),
            "processes": lambda worker, tensors: lambda: touch_once([tensors]),
        },
    ),
    Candidate("open mpi", "Open MPI", _ORANGE, "^"),
    Candidate("open mpi, han", "Open MPI, han", _YELLOW, "v"),
    Candidate("torch nccl", "NCCL, torch", _GREY, "s", calls={"peers_cuda": torch_collective}),
    Candidate(
        *("torch symmetric memory", "torch symmetric memory", _ORANGE, "^"),
        calls={"peers_cuda": torch_symmetric_memory},
    ),
    Candidate("nccl", "NCCL", _YELLOW, "X"),
    Candidate("undivided", "undivided, one replica (limit)", _BLACK),
    Candidate("book", "the book's loop", _GREY),
    Candidate("nn.DataParallel", "nn.DataParallel", _ORANGE),
    Candidate("torch.compile", "torch.compile", _PINK),
    _ours("fused", "fused", _GREEN, "P", calls={"allreduce": local_call("fused")}),
    _ours(
        *("direct", "direct", _SKY, "D"),
        calls={"allreduce": local_call("direct"), "processes": rank_call("direct")},
    ),
    _ours(
        *("ring", "ring", _ORANGE, "^"),
        calls={"allreduce": local_call("ring"), "processes": rank_call("ring")},
    ),
    _ours("sharded", "sharded", _YELLOW, "X", calls={"allreduce": local_call("sharded")}),
    _ours(
        *("auto", "auto", _BLUE, "o"),
        calls={"allreduce": local_auto, "lists": local_auto, "processes": rank_auto},
    ),
    _ours(
        *("allreduce", "pr.allreduce()", _PINK, "<"),
        calls={"allreduce": lambda comm, lists: lambda: pr.allreduce(column(lists))},
        extra=("allreduce",),
    ),
    _ours(
        *("bound", "bound (checked before)", _RED, "*"),
        calls={
            "allreduce": local_bound,
            "lists": local_bound,
            "processes": lambda worker, tensors: worker.comm.bind(tensors),
        },
        extra=("allreduce", "processes"),
    ),
    _ours(
        *("registered", "registered tensors", _GREEN, "P"),
        calls={"processes": rank_auto},
        extra=("processes",),
    ),
    _ours(
        *("backend", 'backend "ringar"', _PINK, "v"),
        calls={
            "processes": lambda worker, tensors: each(
                functools.partial(dist.all_reduce, group=worker.group), tensors
            ),
            "machines": lambda worker, tensor: lambda: dist.all_reduce(tensor, group=worker.group),
        },
        extra=("processes",),
    ),
    _ours(
        *("machines", "several machines", _BLUE, "o"),
        calls={"machines": lambda worker, tensor: lambda: worker.comm.all_reduce(tensor)},
    ),
    _ours("rank", "rank order", _GREY, "s"),
    _ours("tree", "tree", _BLUE, "o"),
    _ours("exact", "exact", _RED, "*"),
    _ours("fused per tensor", "fused, per tensor", _GREEN, "P"),
    _ours("coalesced", "one coalesced call", _ORANGE, "^"),
    _ours("bucketed", "buckets", _BLUE, "o"),
    _ours(
        *("ringar", "pyringar", _BLUE, "o"),
        calls={"ddp": with_ddp},
    ),
    _ours("ringar, shards", "pyringar", _GREEN, "P"),
)
CANDIDATES = {candidate.name: candidate for candidate in _ALL}


def candidate_of(name: str) -> Candidate:
    """Return the entry of a row's candidate, whose name may go on after a comma."""
    base = name.partition(", ")[0]
    return CANDIDATES.get(name) or CANDIDATES.get(base) or Candidate(base, base)


def names_in(section: str, *, peers_only: bool = False) -> tuple[str, ...]:
    """Return the candidates that every case of a section's grid has."""
    return tuple(
        name
        for name, candidate in CANDIDATES.items()
        if section in candidate.calls
        and section not in candidate.extra
        and not (peers_only and candidate.is_ours)
    )
