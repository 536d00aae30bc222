"""A rank of pyringar, and of gloo beside it: torch_rank.py ADDRESS, with RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed one comes first

import pyringar as pr
from benchmarks.peers.rank import Sum, serve
from benchmarks.ranks import Worker


def prepare(worker: Worker, candidate: str, numel: int) -> Sum:
    """Return the call of a candidate on a tensor of its own."""
    tensor = torch.zeros(numel)
    comm, group, barrier = worker.comm, worker.group, worker.comm.barrier
    world_size = worker.world_size
    call: Callable[[], object]
    if candidate == "gloo":
        call, barrier = lambda: dist.all_reduce(tensor), dist.barrier
    elif candidate == "backend":
        call = lambda: dist.all_reduce(tensor, group=group)  # noqa: E731
        barrier = lambda: dist.barrier(group=group)  # noqa: E731
    elif candidate == "limit":
        call, world_size = lambda: tensor.mul_(1), 1
    elif candidate == "bound":
        call = comm.bind([tensor])
    else:
        call = lambda: comm.all_reduce(tensor, algorithm=candidate)  # noqa: E731
    return Sum(tensor.numpy(), worker.rank, world_size, barrier, call)


def main(address: str) -> None:
    """Serve until the benchmark closes the connection."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = Worker(rank, world_size, str(Path(address).parent))
    version = f"pyringar {pr.__version__}"
    serve(address, rank, version, lambda candidate, numel: prepare(worker, candidate, numel))
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1])
