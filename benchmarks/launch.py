"""Time the start of four ranks: threads of `pr.launch`, and the processes of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Run, each_case
from benchmarks.timing import Effort, Sampler, host_s, in_turns

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "import pyringar.distributed; from benchmarks.launch import meet; meet()"


def meet() -> int:
    """Join the group and pass one barrier; return the number of ranks."""
    dist.init_process_group("ringar")
    dist.barrier()
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    return world_size


def as_threads(world_size: int) -> bool:
    """Return whether all ranks met."""
    return pr.launch(meet, world_size) == [world_size] * world_size


def as_processes(world_size: int) -> bool:
    """Return whether all ranks met; raise if torchrun failed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    ranks = ["--nproc-per-node", str(world_size), sys.executable, "-c", PROGRAM]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([*launcher, *ranks], check=True, capture_output=True, env=environment)
    return True


def run_case(run: Run, case: Case) -> None:
    """Check both launchers, then time them in turns."""
    launchers = {"threads": as_threads, "torchrun": as_processes}
    correct = {name: launch(case.world_size) for name, launch in launchers.items()}

    def sampler(launch: Callable[[int], bool]) -> Sampler:
        return lambda: [host_s(lambda: launch(case.world_size))]

    samplers = {name: sampler(launch) for name, launch in launchers.items()}
    run.add(case, in_turns(samplers, run.effort, least_rounds=1), correct)


BENCHMARK = Benchmark(
    section="launch",
    title="Start of four ranks",
    about="From nothing to the end of a first barrier. `threads` is `pr.launch` in a process that "
    "has imported torch; the processes of torchrun import torch themselves.",
    efforts={"full": Effort(5, 60.0), "quick": Effort(1, 5.0), "trial": Effort(1, 0.0)},
    cases=lambda effort: [Case("to a first barrier", 4, ("threads", "torchrun"))],
    measure=each_case(run_case),
    ours="threads",
    peers=("torchrun",),
)
