"""Time all_reduce with k ranks on one GPU against plain torch, NCCL, and what memory allows.

    python benchmarks/allreduce_cuda.py --quick --only ResNet
    python benchmarks/allreduce_cuda.py --json out.jsonl --plot out.png
    python benchmarks/allreduce_cuda.py --dry-run        # CPU ranks, tiny: a trial of this script

Rows say by which clock they were timed:

    device    CUDA events around calls in a row, time per call
    done      from the host's call until the stream has finished
    enqueue   until the call has returned, the device still at work
    graph     CUDA events around replays of a graph of many calls, time per call
    replay    from the replay of a graph of one call until the stream has finished

The limit is the time for reading and writing every buffer once (2 k N bytes) at the rate of a copy
within the device, measured in the same run. On the device's clock tensors are taken in turn from
sets that no cache holds. NCCL's ranks share the GPU in one process, if its version can do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks import nccl
from benchmarks.allreduce import is_correct, reducer
from benchmarks.bench import (
    DTYPES,
    LENET,
    Benchmark,
    Case,
    Effort,
    Run,
    flat_case,
    goal,
    resnet18_shapes,
    run_as_script,
)
from benchmarks.candidates import names_in
from benchmarks.rows import Row
from benchmarks.timing import ROTATED_BYTES, Clock, Timing, rotating

CALLS_IN_GRAPH = 100
NCCL_RANKS = (2, 4)
NCCL_SIZES = (2**16, 2**20, 2**24, 2**28)

Calls = Mapping[str, Callable[[], object]]


# -- one case --------------------------------------------------------------------------------------


def zeros_sets(case: Case, device: str, rotated_bytes: int) -> list[list[list[torch.Tensor]]]:
    """Return sets of tensors of all ranks, of which no cache holds all."""
    num_sets = max(1, -(-rotated_bytes // (case.world_size * case.size_bytes)))
    return [
        [
            [torch.zeros(s, dtype=DTYPES[case.dtype], device=device) for s in case.shapes]
            for _ in range(case.world_size)
        ]
        for _ in range(num_sets)
    ]


def copier(run: Run) -> tuple[Callable[[], object], int]:
    """Return a copy within the device, which reads and writes each byte once, and its bytes."""
    size_bytes = 2**20 if run.is_smoke else 512 * 2**20
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=run.device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source), size_bytes


def limit_of(case: Case, copy: Timing, copy_bytes: int) -> float:
    """Return the seconds for 2 k N bytes at the rate of a copy, which moves each byte twice."""
    return case.world_size * case.size_bytes * copy.median_s / copy_bytes


def run_case(run: Run, case: Case) -> None:
    """Check every candidate, then time all of them and a copy in turns on the device's clock."""
    copy, copy_bytes = copier(run)
    with pr.Communicator([run.device] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case, run.device) for name in case.candidates}
        sets = zeros_sets(case, run.device, 2**16 if run.is_smoke else ROTATED_BYTES)
        calls = {
            name: rotating([reducer(name, comm, lists) for lists in sets])
            for name in case.candidates
        }
        timings = Clock(run.device).interleaved(
            {**calls, "copy": copy}, rounds=run.effort.rounds, budget_s=run.effort.budget_s
        )
    limit_s = limit_of(case, timings.pop("copy"), copy_bytes)
    run.add(run.rows(case, timings, correct, clock="device", limit_s=limit_s))


def replays_of(functions: Calls, calls: int) -> dict[str, Callable[[], object]]:
    """Return each function's replay of a CUDA graph of so many calls, captured after one call."""
    replays: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                function()
        replays[name] = graph.replay
    return replays


def run_latencies(run: Run, case: Case) -> None:
    """Time the same small call by the other clocks: to its end, on the host alone, in a graph."""
    clock = Clock(run.device)
    copy, copy_bytes = copier(run)
    with pr.Communicator([run.device] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case, run.device) for name in case.candidates}
        (lists,) = zeros_sets(case, run.device, 0)
        functions = {name: reducer(name, comm, lists) for name in case.candidates}
        copied = clock.interleaved({"copy": copy}, rounds=5, budget_s=0.5)["copy"]
        ways: dict[str, tuple[Calls, str, int]] = {
            "done": (functions, "done", 1),
            "enqueue": (functions, "enqueue", 1),
        }
        if clock.is_cuda:
            ways["graph"] = replays_of(functions, CALLS_IN_GRAPH), "device", CALLS_IN_GRAPH
            ways["replay"] = replays_of(functions, 1), "done", 1
        for name, (candidates, measured_by, calls) in ways.items():
            timings = clock.interleaved(
                *(candidates, measured_by),
                rounds=run.effort.rounds,
                budget_s=run.effort.budget_s,
            )
            timings = {n: timing.of_each(calls) for n, timing in timings.items()}
            limit_s = limit_of(case, copied, copy_bytes)
            run.add(run.rows(case, timings, correct, clock=name, limit_s=limit_s))


def run_nccl(run: Run, world_size: int) -> None:
    """Add NCCL's rows beside those of the same cases, or the reason why there are none."""
    cases = {
        case.size_bytes: case
        for case in run.cases
        if (case.world_size, case.dtype, case.settings) == (world_size, "fp32", {})
        and case.size_bytes in NCCL_SIZES
    }
    if not cases:
        return
    answer, why = nccl.run(world_size, list(cases), run.effort.rounds)
    if answer is None:
        run.skip(f"NCCL, {world_size} ranks on one GPU", str(why))
        return
    add_nccl_rows(run, answer, cases)


