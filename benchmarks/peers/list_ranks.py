"""Be pyringar's ranks in one process, and plain torch's: list_ranks.py ADDRESS; RANKS: how many."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: an installed one comes first

import pyringar as pr
from benchmarks.candidates import CANDIDATES
from benchmarks.peers.rank import Sum, serve

RANKS = int(os.environ["RANKS"])
COMM = pr.Communicator(["cpu"] * RANKS)


class Lists:
    """A list of tensors for every rank."""

    def __init__(self, candidate: str, numels: list[int]) -> None:
        lists = [[torch.zeros(numel) for numel in numels] for _ in range(RANKS)]
        self.call = CANDIDATES[candidate].calls["lists"](COMM, lists)
        k = 1 if candidate == "limit" else RANKS
        self._sums = [
            Sum([tensor.numpy() for tensor in tensors], rank, k, self.barrier, self.call)
            for rank, tensors in enumerate(lists)
        ]

    def fill(self, shift: int) -> None:
        """Write every rank's numbers."""
        for each in self._sums:
            each.fill(shift)

    def barrier(self) -> None:
        """Do nothing: there is one caller."""

    def is_right(self, shift: int) -> bool:
        """Compare every rank's tensors."""
        return all(each.is_right(shift) for each in self._sums)


serve(sys.argv[1], 0, f"pyringar {pr.__version__}, torch {torch.__version__}", Lists)
