"""Time a training step whose gradients are reduced after backward, or in buckets during it.

A step is forward and backward of all ranks and the reduction of their gradients, without the
optimizer. CPU ranks run one after the other and use all cores, so no idle core can hide a
reduction. The benchmark shows whether buckets slow a step down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import pyringar as pr
from benchmarks.allreduce import naive
from benchmarks.bench import Benchmark, BenchmarkCase, Run, each_case
from benchmarks.machine import num_cores
from benchmarks.timing import Effort, host_s, in_turns
from pyringar.train import lenet, lenet_params
from pyringar.train.model_resnet18 import resnet18


@dataclass(frozen=True)
class Model:
    """Parameters of every rank, and the function that computes the loss of one rank."""

    params: list[list[Tensor]]
    loss: Callable[[int], Tensor]

    @property
    def gradients(self) -> list[list[Tensor]]:
        """Gradients of every rank."""
        return [[param.grad for param in params] for params in self.params]


@dataclass(frozen=True)
class Candidate:
    """A model, its gradient reduction, and the seconds of each part of each step.

    ``reduce`` runs after backward and returns two parts: ``exposed``, the time from the end of
    backward until all sums are complete; with buckets ``reductions``, the time of all reductions.
    """

    model: Model
    reduce: Callable[[], dict[str, float]]
    parts_s: list[dict[str, float]] = field(default_factory=list)

    def sample(self) -> Sequence[float]:
        """Run and time one step."""
        for params in self.model.params:
            for param in params:
                param.grad = None
        begin = time.perf_counter()
        for rank in range(len(self.model.params)):
            self.model.loss(rank).backward()
        parts_s = self.reduce()
        seconds = time.perf_counter() - begin
        self.parts_s.append(parts_s)
        return [seconds]

    def median_parts_s(self) -> dict[str, float]:
        """Return the median seconds of each part over all steps."""
        names = self.parts_s[0]
        return {name: statistics.median(step[name] for step in self.parts_s) for name in names}


def make_lenet(world_size: int) -> Model:
    """Return LeNet with 64 images, divided among the ranks."""
    initial = lenet_params(generator=torch.Generator().manual_seed(0))
    params = [[p.clone().requires_grad_() for p in initial] for _ in range(world_size)]
    shards = _images(world_size, 64)
    return Model(params, lambda rank: lenet(shards[rank], params[rank]).square().sum())


def make_resnet18(world_size: int) -> Model:
    """Return ResNet-18 (11 million parameters) with 8 images, divided among the ranks."""
    nets = [resnet18(seed=0) for _ in range(world_size)]
    shards = _images(world_size, 8)
    params = [list(net.parameters()) for net in nets]
    return Model(params, lambda rank: nets[rank](shards[rank]).square().sum())


def make_small(world_size: int) -> Model:
    """Return a model of 1,000 parameters of 64 elements."""
    generator = torch.Generator().manual_seed(1)
    params = [
        [torch.full((64,), 1e-2 * (i % 7)).requires_grad_() for i in range(1000)]
        for _ in range(world_size)
    ]
    data = [torch.randn(64, generator=generator) for _ in range(world_size)]
    return Model(
        params, lambda rank: sum(nn.functional.tanh(p + data[rank]).sum() for p in params[rank])
    )


def _images(world_size: int, total: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (max(1, total // world_size), 1, 28, 28)
    return [torch.randn(shape, generator=generator) for _ in range(world_size)]


MODELS = {"lenet": make_lenet, "small": make_small, "resnet18": make_resnet18}


def after_backward(model: Model, call: Callable[[list[list[Tensor]]], object]) -> Candidate:

    def reduce() -> dict[str, float]:
        gradients = model.gradients
        return {"exposed": host_s(lambda: call(gradients))}

    return Candidate(model, reduce)


def bucketed(model: Model, comm: pr.Communicator, cap_mb: float) -> Candidate:
    bucketer = pr.GradientBucketer(model.params, comm=comm, bucket_cap_mb=cap_mb, overlap=True)

    def reduce() -> dict[str, float]:
        bucketer.wait()
        stats = bucketer.stats()
        return {"reductions": stats.communication_s, "exposed": stats.exposed_s}

    return Candidate(model, reduce)


def make_candidate(name: str, model: Model, comm: pr.Communicator) -> Candidate:

    def per_tensor(lists: list[list[Tensor]]) -> None:
        for tensors in zip(*lists, strict=True):
            comm.all_reduce(tensors)

    calls = {"naive": naive, "fused per tensor": per_tensor, "coalesced": comm.all_reduce_coalesced}
    if name in calls:
        return after_backward(model, calls[name])
    cap_mb = name.removeprefix("bucketed, ").removesuffix(" MB")
    return bucketed(model, comm, float(cap_mb))


def run_case(run: Run, case: BenchmarkCase) -> None:
    with pr.Communicator(["cpu"] * case.world_size, order="rank") as comm:
        candidates = {
            name: make_candidate(name, MODELS[case.name](case.world_size), comm)
            for name in case.candidates
        }
        correct = check(candidates)
        for candidate in candidates.values():  # drop the first step, which is slower
            candidate.parts_s.clear()
        timings = in_turns({name: c.sample for name, c in candidates.items()}, run.effort)
    parts_s = {name: candidate.median_parts_s() for name, candidate in candidates.items()}
    run.add(case, timings, correct, parts_s=parts_s)


def check(candidates: dict[str, Candidate]) -> dict[str, bool]:
    for candidate in candidates.values():
        candidate.sample()
    want = candidates["naive"].model.gradients[0]
    return {
        name: all(
            torch.equal(grad, right)
            for gradients in candidate.model.gradients
            for grad, right in zip(gradients, want, strict=True)
        )
        for name, candidate in candidates.items()
    }


def hook_cost_s(num_params: int = 2000, rounds: int = 31) -> float:
    """Return the seconds that a gradient hook adds per parameter (difference of minima)."""
    hooked, idle_rank, bare = (
        [torch.zeros(1, requires_grad=True) for _ in range(num_params)] for _ in range(3)
    )

    def backward_s(params: list[Tensor]) -> float:
        for param in params:
            param.grad = None
        return host_s(sum(param * 2.0 for param in params).backward)

    with_hook, without = [], []
    # Only rank 0 of 2 computes gradients, so no bucket is launched and the hooks only count.
    with pr.GradientBucketer([hooked, idle_rank], overlap=False) as bucketer:
        for _ in range(rounds):
            with_hook.append(backward_s(hooked))
            bucketer.wait()
            without.append(backward_s(bare))
    return (min(with_hook) - min(without)) / num_params


def measure(run: Run) -> None:
    run.results.facts["hook_s"] = hook_cost_s(rounds=3 if run.is_trial else 31)
    each_case(run_case)(run)


def cases_of(effort: str) -> list[BenchmarkCase]:
    names = ("naive", "fused per tensor", "coalesced")
    if effort == "trial":
        return [BenchmarkCase("lenet", 2, (*names, "bucketed, 1 MB"))]
    caps_mb = (1, 10) if effort == "quick" else (0.1, 1, 10)
    names += tuple(f"bucketed, {cap_mb:g} MB" for cap_mb in caps_mb)
    return [BenchmarkCase(model, k, names) for model in MODELS for k in (2, 4)]


BENCHMARK = Benchmark(
    section="bucketing",
    title="Gradient buckets",
    about="Time of a training step without the optimizer, CPU ranks in one process. Gradients are "
    "checked bit for bit. `naive` (the book's allreduce), `fused per tensor` and `coalesced` (one "
    "call for all tensors) reduce after backward. `bucketed` reduces during backward, in buckets "
    "of the named size. `exposed` is the time from the end of backward until all sums are complete,"
    " `reductions` the time of all reductions. `small` is 1,000 parameters of 64 elements.",
    efforts={"full": Effort(61, 12.0), "quick": Effort(5, 0.5), "trial": Effort(5, 0.0)},
    setup_s=15.0,
    cases=cases_of,
    measure=measure,
    ours="bucketed, 10 MB",
    peers=("naive",),
    threads=num_cores(),  # idle cores would hide the cost of a reduction
)
