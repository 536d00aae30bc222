"""Time what the order of a sum costs: rank order, a tree, and the correctly rounded sum.

    python benchmarks/orders.py --quick
    python benchmarks/orders.py --sizes 64KiB,16MiB --ranks 4

As in allreduce.py: lists of one process, each call just after a small operation of torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import (
    Benchmark,
    Case,
    Effort,
    Run,
    each_case,
    flat_case,
    goal,
    merged,
    random_lists,
    run_as_script,
)
from benchmarks.machine import num_cores
from benchmarks.rows import Row
from benchmarks.timing import Timing, host_s, in_turns
from pyringar.comm.orders import tree

KIB, MIB = 2**10, 2**20
ORDERS = ("rank", "tree", "exact")
NUM_CHECKED = 1000  # elements of an exact sum, each as a fraction


def is_correct(order: str, comm: pr.Communicator, case: Case) -> bool:
    """Say whether every rank holds the sum of that order after one call."""
    inputs = [mine[0] for mine in random_lists(case)]
    results = [mine[0] for mine in random_lists(case)]
    comm.all_reduce(results, order=order)
    if not all(torch.equal(result, results[0]) for result in results):
        return False
    if order == "exact":
        return _is_nearest(results[0][:NUM_CHECKED], [x[:NUM_CHECKED] for x in inputs])
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    add = torch.add
    want = tree(wide, add) if order == "tree" else reduce(add, wide)
    return torch.equal(results[0], want.to(inputs[0].dtype))


def _is_nearest(found: Tensor, terms: Sequence[Tensor]) -> bool:
    """Say whether no neighbour of a number is nearer to the sum of the terms."""
    ends = [torch.full_like(found, end) for end in (float("inf"), float("-inf"))]
    near = [found, *(torch.nextafter(found, end) for end in ends)]
    for number, *others in zip(*(t.tolist() for t in (*near, *terms)), strict=True):
        total = sum(map(Fraction, others[2:]))
        error = abs(Fraction(number) - total)
        if any(abs(Fraction(other) - total) < error for other in others[:2]):
            return False
    return True


def sampler(order: str, comm: pr.Communicator, case: Case) -> Callable[[], float]:
    """Return what times a call on numbers that are written anew before.

    Sums of sums would grow, and sums of equal numbers prove themselves exact too easily.
    """
    inputs = [mine[0] for mine in random_lists(case)]
    tensors = [x.clone() for x in inputs]
    operand = torch.zeros(2**16)  # as in timing.after_operations

    def sample() -> float:
        for tensor, x in zip(tensors, inputs, strict=True):
            tensor.copy_(x)
        operand.mul_(1)
        return host_s(lambda: comm.all_reduce(tensors, order=order), 1)

    return sample


def run_case(run: Run, case: Case) -> None:
    """Check every order, then time all of them in turns."""
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        samplers = {name: sampler(name, comm, case) for name in case.candidates}
        effort = run.effort
        samples = in_turns(samplers, rounds=effort.rounds, budget_s=effort.budget_s)
    timings = {name: Timing.of(seconds) for name, seconds in samples.items()}
    run.add(run.rows(case, timings, correct, limit_s=None))


def goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what a tree, and an exact sum of large tensors, may cost beside rank order."""
    found = []
    for row in rows:
        most = {"tree": 1.05, "exact": 1.3}.get(row.candidate)
        is_asked = row.candidate == "tree" or (row.size_bytes or 0) >= 16 * MIB
        if most and row.speedup and is_asked:
            what = f"{row.case}, {row.world_size} ranks: {row.candidate} over rank order"
            found.append(goal(row, what, 1 / row.speedup, at_most=most))
    return found


# -- cases -----------------------------------------------------------------------------------------


def grid(sizes: Sequence[int], ranks: Sequence[int], dtype: str = "fp32") -> list[Case]:
    """Return flat tensors of all these sizes on all these numbers of ranks."""
    return [flat_case(size, k, ORDERS, dtype) for size in sizes for k in ranks]


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return grid((4 * KIB,), (3,))
    if effort == "quick":
        return grid((4 * KIB, MIB, 16 * MIB), (4,)) + grid((16 * MIB,), (4,), "bf16")
    sizes = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
    halves = [case for dtype in ("bf16", "fp16") for case in grid((MIB, 16 * MIB), (4, 8), dtype)]
    dtypes = ("fp32", "bf16", "fp16")
    many = [case for dtype in dtypes for case in grid((64 * KIB, MIB), (12, 16), dtype)]
    return merged(grid(sizes, (2, 4, 8)) + halves + many + grid((16 * MIB,), (4, 8), "fp64"))


BENCHMARK = Benchmark(
    section="orders",
    title="What the order of a sum costs",
    about="Lists of one process, whose numbers are written anew before each call. `tree` has the "
    "same bits on any number of ranks; `exact` is the real number, rounded once.",
    baseline=("rank",),
    efforts={"full": Effort(101, 4.0), "quick": Effort(31, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=each_case(run_case),
    grid=grid,
    threads=num_cores(),
    goals=goals,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
