"""Times training steps of the trainer against the book's loop, for 1, 2 and 4 ranks.

    python benchmarks/training.py
    python benchmarks/training.py --models LeNet --ranks 2
    python benchmarks/training.py --device cuda:0 --json out.json

Candidates, each over the same images, batch by batch, an epoch of some steps in turns:

    undivided       one replica, the whole batch: all arithmetic and no communication, the limit
    book            the book's loop on k replicas: backward of one after the other, an allreduce per
                    parameter through rank 0 (mended: it writes into the caller's tensors), SGD
    ringar          pyringar's Trainer, as `pyringar train` runs it, with its checks of replicas
    nn.DataParallel where k GPUs are there: on CPUs it runs the plain module, on one rank

A step is all from the batch to updated parameters. of limit = undivided's median over this one's.
Checked: after the first epoch ringar's parameters are the book's, and all ranks' are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyringar as pr
from benchmarks.allreduce import naive
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.report.text import format_us
from benchmarks.timing import Timing, torch_threads, turns
from pyringar.train import ImageData, TrainConfig, Trainer, lenet, lenet_params
from pyringar.train.data import batches
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.step import sum_loss
from pyringar.train.synthetic import synthetic_images
from pyringar.train.trace import Trace

LR, BATCH_SIZE, SEED = 0.02, 64, 0
MODELS: dict[str, dict[str, Any]] = {
    "LeNet": {"model": "lenet"},
    "ResNet-18, width 8": {"model": "resnet18", "width": 8},
}
NO_CPU_RANKS = "nn.DataParallel knows no CPU ranks: it would run the plain module, undivided"


@dataclass(frozen=True)
class Options:
    """What is measured, and how long."""

    models: tuple[str, ...] = tuple(MODELS)
    ranks: tuple[int, ...] = (1, 2, 4)
    device: str = "cpu"
    steps: int = 4  # of an epoch, which is what is timed at once
    rounds: int = 25
    budget_s: float = 20.0
    threads: int | None = 1


@dataclass(frozen=True)
class Row:
    """One way to train, checked and timed: milliseconds of a step."""

    case: str
    world_size: int
    candidate: str
    device: str
    batch_size: int
    median_ms: float
    min_ms: float
    q1_ms: float
    q3_ms: float
    max_ms: float
    limit_share: float
    ratio_to_book: float
    correct: bool
    rounds: int


# -- candidates ------------------------------------------------------------------------------------


class Book:
    """The book's loop; with one replica it is the undivided step."""

    def __init__(self, model: str, devices: Sequence[str], data: ImageData) -> None:
        self._devices = list(devices)
        self._images, self._labels = data.train_images, data.train_labels
        self._shuffle = torch.Generator().manual_seed(SEED)
        self.replicas: list[list[Tensor]] = []
        self._forward: list[Callable[[Tensor], Tensor]] = []
        for device in devices:
            self._add_replica(model, device)

    def _add_replica(self, model: str, device: str) -> None:
        if model == "LeNet":
            initial = lenet_params(generator=torch.Generator().manual_seed(SEED))
            params = [p.to(device, copy=True).requires_grad_() for p in initial]
            self._forward.append(functools.partial(lenet, params=params))
        else:
            net = resnet18(width=MODELS[model]["width"], seed=SEED).to(device)
            params = list(net.parameters())
            self._forward.append(net)
        self.replicas.append(params)

    def epoch_s(self) -> float:
        """Seconds of one pass over the images."""
        synchronize(self._devices[0])
        start = time.perf_counter()
        for X, y in batches(self._images, self._labels, BATCH_SIZE, self._shuffle):  # noqa: N806
            self._step(X, y)
        synchronize(self._devices[0])
        return time.perf_counter() - start

    def _step(self, X: Tensor, y: Tensor) -> None:  # noqa: N803
        X_shards, y_shards = pr.split_batch(X, y, self._devices)  # noqa: N806
        losses = [
            sum_loss(forward(shard), labels)
            for forward, shard, labels in zip(self._forward, X_shards, y_shards, strict=True)
        ]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            naive([[p.grad for p in params if p.grad is not None] for params in self.replicas])
            for params in self.replicas:
                for param in params:
                    param -= LR * param.grad / len(y)
                    param.grad.zero_()


