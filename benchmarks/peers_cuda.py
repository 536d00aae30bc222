"""Time all_reduce of GPU tensors with one process per rank, beside gloo and NCCL.

NCCL has its own processes, since it fails where ranks share a GPU. A call is timed until the
stream has finished.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.bench import Benchmark, BenchmarkCase, Run
from benchmarks.peers.peer_ranks import LibraryRanksError
from benchmarks.peers.registry import start_our_ranks
from benchmarks.process_allreduce import case_of, run_case
from benchmarks.rows import by_key, num_ranks
from benchmarks.timing import Effort

PEERS, OURS, LIMIT = ("gloo", "nccl"), "auto", "limit"


def measure(run: Run) -> None:
    device = "cpu" if run.is_trial else "cuda"
    for k, cases in by_key(run.cases, lambda case: case.world_size).items():
        with ExitStack() as stack:
            ours = stack.enter_context(start_our_ranks(k, device))
            groups = dict.fromkeys(("gloo", OURS, LIMIT), ours)
            try:
                nccl = stack.enter_context(start_our_ranks(k, device, "nccl"))
                nccl.measure("nccl", 1, 1, 0)
                groups["nccl"] = nccl
            except LibraryRanksError as error:
                run.skip(f"NCCL, {num_ranks(k)}", str(error))
            for case in cases:
                run_case(run, case, groups)


def cases_of(effort: str) -> list[BenchmarkCase]:
    sizes = {"full": (2**16, 2**20, 2**24, 2**28), "quick": (2**16, 2**24), "trial": (2**16,)}
    return [
        case_of(size, k, *PEERS, OURS, LIMIT)
        for k in ((2, 4) if effort == "full" else (2,))
        for size in sizes[effort]
    ]


BENCHMARK = Benchmark(
    section="peers_cuda",
    title="One process per rank, on GPUs",
    about="Time of one call on the slowest rank, float32 tensors on GPUs. gloo copies through host "
    "memory. In `limit`, all ranks multiply their own tensors by 1 at the same time.",
    efforts={"full": Effort(31, 8.0), "quick": Effort(9, 4.0), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    ours=OURS,
    peers=PEERS,
    limit=LIMIT,
    device="cuda",
)
