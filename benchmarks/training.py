"""Time training steps of the trainer against the book's loop, for 1, 2 and 4 ranks.

    python benchmarks/training.py --quick
    python benchmarks/training.py --only LeNet --ranks 2 --json out.jsonl

Each candidate runs over the same images, batch by batch, an epoch of four steps in turns:

    undivided       one replica, the whole batch: all arithmetic and no communication, the limit
    book            the book's loop on k replicas: backward of one after the other, an allreduce per
                    parameter through rank 0 (mended: it writes into the caller's tensors), SGD
    ringar          pyringar's Trainer, as `pyringar train` runs it, with its checks of replicas
    ringar, shards  the same with `--shards 8`: eight parts of every batch, each computed by itself,
                    with the same bits on any of these numbers of ranks
    nn.DataParallel where k GPUs are there: on CPUs it runs the plain module, on one rank

A step is all from the batch to updated parameters. After a first epoch all ranks' parameters must
be equal, and ringar's those of the book. With shards they must have the bits of the book's loop on
a replica for each shard, added in tree order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Effort, Run, each_case, goal, run_as_script
from benchmarks.candidates import naive
from benchmarks.rows import Row
from benchmarks.timing import Timing, in_turns, torch_threads
from pyringar.comm.orders import tree
from pyringar.train import ImageData, TrainConfig, Trainer, lenet, lenet_params
from pyringar.train.data import batches
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.step import sum_loss
from pyringar.train.synthetic import synthetic_images

LR, SEED = 0.02, 0
NUM_SHARDS = 8
MODELS: dict[str, dict[str, Any]] = {
    "LeNet, batch 256": {"model": "lenet", "batch_size": 256},
    "ResNet-18, width 8, batch 128": {"model": "resnet18", "width": 8, "batch_size": 128},
}


# -- candidates ------------------------------------------------------------------------------------


class TorchLoop:
    """An epoch over the images in the order that every candidate draws; a subclass has the step."""

    def __init__(self, model: str, device: str, data: ImageData) -> None:
        self._device, self._data = device, data
        self._batch_size = MODELS[model]["batch_size"]
        self._shuffle = torch.Generator().manual_seed(SEED)

    def epoch_s(self) -> float:
        """Return the seconds of one pass over the images."""
        images, labels = self._data.train_images, self._data.train_labels
        synchronize(self._device)
        start = time.perf_counter()
        for X, y in batches(images, labels, self._batch_size, self._shuffle):  # noqa: N806
            self.step(X, y)
        synchronize(self._device)
        return time.perf_counter() - start

    def step(self, X: Tensor, y: Tensor) -> None:  # noqa: N803
        """Train on one batch."""
        raise NotImplementedError


class Book(TorchLoop):
    """The book's loop; with one replica it is the undivided step."""

    reduce = staticmethod(naive)

    def __init__(self, model: str, devices: Sequence[str], data: ImageData) -> None:
        super().__init__(model, devices[0], data)
        self._devices = list(devices)
        self.replicas: list[list[Tensor]] = []
        self._forward: list[Callable[[Tensor], Tensor]] = []
        for device in devices:
            self._add_replica(model, device)

    def _add_replica(self, model: str, device: str) -> None:
        if MODELS[model]["model"] == "lenet":
            initial = lenet_params(generator=torch.Generator().manual_seed(SEED))
            params = [p.to(device, copy=True).requires_grad_() for p in initial]
            self._forward.append(functools.partial(lenet, params=params))
        else:
            net = resnet18(width=MODELS[model]["width"], seed=SEED).to(device)
            params = list(net.parameters())
            self._forward.append(net)
        self.replicas.append(params)

    def step(self, X: Tensor, y: Tensor) -> None:  # noqa: N803
        """Train on one batch, split over the replicas."""
        X_shards, y_shards = pr.split_batch(X, y, self._devices)  # noqa: N806
        losses = [
            sum_loss(forward(shard), labels)
            for forward, shard, labels in zip(self._forward, X_shards, y_shards, strict=True)
        ]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            self.reduce(
                [[p.grad for p in params if p.grad is not None] for params in self.replicas]
            )
            for params in self.replicas:
                for param in params:
                    param -= LR * param.grad / len(y)
                    param.grad.zero_()


class BookOfShards(Book):
    """The book's loop on a replica for each shard, gradients added by the tree, a thread in all.

    Arithmetic that `--shards` promises to every number of ranks, bit for bit.
    """

    def __init__(self, model: str, data: ImageData) -> None:
        super().__init__(model, ["cpu"] * NUM_SHARDS, data)

    @staticmethod
    def reduce(lists: Sequence[Sequence[Tensor]]) -> None:
        """Write the sum of every column into its tensors."""
        for data in zip(*lists, strict=True):
            total = tree(data, torch.add)
            for tensor in data:
                tensor.copy_(total)

    def epoch_s(self) -> float:
        """Return the seconds of one pass over the images."""
        with torch_threads(1):
            return super().epoch_s()


class TorchDataParallel(TorchLoop):
    """nn.DataParallel with torch's SGD, as the book's concise chapter has it."""

    def __init__(self, model: str, devices: Sequence[str], data: ImageData) -> None:
        super().__init__(model, devices[0], data)
        net = resnet18(width=MODELS[model]["width"], seed=SEED).to(devices[0])
        self._net = nn.DataParallel(net, device_ids=list(devices))
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=LR)
        self.replicas = [list(net.parameters())]

    def step(self, X: Tensor, y: Tensor) -> None:  # noqa: N803
        """Train on one batch."""
        self._optimizer.zero_grad()
        (sum_loss(self._net(X), y) / len(y)).backward()
        self._optimizer.step()


