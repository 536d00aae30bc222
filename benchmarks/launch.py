"""Time four ranks of `pyringar.launch`, from the call to the sums: python benchmarks/launch.py."""

import statistics
import time

import torch
import torch.distributed as dist

import pyringar as pr


def program() -> None:
    """Make a group and add a number of each rank."""
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))


for processes in (False, True):
    times_ms = []
    for _ in range(21):
        start_s = time.perf_counter()
        pr.launch(program, 4, processes=processes)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    first, *others = times_ms  # the first one compiles and imports
    print(
        f"{'processes' if processes else 'threads'}: first {first:.0f} ms, then "
        f"{statistics.median(others):.1f} ms ({min(others):.1f} to {max(others):.1f})"
    )