class Ringar:
    """The trainer, an epoch at a time."""

    def __init__(self, model: str, devices: Sequence[str], data: ImageData) -> None:
        config = TrainConfig(
            devices=list(devices),
            batch_size=BATCH_SIZE,
            epochs=1,
            lr=LR,
            lr_schedule="constant",
            seed=SEED,
            **MODELS[model],
        )
        self._trainer = Trainer(config, data)
        self.close = self._trainer.close
        self.replicas = self._trainer.replicas

    def epoch_s(self) -> float:
        """Seconds of one pass over the images, without the test."""
        return self._trainer.run().epochs[0].seconds


class TorchDataParallel:
    """nn.DataParallel with torch's SGD, as the book's concise chapter has it."""

    def __init__(self, model: str, devices: Sequence[str], data: ImageData) -> None:
        net = resnet18(width=MODELS[model]["width"], seed=SEED).to(devices[0])
        self._net = nn.DataParallel(net, device_ids=list(devices))
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=LR)
        self._images, self._labels = data.train_images, data.train_labels
        self._shuffle = torch.Generator().manual_seed(SEED)
        self._device = devices[0]
        self.replicas = [list(net.parameters())]

    def epoch_s(self) -> float:
        """Seconds of one pass over the images."""
        synchronize(self._device)
        start = time.perf_counter()
        for X, y in batches(self._images, self._labels, BATCH_SIZE, self._shuffle):  # noqa: N806
            self._optimizer.zero_grad()
            (sum_loss(self._net(X), y) / len(y)).backward()
            self._optimizer.step()
        synchronize(self._device)
        return time.perf_counter() - start


def synchronize(device: str) -> None:
    """Wait until the device has finished; the CPU always has."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def make_data(steps: int, device: str) -> ImageData:
    """Images of an epoch of so many steps."""
    images, labels = synthetic_images(steps * BATCH_SIZE, 30)
    few = images[:8], labels[:8]
    data = ImageData("synthetic garments", images, labels, *few)
    return data.to(torch.device(device), torch.float32)


def devices_of(device: str, k: int) -> list[str]:
    """K ranks: on one CPU, or spread over the GPUs."""
    if device == "cpu":
        return ["cpu"] * k
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(k)]


def why_no_data_parallel(model: str, device: str, k: int) -> str | None:
    """Why nn.DataParallel cannot take part; None if it can."""
    if device == "cpu":
        return NO_CPU_RANKS
    if model == "LeNet":
        return "LeNet is a list of tensors and a function here, nn.DataParallel wants a module"
    gpus = torch.cuda.device_count()
    return None if k <= gpus else f"nn.DataParallel wants a GPU per rank, here are {gpus}"


# -- one case --------------------------------------------------------------------------------------


def run_case(model: str, k: int, options: Options) -> list[Row]:
    """Check all candidates in their first epoch, then time epochs of them in turns."""
    devices = devices_of(options.device, k)
    data = make_data(options.steps, devices[0])
    with contextlib.ExitStack() as stack:
        candidates: dict[str, Any] = {"undivided": Book(model, devices[:1], data)}
        candidates["book"] = Book(model, devices, data)
        candidates["ringar"] = Ringar(model, devices, data)
        stack.callback(candidates["ringar"].close)
        if why_no_data_parallel(model, options.device, k) is None:
            candidates["nn.DataParallel"] = TorchDataParallel(model, devices, data)
        for candidate in candidates.values():
            candidate.epoch_s()
        correct = check(candidates)
        samples = run_in_turns(candidates, options)
    timings = {name: Timing.of(s).of_each(options.steps) for name, s in samples.items()}
    return [
        Row(
            case=model,
            world_size=k,
            candidate=name,
            device=options.device,
            batch_size=BATCH_SIZE,
            **timing.spread("ms"),
            limit_share=timings["undivided"].median_s / timing.median_s,
            ratio_to_book=timings["book"].median_s / timing.median_s,
            correct=correct[name],
            rounds=timing.rounds,
        )
        for name, timing in timings.items()
    ]


def check(candidates: dict[str, Any]) -> dict[str, bool]:
    """Whether all ranks have equal parameters, and as many as share the book's shards have its."""
    book = candidates["book"].replicas[0]
    found = {}
    for name, candidate in candidates.items():
        first = candidate.replicas[0]
        is_right = all(math.isfinite(p.detach().sum().item()) for p in first)
        for params in candidate.replicas[1:]:
            pairs = zip(params, first, strict=True)
            is_right &= all(torch.equal(p.detach().cpu(), q.detach().cpu()) for p, q in pairs)
        # The undivided batch has other statistics in batch norm than shards: other numbers.
        if name != "undivided":
            pairs = zip(first, book, strict=True)
            is_right &= all(torch.allclose(p, q, rtol=1e-3, atol=1e-4) for p, q in pairs)
        found[name] = is_right
    return found


