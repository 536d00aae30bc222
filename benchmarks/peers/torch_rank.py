"""A rank of pyringar and of torch.distributed: torch_rank.py ADDRESS.

Environment: RANK, WORLD_SIZE, DEVICE (cpu or cuda) and BACKEND (gloo or nccl).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # searched after an installed pyringar

import pyringar as pr
import pyringar.distributed  # registers the backend
from benchmarks.peers.rank import CheckedSum, serve

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class ProcessGroups:
    """The default process group, the ProcessCommunicator and the group of backend ``ringar``."""

    def __init__(self, folder: Path, device: str = "cpu", backend: str = "gloo") -> None:
        torch.set_num_threads(1)
        torch_store, store = (
            dist.FileStore(str(folder / name), WORLD_SIZE) for name in ("torch", "ours")
        )
        dist.init_process_group(backend, store=torch_store, rank=RANK, world_size=WORLD_SIZE)
        self.comm = pr.ProcessCommunicator(store, RANK, WORLD_SIZE, device=device)
        self.ringar = dist.new_group(backend="ringar") if device == "cpu" else None

    def close(self) -> None:
        """Close the communicator and all process groups."""
        self.comm.close()
        dist.destroy_process_group()


class SumOnDevice:
    """The sum of a GPU tensor, with inputs and check in host memory."""

    def __init__(self, tensor: Tensor, call: Callable[[], object], on_host: CheckedSum) -> None:
        self._tensor, self._call, self._on_host = tensor, call, on_host
        self.barrier = on_host.barrier

    def fill(self, shift: int) -> None:
        """Write the inputs of this rank."""
        self._on_host.fill(shift)
        self._tensor.copy_(torch.from_numpy(self._on_host.array))
        torch.cuda.synchronize()

    def call(self) -> None:
        """Sum the GPU tensor over ranks, and wait for the GPU."""
        self._call()
        torch.cuda.synchronize()

    def is_right(self, shift: int) -> bool:
        """Return whether every element is the sum of the inputs of all ranks."""
        self._on_host.array[...] = self._tensor.cpu().numpy()
        return self._on_host.is_right(shift)


def prepare(
    groups: ProcessGroups, device: str, candidate: str, numel: int
) -> CheckedSum | SumOnDevice:
    """Return the sum of a new tensor by a candidate, with the methods that `serve` calls."""
    tensor = torch.zeros(numel, device=device)
    comm, barrier, world_size = groups.comm, groups.comm.barrier, WORLD_SIZE
    call: Callable[[], object]
    if candidate in ("gloo", "nccl"):
        call = lambda: dist.all_reduce(tensor)  # noqa: E731
        barrier = dist.barrier
    elif candidate == "backend":
        call = lambda: dist.all_reduce(tensor, group=groups.ringar)  # noqa: E731
        barrier = lambda: dist.barrier(group=groups.ringar)  # noqa: E731
    elif candidate == "limit":
        call, world_size = lambda: tensor.mul_(1), 1
    elif candidate == "bound":
        call = comm.bind([tensor])
    else:
        call = lambda: comm.all_reduce(tensor, algorithm=candidate)  # noqa: E731
    if tensor.is_cuda:
        array = torch.zeros(numel).numpy()
        return SumOnDevice(tensor, call, CheckedSum(array, RANK, world_size, barrier, call))
    return CheckedSum(tensor.numpy(), RANK, world_size, barrier, call)


def main(address: str) -> None:
    device = os.environ["DEVICE"]
    if device == "cuda":
        device = f"cuda:{RANK % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    groups = ProcessGroups(Path(address).parent, device, os.environ["BACKEND"])
    version = f"pyringar {pr.__version__}"
    serve(address, RANK, version, lambda name, numel: prepare(groups, device, name, numel))
    groups.close()


if __name__ == "__main__":
    main(sys.argv[1])
