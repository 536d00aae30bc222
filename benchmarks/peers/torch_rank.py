"""Be a rank of pyringar, and of gloo beside it: torch_rank.py ADDRESS, with RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed one comes first

import pyringar as pr
from benchmarks.candidates import CANDIDATES
from benchmarks.peers.rank import Sum, serve
from benchmarks.ranks import Worker


class TorchRank(Worker):
    """One rank: makes tensors and calls."""

    def prepare(self, candidate: str, numels: list[int]) -> Sum:
        """Return the call that a candidate's name stands for, on tensors of its own."""
        make = self.registered if candidate == "registered" else torch.zeros
        tensors = [make(numel) for numel in numels]
        barriers = {"gloo": dist.barrier, "gloo flattened": dist.barrier}
        barriers["backend"] = lambda: dist.barrier(group=self.group)
        return Sum(
            [tensor.numpy() for tensor in tensors],
            self.rank,
            1 if candidate == "limit" else self.world_size,
            barriers.get(candidate, self.comm.barrier),
            CANDIDATES[candidate].calls["processes"](self, tensors),
        )

    def registered(self, numel: int) -> torch.Tensor:
        """Return a tensor in registered memory."""
        tensor = pr.shared_empty(numel)
        self.comm.register(tensor)
        return tensor


def main(address: str) -> None:
    """Serve until the benchmark is through."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = TorchRank(rank, world_size, str(Path(address).parent))
    serve(address, rank, f"pyringar {pr.__version__}", worker.prepare)
    worker.close()


if __name__ == "__main__":
    main(sys.argv[1])