def run_in_turns(candidates: dict[str, Any], options: Options) -> dict[str, list[float]]:
    """Seconds of epochs, one of each candidate in every round."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for number, names in enumerate(turns(candidates, options.rounds)):
        if number >= 5 and time.perf_counter() - start > options.budget_s:
            break
        for name in names:
            samples[name].append(candidates[name].epoch_s())
    return samples


def timeline(options: Options) -> dict[str, Any]:
    """What one step of the whole ResNet-18 on two ranks did and when: there are buckets to see."""
    k, batch_size, steps = 2, 8, 3
    devices = devices_of(options.device, k)
    config = TrainConfig(devices=devices, batch_size=batch_size, epochs=1, model="resnet18")
    images, labels = synthetic_images(steps * batch_size, 31)
    data = ImageData("synthetic garments", images, labels, images[:1], labels[:1])
    trace = Trace()
    with Trainer(config, data, trace) as trainer:
        trainer.run()
    spans = [asdict(span) for span in trace.of_step(trace.steps()[-1])]
    return {"case": "ResNet-18", "world_size": k, "batch_size": batch_size, "spans": spans}


def measure(options: Options, progress: Callable[[str, Sequence[Row]], None]) -> dict[str, Any]:
    """Run the cases; ``progress`` is told of each when it is over. What a results file holds."""
    rows: list[Row] = []
    not_run: dict[tuple[str, str], dict[str, str]] = {}
    with torch_threads(options.threads):
        machine = describe_machine()
        for model in options.models:
            for k in options.ranks:
                why = why_no_data_parallel(model, options.device, k)
                if why is not None:
                    not_run[model, why] = {"what": f"nn.DataParallel, {model}", "why": why}
                found = run_case(model, k, options)
                rows += found
                progress(f"{model}, {k} ranks", found)
        drawn = timeline(options)
    return results_of("training", machine, rows, not_run=list(not_run.values()), timeline=drawn)


# -- output ----------------------------------------------------------------------------------------

HEADER = (
    f"{'model':<20} {'k':>2} {'candidate':<16} {'step':>9} {'minimum':>9} {'of limit':>8} "
    f"{'x book':>6} correct"
)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One case's lines of the table under HEADER."""
    for row in rows:
        print(
            f"{row.case:<20} {row.world_size:>2} {row.candidate:<16} "
            f"{format_us(row.median_ms * 1e3):>9} {format_us(row.min_ms * 1e3):>9} "
            f"{row.limit_share:>8.2f} {row.ratio_to_book:>6.2f} {'yes' if row.correct else 'NO'}",
            flush=True,
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time training steps against the book's loop.")
    parser.add_argument("--models", default=None, help=f"one of {'; '.join(MODELS)} (default: all)")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="most rounds (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=20.0, help="seconds a case (%(default)g)")
    parser.add_argument("--threads", type=int, default=1, help="torch's own (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    args = parser.parse_args(argv)
    if args.models is not None and args.models not in MODELS:
        parser.error(f"--models: {args.models!r} is none of {'; '.join(MODELS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a result was wrong."""
    args = parse_arguments(argv)
    options = Options(
        models=tuple(MODELS) if args.models is None else (args.models,),
        ranks=tuple(int(k) for k in args.ranks.split(",")),
        device=args.device,
        rounds=args.rounds,
        budget_s=args.budget_s,
        threads=args.threads,
    )
    print(HEADER)
    results = measure(options, print_rows)
    for missing in results["not_run"]:
        print(f"not run: {missing['what']}: {missing['why']}")
    if args.json:
        write_results(args.json, results)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
