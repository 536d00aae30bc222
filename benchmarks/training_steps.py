"""Time training steps of the Trainer and of the book's loop, for 1, 2 and 4 CPU ranks.

All candidates train on the same batches, four steps at a time:

    undivided       one replica trains on the whole batch, without communication: the limit
    book            the book's loop on k replicas: one backward after the other, an allreduce per
                    parameter through rank 0, SGD
    ringar          the Trainer of `pyringar train`
    ringar, shards  the Trainer with `--shards 8`

A step goes from the batch to the updated parameters. After the first epoch all ranks must have
equal parameters, and those of `ringar` must be close to those of the book. Parameters with shards
must equal those of the book's loop on one replica per shard, added in tree order, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pyringar as pr
from benchmarks.allreduce import naive
from benchmarks.bench import Benchmark, BenchmarkCase, Run, each_case
from benchmarks.sums import tree_order
from benchmarks.timing import Effort, Sampler, in_turns, torch_threads
from pyringar.train import EpochResult, ImageData, TrainConfig, Trainer
from pyringar.train.data import batches
from pyringar.train.model_lenet import lenet, lenet_params
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.synthetic import synthetic_images

LR, SEED, NUM_SHARDS = 0.02, 0, 8
SHARDS = "ringar, shards"
CANDIDATES = ("undivided", "book", "ringar", SHARDS)
MODELS: dict[str, dict[str, Any]] = {
    "LeNet, batch 256": {"model": "lenet", "batch_size": 256},
    "ResNet-18, width 8, batch 128": {"model": "resnet18", "width": 8, "batch_size": 128},
}


def naive_tree(lists: Sequence[Sequence[Tensor]]) -> None:
    """Sum tensor by tensor in tree order; write each sum into the tensors of all ranks."""
    for data in zip(*lists, strict=True):
        total = tree_order(data)
        for tensor in data:
            tensor.copy_(total)


class BookLoop:
    """The book's training loop; with one replica it is the candidate ``undivided``."""

    def __init__(
        self, model: str, world_size: int, data: ImageData, reduce: Callable[..., None] = naive
    ) -> None:
        self._devices, self._data, self._reduce = ["cpu"] * world_size, data, reduce
        self._batch_size = MODELS[model]["batch_size"]
        self._shuffle = torch.Generator().manual_seed(SEED)
        self._forwards: list[Callable[[Tensor], Tensor]] = []
        self.replicas: list[list[Tensor]] = []
        for _ in range(world_size):
            forward, params = self._replica(**MODELS[model])
            self._forwards.append(forward)
            self.replicas.append(params)

    @staticmethod
    def _replica(model: str, batch_size: int, width: int = 64) -> tuple[Any, list[Tensor]]:
        if model == "resnet18":
            net = resnet18(width=width, seed=SEED)
            return net, list(net.parameters())
        initial = lenet_params(generator=torch.Generator().manual_seed(SEED))
        params = [param.clone().requires_grad_() for param in initial]
        return functools.partial(lenet, params=params), params

    def epoch_s(self) -> float:
        """Train on all images once; return the seconds."""
        images, labels = self._data.train_images, self._data.train_labels
        begin = time.perf_counter()
        for X, y in batches(images, labels, self._batch_size, self._shuffle):  # noqa: N806
            self._step(X, y)
        return time.perf_counter() - begin

    def _step(self, X: Tensor, y: Tensor) -> None:  # noqa: N803
        X_shards, y_shards = pr.split_batch(X, y, self._devices)  # noqa: N806
        losses = [
            nn.functional.cross_entropy(forward(shard), labels, reduction="sum")
            for forward, shard, labels in zip(self._forwards, X_shards, y_shards, strict=True)
        ]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            self._reduce(
                [[p.grad for p in params if p.grad is not None] for params in self.replicas]
            )
            for params in self.replicas:
                for param in params:
                    param -= LR * param.grad / len(y)
                    param.grad.zero_()


