"""Times epochs of 60,000 images on one GPU, eager and as a CUDA graph, with one rank and with two.

    python benchmarks/training_cuda.py                   # all cases
    python benchmarks/training_cuda.py --only LeNet --quick
    python benchmarks/training_cuda.py --json out.json
    python benchmarks/training_cuda.py --dry-run         # CPU ranks, tiny: a trial of this script

Columns: median and minimum seconds of an epoch, from an idle GPU to an idle GPU, without the test;
times one = the median over that of one rank in the same case, the least that ranks on one GPU can
need. Cases take turns, epoch by epoch; the first of each does not count. The last lines are about
communication: what a step takes with buckets, with one reduction after backward, and with none. By
how much buckets make it longer than none is exposed, a share of the step or of a reduction alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.allreduce_cuda import Goal, describe_gpu, format_goal
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.timing import turns
from benchmarks.timing_cuda import Place, interleaved
from pyringar.train import EpochResult, ImageData, TrainConfig, Trainer
from pyringar.train.models import build_model
from pyringar.train.step import sum_loss
from pyringar.train.synthetic import synthetic_images

NUM_IMAGES, NUM_DRAWN = 60_000, 6_000  # drawn once, and taken ten times: drawing is not measured
BATCH_SIZE = 256


@dataclass(frozen=True)
class Case:
    """One way to train; all that have a name train the same model at the same batch size."""

    name: str
    world_size: int
    options: dict[str, Any]


@dataclass(frozen=True)
class EpochRow:
    """One case, timed. ``correct``: the loss fell, and stayed a number."""

    case: str
    world_size: int
    batch_size: int
    images: int
    median_s: float
    min_s: float
    times_one: float | None
    first_loss: float
    last_loss: float
    correct: bool
    rounds: int


@dataclass(frozen=True)
class OverlapRow:
    """A step of ResNet-18, seconds on the device; ``correct``: buckets change no bit of gradients.

    ``exposed_of_step`` is the share of a step by which buckets make it longer than no reduction at
    all, ``exposed_of_reduction`` the same time as a share of the reduction alone.
    """

    case: str
    world_size: int
    bucketed_s: float
    after_backward_s: float
    without_s: float
    reduction_s: float
    exposed_of_step: float
    exposed_of_reduction: float
    correct: bool


# -- epochs ----------------------------------------------------------------------------------------


def cases(dry_run: bool) -> list[Case]:
    """What is timed. Graphs need a GPU."""
    resnet = {"model": "resnet18", **({"width": 4} if dry_run else {})}
    found = [Case("LeNet", k, {}) for k in (1, 2)]
    found += [Case("LeNet, graph", k, {"cuda_graph": True}) for k in (1, 2)]
    found += [Case("ResNet-18", k, resnet) for k in (1, 2)]
    found += [Case("ResNet-18, graph", k, {**resnet, "cuda_graph": True}) for k in (1, 2)]
    found += [Case("ResNet-18, amp", 1, {**resnet, "amp": True})]
    return [case for case in found if not (dry_run and "cuda_graph" in case.options)]


def images(count: int) -> ImageData:
    """So many training images, of which few are different ones."""
    drawn, labels = synthetic_images(min(count, NUM_DRAWN), 20)
    times = -(-count // len(labels))
    test = synthetic_images(256, 21)
    return ImageData(
        "synthetic garments",
        *(drawn.repeat(times, 1, 1, 1)[:count], labels.repeat(times)[:count]),
        *test,
    )


def run_epochs(
    chosen: Sequence[Case], device: str, data: ImageData, rounds: int, budget_s: float
) -> list[EpochRow]:
    """One epoch of each case in turns, until rounds or time are over."""
    size = min(BATCH_SIZE, len(data.train_labels) // 3)
    epochs: list[list[EpochResult]] = [[] for _ in chosen]
    with contextlib.ExitStack() as stack:
        trainers = []
        for case in chosen:
            config = TrainConfig(
                devices=[device] * case.world_size,
                batch_size=size,
                epochs=1,
                lr=0.05,
                lr_schedule="constant",
                **case.options,
            )
            trainers.append(stack.enter_context(Trainer(config, data)))
        begin = time.perf_counter()
        for number, order in enumerate(turns(range(len(chosen)), 1 + rounds)):
            if number > 2 and time.perf_counter() - begin > budget_s:
                break
            for at in order:
                epochs[at] += trainers[at].run().epochs
    rows: dict[tuple[str, int], EpochRow] = {}
    for case, found in zip(chosen, epochs, strict=True):
        one = rows.get((case.name, 1))
        rows[case.name, case.world_size] = row_of(case, size, len(data.train_labels), found, one)
    return list(rows.values())


def row_of(
    case: Case, size: int, count: int, epochs: Sequence[EpochResult], one: EpochRow | None
) -> EpochRow:
    """A case's figures; the first epoch does not count. ``one``: those of one rank."""
    seconds = [epoch.seconds for epoch in epochs[1:]]
    median_s = statistics.median(seconds)
    first, last = epochs[0].loss, epochs[-1].loss
    return EpochRow(
        case=case.name,
        world_size=case.world_size,
        batch_size=size,
        images=count,
        median_s=median_s,
        min_s=min(seconds),
        times_one=None if one is None else median_s / one.median_s,
        first_loss=first,
        last_loss=last,
        correct=math.isfinite(last) and last < first,
        rounds=len(seconds),
    )


