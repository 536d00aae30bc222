"""Time all_reduce with k ranks on one GPU, beside plain torch and a copy within the GPU.

Clocks of a row:

    device    CUDA events around consecutive calls, time per call
    done      host time from the call until the stream has finished
    enqueue   host time until the call returns; the GPU may still compute
    graph     CUDA events around replays of a graph of many calls, time per call
    replay    host time from the replay of a one-call graph until the stream has finished

The limit is the time to read and write every buffer once (2 k N bytes) at the copy rate, which is
measured in the same run. Calls on the clock ``device`` rotate through tensors larger than the L2
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import pyringar as pr
from benchmarks.allreduce import NAIVE, call_of, is_correct, zeros
from benchmarks.bench import (
    LENET,
    MIB,
    Benchmark,
    BenchmarkCase,
    Run,
    each_case,
    flat_case,
    resnet18_shapes,
)
from benchmarks.timing import Call, DeviceClock, Effort, in_turns, rotating

CALLS_IN_GRAPH = 100
ROTATED_BYTES = 256 * MIB  # bytes of the rotated tensors: four times the largest L2 cache
COPY = "copy"


def copy_of(run: Run) -> tuple[Call, int]:
    """Return a function that copies a tensor within the GPU, and the tensor's bytes."""
    size_bytes = MIB if run.is_trial else 512 * MIB
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=run.device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source), size_bytes


def run_case(run: Run, case: BenchmarkCase) -> None:
    with pr.Communicator([run.device] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case, run.device) for name in case.candidates}
        if case.settings.get("is_latency"):
            time_latencies(run, case, comm, correct)
        else:
            time_throughput(run, case, comm, correct)
    if run.device != "cpu":
        torch.cuda.empty_cache()


def time_throughput(
    run: Run, case: BenchmarkCase, comm: pr.Communicator, correct: dict[str, bool]
) -> None:
    all_ranks_bytes = case.world_size * case.size_bytes
    rotated_bytes = 2**16 if run.is_trial else ROTATED_BYTES
    sets = [zeros(case, run.device) for _ in range(max(1, -(-rotated_bytes // all_ranks_bytes)))]
    copy, copy_bytes = copy_of(run)
    calls: dict[str, Call] = {COPY: copy}
    for name in case.candidates:
        calls[name] = rotating([call_of(name, comm, lists) for lists in sets])
    clock = DeviceClock(run.device)
    timings = in_turns({name: clock.sampler(call) for name, call in calls.items()}, run.effort)
    limit_s = timings.pop(COPY).median_s * all_ranks_bytes / copy_bytes
    run.add(case, timings, correct, clock="device", limit_s=limit_s)


def time_latencies(
    run: Run, case: BenchmarkCase, comm: pr.Communicator, correct: dict[str, bool]
) -> None:
    """Time small calls on the clocks ``done``, ``enqueue``, ``graph`` and ``replay``."""
    clock = DeviceClock(run.device)
    calls = {name: call_of(name, comm, zeros(case, run.device)) for name in case.candidates}
    ways = {"done": (calls, "done", 1), "enqueue": (calls, "enqueue", 1)}
    if clock.is_cuda:
        captured = {name: call for name, call in calls.items() if name != "ring"}
        ways["graph"] = replays_of(captured, CALLS_IN_GRAPH), "device", CALLS_IN_GRAPH
        ways["replay"] = replays_of(captured, 1), "done", 1
    for way, (candidates, measured_by, num_calls) in ways.items():
        samplers = {name: clock.sampler(call, measured_by) for name, call in candidates.items()}
        timings = in_turns(samplers, run.effort)
        each = {name: timing.divided_by(num_calls) for name, timing in timings.items()}
        run.add(case, each, correct, clock=way)


def replays_of(calls: dict[str, Callable[[], object]], count: int) -> dict[str, Call]:
    """Return, by candidate, the replay of a CUDA graph that holds `count` calls."""
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        replays[name] = graph.replay
    return replays


def cases_of(effort: str) -> list[BenchmarkCase]:
    large = (NAIVE, "fused", "ring", "auto")
    cases = [
        *(flat_case(256 * MIB, k, large, dtype) for dtype in ("fp32", "bf16") for k in (2, 4, 8)),
        flat_case(256 * MIB, 16, (NAIVE, "fused")),  # the kernel reduces 16 ranks in groups of four
        *(flat_case(size, k, large) for size in (2**16, MIB, 16 * MIB) for k in (2, 4)),
        BenchmarkCase("LeNet", 4, (NAIVE, "auto"), LENET),
        *(BenchmarkCase("ResNet-18", k, (NAIVE, "auto"), resnet18_shapes()) for k in (2, 4)),
    ]
    latencies = [
        flat_case(4096, 4, (NAIVE, "fused", "allreduce", "bound", "ring")),
        BenchmarkCase("LeNet calls", 4, (NAIVE, "auto"), LENET),
    ]
    cases += [replace(case, settings={"is_latency": True}) for case in latencies]
    if effort != "trial":
        return cases
    return [
        replace(case, shapes=tuple((min(s[0], 1000), *s[1:]) for s in case.shapes))
        for case in cases
        if case.name != "ResNet-18"
    ]


BENCHMARK = Benchmark(
    section="allreduce_cuda",
    title="Several ranks on one GPU",
    about="Time of one call, all ranks on the same GPU. `naive` is the book's allreduce. Clocks: "
    "`device` is GPU time per call in a row of calls, `graph` the same in a CUDA graph. `done` is "
    "host time from the call until the GPU has finished, `replay` the same for a CUDA graph. "
    "`enqueue` is host time until the call returns. The limit reads and writes every buffer once "
    "at the rate of a copy within the GPU.",
    efforts={"full": Effort(31, 1.5), "quick": Effort(7, 0.3), "trial": Effort(2, 0.1)},
    cases=cases_of,
    measure=each_case(run_case),
    ours="auto",
    peers=(NAIVE,),
    threads=None,
    device="cuda",
)