class TrainerLoop:
    """Runs pyringar's Trainer one epoch at a time."""

    def __init__(self, devices: list[str], data: ImageData, **options: Any) -> None:
        config = TrainConfig(devices=devices, epochs=1, lr_schedule="constant", **options)
        self._trainer = Trainer(config, data)
        self.close = self._trainer.close
        self.replicas = self._trainer.replicas

    def epoch(self) -> EpochResult:
        """Train on all images once, then test; the result's seconds exclude the test."""
        return self._trainer.run().epochs[0]

    def epoch_s(self) -> float:
        """Train on all images once; return the seconds."""
        return self.epoch().seconds


def loop_of(
    name: str, model: str, world_size: int, data: ImageData, stack: contextlib.ExitStack
) -> Any:
    if name in ("undivided", "book"):
        return BookLoop(model, 1 if name == "undivided" else world_size, data)
    shards = {"shards": NUM_SHARDS} if name == SHARDS else {}
    loop = TrainerLoop(["cpu"] * world_size, data, lr=LR, seed=SEED, **shards, **MODELS[model])
    stack.callback(loop.close)
    return loop


def run_case(run: Run, case: BenchmarkCase) -> None:
    steps = 1 if run.is_trial else 4
    images, labels = synthetic_images(steps * MODELS[case.name]["batch_size"], 30)
    data = ImageData("synthetic garments", images, labels, images[:8], labels[:8])
    with contextlib.ExitStack() as stack:
        loops = {
            name: loop_of(name, case.name, case.world_size, data, stack) for name in case.candidates
        }
        for loop in loops.values():
            loop.epoch_s()
        correct = check(loops, case.name, data)

        def sampler(loop: Any) -> Sampler:
            return lambda: [loop.epoch_s() / steps]

        timings = in_turns({name: sampler(loop) for name, loop in loops.items()}, run.effort)
    run.add(case, timings, correct, limit_s=timings["undivided"].median_s)


def check(loops: dict[str, Any], model: str, data: ImageData) -> dict[str, bool]:
    book = loops["book"].replicas[0]
    found = {}
    for name, loop in loops.items():
        first = loop.replicas[0]
        is_right = all(math.isfinite(param.detach().sum().item()) for param in first)
        for params in loop.replicas[1:]:
            is_right &= all(torch.equal(p, q) for p, q in zip(params, first, strict=True))
        if name == "ringar":  # other candidates compute batch norm over other samples
            pairs = zip(first, book, strict=True)
            is_right &= all(torch.allclose(p, q, rtol=1e-3, atol=1e-4) for p, q in pairs)
        found[name] = is_right
    of_shards = BookLoop(model, NUM_SHARDS, data, naive_tree)
    with torch_threads(1):
        of_shards.epoch_s()
    pairs = zip(loops[SHARDS].replicas[0], of_shards.replicas[0], strict=True)
    found[SHARDS] &= all(torch.equal(p, q) for p, q in pairs)
    return found


def cases_of(effort: str) -> list[BenchmarkCase]:
    if effort == "trial":
        return [BenchmarkCase(next(iter(MODELS)), 2, CANDIDATES)]
    return [BenchmarkCase(model, k, CANDIDATES) for model in MODELS for k in (1, 2, 4)]


BENCHMARK = Benchmark(
    section="training",
    title="Training steps",
    about="Time from the batch to the updated parameters, CPU ranks in one process. Parameters are "
    "compared with those of the book's loop. `book` is that loop, which reduces each parameter "
    "through rank 0 after backward. `ringar` is the trainer of `pyringar train`; `ringar, shards` "
    "is the trainer with `--shards 8`, one thread per shard. The limit, `undivided`, is one "
    "replica that trains on the whole batch without communication.",
    efforts={"full": Effort(25, 20.0), "quick": Effort(5, 1.0), "trial": Effort(5, 0.0)},
    setup_s=5.0,
    cases=cases_of,
    measure=each_case(run_case),
    ours="ringar",
    peers=("book",),
    limit="undivided",
    threads=None,
)
