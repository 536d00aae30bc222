"""Small programs for gpu_check.py.

python benchmarks/gpu_runs.py build              # compile both engines; print the machine
python benchmarks/gpu_runs.py reduce             # run all kernels, for a sanitizer
python benchmarks/gpu_runs.py launch ALGORITHM   # three large calls, for a profiler
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # searched after an installed pyringar

import pyringar as pr
from benchmarks.machine import describe_machine
from pyringar.engine import load

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)


def build_engines() -> None:
    """Compile the engines in parallel; print the machine as JSON."""
    if os.environ.get("PYRINGAR_TEST_CUDA_ON_CPU") == "1":
        machine = describe_machine()
    else:
        if not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} finds no CUDA device")
        major, minor = torch.cuda.get_device_capability()
        os.environ["PYRINGAR_CUDA_ARCHS"] = f"{major}.{minor}"  # the other steps set it, too
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda load_engine: load_engine(), (load.cuda_engine, load.engine)))
        machine = describe_machine("cuda")
    print(json.dumps(machine))


def reduce_all() -> None:
    """Run all kernels on aligned, odd-sized, strided tensors and lists of tensors.

    Every tensor is a separate allocation, so that a sanitizer detects reads past its end.
    """
    with pr.Communicator(["cuda:0"] * 3, timeout=100.0) as comm:
        for algorithm in ("fused", "direct", "ring"):
            for dtype in DTYPES:
                for numel in (1, 37, 1031, 20_011):
                    host = torch.arange(numel) % 5
                    data = [(host + rank).to(dtype).cuda() for rank in range(3)]
                    comm.all_reduce(data, algorithm=algorithm)
                    if not all(torch.equal(t.cpu(), (host * 3 + 3).to(dtype)) for t in data):
                        sys.exit(f"wrong sum: {algorithm}, {dtype}, {numel} elements")
            lists = [[torch.ones(n, device="cuda") for n in (3, 999, 70)] for _ in range(3)]
            comm.all_reduce_coalesced(lists, algorithm=algorithm)
            views = [torch.ones(999, device="cuda")[1:] for _ in range(3)]
            comm.all_reduce(views, algorithm=algorithm)
        inputs = [torch.ones(300, device="cuda") for _ in range(3)]
        outputs = [torch.zeros(100, device="cuda") for _ in range(3)]
        comm.reduce_scatter(outputs, inputs)
        comm.all_gather(inputs, outputs)
        comm.broadcast(inputs, root=2)
        torch.cuda.synchronize()
        comm.all_reduce([tensor[::2] for tensor in inputs])
        torch.cuda.synchronize()


def launch(algorithm: str) -> None:
    """Launch a kernel three times; a profiler reads the third, with warm caches and clocks."""
    with pr.Communicator(["cuda:0"] * 4, timeout=100.0) as comm:
        tensors = [torch.ones(2**24, device="cuda") for _ in range(4)]
        for _ in range(3):
            comm.all_reduce(tensors, algorithm=algorithm)
        torch.cuda.synchronize()


if __name__ == "__main__":
    {"build": build_engines, "reduce": reduce_all, "launch": launch}[sys.argv[1]](*sys.argv[2:])
