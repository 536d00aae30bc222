"""Times one rank per process: ours against gloo, in the same processes, interleaved.

    python benchmarks/processes.py                         # the cases of the README's table
    python benchmarks/processes.py --only "4 KiB" --rounds 9
    python benchmarks/processes.py --json out.json

A call's time is that of the slowest rank, from a common barrier on. Small messages are timed with
gloo's processors kept awake by idle-priority loops, for it loses most of its time waking them.
limit: every rank multiplies its own tensors in place, once, all ranks at the same time: the least
memory traffic that an all_reduce can have (2 k N); only sizes well beyond the caches say much.
backend: dist.all_reduce on a group of backend "ringar".
"after 100 ms": all ranks sleep, meet at a barrier, and 20 calls are timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pyringar as pr
import pyringar.distributed  # registers the backend
from pyringar.comm.auto import choose

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.allreduce import UNITS, expected, format_size
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.report.text import format_us
from benchmarks.timing import Timing, torch_threads, turns
from benchmarks.workers import receive

KIB, MIB = UNITS["KiB"], UNITS["MiB"]
MOST_S = 60.0  # of a case on a machine so busy that not even five rounds fit
ALGORITHMS = ("direct", "ring")  # asked for by name; "checked" is what auto takes
UNNAMED = ("bound", "checked", "coalesced")
OURS = ("bound", "checked", "registered", "coalesced", "backend", *ALGORITHMS)


@dataclass(frozen=True)
class Case:
    """Tensors of one rank, how many ranks, who reduces them."""

    name: str
    numels: tuple[int, ...]  # float32
    world_size: int
    candidates: tuple[str, ...]
    awake: bool = False  # idle-priority loops keep the processors awake
    idle_s: float = 0.0  # sleep before every round; its calls are those just after

    @property
    def size_bytes(self) -> int:
        """Bytes of one rank's tensors."""
        return 4 * sum(self.numels)


@dataclass(frozen=True)
class Row:
    """One candidate in one case, checked and timed."""

    case: str
    size_bytes: int
    world_size: int
    candidate: str
    median_us: float
    min_us: float
    q1_us: float
    q3_us: float
    max_us: float
    ratio_to_gloo: float | None
    limit_share: float | None
    correct: bool
    rounds: int
    takes: str | None  # the algorithm, where none was named


