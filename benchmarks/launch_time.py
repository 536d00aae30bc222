"""Time `pyringar.launch` of four ranks and one all_reduce: python benchmarks/launch_time.py."""

import statistics
import time

import torch
import torch.distributed as dist

import pyringar as pr


def program() -> None:
    """Make a process group and sum one element over the ranks."""
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))


for processes in (False, True):
    times_ms = []
    for _ in range(21):
        start_s = time.perf_counter()
        pr.launch(program, 4, processes=processes)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    first, *later = times_ms  # the first launch compiles the engine and imports modules
    print(
        f"{'processes' if processes else 'threads'}: first {first:.0f} ms, then "
        f"{statistics.median(later):.1f} ms ({min(later):.1f} to {max(later):.1f})"
    )
