"""Time one rank per process: ours against gloo, in the same processes, interleaved.

    python benchmarks/processes.py --quick
    python benchmarks/processes.py --only "4 KiB" --rounds 9
    python benchmarks/processes.py --json out.jsonl

A call's time is that of the slowest rank, from a common barrier on. Small messages are timed with
the processors kept awake by idle-priority loops, since gloo loses most of its time waking them.
"after 100 ms": all ranks sleep, meet at a barrier, and 20 calls are timed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
    format_size,
    is_sum,
    merged,
    run_as_script,
)
from benchmarks.candidates import CANDIDATES, names_in
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.rows import by_key
from benchmarks.timing import host_s, in_turns
from pyringar.comm.auto import choose

KIB, MIB = 2**10, 2**20
MOST_S = 60.0  # of a case on a machine so busy that not even five rounds fit
ROUND_S = 5e-3
UNNAMED = ("bound", "auto")


# -- in the ranks' processes -----------------------------------------------------------------------


class CallWorker(Worker):
    """One rank: makes tensors, runs candidates, keeps time."""

    def tensors(self, case: Case, candidate: str) -> list[Tensor]:
        """Return zeros, in memory that is registered where the candidate wants that."""
        numels = [shape[0] for shape in case.shapes]
        if candidate != "registered":
            return [torch.zeros(n) for n in numels]
        shared = [pr.shared_empty(n) for n in numels]
        for tensor in shared:
            self.comm.register(tensor)
        return shared

    def function(self, candidate: str, tensors: list[Tensor]) -> Callable[[], object]:
        """Return the call that a candidate's name stands for."""
        return CANDIDATES[candidate].calls["processes"](self, tensors)

    def is_correct(self, case: Case, candidate: str) -> bool:
        """Say whether this rank holds the sum after one call; the limit sums nothing."""
        tensors = self.tensors(case, candidate)
        inputs = [
            [
                torch.randn(t.numel(), generator=torch.Generator().manual_seed(9 + r))
                for t in tensors
            ]
            for r in range(self.world_size)
        ]
        for tensor, mine in zip(tensors, inputs[self.rank], strict=True):
            tensor.copy_(mine)
        self.function(candidate, tensors)()
        return candidate == "limit" or is_sum(candidate, tensors, inputs)

    def time_calls(self, function: Callable[[], object], calls: int, idle_s: float = 0.0) -> float:
        """Return the seconds per call on this rank, from a common start."""
        time.sleep(idle_s)
        self.comm.barrier()
        return host_s(function, calls)

    def sampler(self, function: Callable[[], object], idle_s: float) -> Callable[[], float]:
        """Return what takes a sample: some milliseconds of calls; few after a sleep."""
        if idle_s:
            return lambda: self.time_calls(function, 20, idle_s)
        self.time_calls(function, 2)
        # Twice: a lucky one on a busy machine would ask for far too many calls.
        once_s = max(self.over_ranks([self.time_calls(function, 4) for _ in range(2)]))
        calls = max(1, min(2000, round(ROUND_S / once_s)))

        def sample() -> float:
            self.time_calls(function, 1 + calls // 4)
            return self.time_calls(function, calls)

        return sample

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check every candidate, then time all of them in turns."""
        correct = [float(self.is_correct(case, name)) for name in case.candidates]
        correct = self.over_ranks(correct, "min")
        shared = self.tensors(case, "auto")  # pages of their own would be luck of their own
        samplers = {
            name: self.sampler(
                self.function(name, self.tensors(case, name) if name == "registered" else shared),
                case.settings.get("idle_s", 0.0),
            )
            for name in case.candidates
        }
        samples = in_turns(
            samplers,
            rounds=effort.rounds,
            budget_s=effort.budget_s,
            most_s=MOST_S,
            agree=self.agree,
        )
        return self.slowest(samples), {
            name: bool(c) for name, c in zip(case.candidates, correct, strict=True)
        }


# -- in the parent ---------------------------------------------------------------------------------


def spin() -> None:
    """Keep a processor from halting, and give it up to whoever wants it."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() != 1:
        for _ in range(100_000):
            pass


@contextmanager
def awake_processors(wanted: bool) -> Iterator[None]:
    """Run idle-priority loops, one per core, while the block runs."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0)) if wanted else 0
    spinners = [context.Process(target=spin, daemon=True) for _ in range(cores)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def measure(run: Run) -> None:
    """Run the cases in groups that the same processes can run."""
    groups = by_key(run.cases, lambda c: (c.world_size, c.settings.get("awake", False)))
    for (_, awake), cases in groups.items():
        with awake_processors(awake):
            for case, timings, correct in run_cases(CallWorker, cases, run.effort):
                taken, _ = choose("processes")
                run.add(
                    run.rows(
                        *(case, timings, correct),
                        limit_s=timings["limit"].median_s if "limit" in timings else None,
                        takes=dict.fromkeys(UNNAMED, taken),
                    )
                )


# -- cases -----------------------------------------------------------------------------------------


def case_of(size_bytes: int, k: int, *candidates: str, **settings: Any) -> Case:
    """Return a case of one flat tensor per rank."""
    shape = (size_bytes // 4,)
    return Case(format_size(size_bytes), k, candidates, (shape,), settings=settings)


def grid(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Return all sizes on all numbers of ranks, the small ones with awake processors."""
    cases = []
    for k in ranks:
        for size in sizes:
            also = "bound" if size <= MIB else "registered"
            cases.append(case_of(size, k, *names_in("processes"), also, awake=size <= MIB))
    return cases


def single_cases() -> list[Case]:
    """Return the cases beside the grid: tiny, large, lists, the backend, and after a sleep."""
    everything = ("gloo", "auto", "registered", "limit")
    cases = [case_of(8, 2, "gloo", "bound", "auto", awake=True), case_of(256 * MIB, 2, *everything)]
    many = (((16 * KIB,),) * 64,)
    cases.append(Case("64 x 64 KiB", 2, ("gloo", "gloo flattened", "auto"), *many))
    cases += [case_of(size, 2, "gloo", "backend") for size in (4 * KIB, MIB, 25 * MIB, 100 * MIB)]
    for name, settings in (("hot", {}), ("after 100 ms", {"idle_s": 0.1})):
        case = case_of(256 * KIB, 2, "auto", **settings)
        cases.append(replace(case, name=f"256 KiB, {name}"))
    return cases


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return [replace(grid((4 * KIB,), (2,))[0], settings={})]
    if effort == "quick":
        return grid((4 * KIB, MIB, 16 * MIB), (2, 4))
    sizes = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    return merged(grid(sizes, (2, 4)) + single_cases())


BENCHMARK = Benchmark(
    section="processes",
    title="One process per rank",
    about="Times of the slowest rank from a common barrier on. gloo sleeps between messages, and "
    "is far from its minimum most of the time. In the limit every rank writes its own tensors in "
    "place, once, all ranks at the same time; only sizes well beyond the caches say much.",
    baseline=("gloo", "gloo flattened"),
    efforts={"full": Effort(61, 8.0), "quick": Effort(7, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    grid=grid,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
