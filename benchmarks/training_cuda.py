"""Time epochs of 60,000 images on one GPU, eager and as a CUDA graph, with one rank and with two.

    python benchmarks/training_cuda.py --quick --only LeNet
    python benchmarks/training_cuda.py --json out.jsonl
    python benchmarks/training_cuda.py --dry-run         # CPU ranks, tiny: a trial of this script

An epoch goes from an idle GPU to an idle GPU, without the test; the first of each case does not
count. Cases take turns, and every epoch is written as it ends: a run that is cut off keeps them.
Then a step of ResNet-18 is timed with buckets, with one reduction after backward, and with none.
By how much buckets make it longer than none is exposed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Effort, Run, goal, run_as_script
from benchmarks.rows import Row
from benchmarks.timing import Clock, Timing, in_turns
from pyringar.train import EpochResult, ImageData, TrainConfig, Trainer
from pyringar.train.models import build_model
from pyringar.train.step import sum_loss
from pyringar.train.synthetic import synthetic_images

NUM_IMAGES, NUM_DRAWN = 60_000, 6_000  # drawn once, and taken ten times: drawing is not measured
BATCH_SIZE = 256
STEP = "ResNet-18, one step"
RINGAR = "ringar"


def images(count: int) -> ImageData:
    """Return so many training images, of which few are different ones."""
    drawn, labels = synthetic_images(min(count, NUM_DRAWN), 20)
    times = -(-count // len(labels))
    test = synthetic_images(256, 21)
    return ImageData(
        "synthetic garments",
        *(drawn.repeat(times, 1, 1, 1)[:count], labels.repeat(times)[:count]),
        *test,
    )


def run_epochs(run: Run, cases: Sequence[Case]) -> None:
    """Time epochs of all cases in turns; the limit is the epoch of one rank."""
    data = images(300 if run.is_smoke else NUM_IMAGES)
    size = min(BATCH_SIZE, len(data.train_labels) // 3)
    run.results.facts |= {"images": len(data.train_labels), "batch_size": size}

    def trainer_of(case: Case) -> Trainer:
        config = TrainConfig(
            devices=[run.device] * case.world_size,
            batch_size=size,
            epochs=1,
            lr=0.05,
            lr_schedule="constant",
            **case.settings,
        )
        return stack.enter_context(Trainer(config, data))

    def epoch_of(trainer: Trainer) -> Callable[[], EpochResult]:
        return lambda: trainer.run().epochs[0]

    with contextlib.ExitStack() as stack:
        found = in_turns(
            {(c.name, c.world_size): epoch_of(trainer_of(c)) for c in cases},
            rounds=1 + run.effort.rounds,
            budget_s=run.effort.budget_s,
            least_rounds=2,
            look=lambda found: run.write_so_far(rows_of_epochs(run, cases, found)),
        )
    run.add(rows_of_epochs(run, cases, found))


def rows_of_epochs(
    run: Run, cases: Sequence[Case], found: Mapping[tuple[str, int], Sequence[EpochResult]]
) -> list[Row]:
    """Return the rows of the cases that have an epoch after their first."""
    rows: list[Row] = []
    one: dict[str, float] = {}
    for case in cases:
        epochs = found[case.name, case.world_size]
        if len(epochs) < 2:
            continue
        timing = Timing.of(epoch.seconds for epoch in epochs[1:])
        if case.world_size == 1:
            one[case.name] = timing.median_s
        first, last = epochs[0].loss, epochs[-1].loss
        correct = {RINGAR: math.isfinite(last) and last < first}
        limit_s = one.get(case.name)
        rows += run.rows(case, {RINGAR: timing}, correct, limit_s=limit_s, baseline_s=limit_s)
    return rows


# -- one step's communication ----------------------------------------------------------------------


def run_step(run: Run, case: Case) -> None:
    """Time a step of ResNet-18 on two ranks with its gradients reduced in different ways."""
    size, width = (8, 4) if run.is_smoke else (BATCH_SIZE, 64)
    devices = [torch.device(run.device)] * 2
    config = TrainConfig(model="resnet18", width=width, devices=[run.device] * 2)
    X, y = (tensor.to(run.device) for tensor in synthetic_images(size, 22))  # noqa: N806
    X_shards, y_shards = pr.split_batch(X, y, devices)  # noqa: N806
    with pr.Communicator([run.device] * 2, order="rank") as comm, contextlib.ExitStack() as stack:
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

        calls: dict[str, Callable[[], object]] = {
            "bucketed": lambda: step(model.bucketer.wait),
            "coalesced": lambda: step_after(lambda: comm.all_reduce_coalesced(gradients())),
            "without": lambda: step_after(lambda: None),
        }
        is_equal = leave_equal_gradients(calls["bucketed"], calls["coalesced"], gradients)
        clock, rounds = Clock(run.device), 5 + 5 * run.effort.rounds
        timings = clock.interleaved(calls, rounds=rounds, budget_s=4.0)
        lists = [[torch.zeros_like(grad) for grad in mine] for mine in gradients()]
        alone = {"reduction alone": lambda: comm.all_reduce_coalesced(lists)}
        timings |= clock.interleaved(alone, rounds=rounds, budget_s=1.0)
    without_s = timings["without"].median_s
    exposed_s = max(0.0, timings["bucketed"].median_s - without_s)
    parts_s = {"bucketed": {"exposed": exposed_s}}
    correct = dict.fromkeys(timings, is_equal)
    run.add(run.rows(case, timings, correct, limit_s=without_s, parts_s=parts_s))


def leave_equal_gradients(
    one: Callable[[], object],
    other: Callable[[], object],
    gradients: Callable[[], list[list[Tensor]]],
) -> bool:
    """Say whether two steps leave the same bits, with convolutions that add in one order."""
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


# -- cases and goals -------------------------------------------------------------------------------


def measure(run: Run) -> None:
    """Time epochs, then a step's communication."""
    epochs = [case for case in run.cases if case.name != STEP]
    epochs = [c for c in epochs if run.device != "cpu" or "cuda_graph" not in c.settings]
    if epochs:
        run_epochs(run, epochs)
    for case in run.cases:
        if case.name == STEP:
            run_step(run, case)


