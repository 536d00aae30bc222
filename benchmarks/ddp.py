"""Times DDP's training step on the backends gloo and ringar, in the same processes, interleaved.

    python benchmarks/ddp.py --json out.json

A step is forward, backward and DDP's all-reduces, without the optimiser; its time is that of the
slowest rank. communication = step - the same step of the bare module, which reduces nothing. On as
many cores as ranks nothing can overlap: what communication costs is what it computes and waits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyringar.distributed  # noqa: F401  (registers the backend)
from pyringar.train.model_resnet18 import resnet18

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.report.text import format_us
from benchmarks.timing import Timing, torch_threads, turns
from benchmarks.workers import receive

CANDIDATES = ("bare", "gloo", "ringar")


@dataclass(frozen=True)
class Row:
    """One backend under one model."""

    case: str
    world_size: int
    candidate: str
    step_ms: float
    min_step_ms: float
    q1_ms: float
    q3_ms: float
    max_ms: float
    communication_ms: float | None
    ratio_to_gloo: float | None
    correct: bool
    rounds: int


def mlp() -> nn.Module:
    """25 million parameters in six matrices."""
    width = 2048
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18, width 8": (lambda: resnet18(width=8), (32, 1, 28, 28)),
    "MLP, 25 M parameters": (mlp, (32, 2048)),
}


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward; gradients are made anew."""
    model.zero_grad()
    model(x).square().mean().backward()


def gradients(model: nn.Module) -> Tensor:
    """All of them, end to end."""
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


def work(
    rank: int, world_size: int, folder: str, rounds: int, models: Sequence[str], out: Any
) -> None:
    """One rank: all models, all candidates."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    ours = dist.new_group(backend="ringar")
    for name in models:
        make, shape = MODELS[name]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        models: dict[str, nn.Module] = {}
        for candidate in CANDIDATES:
            torch.manual_seed(0)
            module = make()
            group = {"gloo": dist.group.WORLD, "ringar": ours}.get(candidate)
            models[candidate] = (
                module
                if group is None
                else DistributedDataParallel(
                    module, process_group=group, gradient_as_bucket_view=True
                )
            )
        for _ in range(3):  # DDP makes its buckets anew after the first
            for model in models.values():
                step(model, x)
        correct = torch.allclose(
            gradients(models["gloo"]), gradients(models["ringar"]), rtol=1e-3, atol=1e-5
        )
        samples: dict[str, list[float]] = {candidate: [] for candidate in CANDIDATES}
        for order in turns(CANDIDATES, rounds):
            for candidate in order:
                step(models[candidate], x)
                dist.barrier(group=ours)
                start = time.perf_counter()
                step(models[candidate], x)
                samples[candidate].append(time.perf_counter() - start)
        slowest = {c: slowest_rank(s, ours) for c, s in samples.items()}
        if rank == 0:
            out.put(rows(name, world_size, slowest, correct))
        del models
    dist.destroy_process_group()


def slowest_rank(seconds: list[float], group: Any) -> list[float]:
    """The slowest rank's time of each step."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    slowest: list[float] = tensor.tolist()
    return slowest


def rows(name: str, world_size: int, samples: dict[str, list[float]], correct: bool) -> list[Row]:
    """Seconds become rows."""
    timings = {candidate: Timing.of(s) for candidate, s in samples.items()}
    medians = {candidate: timing.median_s for candidate, timing in timings.items()}
    spent = {c: medians[c] - medians["bare"] for c in CANDIDATES if c != "bare"}
    return [
        Row(
            case=name,
            world_size=world_size,
            candidate=candidate,
            step_ms=medians[candidate] * 1e3,
            min_step_ms=timings[candidate].min_s * 1e3,
            q1_ms=timings[candidate].q1_s * 1e3,
            q3_ms=timings[candidate].q3_s * 1e3,
            max_ms=timings[candidate].max_s * 1e3,
            communication_ms=spent[candidate] * 1e3 if candidate in spent else None,
            ratio_to_gloo=spent["gloo"] / spent[candidate]
            if candidate in spent and min(spent["gloo"], spent[candidate]) > 0
            else None,  # in the noise: a ratio would say nothing
            correct=correct,
            rounds=len(samples[candidate]),
        )
        for candidate in CANDIDATES
    ]


def format_row(row: Row) -> str:
    """One line of the printed table."""
    spent = "-" if row.communication_ms is None else format_us(row.communication_ms * 1e3)
    ratio = "-" if row.ratio_to_gloo is None else f"{row.ratio_to_gloo:.1f}"
    return (
        f"{row.case:<22} {row.world_size:>2} {row.candidate:<8} {format_us(row.step_ms * 1e3):>9} "
        f"{spent:>13} {ratio:>7} {'yes' if row.correct else 'NO'}"
    )


@dataclass(frozen=True)
class Options:
    """What is measured, and how long."""

    world_size: int = 2
    rounds: int = 25
    models: tuple[str, ...] = tuple(MODELS)


def run_models(options: Options) -> Iterator[list[Row]]:
    """The rows of one model after the other, from processes of their own."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=work,
                args=(rank, options.world_size, folder, options.rounds, options.models, out),
            )
            for rank in range(options.world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            for name in options.models:
                yield receive(out, workers, 600.0, name)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        finally:
            for worker in workers:
                worker.join(timeout=60)
                worker.kill()


def measure(options: Options, progress: Callable[[str, Sequence[Row]], None]) -> dict[str, Any]:
    """Run the models; ``progress`` is told of each when it is over. What a results file holds."""
    with torch_threads(1):
        machine = describe_machine()
    found: list[Row] = []
    for new in run_models(options):
        found += new
        progress(f"{new[0].case}, {new[0].world_size} ranks", new)
    return results_of("ddp", machine, found)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One model's lines of the table."""
    for row in rows:
        print(format_row(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all models; exit status 1 when gradients were wrong."""
    parser = argparse.ArgumentParser(description="Time DDP's step on gloo and on ringar.")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=25, help="steps of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    args = parser.parse_args(argv)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}")
    print(f"{'model':<22} {'k':>2} {'backend':<8} {'step':>9} {'communication':>13} {'x gloo':>7}")
    results = measure(Options(args.ranks, args.rounds), print_rows)
    if args.json:
        write_results(args.json, results)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
