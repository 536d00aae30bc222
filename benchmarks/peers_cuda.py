"""Time ranks in processes with tensors on GPUs beside gloo and NCCL.

NCCL has its own processes, since it fails where ranks share a GPU. A call is timed until the
stream has finished.
"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.bench import Benchmark, Case, Run
from benchmarks.peers.group import GroupError
from benchmarks.peers.registry import start_our_ranks
from benchmarks.processes import case_of, run_case
from benchmarks.rows import by_key, num_ranks
from benchmarks.timing import Effort

PEERS, OURS, LIMIT = ("gloo", "nccl"), "auto", "limit"


def measure(run: Run) -> None:
    """Start the ranks once per number of ranks, and run the cases; NCCL may refuse."""
    device = "cpu" if run.is_trial else "cuda"
    for k, cases in by_key(run.cases, lambda case: case.world_size).items():
        with ExitStack() as stack:
            ours = stack.enter_context(start_our_ranks(k, device))
            groups = dict.fromkeys(("gloo", OURS, LIMIT), ours)
            try:
                nccl = stack.enter_context(start_our_ranks(k, device, "nccl"))
                nccl.measure("nccl", 1, 1, 0)
                groups["nccl"] = nccl
            except GroupError as error:
                run.skip(f"NCCL, {num_ranks(k)}", str(error))
            for case in cases:
                run_case(run, case, groups)


def cases_of(effort: str) -> list[Case]:
    """Return the sizes and the numbers of ranks."""
    sizes = {"full": (2**16, 2**20, 2**24, 2**28), "quick": (2**16, 2**24), "trial": (2**16,)}
    return [
        case_of(size, k, *PEERS, OURS, LIMIT)
        for k in ((2, 4) if effort == "full" else (2,))
        for size in sizes[effort]
    ]


BENCHMARK = Benchmark(
    section="peers_cuda",
    title="Ranks in processes on GPUs",
    about="One process per rank, tensors on GPUs, time of the slowest rank. In the limit all ranks "
    "write their own tensors in place. gloo copies through the memory of the host.",
    efforts={"full": Effort(31, 8.0), "quick": Effort(9, 4.0), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    ours=OURS,
    peers=PEERS,
    limit=LIMIT,
    device="cuda",
)