class Ringar:
    """The trainer, an epoch at a time."""

    def __init__(self, model: str, devices: Sequence[str], data: ImageData, **options: Any) -> None:
        config = TrainConfig(
            devices=list(devices),
            epochs=1,
            lr=LR,
            lr_schedule="constant",
            seed=SEED,
            **options,
            **MODELS[model],
        )
        self._trainer = Trainer(config, data)
        self.close = self._trainer.close
        self.replicas = self._trainer.replicas

    def epoch_s(self) -> float:
        """Return the seconds of one pass over the images, without the test."""
        return self._trainer.run().epochs[0].seconds


LOOPS = {
    "undivided": lambda model, devices, data: Book(model, devices[:1], data),
    "book": Book,
    "ringar": Ringar,
    "ringar, shards": functools.partial(Ringar, shards=NUM_SHARDS),
    "nn.DataParallel": TorchDataParallel,
}


def synchronize(device: str) -> None:
    """Wait until the device has finished; the CPU always has."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def why_no_data_parallel(model: str, device: str, k: int) -> str | None:
    """Return why nn.DataParallel cannot take part; None if it can."""
    if device == "cpu":
        return "nn.DataParallel knows no CPU ranks: it would run the plain module, undivided"
    if MODELS[model]["model"] == "lenet":
        return "LeNet is a list of tensors and a function here, nn.DataParallel wants a module"
    gpus = torch.cuda.device_count()
    return None if k <= gpus else f"nn.DataParallel wants a GPU per rank, here are {gpus}"


# -- one case --------------------------------------------------------------------------------------


def run_case(run: Run, case: Case) -> None:
    """Check all candidates in their first epoch, then time epochs of them in turns."""
    devices, steps = devices_of(run.device, case.world_size), 1 if run.is_smoke else 4
    why = why_no_data_parallel(case.name, run.device, case.world_size)
    if why is not None:
        run.skip(f"nn.DataParallel, {case.name}", why)
    names = [name for name in case.candidates if name != "nn.DataParallel" or why is None]
    if run.device != "cpu":
        names.remove("ringar, shards")
        run.skip(f"ringar, shards, {case.name}", "its bits are those of CPU ranks")
    data = make_data(steps * MODELS[case.name]["batch_size"], devices[0])
    with contextlib.ExitStack() as stack:
        loops = {name: LOOPS[name](case.name, devices, data) for name in names}
        for name in names:
            if name.startswith("ringar"):
                stack.callback(loops[name].close)
        for loop in loops.values():
            loop.epoch_s()
        correct = check(loops)
        if "ringar, shards" in loops:
            of_shards = BookOfShards(case.name, data)
            of_shards.epoch_s()
            pairs = zip(loops["ringar, shards"].replicas[0], of_shards.replicas[0], strict=True)
            correct["ringar, shards"] &= all(torch.equal(p, q) for p, q in pairs)
        samples = in_turns(
            {name: loop.epoch_s for name, loop in loops.items()},
            rounds=run.effort.rounds,
            budget_s=run.effort.budget_s,
        )
    timings = {name: Timing.of(seconds).of_each(steps) for name, seconds in samples.items()}
    run.add(run.rows(case, timings, correct, limit_s=timings["undivided"].median_s))


def devices_of(device: str, k: int) -> list[str]:
    """Return k devices: the CPU for all ranks, or ranks spread over the GPUs."""
    if device == "cpu":
        return ["cpu"] * k
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(k)]


def make_data(num_images: int, device: str) -> ImageData:
    """Return the images of an epoch."""
    images, labels = synthetic_images(num_images, 30)
    data = ImageData("synthetic garments", images, labels, images[:8], labels[:8])
    return data.to(torch.device(device), torch.float32)


def check(loops: dict[str, Any]) -> dict[str, bool]:
    """Say of each whether all its ranks have equal parameters, and those of the book."""
    book = loops["book"].replicas[0]
    found = {}
    for name, loop in loops.items():
        first = loop.replicas[0]
        is_right = all(math.isfinite(p.detach().sum().item()) for p in first)
        for params in loop.replicas[1:]:
            pairs = zip(params, first, strict=True)
            is_right &= all(torch.equal(p.detach().cpu(), q.detach().cpu()) for p, q in pairs)
        # Batch norm has statistics of its own for every part: other numbers for other parts.
        if name not in ("undivided", "ringar, shards"):
            pairs = zip(first, book, strict=True)
            is_right &= all(torch.allclose(p, q, rtol=1e-3, atol=1e-4) for p, q in pairs)
        found[name] = is_right
    return found


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return [Case(next(iter(MODELS)), 2, tuple(LOOPS))]
    return [Case(model, k, tuple(LOOPS)) for model in MODELS for k in (1, 2, 4)]


def goals_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return how fast two and four ranks must be against the book's loop: no slower."""
    found = {(row.case, row.world_size): row for row in rows if row.candidate == "ringar"}
    goals = []
    for case, k in itertools.product(MODELS, (2, 4)):
        row = found.get((case, k))
        value = row.baseline_s / row.median_s if row is not None and row.baseline_s else None
        goals.append(goal(row, f"{case}, {k} ranks: times the book's loop", value, at_least=1.0))
    return goals


BENCHMARK = Benchmark(
    section="training",
    title="Training steps",
    about="From the batch to updated parameters; parameters checked against the book's. The limit, "
    "`undivided`, is the whole batch on one replica: all of the arithmetic and no communication. "
    "`book` reduces each parameter through rank 0 after backward; `ringar, shards` computes a "
    "batch in eight parts, each with one thread.",
    baseline=("book",),
    limit="undivided",
    efforts={"full": Effort(25, 20.0), "quick": Effort(5, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=each_case(run_case),
    threads=None,
    device="any",
    goals=goals_of,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