def flat(size_bytes: int, k: int, *candidates: str, awake: bool = False) -> Case:
    """One flat tensor per rank."""
    return Case(format_size(size_bytes), (size_bytes // 4,), k, candidates, awake)


def readme_cases() -> list[Case]:
    """What the README's table shows."""
    small = (8, 4 * KIB, 64 * KIB, MIB)
    large = (4 * MIB, 16 * MIB)
    cases = [flat(size, 2, "gloo", "bound", "checked", awake=True) for size in small]
    cases += [flat(size, 2, "gloo", "checked", "limit") for size in large]
    everything = ("gloo", "checked", "registered", "limit")
    cases += [flat(64 * MIB, k, *everything) for k in (2, 4)]
    cases += [flat(256 * MIB, 2, *everything)]
    cases += [
        flat(4 * KIB, 4, "gloo", "bound", "checked", awake=True),
        flat(MIB, 4, "gloo", "bound", "checked", awake=True),
    ]
    cases.append(Case("64 x 64 KiB", (16 * KIB,) * 64, 2, ("gloo", "gloo flattened", "coalesced")))
    cases += [flat(size, 2, "gloo", "backend") for size in (4 * KIB, MIB, 25 * MIB, 100 * MIB)]
    cases.append(Case("256 KiB, hot", (64 * KIB,), 2, ("checked",)))
    cases.append(Case("256 KiB, after 100 ms", (64 * KIB,), 2, ("checked",), idle_s=0.1))
    return cases


def report_cases(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """A grid of sizes and ranks, with every algorithm beside gloo and the limit."""
    everyone = ("gloo", "checked", "direct", "ring", "limit")
    cases = []
    for k in ranks:
        for size in sizes:
            also = ("bound",) if size <= MIB else ("registered",)
            cases.append(flat(size, k, *everyone, *also, awake=size <= MIB))
    return cases


def merged(cases: Sequence[Case]) -> list[Case]:
    """Each case once, with all candidates that it has anywhere, awake if it is so anywhere."""
    found: dict[tuple[str, int], Case] = {}
    for case in cases:
        key = case.name, case.world_size
        if key in found:
            candidates = dict.fromkeys((*found[key].candidates, *case.candidates))
            awake = case.awake or found[key].awake
            found[key] = replace(found[key], candidates=tuple(candidates), awake=awake)
        else:
            found[key] = case
    return list(found.values())


# -- in the workers --------------------------------------------------------------------------------


def flatten_and_reduce(tensors: Sequence[Tensor]) -> None:
    """What users of gloo do with many tensors."""
    flat_tensor = torch.cat([t.view(-1) for t in tensors])
    dist.all_reduce(flat_tensor)
    parts = flat_tensor.split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


class Worker:
    """One rank: makes tensors, runs candidates, keeps time."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        store = dist.FileStore(f"{folder}/gloo", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self.backend = dist.new_group(backend="ringar")
        self.comm = pr.ProcessCommunicator(
            dist.FileStore(f"{folder}/ours", world_size), rank, world_size
        )

    def tensors(self, case: Case, candidate: str) -> list[Tensor]:
        """Zeros for timing; where the candidate wants them registered, so."""
        if candidate != "registered":
            return [torch.zeros(n) for n in case.numels]
        shared = [pr.shared_empty(n) for n in case.numels]
        for tensor in shared:
            self.comm.register(tensor)
        return shared

    def function(self, candidate: str, tensors: list[Tensor]) -> Callable[[], object]:
        """The call that a candidate's name stands for."""
        if candidate == "limit":
            return lambda: [t.mul_(1) for t in tensors]
        if candidate == "gloo":
            return lambda: [dist.all_reduce(t) for t in tensors]
        if candidate == "backend":
            return lambda: [dist.all_reduce(t, group=self.backend) for t in tensors]
        if candidate == "gloo flattened":
            return lambda: flatten_and_reduce(tensors)
        if candidate == "bound":
            return self.comm.bind(tensors)
        if candidate in ALGORITHMS:
            return lambda: self.comm.all_reduce(tensors, algorithm=candidate)
        if len(tensors) == 1:
            return lambda: self.comm.all_reduce(tensors[0])
        return lambda: self.comm.all_reduce_coalesced(tensors)

    def is_correct(self, case: Case, candidate: str) -> bool:
        """The promised order bit for bit from ours; gloo's own order within a rounding."""
        tensors = self.tensors(case, candidate)
        inputs = [
            [torch.randn(n, generator=torch.Generator().manual_seed(9 + r)) for n in case.numels]
            for r in range(self.world_size)
        ]
        for tensor, mine in zip(tensors, inputs[self.rank], strict=True):
            tensor.copy_(mine)
        self.function(candidate, tensors)()
        wanted = expected(inputs, in_ring_order=candidate == "ring")
        for tensor, want in zip(tensors, wanted, strict=True):
            if candidate in OURS and not torch.equal(tensor, want):
                return False
            if candidate.startswith("gloo") and not torch.allclose(
                tensor, want, rtol=1e-5, atol=1e-5
            ):
                return False
        return True

    def time_calls(self, function: Callable[[], object], calls: int, idle_s: float) -> float:
        """Seconds per call on this rank, from a common start."""
        time.sleep(idle_s)
        self.comm.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    def over_ranks(self, values: list[float], reduce: str) -> list[float]:
        """Each value's maximum or minimum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self.comm.all_reduce(tensor, reduce)
        result: list[float] = tensor.tolist()
        return result

    def run_case(self, case: Case, rounds: int, budget_s: float) -> list[Row]:
        """Check every candidate, then time all of them in turns."""
        correct = [float(self.is_correct(case, name)) for name in case.candidates]
        correct = self.over_ranks(correct, "min")
        shared = self.tensors(case, "checked")  # pages of their own would be luck of their own
        functions = [
            self.function(name, self.tensors(case, name) if name == "registered" else shared)
            for name in case.candidates
        ]
        calls = [self.calls_per_round(case, function) for function in functions]
        samples: list[list[float]] = [[] for _ in functions]
        start = time.perf_counter()
        for round_number, order in enumerate(turns(range(len(functions)), rounds)):
            spent = self.over_ranks([time.perf_counter() - start], "max")[0]
            if spent > budget_s and (round_number >= 5 or spent > MOST_S):
                break
            for i in order:
                if not case.idle_s:
                    self.time_calls(functions[i], 1 + calls[i] // 4, 0.0)
                samples[i].append(self.time_calls(functions[i], calls[i], case.idle_s))
        return self.rows(case, [self.over_ranks(s, "max") for s in samples], correct)

    def calls_per_round(self, case: Case, function: Callable[[], object]) -> int:
        """As many as take some milliseconds; few after a sleep, before ranks have settled."""
        if case.idle_s:
            return 20
        self.time_calls(function, 2, 0.0)
        # Twice: one that is lucky on a busy machine would ask for far too many.
        once_s = max(self.over_ranks([self.time_calls(function, 4, 0.0) for _ in range(2)], "max"))
        return max(1, min(2000, round(5e-3 / once_s)))

    def rows(self, case: Case, samples: list[list[float]], correct: list[float]) -> list[Row]:
        """Seconds become rows."""
        timings = {n: Timing.of(s) for n, s in zip(case.candidates, samples, strict=True)}
        medians = {name: timing.median_s for name, timing in timings.items()}
        # The yardstick of lists is gloo's better way.
        gloo_s = min((s for n, s in medians.items() if n.startswith("gloo")), default=None)
        limit_s = medians.get("limit")
        taken, _ = choose("processes", "any", case.size_bytes)
        return [
            Row(
                case=case.name,
                size_bytes=case.size_bytes,
                world_size=case.world_size,
                candidate=name,
                **timings[name].spread("us"),
                ratio_to_gloo=gloo_s / medians[name] if gloo_s else None,
                limit_share=limit_s / medians[name] if limit_s else None,
                correct=bool(right),
                rounds=timings[name].rounds,
                takes=taken if name in UNNAMED else None,
            )
            for name, right in zip(case.candidates, correct, strict=True)
        ]


def work(rank: int, cases: list[Case], folder: str, rounds: int, budget_s: float, out: Any) -> None:
    """A process: all cases of one world size."""
    worker = Worker(rank, cases[0].world_size, folder)
    for case in cases:
        rows = worker.run_case(case, rounds, budget_s)
        if rank == 0:
            out.put(rows)
    worker.comm.close()
    dist.destroy_process_group()


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
    """Idle-priority loops, one per core, while the block runs."""
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


def run_group(cases: list[Case], rounds: int, budget_s: float) -> Iterator[list[Row]]:
    """Rows of cases of one world size, case by case."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder, awake_processors(cases[0].awake):
        workers = [
            context.Process(target=work, args=(rank, cases, folder, rounds, budget_s, out))
            for rank in range(cases[0].world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            for case in cases:
                what = f"{case.name}, {case.world_size} ranks"
                yield receive(out, workers, 600.0, what)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        finally:
            for worker in workers:
                worker.join(timeout=60)
                worker.kill()


HEADER = (
    f"{'case':<22} {'k':>2} {'candidate':<15} {'median':>9} {'minimum':>9} {'x gloo':>8} "
    f"{'of limit':>8} correct"
)


def format_row(row: Row) -> str:
    """One line of the table under HEADER."""
    ratio = f"{row.ratio_to_gloo:.1f}" if row.ratio_to_gloo else "-"
    share = f"{row.limit_share:.2f}" if row.limit_share else "-"
    return (
        f"{row.case:<22} {row.world_size:>2} {row.candidate:<15} {format_us(row.median_us):>9} "
        f"{format_us(row.min_us):>9} {ratio:>8} {share:>8} {'yes' if row.correct else 'NO'}"
    )


def groups_of(cases: list[Case]) -> list[list[Case]]:
    """Cases that the same processes can run one after the other."""
    groups: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.world_size, case.awake), []).append(case)
    return list(groups.values())


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time ranks in processes against gloo.")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--ranks", type=int, help="cases of this many ranks")
    parser.add_argument(
        "--rounds", type=int, default=31, help="most rounds per case (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=4.0, help="seconds per case (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    return parser.parse_args(argv)


def measure(
    cases: Sequence[Case],
    progress: Callable[[str, Sequence[Row]], None],
    *,
    rounds: int,
    budget_s: float,
) -> dict[str, Any]:
    """Run the cases; ``progress`` is told of each when it is over. What a results file holds."""
    with torch_threads(1):
        machine = describe_machine()
    rows: list[Row] = []
    for group in groups_of(list(cases)):
        for found in run_group(group, rounds, budget_s):
            rows += found
            progress(f"{found[0].case}, {found[0].world_size} processes", found)
    return results_of("processes", machine, rows)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One case's lines of the table."""
    for row in rows:
        print(format_row(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a result was wrong."""
    args = parse_arguments(argv)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}")
    print(HEADER)
    cases = [
        case
        for case in readme_cases()
        if args.only in case.name and args.ranks in (None, case.world_size)
    ]
    results = measure(cases, print_rows, rounds=args.rounds, budget_s=args.budget_s)
    if args.json:
        write_results(args.json, results)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
