"""Be a rank of DeepSpeed's shared-memory op: deepspeed_rank.py ADDRESS, with RANK and WORLD_SIZE.

The op has no barrier: its sum of one element is one. Its segments bear MASTER_PORT in their names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.rank import Sum, serve

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = sys.argv[1]
NAME = Path(ADDRESS).parent.name  # of this group alone
os.environ |= {"LOCAL_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "ranks", "MASTER_PORT": NAME}


def prepare(candidate: str, numels: list[int]) -> Sum:
    """Return the call of the op that sums in place, tensor by tensor."""
    for segment in Path("/dev/shm").glob(f"*_{NAME}_{RANK}"):
        segment.unlink()  # all ranks have it; nobody else would remove it
    tensors = [torch.zeros(numel) for numel in numels]
    first, one, reduce = tensors[0], torch.zeros(1), torch.ops.deepspeed.inference_all_reduce_

    def call() -> None:
        reduce(first)

    def many() -> None:
        for tensor in tensors:
            reduce(tensor)

    arrays = [tensor.numpy() for tensor in tensors]
    timed = call if len(tensors) == 1 else many
    return Sum(arrays, RANK, WORLD_SIZE, lambda: reduce(one), timed)


torch.set_num_threads(1)
ShareMemCommBuilder().load(verbose=False).initialize(WORLD_SIZE, RANK)
serve(ADDRESS, RANK, f"DeepSpeed {deepspeed.__version__}", prepare)