def cases_of(effort: str) -> list[Case]:
    """Return what is timed with this effort; graphs need a GPU."""
    resnet = {"model": "resnet18", **({"width": 4} if effort == "smoke" else {})}
    models: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("LeNet", (1, 2), {}),
        ("LeNet, graph", (1, 2), {"cuda_graph": True}),
        ("ResNet-18", (1, 2), resnet),
        ("ResNet-18, graph", (1, 2), {**resnet, "cuda_graph": True}),
        ("ResNet-18, amp", (1,), {**resnet, "amp": True}),
    ]
    cases = [Case(name, k, (RINGAR,), settings=s) for name, ranks, s in models for k in ranks]
    return [*cases, Case(STEP, 2, ("bucketed", "coalesced", "without", "reduction alone"))]


def goals_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures to reach on one GPU of the H200's class, for 60,000 images."""
    found = {(row.case, row.world_size, row.candidate): row for row in rows}

    def seconds(case: str, at_most: float) -> dict[str, Any]:
        row = found.get((case, 1, RINGAR))
        return goal(row, f"{case}, 1 rank: epoch, s", row and row.median_s, at_most=at_most)

    two, step = found.get(("ResNet-18", 2, RINGAR)), found.get((STEP, 2, "bucketed"))
    times_one = two.median_s / two.limit_s if two and two.limit_s else None
    share = step.parts_s["exposed"] / step.median_s if step else None
    return [
        seconds("LeNet, graph", 0.15),
        seconds("LeNet", 0.5),
        seconds("ResNet-18", 3.0),
        goal(two, "ResNet-18, 2 ranks: times the epoch of one", times_one, at_most=1.1),
        goal(step, f"{STEP}: exposed, share of the step", share, at_most=0.2),
    ]


BENCHMARK = Benchmark(
    section="training_cuda",
    title="Training on one GPU",
    about="Epochs of 60,000 images, median from an idle GPU to an idle GPU; the limit is the epoch "
    "of one rank. Of one step, `exposed` is what buckets add to the step without reductions, its "
    "limit.",
    baseline=("coalesced",),
    efforts={"full": Effort(5, 50.0), "quick": Effort(2, 50.0), "smoke": Effort(2, 50.0)},
    cases=cases_of,
    measure=measure,
    device="cuda",
    goals=goals_of,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
