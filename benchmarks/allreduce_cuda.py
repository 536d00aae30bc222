"""Times all_reduce with k ranks on one GPU against the book's way, NCCL, and what memory allows.

    python benchmarks/allreduce_cuda.py                         # all cases
    python benchmarks/allreduce_cuda.py --only ResNet --quick
    python benchmarks/allreduce_cuda.py --json out.json --plot out.png

Columns are those of benchmarks/allreduce.py, and the clock:

    device    CUDA events around calls in a row, time per call
    done      from the host's call until the stream has finished
    enqueue   until the call has returned, the device still at work
    graph     CUDA events around replays of a graph of many calls, time per call
    replay    from the replay of a graph of one call until the stream has finished

limit = time for reading and writing every buffer once (2 k N bytes) at the rate of a copy within
the device, measured in the same run. Candidates take turns. On the device's clock tensors are taken
in turn from sets that no cache holds. naive is the loop of benchmarks/allreduce.py. NCCL's ranks
share the GPU in one process, if its version can do that (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks import nccl
from benchmarks.allreduce import (
    DTYPES,
    HEADER,
    LENET,
    PEERS,
    Case,
    Row,
    flat_case,
    format_row,
    plot,
    reducer,
    resnet18_shapes,
)
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.timing import Timing
from benchmarks.timing_cuda import ROTATED_BYTES, Measure, Place, interleaved

COPY_BYTES = 512 * 2**20
CALLS_IN_GRAPH = 100
Progress = Callable[[str, Sequence[Row]], None]

NCCL_RANKS = (2, 4)
NCCL_SIZES = (2**16, 2**20, 2**24, 2**28)


@dataclass(frozen=True)
class DeviceRow(Row):
    """A row, with the clock that it was measured by."""

    clock: str


@dataclass(frozen=True)
class Goal:
    """A figure to reach: ``value`` is what was measured, None where nothing was."""

    case: str
    world_size: int
    algorithm: str
    figure: str
    at_least: float | None
    at_most: float | None
    value: float | None

    @property
    def is_reached(self) -> bool | None:
        """Whether it was; None if it was not measured."""
        if self.value is None:
            return None
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)


# -- one case --------------------------------------------------------------------------------------


def random_lists(case: Case, device: str) -> list[list[Tensor]]:
    """Random numbers, another seed on every rank, drawn where they are needed."""
    lists = []
    for rank in range(case.world_size):
        generator = torch.Generator(device).manual_seed(1000 + rank)
        lists.append(
            [
                torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])
                for shape in case.shapes
            ]
        )
    return lists


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum from left to right in fp32 or wider, rounded once."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def expected(tensors: Sequence[Tensor], in_ring_order: bool) -> Tensor:
    """The promised sum of one tensor per rank, flat: of ranks in order, or the ring's by chunks."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    if not in_ring_order:
        return in_order(flat)
    k = len(flat)
    columns = zip(*(tensor.tensor_split(k) for tensor in flat), strict=True)
    return torch.cat(
        [
            in_order([parts[(chunk + 1 + i) % k] for i in range(k)])
            for chunk, parts in enumerate(columns)
        ]
    )


def is_correct(name: str, comm: pr.Communicator, case: Case) -> bool:
    """Whether every rank holds the promised bits after one call (naive: nearly, in 16 bits)."""
    lists = random_lists(case, str(comm.devices[0]))
    wanted = [expected(column, name == "ring") for column in zip(*lists, strict=True)]
    reducer(name, comm, lists)()
    pairs = [(got.view(-1), w) for tensors in lists for got, w in zip(tensors, wanted, strict=True)]
    if name in PEERS:  # torch's order is its own, and it rounds 16 bits after every addition
        far = 0.1 if case.dtype in ("fp16", "bf16") else 1e-5
        return all(torch.allclose(got.float(), w.float(), rtol=far, atol=far) for got, w in pairs)
    return all(torch.equal(got, w) for got, w in pairs)


