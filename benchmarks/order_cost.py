"""Time sums in rank order, in tree order and exactly rounded, to compare their cost."""

from __future__ import annotations

from functools import partial

import torch

import pyringar as pr
from benchmarks.bench import KIB, MIB, Benchmark, BenchmarkCase, Run, each_case, flat_case
from benchmarks.machine import num_cores
from benchmarks.sums import is_nearest, random_lists, rank_order, tree_order
from benchmarks.timing import Effort, Sampler, after_operation, in_turns

ORDERS = ("rank", "tree", "exact")


def is_correct(order: str, comm: pr.Communicator, case: BenchmarkCase) -> bool:
    """Return whether every rank holds the sum in that order, bit for bit."""
    inputs, results = ([own[0] for own in random_lists(case)] for _ in range(2))
    comm.all_reduce(results, order=order)
    if not all(torch.equal(result, results[0]) for result in results):
        return False
    if order == "exact":
        return is_nearest(results[0], inputs)
    return torch.equal(results[0], {"rank": rank_order, "tree": tree_order}[order](inputs))


def sampler(order: str, comm: pr.Communicator, case: BenchmarkCase) -> Sampler:
    """Return a sampler of calls that restores the random inputs before each call.

    Else the sums would grow, and equal inputs of a second call would shortcut the exact sum.
    """
    inputs = [tensors[0] for tensors in random_lists(case)]
    tensors = [x.clone() for x in inputs]

    def fill() -> None:
        for tensor, x in zip(tensors, inputs, strict=True):
            tensor.copy_(x)

    return after_operation(partial(comm.all_reduce, tensors, order=order), fill)


def run_case(run: Run, case: BenchmarkCase) -> None:
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        samplers = {name: sampler(name, comm, case) for name in case.candidates}
        run.add(case, in_turns(samplers, run.effort), correct)


def cases_of(effort: str) -> list[BenchmarkCase]:
    if effort == "trial":
        return [flat_case(4 * KIB, 3, ORDERS)]
    if effort == "quick":
        return [flat_case(size, 4, ORDERS) for size in (4 * KIB, MIB, 16 * MIB)]
    sizes = [("fp32", size) for size in (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)]
    sizes += [("fp64", 16 * MIB)]
    sizes += [(dtype, size) for dtype in ("fp16", "bf16") for size in (MIB, 16 * MIB)]
    return [flat_case(size, k, ORDERS, dtype) for dtype, size in sizes for k in (4, 8)]


BENCHMARK = Benchmark(
    section="orders",
    title="What the order of a sum costs",
    about="Time of one call, all CPU ranks in one process, new inputs before each call. `rank` "
    "adds from rank 0 on, `tree` gives the same bits with any number of ranks, `exact` is the "
    "exact sum, rounded once.",
    efforts={"full": Effort(101, 4.0), "quick": Effort(31, 0.5), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=each_case(run_case),
    ours="tree",
    threads=num_cores(),
)
