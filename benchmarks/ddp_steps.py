"""Time a DistributedDataParallel step on the backends gloo and ringar, in the same processes."""

from __future__ import annotations

import sys

from benchmarks.bench import Benchmark, BenchmarkCase, Run
from benchmarks.peers.registry import HERE, start_ranks
from benchmarks.process_allreduce import run_case
from benchmarks.timing import Effort

LIMIT, CANDIDATES = "bare", ("gloo", "ringar")
MODELS = ("ResNet-18, width 8", "MLP, 25 M parameters")


def measure(run: Run) -> None:
    with start_ranks("DDP", [sys.executable, str(HERE / "ddp_rank.py")], 2) as group:
        groups = dict.fromkeys((LIMIT, *CANDIDATES), group)
        for case in run.cases:
            run_case(run, case, groups)


def cases_of(effort: str) -> list[BenchmarkCase]:
    names = MODELS[:1] if effort == "trial" else MODELS
    return [BenchmarkCase(name, 2, (LIMIT, *CANDIDATES)) for name in names]


BENCHMARK = Benchmark(
    section="ddp",
    title="DistributedDataParallel",
    about="Time of a DDP step without the optimizer (forward, backward, all-reduces) on the "
    "slowest of 2 CPU ranks. `gloo` and `ringar` are the backends. The limit, `bare`, is the same "
    "step without DDP.",
    efforts={"full": Effort(31, 60.0), "quick": Effort(7, 10.0), "trial": Effort(2, 60.0)},
    setup_s=20.0,
    cases=cases_of,
    measure=measure,
    ours="ringar",
    peers=("gloo",),
    limit=LIMIT,
)