# -- one step's communication ----------------------------------------------------------------------


def run_overlap(place: Place, width: int, size: int, rounds: int, budget_s: float) -> OverlapRow:
    """Time a step of ResNet-18 on two ranks with its gradients reduced in different ways."""
    devices = [torch.device(place.device)] * 2
    config = TrainConfig(model="resnet18", width=width, devices=[place.device] * 2)
    X, y = (tensor.to(place.device) for tensor in synthetic_images(size, 22))  # noqa: N806
    X_shards, y_shards = pr.split_batch(X, y, devices)  # noqa: N806
    with pr.Communicator([place.device] * 2, order="rank") as comm, contextlib.ExitStack() as stack:
        model = build_model(config, devices, comm)
        stack.callback(model.close)

        def gradients() -> list[list[Tensor]]:
            return [[param.grad for param in params] for params in model.params]

        def step(reduce: Callable[[], None]) -> None:
            """All of a step but its update: the same step again and again."""
            for param in itertools.chain(*model.params):
                param.grad = None
            losses = map(sum_loss, model.scores(X_shards), y_shards)
            torch.autograd.backward(list(losses))
            reduce()

        def step_after(reduce: Callable[[], None]) -> None:
            with model.bucketer.no_sync():
                step(reduce)

        candidates: dict[str, Callable[[], object]] = {
            "bucketed": lambda: step(model.bucketer.wait),
            "after": lambda: step_after(lambda: comm.all_reduce_coalesced(gradients())),
            "without": lambda: step_after(lambda: None),
        }
        correct = leaves_equal_gradients(candidates["bucketed"], candidates["after"], gradients)
        timings = interleaved(candidates, place.device_s, rounds=rounds, budget_s=budget_s)
        lists = [[torch.zeros_like(grad) for grad in mine] for mine in gradients()]
        alone = interleaved(
            {"alone": lambda: comm.all_reduce_coalesced(lists)},
            place.device_s,
            rounds=rounds,
            budget_s=budget_s / 4,
        )["alone"].median_s
    bucketed, after, without = (timings[name].median_s for name in candidates)
    exposed_s = max(0.0, bucketed - without)
    return OverlapRow(
        case="ResNet-18",
        world_size=2,
        bucketed_s=bucketed,
        after_backward_s=after,
        without_s=without,
        reduction_s=alone,
        exposed_of_step=exposed_s / bucketed,
        exposed_of_reduction=exposed_s / alone,
        correct=correct,
    )


def leaves_equal_gradients(
    one: Callable[[], object],
    other: Callable[[], object],
    gradients: Callable[[], list[list[Tensor]]],
) -> bool:
    """Whether two steps leave the same bits, with convolutions that always add in one order."""
    was = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        found = []
        for step in (one, other):
            step()
            found.append([grad.clone() for mine in gradients() for grad in mine])
    finally:
        torch.backends.cudnn.deterministic = was
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- what is wanted, and the report ----------------------------------------------------------------


