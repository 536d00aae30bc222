"""Time all_reduce over CPU ranks of one process against plain torch and what memory allows.

    python benchmarks/allreduce.py --quick
    python benchmarks/allreduce.py --sizes 4KiB,1MiB --ranks 2,4 --candidates fused,ring
    python benchmarks/allreduce.py --json out.jsonl --plot out.png

Every call comes just after a small operation of torch's on all its threads, as in training, and
every candidate has buffers of its own. The limit is an in-place multiplication of k such buffers,
or of one that is as large, by torch's own threads, in the same turns: the fastest call of either.
The candidates are in candidates.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import (
    DTYPES,
    LENET,
    Benchmark,
    Case,
    Effort,
    Run,
    each_case,
    flat_case,
    is_sum,
    merged,
    random_lists,
    resnet18_shapes,
    run_as_script,
)
from benchmarks.candidates import CANDIDATES, names_in, touch_once
from benchmarks.machine import num_cores
from benchmarks.timing import after_operations
from pyringar.comm.auto import choose

KIB, MIB = 2**10, 2**20
SIZES_OF_16 = (4 * KIB, 256 * KIB, MIB, 16 * MIB)
UNNAMED = ("auto", "bound")


def zeros(case: Case) -> list[list[Tensor]]:
    """Return buffers for one candidate: sums of zeros stay what they are."""
    dtype = DTYPES[case.dtype]
    return [[torch.zeros(s, dtype=dtype) for s in case.shapes] for _ in range(case.world_size)]


def reducer(name: str, comm: pr.Communicator, lists: list[list[Tensor]]) -> Callable[[], object]:
    """Return the call that a candidate's name stands for."""
    return CANDIDATES[name].calls["allreduce"](comm, lists)


def is_correct(name: str, comm: pr.Communicator, case: Case, device: str = "cpu") -> bool:
    """Say whether every rank holds the sum after one call."""
    inputs, lists = random_lists(case, device), random_lists(case, device)
    reducer(name, comm, lists)()
    return all(is_sum(name, tensors, inputs) for tensors in lists)


def run_case(run: Run, case: Case) -> None:
    """Check every candidate, then time all of them and the limit in turns."""
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        calls = {name: reducer(name, comm, zeros(case)) for name in case.candidates}
        touched = zeros(case)
        flat = torch.zeros(case.world_size * case.size_bytes // DTYPES[case.dtype].itemsize)
        flat = flat.to(DTYPES[case.dtype])
        limits = {"each": lambda: touch_once(touched), "flat": lambda: flat.mul_(1)}
        timings = after_operations(
            calls | limits, rounds=run.effort.rounds, budget_s=run.effort.budget_s
        )
    limit_s = min(timings.pop(name).min_s for name in limits)
    taken, _ = choose("host")
    takes = dict.fromkeys(UNNAMED, taken)
    run.add(run.rows(case, timings, correct, limit_s=limit_s, takes=takes))


# -- cases -----------------------------------------------------------------------------------------


def grid(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Return flat tensors of all these sizes on all these numbers of ranks."""
    return [flat_case(size, k, names_in("allreduce")) for size in sizes for k in ranks]


def lists(ranks: Sequence[int]) -> list[Case]:
    """Return all parameters of a model: where it matters which rank owns which."""
    models = {"LeNet": LENET, "ResNet-18": resnet18_shapes()}
    return [
        Case(name, k, (*names_in("allreduce"), "bound"), shapes)
        for name, shapes in models.items()
        for k in ranks
    ]


def single_cases() -> list[Case]:
    """Return the cases beside the grid: more ranks, other dtypes, calls checked before."""
    cases = [flat_case(4 * KIB, k, ("naive", "allreduce", "bound")) for k in (2, 4, 8, 16)]
    for size in (256 * KIB, MIB):
        cases += [flat_case(size, k, ("naive", "fused", "bound")) for k in (2, 4, 8, 16)]
    cases += [flat_case(n, 16, ("naive", "fused", "auto")) for n in SIZES_OF_16]
    for dtype in ("bf16", "fp16"):
        cases += [flat_case(64 * MIB, k, ("naive", "fused"), dtype) for k in (2, 4)]
    return cases


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return grid((4 * KIB, 16 * KIB), (2,))
    if effort == "quick":
        return grid((4 * KIB, 64 * KIB, MIB, 16 * MIB), (2, 4, 8)) + lists((2, 4))
    sizes = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    return merged(grid(sizes, (2, 4, 8)) + single_cases() + lists((2, 4, 8)))


BENCHMARK = Benchmark(
    section="allreduce",
    title="Ranks that are lists of one process",
    about="One interleaved run; single calls, each just after a small operation of torch's on all "
    "threads, and buffers of their own for each candidate. `bound` is a call whose arguments were "
    "checked before. The limit reads and writes every buffer once, the least that an allreduce can "
    "do.",
    baseline=("naive",),
    efforts={
        "full": Effort(1000, 6.0),
        "quick": Effort(200, 1.0),
        "smoke": Effort(5, 0.0),
    },
    cases=cases_of,
    measure=each_case(run_case),
    grid=grid,
    threads=num_cores(),  # peers and the limit get all cores, as ours do
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