def rotated(name: str, comm: pr.Communicator, sets: list[list[list[Tensor]]]) -> Callable[[], Any]:
    """The candidate over one set of tensors after the other, so that no cache helps."""
    calls = itertools.cycle([reducer(name, comm, lists) for lists in sets])
    return lambda: next(calls)()


def copier(place: Place, size_bytes: int) -> Callable[[], object]:
    """A copy of so many bytes, which reads and writes each once."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=place.device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def make_row(
    case: Case,
    name: str,
    timing: Timing,
    naive: Timing,
    *,
    clock: str,
    limit_s: float,
    correct: bool,
) -> DeviceRow:
    """One candidate's figures."""
    algbw = case.size_bytes / timing.median_s / 1e9
    return DeviceRow(
        case=case.name,
        size_bytes=case.size_bytes,
        world_size=case.world_size,
        dtype=case.dtype,
        algorithm=name,
        **timing.spread("us"),
        algbw_gbps=algbw,
        busbw_gbps=algbw * 2 * (case.world_size - 1) / case.world_size,
        limit_share=limit_s / timing.median_s,
        ratio_to_naive=naive.median_s / timing.median_s,
        ratio_of_minima=naive.min_s / timing.min_s,
        correct=correct,
        rounds=timing.rounds,
        clock=clock,
        limit_us=limit_s * 1e6,
    )


def limit_of(case: Case, copy: Timing, copy_bytes: int) -> float:
    """Seconds for 2 k N bytes at the rate of a copy, which moves each of its bytes twice."""
    return case.world_size * case.size_bytes * copy.median_s / copy_bytes


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    budget_s: float
    copy_bytes: int = COPY_BYTES
    rotated_bytes: int = ROTATED_BYTES