def goals_of(rows: Sequence[EpochRow], overlap: OverlapRow | None) -> list[Goal]:
    """The figures to reach on one GPU of the H200's class, for 60,000 images."""
    found = {(row.case, row.world_size): row for row in rows}

    def goal(name: str, k: int, figure: str, at_most: float) -> Goal:
        row = found.get((name, k))
        value = None if row is None else getattr(row, figure)
        return Goal(name, k, "training", figure, None, at_most, value)

    share = None if overlap is None else overlap.exposed_of_step
    return [
        goal("LeNet, graph", 1, "median_s", 0.15),
        goal("LeNet", 1, "median_s", 0.5),
        goal("ResNet-18", 1, "median_s", 3.0),
        goal("ResNet-18", 2, "times_one", 1.1),
        Goal("ResNet-18", 2, "training", "exposed_of_step", None, 0.2, share),
    ]


def format_row(row: EpochRow) -> str:
    """One line under HEADER."""
    times = "-" if row.times_one is None else f"{row.times_one:.2f}"
    return (
        f"{row.case:<17} {row.world_size:>2} {row.median_s:>9.4f} {row.min_s:>9.4f} {times:>9} "
        f"{'yes' if row.correct else 'NO'}"
    )


HEADER = f"{'case':<17} {'k':>2} {'median s':>9} {'min s':>9} {'times one':>9} correct"


def format_overlap(row: OverlapRow) -> str:
    """Two lines: the times, and what they say."""
    return (
        f"{row.case}, {row.world_size} ranks, a step: {row.bucketed_s * 1e3:.3f} ms with buckets, "
        f"{row.after_backward_s * 1e3:.3f} after backward, {row.without_s * 1e3:.3f} without\n"
        f"exposed: {row.exposed_of_step:.1%} of the step, {row.exposed_of_reduction:.0%} of "
        f"{row.reduction_s * 1e3:.3f} ms of reduction; gradients "
        f"{'equal' if row.correct else 'DIFFER'}"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time training on one GPU, eager and as a graph.")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="two rounds of every case")
    parser.add_argument("--rounds", type=int, default=5, help="most rounds (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=50.0, help="seconds for all epochs (default: %(default)g)"
    )
    parser.add_argument("--json", metavar="PATH", help="write rows, goals and machine there")
    parser.add_argument(
        "--dry-run", action="store_true", help="over CPU ranks, tiny: a trial of this script"
    )
    return parser.parse_args(argv)


def num_units(args: argparse.Namespace) -> int:
    """How often `measure` calls ``progress``."""
    return 2


def measure(
    args: argparse.Namespace, progress: Callable[[str, Sequence[Any]], None]
) -> dict[str, Any]:
    """Time epochs, then a step's communication. What a results file holds."""
    machine = describe_machine() | ({} if args.dry_run else describe_gpu())
    place, rounds = Place("cpu" if args.dry_run else "cuda:0"), 2 if args.quick else args.rounds
    chosen = [case for case in cases(args.dry_run) if args.only in case.name]
    data = images(300 if args.dry_run else NUM_IMAGES)
    rows = run_epochs(chosen, place.device, data, rounds, args.budget_s)
    progress("epochs", rows)
    overlap = None
    if any(case.name == "ResNet-18" for case in chosen):
        size, width = (8, 4) if args.dry_run else (BATCH_SIZE, 64)
        overlap = run_overlap(place, width, size, 5 + 5 * rounds, 4.0)
        progress("a step's communication", [overlap])
    goals = [] if args.dry_run else goals_of(rows, overlap)
    found = [{**asdict(goal), "is_reached": goal.is_reached} for goal in goals]
    every = [*rows, *([overlap] if overlap else [])]
    return results_of("training_cuda", machine, every, goals=found)


def print_rows(label: str, rows: Sequence[Any]) -> None:
    """The table of epochs, or the lines about one step."""
    if rows and isinstance(rows[0], OverlapRow):
        print(format_overlap(rows[0]), flush=True)
    else:
        print("\n".join([HEADER, *map(format_row, rows)]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a result was wrong, 2 without a GPU."""
    args = parse_arguments(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--dry-run tries the script itself)")
        return 2
    machine = describe_machine() | ({} if args.dry_run else describe_gpu())
    print(f"{machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, {machine['date']}")
    report = measure(args, print_rows)
    print()
    for goal in report["goals"]:
        print(format_goal(Goal(**{key: goal[key] for key in goal if key != "is_reached"})))
    if args.json:
        write_results(args.json, report)
    return 0 if all(row["correct"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
