"""Time all_reduce over CPU ranks of one process beside JAX, whose ranks are devices of a process.

    python benchmarks/lists.py --quick
    python benchmarks/lists.py --sizes 64KiB,4MiB --ranks 2 --json out.jsonl

As in processes.py, each library has a process of its own, and every tensor is written before a
call that is timed by itself. allreduce.py compares ours with plain torch and many sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import Benchmark, Case, Effort, Run, run_as_script
from benchmarks.candidates import names_in
from benchmarks.machine import num_cores
from benchmarks.peers.registry import peers_of, start_our_lists
from benchmarks.processes import case_of, measure_beside

KIB, MIB = 2**10, 2**20


def measure(run: Run) -> None:
    """Run the cases beside the process of our lists."""
    measure_beside(run, start_our_lists)


def grid(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Return all sizes on all numbers of ranks."""
    return [case_of(size, k, *names_in("lists"), "bound") for size in sizes for k in ranks]


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return grid((4 * KIB,), (2,))
    if effort == "quick":
        return grid((4 * KIB, MIB), (2, 4))
    return grid((4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB), (2, 4))


BENCHMARK = Benchmark(
    section="lists",
    title="Ranks of one process, beside JAX",
    about="Ours are tensors of one process; JAX's ranks are CPU devices of one process, summed by "
    "`psum` in a compiled function that may reuse its argument's memory. Each has a process of its "
    "own and all cores in turn. One call is timed after every tensor was written: ours by the "
    "caller, JAX's by its devices. The limit reads and writes every buffer once.",
    baseline=("naive", *peers_of("lists")),
    efforts={"full": Effort(31, 6.0), "quick": Effort(7, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    grid=grid,
    threads=num_cores(),
    peers=peers_of("lists"),
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
