"""Time the start of four ranks: threads of `pr.launch`, and the processes of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Run, each_case
from benchmarks.timing import Effort, host_s, in_turns

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "import pyringar.distributed; from benchmarks.launch import meet; meet()"


def meet() -> None:
    """Join the group and pass one barrier."""
    dist.init_process_group("ringar")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    dist.barrier()
    dist.destroy_process_group()


def torchrun(world_size: int) -> None:
    """Run ``meet`` in processes; CalledProcessError if a rank failed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    ranks = ["--nproc-per-node", str(world_size), sys.executable, "-c", PROGRAM]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([*launcher, *ranks], check=True, capture_output=True, env=environment)


def run_case(run: Run, case: Case) -> None:
    """Time both launchers in turns. A rank that does not meet the others raises."""
    samplers = {
        "threads": lambda: [host_s(lambda: pr.launch(meet, case.world_size))],
        "torchrun": lambda: [host_s(lambda: torchrun(case.world_size))],
    }
    samplers["threads"]()  # loads the engine
    timings = in_turns(samplers, run.effort, least_rounds=1)
    run.add(case, timings, dict.fromkeys(timings, True))


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