def add_nccl_rows(run: Run, answer: Mapping[str, Any], cases: Mapping[int, Case]) -> None:
    """Add the child's timings as rows; the baseline and the limit are those of the same case."""
    for measured in answer["timings"]:
        case = cases[measured["size_bytes"]]
        beside = next(
            row
            for row in run.results.rows
            if (row.case, row.world_size, row.clock) == (case.name, case.world_size, "device")
        )
        run.add(
            run.rows(
                *(case, {"nccl": Timing(**measured["timing"])}, {"nccl": measured["correct"]}),
                limit_s=beside.limit_s,
                baseline_s=beside.baseline_s,
                clock="device",
            )
        )


def measure(run: Run) -> None:
    """Run the cases, then NCCL on those that it knows."""
    for case in run.cases:
        measure_one = run_latencies if case.settings.get("is_latency") else run_case
        measure_one(run, case)
        if run.device != "cpu":
            torch.cuda.empty_cache()
    if run.device != "cpu":
        for world_size in NCCL_RANKS:
            run_nccl(run, world_size)


# -- cases and goals -------------------------------------------------------------------------------


def device_cases() -> list[Case]:
    """Return the cases of the device's clock."""
    peers = names_in("allreduce", peers_only=True)
    large = (*peers, "fused", "ring", "auto")
    cases = [flat_case(2**28, k, large, dtype) for dtype in ("fp32", "bf16") for k in (2, 4, 8)]
    cases += [flat_case(2**28, 16, (*peers, "fused"))]  # in groups of four
    cases += [flat_case(size, k, large) for size in NCCL_SIZES[:-1] for k in (2, 4)]
    cases += [Case("LeNet", 4, (*peers, "auto"), LENET)]
    cases += [Case("ResNet-18", k, (*peers, "auto"), resnet18_shapes()) for k in (2, 4)]
    return cases


def latency_cases() -> list[Case]:
    """Return the cases of the host's clocks and the graph's."""
    small = flat_case(4096, 4, ("naive", "fused", "allreduce", "bound", "ring"))
    lenet = Case("LeNet calls", 4, ("naive", "auto"), LENET)
    return [replace(case, settings={"is_latency": True}) for case in (small, lenet)]


def cases_of(effort: str) -> list[Case]:
    """Return all cases; of smoke small ones, with at most 1000 elements a dimension."""
    cases = device_cases() + latency_cases()
    if effort != "smoke":
        return cases
    return [
        replace(case, shapes=tuple((min(s[0], 1000), *s[1:]) for s in case.shapes))
        for case in cases
        if case.name != "ResNet-18"
    ]


def goals_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures to reach on one GPU of the H100's class."""
    found = {(row.case, row.world_size, row.candidate, row.clock): row for row in rows}
    goals = []

    def want(case: str, k: int, name: str, figure: str, clock: str = "device", **at: float) -> None:
        row = found.get((case, k, name, clock))
        value = row and getattr(row, figure)
        goals.append(goal(row, f"{case}, {k} ranks, {name}: {figure}, {clock}", value, **at))

    for dtype, of_ring in (("fp32", 0.4), ("bf16", 0.25)):
        for k in (2, 4, 8):
            want(f"256 MiB {dtype}", k, "fused", "limit_share", at_least=0.98)
        want(f"256 MiB {dtype}", 8, "ring", "limit_share", at_least=of_ring)
    for k in (2, 4):
        want("16 MiB fp32", k, "fused", "limit_share", at_least=0.9)
        want("ResNet-18", k, "auto", "limit_share", at_least=0.85)
    for clock, most_us in (("enqueue", 5.0), ("done", 13.0)):
        want("4 KiB fp32", 4, "fused", "median_s", clock, at_most=most_us * 1e-6)
    want("LeNet calls", 4, "auto", "median_s", "enqueue", at_most=8e-6)
    return goals + nccl_goals(found)


def nccl_goals(found: Mapping[tuple[object, ...], Row]) -> list[dict[str, Any]]:
    """Want half as much again as NCCL where ranks share the GPU; of the ring as much."""
    goals = []
    for (case, k, name, clock), theirs in found.items():
        for ours, times in (("fused", 1.5), ("ring", 1.0)) if name == "nccl" else ():
            own = found.get((case, k, ours, clock))
            value = theirs.median_s / own.median_s if own else None
            what = f"{case}, {k} ranks, {ours}: times NCCL, {clock}"
            goals.append(goal(own, what, value, at_least=times))
    return goals


BENCHMARK = Benchmark(
    section="allreduce_cuda",
    title="Several ranks on one GPU",
    about="Clocks: `device` and `graph` by events on the stream, `done` and `replay` until the "
    "stream has finished, `enqueue` on the host alone. The limit moves every byte once at the rate "
    "of a copy within the device.",
    baseline=("naive",),
    efforts={"full": Effort(31, 1.5), "quick": Effort(7, 0.3), "smoke": Effort(2, 0.1)},
    cases=cases_of,
    measure=measure,
    device="cuda",
    goals=goals_of,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
