"""Time epochs on one GPU, eager and as a CUDA graph, with one rank and with two, beside torch.

    python benchmarks/training_cuda.py --quick --only LeNet
    python benchmarks/training_cuda.py --json out.jsonl
    python benchmarks/training_cuda.py --dry-run         # CPU ranks, tiny: a trial of this script

An epoch has 60,000 images in batches of 256. It goes from an idle GPU to an idle GPU, without the
test. ResNet-18 runs a quarter of the images, and its time is scaled: `measured` holds the time that
was measured. The first epoch of each case does not count. Cases take turns, and every epoch is
written as it ends. Images are on the GPU before an epoch begins.

    ringar            the Trainer of `pyringar train`
    nn.DataParallel   the book's loop as printed: nn.DataParallel over one GPU, torch's SGD
    torch.compile     the same loop without it: channels_last, autocast to bf16, torch.compile; in a
                      process of its own, which is ended after a minute

Then a step of ResNet-18 is timed with buckets, with one reduction after backward, and with none.
The difference of the first and the last is exposed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Effort, Run, goal, run_as_script
from benchmarks.rows import Row
from benchmarks.timing import Clock, Timing, in_turns
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.data import batches
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.models import build_model
from pyringar.train.step import sum_loss
from pyringar.train.synthetic import synthetic_images

NUM_IMAGES, NUM_DRAWN = 60_000, 6_000  # drawn once, and repeated: drawing is not measured
BATCH_SIZE = 256
RESNET_IMAGES = 60 * BATCH_SIZE  # a batch of another size would be compiled again
LR = 0.05
COMPILE_S = 60.0
STEP = "ResNet-18, one step"
RINGAR, BOOK, COMPILED = "ringar", "nn.DataParallel", "torch.compile"

Key = tuple[str, int, str]  # case, ranks, candidate


class Epoch(NamedTuple):
    """Seconds and mean loss of one pass over the images."""

    seconds: float
    loss: float


class TorchLoop:
    """The book's loop: a module, cross entropy and SGD.

    Args:
        net: On its device.
        data: Images and labels on that device.
        size: Images of a batch.
        is_amp: Compute in bf16, with images in channels_last.
    """

    def __init__(self, net: nn.Module, data: ImageData, size: int, *, is_amp: bool = False) -> None:
        self._net, self._data, self._size, self._is_amp = net.train(), data, size, is_amp
        self._device = data.train_images.device.type
        self._optimizer = torch.optim.SGD(net.parameters(), LR)
        self._shuffle = torch.Generator().manual_seed(0)

    def epoch(self) -> Epoch:
        """Train for one epoch."""
        images, labels = self._data.train_images, self._data.train_labels
        clock, total = Clock(self._device), torch.zeros((), device=images.device)
        clock.synchronize()
        begin = time.perf_counter()
        for X, y in batches(images, labels, self._size, self._shuffle):  # noqa: N806
            self._optimizer.zero_grad()
            loss = self._loss(X, y)
            loss.backward()
            self._optimizer.step()
            total += loss.detach() * len(y)
        clock.synchronize()
        return Epoch(time.perf_counter() - begin, total.item() / len(labels))

    def _loss(self, X: Tensor, y: Tensor) -> Tensor:  # noqa: N803
        if not self._is_amp:
            return nn.functional.cross_entropy(self._net(X), y)
        X = X.contiguous(memory_format=torch.channels_last)  # noqa: N806
        with torch.autocast(self._device, torch.bfloat16):
            return nn.functional.cross_entropy(self._net(X), y)


def lenet_module() -> nn.Module:
    """Return the book's LeNet as a module."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@functools.cache
