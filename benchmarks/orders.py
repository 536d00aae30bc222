"""Time what the order of a sum costs: rank order, a tree, and the correctly rounded sum."""

from __future__ import annotations

from functools import partial

import torch

import pyringar as pr
from benchmarks.bench import KIB, MIB, Benchmark, Case, Run, each_case, flat_case
from benchmarks.machine import num_cores
from benchmarks.sums import is_nearest, random_lists, rank_order, tree_order
from benchmarks.timing import Effort, Sampler, after_operation, in_turns

ORDERS = ("rank", "tree", "exact")


def is_correct(order: str, comm: pr.Communicator, case: Case) -> bool:
    """Return whether every rank holds the sum of that order after one call."""
    inputs, results = ([own[0] for own in random_lists(case)] for _ in range(2))
    comm.all_reduce(results, order=order)
    if not all(torch.equal(result, results[0]) for result in results):
        return False
    if order == "exact":
        return is_nearest(results[0], inputs)
    return torch.equal(results[0], {"rank": rank_order, "tree": tree_order}[order](inputs))


def sampler(order: str, comm: pr.Communicator, case: Case) -> Sampler:
    """Return a sampler of calls on inputs that are written anew before each call.

    Sums of sums would grow, and a sum of equal numbers is found to be exact too easily.
    """
    inputs = [tensors[0] for tensors in random_lists(case)]
    tensors = [x.clone() for x in inputs]

    def fill() -> None:
        for tensor, x in zip(tensors, inputs, strict=True):
            tensor.copy_(x)

    return after_operation(partial(comm.all_reduce, tensors, order=order), fill)


def run_case(run: Run, case: Case) -> None:
    """Check every order, then time all of them in turns."""
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        samplers = {name: sampler(name, comm, case) for name in case.candidates}
        run.add(case, in_turns(samplers, run.effort), correct)


def cases_of(effort: str) -> list[Case]:
    """Return the cases by dtype, size and number of ranks."""
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
    about="Lists of one process, whose numbers are written anew before each call. `tree` has the "
    "same bits on any number of ranks; `exact` is the real number, rounded once.",
    efforts={"full": Effort(101, 4.0), "quick": Effort(31, 0.5), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=each_case(run_case),
    ours="tree",
    threads=num_cores(),
)
