"""Time one rank per process: ours, gloo, and the libraries that benchmarks/peers can install.

    python benchmarks/processes.py --quick
    python benchmarks/processes.py --only "4 KiB" --ranks 2 --peers impi,openmpi
    python benchmarks/processes.py --json out.jsonl

The ranks of each library are processes that are started once, and wait in the kernel while it is
not their turn. Each call is timed by itself: every rank writes its tensor, so that its own cache
holds it, all meet at the library's own barrier, and the slowest rank's time counts. Every sum is
checked, element by element, after the call that was timed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import Benchmark, Case, Effort, Run, format_size, merged, run_as_script
from benchmarks.candidates import names_in
from benchmarks.machine import num_cores
from benchmarks.peers.group import Answer, Group, GroupError
from benchmarks.peers.registry import PEERS, peers_of, start_our_ranks
from benchmarks.rows import by_key
from benchmarks.timing import Timing, in_turns
from pyringar.comm.auto import choose

KIB, MIB = 2**10, 2**20
MOST_S = 60.0  # of a case on a machine so busy that not even five rounds fit
MOST_IDLE_SHARE = 0.05  # of a processor, for a rank whose turn it is not
LEAST_IDLE_CPU_S = 0.05  # less says nothing: a run was very short
LIBRARIES = peers_of("processes")
UNNAMED = ("bound", "auto", "registered", "backend")


def measure(run: Run) -> None:
    """Run the cases beside the ranks of pyringar and gloo."""
    measure_beside(run, start_our_ranks)


def measure_beside(run: Run, start_ours: Callable[[int], Group]) -> None:
    """Run the cases in groups that the same processes can run."""
    for k, cases in by_key(run.cases, lambda case: case.world_size).items():
        names = {name for case in cases for name in case.candidates}
        with ExitStack() as stack:
            ours = stack.enter_context(start_ours(k))
            peers = {
                name: stack.enter_context(PEERS[name].start(k))
                for name in run.peers
                if name in names
            }
            for case in cases:
                measure_case(run, case, ours, peers)
            for group in (ours, *peers.values()):
                note_group(run, group)


def measure_case(run: Run, case: Case, ours: Group, peers: Mapping[str, Group]) -> None:
    """Time and check all candidates in turns, and take their rows."""
    numels = [shape[0] for shape in case.shapes]
    idle_s = case.settings.get("idle_s", 0.0)
    is_busy = case.settings.get("busy", False)
    with busy_process() if is_busy else nullcontext():
        samplers = {
            name: peers.get(name, ours).sampler(name, numels, idle_s)
            for name in case.candidates
            if name not in PEERS or name in peers
        }
        answers = in_turns(
            samplers, rounds=run.effort.rounds, budget_s=run.effort.budget_s, most_s=MOST_S
        )
    timings = {name: timing_of(found, is_busy) for name, found in answers.items()}
    correct = {name: not any(a.wrong for a in found) for name, found in answers.items()}
    limit_s = timings["limit"].median_s if "limit" in timings else None
    taken, _ = choose("host" if run.benchmark.section == "lists" else "processes")
    takes = dict.fromkeys(UNNAMED, taken)
    run.add(run.rows(case, timings, correct, limit_s=limit_s, takes=takes))


def timing_of(answers: Sequence[Answer], is_busy: bool) -> Timing:
    """Summarize the calls of all rounds; beside a busy process, each round's mean.

    Few calls bear all that another process costs: a median of calls would not show it.
    """
    means = (statistics.fmean(answer.seconds) for answer in answers)
    calls = (seconds for answer in answers for seconds in answer.seconds)
    return replace(Timing.of(means if is_busy else calls), rounds=len(answers))


BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:  # nobody else would end it when the benchmark is killed
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that never sleeps, on whatever core the system gives it."""
    program = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def note_group(run: Run, group: Group) -> None:
    """Note a library's version, and what its ranks used of the processors out of turn.

    Raises:
        GroupError: So much that the others' times would be about them.
    """
    shares = run.results.facts.setdefault("idle_share", {})
    shares[group.name] = max(round(group.idle_share, 4), shares.get(group.name, 0.0))
    run.results.facts.setdefault("versions", {})[group.name] = group.version
    if group.idle_share > MOST_IDLE_SHARE and group.idle_cpu_s > LEAST_IDLE_CPU_S:
        raise GroupError(
            f"{group.name}: a rank used {group.idle_share:.0%} of a processor while others were "
            f"measured, expected {MOST_IDLE_SHARE:.0%} at most"
        )


# -- cases -----------------------------------------------------------------------------------------


def case_of(size_bytes: int, k: int, *candidates: str, **settings: Any) -> Case:
    """Return a case of one flat tensor per rank."""
    shape = (size_bytes // 4,)
    return Case(format_size(size_bytes), k, candidates, (shape,), settings=settings)


def grid(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Return all sizes on all numbers of ranks."""
    ours = (*names_in("processes"), "bound", "backend")
    return [
        case_of(size, k, *ours, *(("registered",) if size > MIB else ()))
        for k in ranks
        for size in sizes
    ]


def beside_a_busy_process(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Return cases while another process, which the benchmark starts, never sleeps."""
    return [
        replace(case, name=f"{case.name}, beside a busy process")
        for size in sizes
        for k in ranks
        for case in [case_of(size, k, "gloo", *LIBRARIES, "auto", "bound", busy=True)]
    ]


def single_cases() -> list[Case]:
    """Return the cases of lists, and of a first call after a sleep."""
    many = (((16 * KIB,),) * 64,)
    cases = [Case("64 x 64 KiB", 2, ("gloo", "gloo flattened", *LIBRARIES, "auto"), *many)]
    for name, settings in (("hot", {}), ("after 100 ms", {"idle_s": 0.1})):
        case = case_of(256 * KIB, 2, "auto", **settings)
        cases.append(replace(case, name=f"256 KiB, {name}"))
    return cases


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    crowded = 2 * num_cores()  # ranks that must share cores, whatever the machine
    if effort == "smoke":
        return grid((4 * KIB,), (2,))
    if effort == "quick":
        sizes = (4 * KIB, MIB, 16 * MIB)
        return merged(grid(sizes, (2, 4)) + beside_a_busy_process((4 * KIB,), (2,)))
    sizes = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    cases = grid(sizes, (2, 4)) + grid((8, 4 * KIB, MIB, 16 * MIB), (crowded,)) + single_cases()
    return merged(cases + beside_a_busy_process((4 * KIB, MIB, 16 * MIB), (2, 4)))


BENCHMARK = Benchmark(
    section="processes",
    title="One process per rank",
    about="A call is timed by itself, the slowest rank's time counts, and every rank has just "
    "written its tensor and met the others at the library's own barrier. Each library's ranks are "
    "processes of their own, which wait in the kernel while others are measured: a run in which a "
    f"rank uses more than {MOST_IDLE_SHARE:.0%} of a processor out of turn fails. `auto` is the "
    "call that users make, `bound` one whose arguments were checked before, and the best peer is "
    "the fastest of gloo and all libraries that are not ours. Libraries run with the settings that "
    "they come with. Beside a busy process, which the benchmark starts, times are means of a "
    "round's calls, few of which bear all that it costs. In the limit every rank writes its own "
    "tensors in place, once, all ranks at the same time; only sizes well beyond the caches say "
    "much.",
    baseline=("gloo", "gloo flattened", *LIBRARIES),
    efforts={"full": Effort(31, 8.0), "quick": Effort(7, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    grid=grid,
    peers=LIBRARIES,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
