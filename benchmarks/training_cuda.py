"""Time training epochs on one GPU, eager and as a CUDA graph, with 1 and 2 ranks.

An epoch has 60,000 images in batches of 256, which are in GPU memory before it begins. The GPU is
idle at its beginning and at its end. The test is not included. ResNet-18 trains on a quarter of the
images, and the time is multiplied by four.

    ringar            the Trainer of `pyringar train`
    nn.DataParallel   the book's loop: nn.DataParallel over one GPU with torch.optim.SGD

Then a step of ResNet-18 is timed with buckets, with one reduction after backward, and without a
reduction. The exposed time is the difference between the first and the last.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pyringar as pr
from benchmarks.bench import Benchmark, BenchmarkCase, Run, each_case
from benchmarks.timing import DeviceClock, Effort, Sampler, in_turns
from benchmarks.training_steps import TrainerLoop
from pyringar.train import EpochResult, ImageData, LeNet
from pyringar.train.data import batches
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.synthetic import synthetic_images

NUM_IMAGES, NUM_DRAWN = 60_000, 6_000  # images of an epoch; distinct images, which repeat
BATCH_SIZE = 256
RESNET_IMAGES = 60 * BATCH_SIZE
LR = 0.05
STEP = "ResNet-18, one step"
RINGAR, BOOK = "ringar", "nn.DataParallel"


class TimedEpoch(NamedTuple):
    """Seconds and mean loss of one pass over the images."""

    seconds: float
    loss: float


class DataParallelLoop:
    """The book's loop: nn.DataParallel, cross entropy and torch.optim.SGD."""

    def __init__(self, net: nn.Module, device: str, data: ImageData, batch_size: int) -> None:
        self._net = nn.DataParallel(net.to(device), device_ids=[0] if device != "cpu" else None)
        self._data = data.to(torch.device(device), torch.float32)
        self._clock, self._batch_size = DeviceClock(device), batch_size
        self._optimizer = torch.optim.SGD(net.parameters(), LR)
        self._shuffle = torch.Generator().manual_seed(0)

    def epoch(self) -> TimedEpoch:
        """Train for one epoch."""
        images, labels = self._data.train_images, self._data.train_labels
        total = torch.zeros((), device=images.device)
        self._clock.synchronize()
        begin = time.perf_counter()
        for X, y in batches(images, labels, self._batch_size, self._shuffle):  # noqa: N806
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._net(X), y)
            loss.backward()
            self._optimizer.step()
            total += loss.detach() * len(y)
        self._clock.synchronize()
        return TimedEpoch(time.perf_counter() - begin, total.item() / len(labels))


