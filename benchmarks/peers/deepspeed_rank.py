"""A rank of DeepSpeed's shared-memory all-reduce: RANK=r WORLD_SIZE=k deepspeed_rank.py ADDRESS.

DeepSpeed's op has no barrier, so the sum of one element serves as the barrier. DeepSpeed puts
MASTER_PORT into the names of its shared-memory segments. The compiled op is loaded directly,
because DeepSpeed's loader would compile it again.
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

from benchmarks.peers.rank import CheckedSum, serve

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = sys.argv[1]
NAME = Path(ADDRESS).parent.name  # unique to these ranks
os.environ |= {"LOCAL_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "ranks", "MASTER_PORT": NAME}


def prepare(candidate: str, numel: int) -> CheckedSum:
    """Return a `CheckedSum` that calls DeepSpeed's in-place all-reduce."""
    for segment in Path("/dev/shm").glob(f"*_{NAME}_{RANK}"):
        segment.unlink()  # every rank has mapped the segment; DeepSpeed never removes it
    tensor, one = torch.zeros(numel), torch.zeros(1)
    reduce = torch.ops.deepspeed.inference_all_reduce_
    return CheckedSum(tensor.numpy(), RANK, WORLD_SIZE, lambda: reduce(one), lambda: reduce(tensor))


def load(name: str) -> Any:
    path = Path(os.environ["TORCH_EXTENSIONS_DIR"], name, f"{name}.so")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch.set_num_threads(1)
load("deepspeed_shm_comm").initialize(WORLD_SIZE, RANK)
serve(ADDRESS, RANK, f"DeepSpeed {importlib.metadata.version('deepspeed')}", prepare)
