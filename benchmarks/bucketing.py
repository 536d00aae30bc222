"""Time a training step with gradients reduced after backward, or in buckets while it runs.

A step is forward and backward of all ranks and the reduction of their gradients, without the
optimizer. CPU ranks run one after the other on all cores, so no idle core can hide a reduction:
on a CPU this shows that buckets cost nothing.
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
from benchmarks.bench import Benchmark, Case, Run, each_case
from benchmarks.machine import num_cores
from benchmarks.timing import Effort, host_s, in_turns
from pyringar.train import lenet, lenet_params
from pyringar.train.model_resnet18 import resnet18


@dataclass(frozen=True)
class Model:
    """Parameters of every rank, and the loss of one rank's shard."""

    params: list[list[Tensor]]
    loss: Callable[[int], Tensor]

    @property
    def gradients(self) -> list[list[Tensor]]:
        """The gradients of every rank."""
        return [[param.grad for param in params] for params in self.params]


@dataclass(frozen=True)
class Candidate:
    """A way to reduce, and the known parts of its steps' times.

    ``reduce`` runs after backward. It returns seconds: ``exposed``, the reductions' time after
    backward, and in buckets also ``reductions``, all of their time.
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
        """Return the median of each part over all steps."""
        names = self.parts_s[0]
        return {name: statistics.median(step[name] for step in self.parts_s) for name in names}


def make_lenet(world_size: int) -> Model:
    """Return LeNet with 64 images over all ranks."""
    initial = lenet_params(generator=torch.Generator().manual_seed(0))
    params = [[p.clone().requires_grad_() for p in initial] for _ in range(world_size)]
    shards = _images(world_size, 64)
    return Model(params, lambda rank: lenet(shards[rank], params[rank]).square().sum())


def make_resnet18(world_size: int) -> Model:
    """Return ResNet-18, all 11 million parameters, with 8 images over all ranks."""
    nets = [resnet18(seed=0) for _ in range(world_size)]
    shards = _images(world_size, 8)
    params = [list(net.parameters()) for net in nets]
    return Model(params, lambda rank: nets[rank](shards[rank]).square().sum())


def make_small(world_size: int) -> Model:
    """Return 1,000 vectors of 64 numbers."""
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
    """Return the candidate that reduces after backward: all of the time is exposed."""

    def reduce() -> dict[str, float]:
        gradients = model.gradients
        return {"exposed": host_s(lambda: call(gradients))}

    return Candidate(model, reduce)


def bucketed(model: Model, comm: pr.Communicator, cap_mb: float) -> Candidate:
    """Return the candidate that reduces while backward runs."""
    bucketer = pr.GradientBucketer(model.params, comm=comm, bucket_cap_mb=cap_mb, overlap=True)

    def reduce() -> dict[str, float]:
        bucketer.wait()
        stats = bucketer.stats()
        return {"reductions": stats.communication_s, "exposed": stats.exposed_s}

    return Candidate(model, reduce)


def make_candidate(name: str, model: Model, comm: pr.Communicator) -> Candidate:
    """Return the candidate of a name, such as "bucketed, 1 MB"."""

    def per_tensor(lists: list[list[Tensor]]) -> None:
        for tensors in zip(*lists, strict=True):
            comm.all_reduce(tensors)

    calls = {"naive": naive, "fused per tensor": per_tensor, "coalesced": comm.all_reduce_coalesced}
    if name in calls:
        return after_backward(model, calls[name])
    cap_mb = name.removeprefix("bucketed, ").removesuffix(" MB")
    return bucketed(model, comm, float(cap_mb))


def run_case(run: Run, case: Case) -> None:
    """Check all candidates, then time their steps in turns."""
    with pr.Communicator(["cpu"] * case.world_size, order="rank") as comm:
        candidates = {
            name: make_candidate(name, MODELS[case.name](case.world_size), comm)
            for name in case.candidates
        }
        correct = check(candidates)
        for candidate in candidates.values():  # the first step is slower
            candidate.parts_s.clear()
        timings = in_turns({name: c.sample for name, c in candidates.items()}, run.effort)
    parts_s = {name: candidate.median_parts_s() for name, candidate in candidates.items()}
    run.add(case, timings, correct, parts_s=parts_s)


def check(candidates: dict[str, Candidate]) -> dict[str, bool]:
    """Return whether each leaves the naive sum, bit for bit, in every rank's gradients."""
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
    """Return the cost of a gradient hook: a parameter with one against one without, by minima."""
    hooked, other, bare = (
        [torch.zeros(1, requires_grad=True) for _ in range(num_params)] for _ in range(3)
    )

    def backward_s(params: list[Tensor]) -> float:
        for param in params:
            param.grad = None
        return host_s(sum(param * 2.0 for param in params).backward)

    with_hook, without = [], []
    # Of two ranks only one has gradients: no bucket is complete, and the hooks only count.
    with pr.GradientBucketer([hooked, other], overlap=False) as bucketer:
        for _ in range(rounds):
            with_hook.append(backward_s(hooked))
            bucketer.wait()
            without.append(backward_s(bare))
    return (min(with_hook) - min(without)) / num_params


def measure(run: Run) -> None:
    """Measure a hook, then run the cases."""
    run.results.facts["hook_s"] = hook_cost_s(rounds=3 if run.is_trial else 31)
    each_case(run_case)(run)


def cases_of(effort: str) -> list[Case]:
    """Return all models on two and four ranks."""
    names = ("naive", "fused per tensor", "coalesced")
    if effort == "trial":
        return [Case("lenet", 2, (*names, "bucketed, 1 MB"))]
    caps_mb = (1, 10) if effort == "quick" else (0.1, 1, 10)
    names += tuple(f"bucketed, {cap_mb:g} MB" for cap_mb in caps_mb)
    return [Case(model, k, names) for model in MODELS for k in (2, 4)]


BENCHMARK = Benchmark(
    section="bucketing",
    title="Gradients while backward runs",
    about="A training step without the optimizer, gradients checked bit for bit. `exposed` is "
    "the part of the reductions' time after backward.",
    efforts={"full": Effort(61, 12.0), "quick": Effort(5, 0.5), "trial": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    ours="bucketed, 10 MB",
    peers=("naive",),
    threads=num_cores(),  # with one thread, a reduction could use an idle core
)
