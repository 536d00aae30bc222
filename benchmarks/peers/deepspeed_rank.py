"""Be a rank of DeepSpeed's shared-memory op: deepspeed_rank.py ADDRESS, with RANK and WORLD_SIZE.

The op has no barrier: its sum of one element is one. Its segments bear MASTER_PORT in their names.
It is loaded as install.py has compiled it: DeepSpeed's own loader asks ninja, of which another
version than that of the last call would compile it again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

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


def load(name: str) -> Any:
    """Return an extension of torch's that lies where such are compiled."""
    path = Path(os.environ["TORCH_EXTENSIONS_DIR"], name, f"{name}.so")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch.set_num_threads(1)
load("deepspeed_shm_comm").initialize(WORLD_SIZE, RANK)
serve(ADDRESS, RANK, f"DeepSpeed {importlib.metadata.version('deepspeed')}", prepare)