def images(count: int) -> ImageData:
    """Return ``count`` training images: 6,000 are drawn, once, and repeated."""
    drawn, labels = synthetic_images(min(count, NUM_DRAWN), 20)
    times = -(-count // len(labels))
    test = synthetic_images(256, 21)
    return ImageData(
        "synthetic garments",
        *(drawn.repeat(times, 1, 1, 1)[:count], labels.repeat(times)[:count]),
        *test,
    )


# -- epochs ----------------------------------------------------------------------------------------


def run_epochs(run: Run, cases: Sequence[Case]) -> None:
    """Time epochs of all cases in turns; list a case that fails in its first epoch as not run."""
    of_key = {(c.name, c.world_size, name): c for c in cases for name in c.candidates}
    first: dict[Key, Epoch] = {}
    compiled: dict[Key, list[Epoch]] = {}
    turns: dict[Key, Callable[[], Epoch]] = {}

    def rows(found: Mapping[Key, Sequence[Epoch]]) -> list[Row]:
        return rows_of_epochs(run, cases, first, {**compiled, **found})

    with contextlib.ExitStack() as stack:
        for key, case in of_key.items():
            try:
                if key[2] == COMPILED:
                    first[key], *compiled[key] = compiled_epochs(run, case)
                else:
                    epoch = epoch_of(run, case, key[2], stack)
                    first[key] = epoch()
                    turns[key] = epoch
            except Exception as error:  # others go on, and the report holds the reason
                what = f"{key[2]}, {case.name}, {case.world_size} ranks"
                run.skip(what, f"{type(error).__name__}: {error}".partition("\n")[0])
        found = in_turns(
            turns,
            rounds=run.effort.rounds,
            budget_s=run.effort.budget_s,
            least_rounds=1,
            look=lambda found: run.write_so_far(rows(found)),
        )
    run.add(rows(found))


def epoch_of(run: Run, case: Case, name: str, stack: contextlib.ExitStack) -> Callable[[], Epoch]:
    """Return a function that trains for an epoch."""
    data, size = data_of(run, case)
    if name == RINGAR:
        config = TrainConfig(
            devices=[run.device] * case.world_size,
            batch_size=size,
            epochs=1,
            lr=LR,
            lr_schedule="constant",
            **case.settings,
        )
        trainer = stack.enter_context(Trainer(config, data))
        return lambda: Epoch(*((e := trainer.run().epochs[0]).seconds, e.loss))
    device = torch.device(run.device)
    net = module_of(case).to(device)
    net = nn.DataParallel(net, device_ids=[0] if device.type == "cuda" else None)
    return TorchLoop(net, data.to(device, torch.float32), size).epoch


def compiled_epochs(run: Run, case: Case) -> list[Epoch]:
    """Run epochs of the compiled module, alone in a process: a compiler cannot be interrupted.

    Raises:
        RuntimeError: It failed.
        TimeoutError: It was not ready in time.
    """
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    data, size = data_of(run, case)
    arguments = (out, run.device, module_of(case), data, size, 1 + run.effort.rounds)
    process = context.Process(target=_run_compiled, args=arguments)
    process.start()
    try:
        found = out.get(timeout=COMPILE_S)
    except queue.Empty:
        raise TimeoutError(f"not compiled and run within {COMPILE_S:g} s") from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return [Epoch(*epoch) for epoch in found]


def _run_compiled(
    out: Any, device: str, net: nn.Module, data: ImageData, size: int, epochs: int
) -> None:
    """Put the epochs, or the error."""
    try:
        net = net.to(device, memory_format=torch.channels_last)
        if device != "cpu":  # a trial need not wait for a compiler
            net = torch.compile(net)
        loop = TorchLoop(net, data.to(torch.device(device), torch.float32), size, is_amp=True)
        out.put([tuple(loop.epoch()) for _ in range(epochs)])
    except Exception as error:
        out.put(f"{type(error).__name__}: {error}")


def module_of(case: Case) -> nn.Module:
    """Return the case's model as a module."""
    if case.settings.get("model") != "resnet18":
        return lenet_module()
    return resnet18(width=case.settings.get("width", 64), seed=0)


def data_of(run: Run, case: Case) -> tuple[ImageData, int]:
    """Return the images of an epoch, and the size of a batch."""
    data = images(300 if run.is_smoke else num_images(case))
    return data, min(BATCH_SIZE, len(data.train_labels) // 3)


def num_images(case: Case) -> int:
    """Return how many images are measured."""
    return RESNET_IMAGES if case.settings.get("model") == "resnet18" else NUM_IMAGES


def rows_of_epochs(
    run: Run,
    cases: Sequence[Case],
    first: Mapping[Key, Epoch],
    found: Mapping[Key, Sequence[Epoch]],
) -> list[Row]:
    """Return the rows of all that have a second epoch; the baseline is torch's, or one rank's."""
    measured = {
        key: Timing.of(e.seconds for e in epochs) for key, epochs in found.items() if epochs
    }
    rows: list[Row] = []
    for case in cases:
        scale = 1.0 if run.is_smoke else num_images(case) / NUM_IMAGES
        one = measured.get((case.name, 1, RINGAR))
        torch_s = [
            timing.median_s
            for (name, _, candidate), timing in measured.items()
            if name == case.name and candidate != RINGAR
        ]
        for name in case.candidates:
            key = case.name, case.world_size, name
            if key not in measured:
                continue
            timing = measured[key]
            last = found[key][-1].loss
            limit_s = one.median_s / scale if one and name == RINGAR else None
            rows += run.rows(
                case,
                {name: timing.of_each(scale)},
                {name: math.isfinite(last) and last < first[key].loss},
                limit_s=limit_s,
                baseline_s=torch_s[0] / scale if torch_s else limit_s,
                parts_s={name: {"measured": timing.median_s}} if scale != 1 else None,
            )
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
    graph = {"cuda_graph": True}
    models: list[tuple[str, tuple[int, ...], dict[str, Any], tuple[str, ...]]] = [
        ("LeNet", (1, 2), {}, (BOOK,)),
        ("LeNet, graph", (1, 2), graph, ()),
        ("ResNet-18", (1, 2), resnet, (BOOK,)),
        ("ResNet-18, graph", (1, 2), resnet | graph, ()),
        ("ResNet-18, amp", (1, 2), resnet | {"amp": True}, (COMPILED,)),  # a graph on a GPU
    ]
    cases = [
        Case(name, k, (RINGAR, *(peers if k == 1 else ())), settings=settings)
        for name, ranks, settings, peers in models
        for k in ranks
    ]
    return [*cases, Case(STEP, 2, ("bucketed", "coalesced", "without", "reduction alone"))]


def goals_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures to reach on one GPU of the H100's class, for 60,000 images."""
    found = {(row.case, row.world_size, row.candidate): row for row in rows}
    goals = []
    for case, at_most in (("ResNet-18, amp", 1.0), ("LeNet", 0.4), ("LeNet, graph", 0.12)):
        row = found.get((case, 1, RINGAR))
        goals.append(goal(row, f"{case}: epoch, s", row and row.median_s, at_most=at_most))
    for case in ("LeNet, graph", "ResNet-18, graph", "ResNet-18, amp"):
        row = found.get((case, 2, RINGAR))
        times = row.median_s / row.limit_s if row and row.limit_s else None
        goals.append(goal(row, f"{case}, 2 ranks: times one rank", times, at_most=1.15))
    step = found.get((STEP, 2, "bucketed"))
    share = step.parts_s["exposed"] / step.median_s if step else None
    return [*goals, goal(step, f"{STEP}: exposed, share of the step", share, at_most=0.2)]


BENCHMARK = Benchmark(
    section="training_cuda",
    title="Training on one GPU",
    about="Epochs of 60,000 images, median from an idle GPU to an idle GPU; the limit of two ranks "
    "is the epoch of one. Where `measured` stands, a quarter of the images ran, scaled. "
    "`nn.DataParallel` is the book's loop, `torch.compile` one with channels_last and bf16. Of one "
    "step, `exposed` is what buckets add to the step without reductions, its limit.",
    baseline=("coalesced",),
    efforts={"full": Effort(5, 60.0), "quick": Effort(2, 25.0), "smoke": Effort(2, 50.0)},
    cases=cases_of,
    measure=measure,
    device="cuda",
    goals=goals_of,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
