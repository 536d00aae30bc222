"""Time all_reduce with all CPU ranks in one process, by algorithm and beside plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import pyringar as pr
from benchmarks.bench import (
    DTYPES,
    KIB,
    LENET,
    MIB,
    Benchmark,
    BenchmarkCase,
    Run,
    each_case,
    flat_case,
    resnet18_shapes,
)
from benchmarks.machine import num_cores
from benchmarks.sums import is_close, random_lists, rank_order, ring_order
from benchmarks.timing import Effort, after_operation, in_turns

NAIVE = "naive"
CANDIDATES = (NAIVE, "fused", "direct", "ring", "sharded", "auto")
LIMITS = ("each buffer", "one buffer")
Lists = list[list[Tensor]]  # lists[rank][i] is tensor i of a rank


def naive(lists: Sequence[Sequence[Tensor]]) -> None:
    """Add each tensor on rank 0, then copy the sum to all ranks, as the book's loop does."""
    for data in zip(*lists, strict=True):
        first = data[0]
        for other in data[1:]:
            first.add_(other)
        for other in data[1:]:
            other.copy_(first)


def call_of(name: str, comm: pr.Communicator, lists: Lists) -> Callable[[], object]:
    column = [tensors[0] for tensors in lists]
    is_list = len(lists[0]) > 1
    if name == NAIVE:
        return lambda: naive(lists)
    if name == "allreduce":
        return lambda: pr.allreduce(column)
    if name == "bound":
        return comm.bind_coalesced(lists) if is_list else comm.bind(column)
    if is_list:
        return lambda: comm.all_reduce_coalesced(lists, algorithm=name)
    return lambda: comm.all_reduce(column, algorithm=name)


def is_correct(name: str, comm: pr.Communicator, case: BenchmarkCase, device: str = "cpu") -> bool:
    """Return whether every rank holds the sums: exact bits, except for the book's loop."""
    inputs, lists = random_lists(case, device), random_lists(case, device)
    call_of(name, comm, lists)()
    promised = ring_order if name == "ring" else rank_order
    for i, terms in enumerate(zip(*inputs, strict=True)):
        want = promised([term.flatten() for term in terms])
        is_right = is_close if name == NAIVE else torch.equal
        if not all(is_right(tensors[i].flatten(), want) for tensors in lists):
            return False
    return True


def zeros(case: BenchmarkCase, device: str = "cpu") -> Lists:
    """Return tensors of zeros, since repeated in-place sums of other values overflow."""
    dtype = DTYPES[case.dtype]
    return [
        [torch.zeros(shape, dtype=dtype, device=device) for shape in case.shapes]
        for _ in range(case.world_size)
    ]


def run_case(run: Run, case: BenchmarkCase) -> None:
    buffers = [tensor for tensors in zeros(case) for tensor in tensors]
    one_buffer = torch.zeros(sum(map(torch.numel, buffers)), dtype=DTYPES[case.dtype])
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        calls = {name: call_of(name, comm, zeros(case)) for name in case.candidates}
        limits = (lambda: [buffer.mul_(1) for buffer in buffers], lambda: one_buffer.mul_(1))
        calls |= zip(LIMITS, limits, strict=True)
        samplers = {name: after_operation(call) for name, call in calls.items()}
        timings = in_turns(samplers, run.effort)
    limit_s = min(timings.pop(name).min_s for name in LIMITS)
    run.add(case, timings, correct, limit_s=limit_s)


def cases_of(effort: str) -> list[BenchmarkCase]:
    if effort == "trial":
        return [flat_case(size, 2, (*CANDIDATES, "bound")) for size in (4 * KIB, 16 * KIB)]
    if effort == "quick":
        sizes, all_ranks = (4 * KIB, 64 * KIB, MIB, 16 * MIB), (2, 4, 8)
    else:
        sizes = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
        all_ranks = (2, 4, 8, 16)
    cases = [flat_case(size, k, candidates_of(size, k)) for size in sizes for k in all_ranks]
    if effort == "full":
        halves = (("fp16", 2), ("fp16", 4), ("bf16", 2), ("bf16", 4))
        cases += [flat_case(64 * MIB, k, (NAIVE, "fused"), dtype) for dtype, k in halves]
    models = {"LeNet": LENET, "ResNet-18": resnet18_shapes()}
    names = (*CANDIDATES, "bound")
    return cases + [BenchmarkCase(m, k, names, models[m]) for m in models for k in all_ranks[:3]]


def candidates_of(size_bytes: int, k: int) -> tuple[str, ...]:
    names = (NAIVE, "fused", "auto") if k > 8 else CANDIDATES
    if size_bytes <= 4 * KIB:
        names += ("allreduce",)
    return (*names, "bound") if size_bytes <= MIB else names


BENCHMARK = Benchmark(
    section="allreduce",
    title="All ranks in one process",
    about="Time of one call on CPU tensors, one tensor per rank or all parameters of a model. A "
    "small torch operation on all threads comes before each call. `naive` is the book's allreduce; "
    "`fused`, `direct`, `ring` and `sharded` are the [algorithms](algorithms.md), `auto` is the "
    "default. `allreduce` is the function `pr.allreduce`; `bound` is a prepared call "
    "(`comm.bind`), which checks its arguments once. The limit reads and writes every buffer once.",
    efforts={"full": Effort(1000, 6.0), "quick": Effort(200, 0.5), "trial": Effort(5, 0.0)},
    setup_s=4.0,
    cases=cases_of,
    measure=each_case(run_case),
    ours="auto",
    peers=(NAIVE,),
    threads=num_cores(),  # torch threads: the book's loop uses all cores, as pyringar does
)