@functools.cache
def images(count: int) -> ImageData:
    """Return synthetic training images, of which the first 6,000 are distinct."""
    drawn, labels = synthetic_images(min(count, NUM_DRAWN), 20)
    times = -(-count // len(labels))
    train = drawn.repeat(times, 1, 1, 1)[:count], labels.repeat(times)[:count]
    return ImageData("synthetic garments", *train, *synthetic_images(256, 21))


def run_epochs(run: Run, case: BenchmarkCase) -> None:
    is_resnet = case.settings.get("model") == "resnet18"
    count = 96 if run.is_trial else RESNET_IMAGES if is_resnet else NUM_IMAGES
    scale = 1.0 if run.is_trial else count / NUM_IMAGES
    data, batch_size = images(count), min(BATCH_SIZE, count // 3)
    losses: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        epochs = {
            name: epoch_of(name, run, case, data, batch_size, stack) for name in case.candidates
        }
        first_losses = {name: epoch().loss for name, epoch in epochs.items()}

        def sampler(name: str) -> Sampler:
            def sample() -> Sequence[float]:
                epoch = epochs[name]()
                losses[name] = epoch.loss
                return [epoch.seconds / scale]

            return sample

        timings = in_turns({name: sampler(name) for name in epochs}, run.effort, least_rounds=1)
    correct = {
        name: math.isfinite(loss) and loss < first_losses[name] for name, loss in losses.items()
    }
    mine = case.name, RINGAR
    before = [r.median_s for r in run.results.rows if (r.case, r.candidate) == mine]
    # The limit of two ranks on one GPU is the epoch of one rank, which an earlier case measured.
    run.add(case, timings, correct, limit_s=before[0] if before else None)


def epoch_of(
    name: str,
    run: Run,
    case: BenchmarkCase,
    data: ImageData,
    batch_size: int,
    stack: contextlib.ExitStack,
) -> Callable[[], TimedEpoch | EpochResult]:
    if name == BOOK:
        is_resnet = case.settings.get("model") == "resnet18"
        net = resnet18(width=case.settings.get("width", 64)) if is_resnet else LeNet()
        return DataParallelLoop(net, run.device, data, batch_size).epoch
    devices = [run.device] * case.world_size
    ringar = TrainerLoop(devices, data, lr=LR, batch_size=batch_size, **case.settings)
    stack.callback(ringar.close)
    return ringar.epoch


def run_step(run: Run, case: BenchmarkCase) -> None:
    size, width = (8, 4) if run.is_trial else (BATCH_SIZE, 64)
    devices = [torch.device(run.device)] * case.world_size
    nets = [resnet18(width=width, seed=0).to(run.device) for _ in devices]
    params = [list(net.parameters()) for net in nets]
    X, y = (tensor.to(run.device) for tensor in synthetic_images(size, 22))  # noqa: N806
    shards = list(zip(*pr.split_batch(X, y, devices), strict=True))
    with (
        pr.Communicator([run.device] * case.world_size, order="rank") as comm,
        pr.GradientBucketer(params, comm=comm, overlap=True) as bucketer,
    ):

        def gradients() -> list[list[Tensor]]:
            return [[param.grad for param in mine] for mine in params]

        def step(reduce: Callable[[], object]) -> None:
            """Run a step without the optimizer, so that all steps are equal."""
            for net in nets:
                net.zero_grad()
            losses = [
                nn.functional.cross_entropy(net(images), labels, reduction="sum")
                for net, (images, labels) in zip(nets, shards, strict=True)
            ]
            torch.autograd.backward(losses)
            reduce()

        def step_after(reduce: Callable[[], object]) -> None:
            with bucketer.no_sync():
                step(reduce)

        calls: dict[str, Callable[[], object]] = {
            "bucketed": lambda: step(bucketer.wait),
            "coalesced": lambda: step_after(lambda: comm.all_reduce_coalesced(gradients())),
            "without": lambda: step_after(lambda: None),
        }
        found = []
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            for name in ("bucketed", "coalesced"):
                calls[name]()
                found.append([grad.clone() for mine in gradients() for grad in mine])
        is_equal = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        clock = DeviceClock(run.device)
        effort = Effort(5 + 5 * run.effort.rounds, 4.0)
        timings = in_turns({name: clock.sampler(call) for name, call in calls.items()}, effort)
    without_s = timings["without"].median_s
    parts_s = {"bucketed": {"exposed": max(0.0, timings["bucketed"].median_s - without_s)}}
    run.add(case, timings, dict.fromkeys(timings, is_equal), limit_s=without_s, parts_s=parts_s)


def run_case(run: Run, case: BenchmarkCase) -> None:
    if case.name == STEP:
        run_step(run, case)
    elif run.device != "cpu" or "cuda_graph" not in case.settings:
        run_epochs(run, case)


def cases_of(effort: str) -> list[BenchmarkCase]:
    resnet = {"model": "resnet18", **({"width": 4} if effort == "trial" else {})}
    models: dict[str, dict[str, Any]] = {
        "LeNet": {},
        "LeNet, graph": {"cuda_graph": True},
        "ResNet-18": resnet,
        "ResNet-18, graph": resnet | {"cuda_graph": True},
        "ResNet-18, amp": resnet | {"amp": True},  # on a GPU, amp turns on the CUDA graph
    }
    cases = [
        BenchmarkCase(
            name, k, (RINGAR, BOOK) if k == 1 and "," not in name else (RINGAR,), settings=options
        )
        for name, options in models.items()
        for k in (1, 2)
    ]
    return [*cases, BenchmarkCase(STEP, 2, ("bucketed", "coalesced", "without"))]


BENCHMARK = Benchmark(
    section="training_cuda",
    title="Training on one GPU",
    about="Time of an epoch of 60,000 images in GPU memory, without the test. ResNet-18 trains on "
    "a quarter of the images, and its time is multiplied by four. `ringar` is the trainer of "
    "`pyringar train`, `nn.DataParallel` the book's loop. *Graph* replays a CUDA graph; *amp* "
    "computes in bfloat16. The limit of 2 ranks is the epoch of 1 rank. `ResNet-18, one step` is a "
    "step with `bucketed` gradients, with one `coalesced` reduction after backward, and `without` "
    "a reduction, which is its limit. `exposed` is the difference between `bucketed` and "
    "`without`.",
    efforts={"full": Effort(5, 20.0), "quick": Effort(2, 5.0), "trial": Effort(2, 5.0)},
    cases=cases_of,
    measure=each_case(run_case),
    ours=RINGAR,
    peers=(BOOK,),
    limit="without",
    threads=None,
    device="cuda",
)
