"""Time one rank per process: ours, gloo, and the libraries that peers/install.py can install.

Each library has its own ranks, which are started once per number of ranks, and which wait in
the kernel while another library is measured. A rank writes its tensor before each call, so that
its own cache holds it, and all ranks meet at the library's own barrier. The slowest rank's time
counts. Every sum is checked, element by element, after the call that was timed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from benchmarks.bench import KIB, MIB, Benchmark, Case, Run, format_size
from benchmarks.machine import num_cores
from benchmarks.peers.group import Group
from benchmarks.peers.registry import PEERS, start_our_ranks
from benchmarks.rows import by_key
from benchmarks.timing import Effort, Sampler, in_turns

BESIDE = ", beside a busy process"  # how the names of cases with another program end
LIMIT = "limit"
OURS = ("gloo", "auto", "bound", "direct", "backend", LIMIT)  # in the same processes


def measure(run: Run) -> None:
    """Start the ranks of all libraries once per number of ranks, and run the cases."""
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


def run_case(run: Run, case: Case, groups: Mapping[str, Group]) -> None:
    """Time and check the candidates that have ranks, in turns."""
    wrong = dict.fromkeys(case.candidates, 0)
    is_busy = case.name.endswith(BESIDE)

    def sampler(name: str) -> Sampler:
        what = case.shapes[0][0] if case.shapes else case.name
        measure_calls = groups[name].sampler(name, what)

        def sample() -> Sequence[float]:
            answer = measure_calls()
            wrong[name] += answer.wrong
            # Few calls bear all that another process costs: a median of calls would not show it.
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
while os.getppid() == parent:  # nobody else would end it when the benchmark is killed
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that never sleeps."""
    program = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def case_of(size_bytes: int, k: int, *candidates: str, suffix: str = "") -> Case:
    """Return a case with one flat tensor per rank."""
    return Case(f"{format_size(size_bytes)}{suffix}", k, candidates, ((size_bytes // 4,),))


def cases_of(effort: str) -> list[Case]:
    """Return the cases, those of one number of ranks together."""
    crowded = 2 * num_cores()  # ranks that share cores, whatever the machine
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
    about="A call is timed by itself, and the slowest rank's time counts. Every rank has just "
    "written its tensor and met the other ranks at the library's own barrier. The ranks of each "
    "library are processes of their own, which wait in the kernel while another library is "
    "measured. `auto` is the call that users make, `bound` a call whose arguments were checked "
    "before, `backend` a call of torch.distributed. Libraries run with the settings that they come "
    "with. Beside a busy process, which the benchmark starts, times are means of a round's calls. "
    "In the limit all ranks write their own tensors in place, once, at the same time; it says "
    "much only for sizes well beyond the caches.",
    efforts={"full": Effort(31, 8.0), "quick": Effort(7, 1.0), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    ours="auto",
    peers=("gloo", *PEERS),
    limit=LIMIT,
)
