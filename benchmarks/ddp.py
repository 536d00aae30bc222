"""Time a step of DistributedDataParallel on the backends gloo and ringar, in the same processes."""

from __future__ import annotations

import sys

from benchmarks.bench import Benchmark, Case, Run
from benchmarks.peers.registry import HERE, start_ranks
from benchmarks.processes import run_case
from benchmarks.timing import Effort

LIMIT, CANDIDATES = "bare", ("gloo", "ringar")
MODELS = ("ResNet-18, width 8", "MLP, 25 M parameters")


def measure(run: Run) -> None:
    """Run the models in the same processes."""
    with start_ranks("DDP", [sys.executable, str(HERE / "ddp_rank.py")], 2) as group:
        groups = dict.fromkeys((LIMIT, *CANDIDATES), group)
        for case in run.cases:
            run_case(run, case, groups)


def cases_of(effort: str) -> list[Case]:
    """Return the models, on two ranks."""
    names = MODELS[:1] if effort == "trial" else MODELS
    return [Case(name, 2, (LIMIT, *CANDIDATES)) for name in names]


BENCHMARK = Benchmark(
    section="ddp",
    title="DistributedDataParallel",
    about="A step without the optimizer: forward, backward and the all-reduces of DDP, time of the "
    "slowest rank. The limit is the same step without DDP.",
    efforts={"full": Effort(31, 60.0), "quick": Effort(7, 10.0), "trial": Effort(2, 60.0)},
    cases=cases_of,
    measure=measure,
    ours="ringar",
    peers=("gloo",),
    limit=LIMIT,
)
