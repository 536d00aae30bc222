"""Time all_reduce with one process per rank: pyringar, gloo, and the libraries of peers/.

benchmarks/README.md describes the method.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from benchmarks.bench import KIB, MIB, Benchmark, BenchmarkCase, Run, format_size
from benchmarks.machine import num_cores
from benchmarks.peers.peer_ranks import LibraryRanks
from benchmarks.peers.registry import PEERS, start_our_ranks
from benchmarks.rows import by_key
from benchmarks.timing import Effort, Sampler, in_turns

BESIDE = ", beside a busy process"  # suffix of cases that run beside a busy process
LIMIT = "limit"
OURS = (
    "gloo",
    "auto",
    "bound",
    "direct",
    "backend",
    LIMIT,
)  # candidates that torch_rank.py runs, all in one set of processes


def measure(run: Run) -> None:
    present = []
    for name, peer in PEERS.items():
        if why := peer.why_not():
            run.skip(peer.label, why)
        else:
            present.append(name)
    for k, cases in by_key(run.cases, lambda case: case.world_size).items():
        with ExitStack() as stack:
            ours = stack.enter_context(start_our_ranks(k))
            groups = dict.fromkeys(OURS, ours)
            groups |= {name: stack.enter_context(PEERS[name].start(k)) for name in present}
            for case in cases:
                run_case(run, case, groups)
            versions = {group.name: group.version for group in groups.values()}
            run.results.facts["versions"] = versions


def run_case(run: Run, case: BenchmarkCase, groups: Mapping[str, LibraryRanks]) -> None:
    wrong = dict.fromkeys(case.candidates, 0)
    is_busy = case.name.endswith(BESIDE)

    def sampler(name: str) -> Sampler:
        what = case.shapes[0][0] if case.shapes else case.name
        measure_calls = groups[name].sampler(name, what)

        def sample() -> Sequence[float]:
            answer = measure_calls()
            wrong[name] += answer.wrong
            # Mean, not median: the busy process delays only a few calls, but by much.
            return [statistics.fmean(answer.seconds)] if is_busy else answer.seconds

        return sample

    with busy_process() if is_busy else nullcontext():
        samplers = {name: sampler(name) for name in case.candidates if name in groups}
        timings = in_turns(samplers, run.effort)
    correct = {name: not count for name, count in wrong.items()}
    limit = timings.get(run.benchmark.limit or "")
    limit_s = limit.median_s if limit else None
    run.add(case, timings, correct, limit_s=limit_s)


BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # exits after a killed benchmark
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[None]:
    program = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def case_of(size_bytes: int, k: int, *candidates: str, suffix: str = "") -> BenchmarkCase:
    return BenchmarkCase(f"{format_size(size_bytes)}{suffix}", k, candidates, ((size_bytes // 4,),))


def cases_of(effort: str) -> list[BenchmarkCase]:
    crowded = 2 * num_cores()  # more ranks than cores on every machine
    sizes: Sequence[int] = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    busy_sizes, all_ranks = (4 * KIB, MIB, 16 * MIB), sorted({2, 4, crowded})
    if effort == "trial":
        sizes, busy_sizes, all_ranks = (4 * KIB,), (), [2]
    elif effort == "quick":
        sizes, busy_sizes, all_ranks = (4 * KIB, MIB, 16 * MIB), (4 * KIB,), [2, 4]
    some = ("gloo", *PEERS, "auto", "bound")
    return [
        case
        for k in all_ranks
        for case in (
            *(case_of(size, k, *PEERS, *OURS) for size in sizes),
            *(case_of(size, k, *some, suffix=BESIDE) for size in busy_sizes),
        )
    ]


BENCHMARK = Benchmark(
    section="processes",
    title="One process per rank",
    about="Time of one call on the slowest rank, float32 tensors in the memory of one machine. "
    "Before each call, every rank writes its tensor and waits at the library's barrier. Each "
    "library has its own processes, which sleep while another library is measured, and runs with "
    "its default settings. `auto` is pyringar's default call, `bound` a prepared call, `direct` an "
    "algorithm, `backend` a call of torch.distributed on the backend `ringar`. Beside a busy "
    "process, which keeps one core busy, times are means over the calls of a round. In `limit`, "
    "all ranks multiply their own tensors by 1 at the same time; it means little for tensors that "
    "fit in a cache.",
    efforts={"full": Effort(31, 8.0), "quick": Effort(7, 1.0), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    ours="auto",
    peers=("gloo", *PEERS),
    limit=LIMIT,
)