def run_case(place: Place, case: Case, effort: Effort) -> list[DeviceRow]:
    """Check every candidate, then time all of them and a copy in turns on the device's clock."""
    with pr.Communicator([place.device] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        num_sets = max(1, -(-effort.rotated_bytes // (case.world_size * case.size_bytes)))
        sets = [
            [
                [torch.zeros(s, dtype=DTYPES[case.dtype], device=place.device) for s in case.shapes]
                for _ in range(case.world_size)
            ]
            for _ in range(num_sets)
        ]
        functions = {name: rotated(name, comm, sets) for name in case.candidates}
        timings = interleaved(
            {**functions, "copy": copier(place, effort.copy_bytes)},
            place.device_s,
            rounds=effort.rounds,
            budget_s=effort.budget_s,
        )
    limit_s = limit_of(case, timings["copy"], effort.copy_bytes)
    return [
        make_row(
            case,
            name,
            timings[name],
            timings["naive"],
            clock="device",
            limit_s=limit_s,
            correct=correct[name],
        )
        for name in case.candidates
    ]


def replays_of(
    functions: Mapping[str, Callable[[], object]], calls: int
) -> dict[str, Callable[[], object]]:
    """For each function the replay of a CUDA graph of so many calls, captured after one outside."""
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


def run_latencies(place: Place, case: Case, effort: Effort) -> list[DeviceRow]:
    """The same small call by three clocks: to its end, on the host alone, and in a graph."""
    rows = []
    with pr.Communicator([place.device] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        lists = [[torch.zeros_like(t) for t in ts] for ts in random_lists(case, place.device)]
        functions = {name: reducer(name, comm, lists) for name in case.candidates}
        copy = interleaved(
            {"copy": copier(place, effort.copy_bytes)}, place.device_s, rounds=5, budget_s=0.5
        )["copy"]
        limit_s = limit_of(case, copy, effort.copy_bytes)
        clocks: dict[str, tuple[Mapping[str, Callable[[], object]], Measure, int]] = {
            "done": (functions, place.done_s, 1),
            "enqueue": (functions, place.enqueue_s, 1),
        }
        if place.is_cuda:
            clocks["graph"] = replays_of(functions, CALLS_IN_GRAPH), place.device_s, CALLS_IN_GRAPH
            clocks["replay"] = replays_of(functions, 1), place.done_s, 1
        for clock, (candidates, measure, calls) in clocks.items():
            timings = interleaved(
                candidates, measure, rounds=effort.rounds, budget_s=effort.budget_s
            )
            each = {name: timing.of_each(calls) for name, timing in timings.items()}
            rows += [
                make_row(
                    case,
                    name,
                    each[name],
                    each["naive"],
                    clock=clock,
                    limit_s=limit_s,
                    correct=correct[name],
                )
                for name in case.candidates
            ]
    return rows


# -- NCCL ------------------------------------------------------------------------------------------


def run_nccl(
    cases: Sequence[Case], rows: Sequence[DeviceRow], world_size: int, rounds: int
) -> tuple[list[DeviceRow], str | None]:
    """NCCL's rows beside those of the same cases, or the reason why there are none."""
    own = {
        case.size_bytes: case
        for case in cases
        if case.world_size == world_size and case.dtype == "fp32" and case.size_bytes in NCCL_SIZES
    }
    if not own:
        return [], None
    answer, why = nccl.run(world_size, list(own), rounds)
    if answer is None:
        return [], why
    naive = {row.size_bytes: row for row in rows if row.algorithm == "naive"}
    return nccl_rows(answer, own, naive), None


def nccl_rows(
    answer: Mapping[str, Any], cases: Mapping[int, Case], naive: Mapping[int, DeviceRow]
) -> list[DeviceRow]:
    """The child's timings as rows; naive and the limit are those of the same case."""
    rows = []
    for measured in answer["timings"]:
        case, base = cases[measured["size_bytes"]], naive[measured["size_bytes"]]
        base_us = (base.median_us, base.min_us, base.q1_us, base.q3_us, base.max_us)
        base_s = Timing(*(us / 1e6 for us in base_us), base.rounds, 1)
        rows.append(
            make_row(
                case,
                f"nccl {answer['version']}",
                Timing(**measured["timing"]),
                base_s,
                clock="device",
                limit_s=base.limit_us / 1e6,
                correct=measured["correct"],
            )
        )
    return rows


# -- what is run, what is wanted -------------------------------------------------------------------


def device_cases() -> list[Case]:
    """Cases of the device's clock."""
    large = ("stack", "fused", "ring", "auto")
    cases = [flat_case(2**28, k, dtype, large) for dtype in ("fp32", "bf16") for k in (2, 4, 8)]
    cases += [flat_case(size, k, "fp32", large) for size in NCCL_SIZES[:-1] for k in (2, 4)]
    lenet, resnet = tuple(LENET), tuple(resnet18_shapes())
    cases += [Case("LeNet", lenet, 4, "fp32", ("naive", "stack", "coalesced"))]
    cases += [Case("ResNet-18", resnet, k, "fp32", ("naive", "stack", "coalesced")) for k in (2, 4)]
    return cases


def latency_cases() -> list[Case]:
    """Cases of the host's clocks and the graph's."""
    lenet = Case("LeNet calls", tuple(LENET), 4, "fp32", ("naive", "coalesced"))
    return [flat_case(4096, 4, "fp32", ("fused", "allreduce", "bound", "ring")), lenet]


def goals_of(rows: Sequence[DeviceRow]) -> list[Goal]:
    """The figures to reach on one GPU of the H200's class."""
    found = {(r.case, r.world_size, r.algorithm, r.clock): r for r in rows}

    def goal(
        key: tuple[str, int, str, str],
        field: str,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Goal:
        row = found.get(key)
        value = None if row is None else float(getattr(row, field))
        figure = f"{field}, {key[3]}"
        return Goal(key[0], key[1], key[2], figure, at_least, at_most, value)

    goals = []
    for dtype in ("fp32", "bf16"):
        for k, times in ((2, 1.2), (4, 1.7), (8, 2.0)):
            case = f"256 MiB {dtype}"
            goals.append(goal((case, k, "fused", "device"), "limit_share", 0.9))
            goals.append(goal((case, k, "fused", "device"), "ratio_to_naive", times))
            goals.append(goal((case, k, "ring", "device"), "limit_share", 0.45))
    goals.append(goal(("LeNet", 4, "coalesced", "device"), "ratio_to_naive", 10))
    for k in (2, 4):
        goals.append(goal(("ResNet-18", k, "coalesced", "device"), "ratio_to_naive", 5))
        goals.append(goal(("ResNet-18", k, "coalesced", "device"), "limit_share", 0.75))
    small = ("4 KiB fp32", 4, "fused")
    for clock, most_us in (("done", 15.0), ("graph", 6.0), ("enqueue", 8.0)):
        goals.append(goal((*small, clock), "median_us", at_most=most_us))
    return goals + nccl_goals(rows)


def nccl_goals(rows: Sequence[DeviceRow]) -> list[Goal]:
    """Half as fast again as NCCL where ranks share the GPU; the ring at least as fast."""
    goals = []
    for theirs in (row for row in rows if row.algorithm.startswith("nccl")):
        for name, times in (("fused", 1.5), ("ring", 1.0)):
            own = [
                row
                for row in rows
                if (row.case, row.world_size, row.algorithm, row.clock)
                == (theirs.case, theirs.world_size, name, "device")
            ]
            value = theirs.median_us / own[0].median_us if own else None
            figure = f"times {theirs.algorithm}, device"
            goals.append(Goal(theirs.case, theirs.world_size, name, figure, times, None, value))
    return goals


# -- report ----------------------------------------------------------------------------------------


def driver_version() -> str:
    """The NVIDIA driver's."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: no nvidia-smi"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown: nvidia-smi failed"


def describe_gpu() -> dict[str, Any]:
    """The GPU, its driver, and the versions of what drives it."""
    from pyringar.engine import load

    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "gpus": torch.cuda.device_count(),
        "compute_capability": f"{facts.major}.{facts.minor}",
        "gpu_memory_gib": round(facts.total_memory / 2**30, 1),
        "multiprocessors": facts.multi_processor_count,
        "l2_mib": round(facts.L2_cache_size / 2**20, 1),
        "driver": driver_version(),
        "torch_cuda": torch.version.cuda,
        "engine_cuda": load.cuda_engine().runtime_version(),
        "nccl": nccl.nccl_version(),
    }


def format_goal(goal: Goal) -> str:
    """One line: what was wanted, what was measured."""
    wanted = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
    value = "not measured" if goal.value is None else f"{goal.value:.3g}"
    state = {None: "-", True: "reached", False: "NOT REACHED"}[goal.is_reached]
    return (
        f"{goal.case:<16} {goal.world_size:>2} {goal.algorithm:<12} {goal.figure:<24} "
        f"{wanted:>8} {value:>13}  {state}"
    )


def report_of(
    machine: Mapping[str, Any], rows: Sequence[DeviceRow], not_run: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Everything in types that JSON knows."""
    goals = [{**asdict(goal), "is_reached": goal.is_reached} for goal in goals_of(rows)]
    return results_of("allreduce_cuda", machine, rows, goals=goals, not_run=list(not_run))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Time all_reduce over ranks on one GPU against naive, NCCL and the limit."
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a few rounds of every case")
    parser.add_argument("--rounds", type=int, default=31, help="most rounds (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=1.5, help="seconds per case (default: %(default)s)"
    )
    parser.add_argument("--no-nccl", action="store_true", help="leave NCCL's rows out")
    parser.add_argument("--json", metavar="PATH", help="write rows, goals and machine there")
    parser.add_argument("--plot", metavar="PATH", help="write a PNG there")
    parser.add_argument(
        "--dry-run", action="store_true", help="over CPU ranks, tiny: a trial of this script"
    )
    return parser.parse_args(argv)


def shrunk(case: Case) -> Case:
    """The same case with one row of every tensor, for dry runs."""
    shapes = tuple((min(shape[0], 1000), *shape[1:]) for shape in case.shapes)
    return Case(case.name, shapes, case.world_size, case.dtype, case.candidates)


def effort_of(args: argparse.Namespace) -> Effort:
    """How long to measure."""
    if args.dry_run:
        return Effort(2, 0.1, copy_bytes=2**20, rotated_bytes=2**16)
    return Effort(7, 0.3) if args.quick else Effort(args.rounds, args.budget_s)


class Results:
    """Rows, told and written as they come: who is killed has told what was known."""

    def __init__(self, machine: Mapping[str, Any], path: str | None, progress: Progress) -> None:
        self._machine = machine
        self._path = path
        self._progress = progress
        self.rows: list[DeviceRow] = []
        self._not_run: list[dict[str, Any]] = []

    def add(self, label: str, rows: Sequence[DeviceRow]) -> None:
        """One case's rows."""
        self.rows += rows
        self._progress(label, rows)
        self._write()

    def add_not_run(self, algorithm: str, world_size: int, why: str) -> None:
        """What could not be measured, and the reason."""
        what = f"{algorithm}, {world_size} ranks on one GPU"
        self._not_run.append(
            {"algorithm": algorithm, "world_size": world_size, "what": what, "why": why}
        )
        self._write()

    def report(self) -> dict[str, Any]:
        """What a results file holds."""
        return report_of(self._machine, self.rows, self._not_run)

    def _write(self) -> None:
        if self._path:
            write_results(self._path, self.report())


def measure_all(args: argparse.Namespace, results: Results) -> None:
    """Run the cases, then NCCL on those that it knows."""
    place, effort = Place("cpu" if args.dry_run else "cuda:0"), effort_of(args)
    on_device, latencies = chosen(args)
    for cases, run in ((on_device, run_case), (latencies, run_latencies)):
        for case in cases:
            rows = run(place, shrunk(case) if args.dry_run else case, effort)
            results.add(f"{case.name}, {case.world_size} ranks on one GPU", rows)
            if place.is_cuda:
                torch.cuda.empty_cache()
    if args.no_nccl or args.dry_run:
        return
    for world_size in NCCL_RANKS:
        key = (world_size, "fp32", "device")
        same = [row for row in results.rows if (row.world_size, row.dtype, row.clock) == key]
        rows, why = run_nccl(on_device, same, world_size, effort.rounds)
        results.add(f"NCCL, {world_size} ranks on one GPU", rows)
        if why is not None:
            results.add_not_run("nccl", world_size, why)


def chosen(args: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """The cases of the device's clock, and those of the host's."""
    on_device = [case for case in device_cases() if args.only in case.name]
    return on_device, [case for case in latency_cases() if args.only in case.name]


def num_units(args: argparse.Namespace) -> int:
    """How often `measure` calls ``progress``."""
    return sum(map(len, chosen(args))) + (0 if args.no_nccl or args.dry_run else len(NCCL_RANKS))


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run the cases; ``progress`` is told of each when it is over. What a results file holds."""
    machine = describe_machine() | ({} if args.dry_run else describe_gpu())
    results = Results(machine, args.json, progress)
    measure_all(args, results)
    return results.report()


def print_rows(label: str, rows: Sequence[DeviceRow]) -> None:
    """One case's lines of the table."""
    for row in rows:
        print(f"{format_row(row)}  {row.clock}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a result was wrong, 2 without a GPU."""
    args = parse_arguments(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--dry-run tries the script itself)")
        return 2
    machine = describe_machine() | ({} if args.dry_run else describe_gpu())
    name = machine.get("gpu", machine["cpu"])
    print(f"{name}, torch {machine['torch']}, {machine['date']}")
    print(f"{HEADER}  clock")
    report = measure(args, print_rows)
    rows = [DeviceRow(**row) for row in report["rows"]]
    for missing in report["not_run"]:
        print(f"{missing['what']}: not run: {missing['why']}")
    print()
    for goal in goals_of(rows):
        print(format_goal(goal))
    if args.plot:
        plot(rows, {**machine, "cpu": name}, args.plot)
    return 0 if all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
