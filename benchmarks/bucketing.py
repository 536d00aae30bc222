"""Time a training step with gradients reduced in four ways: after backward, or while it runs.

    python benchmarks/bucketing.py --quick
    python benchmarks/bucketing.py --only lenet --ranks 4 --json out.jsonl

A step is forward and backward of all ranks and the reduction of their gradients, without the
optimiser. Ranks take turns on the host's cores, so there is no idle core that a reduction could
use: hiding it cannot make the step shorter than the work in it. On a CPU this shows that buckets
cost nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Effort, Run, run_as_script
from benchmarks.candidates import naive
from benchmarks.machine import num_cores
from benchmarks.timing import Timing, host_s, in_turns
from pyringar.train import lenet, lenet_params
from pyringar.train.model_resnet18 import resnet18

Sample = tuple[float, float, float]  # seconds of a step, its reductions, and those after backward


@dataclass(frozen=True)
class Model:
    """Parameters of every rank, and the loss of one rank's shard."""

    params: list[list[Tensor]]
    loss: Callable[[int], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A way to reduce: what runs after backward, and returns the seconds of a `Sample`'s end."""

    model: Model
    reduce: Callable[[], tuple[float, float]]

    def step(self) -> Sample:
        """Run and time one step."""
        for params in self.model.params:
            for param in params:
                param.grad = None
        start = time.perf_counter()
        for rank in range(len(self.model.params)):
            self.model.loss(rank).backward()
        reduction_s, exposed_s = self.reduce()
        return time.perf_counter() - start, reduction_s, exposed_s


# -- models ----------------------------------------------------------------------------------------


def make_lenet(world_size: int) -> Model:
    """Return LeNet with 64 images over all ranks."""
    initial = lenet_params(generator=torch.Generator().manual_seed(0))
    params = [[p.clone().requires_grad_() for p in initial] for _ in range(world_size)]
    shards = _images(world_size, 64)
    return Model(params, lambda rank: lenet(shards[rank], params[rank]).square().sum())


def make_resnet18(world_size: int) -> Model:
    """Return ResNet-18, all 11 million parameters, with 8 images over all ranks."""
    nets = []
    for _ in range(world_size):
        torch.manual_seed(0)
        nets.append(resnet18())
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


# -- candidates ------------------------------------------------------------------------------------


def after_backward(model: Model, call: Callable[[list[list[Tensor]]], object]) -> Candidate:
    """Return the candidate that begins when backward is over: all of it is exposed."""

    def reduce() -> tuple[float, float]:
        gradients = [[param.grad for param in params] for params in model.params]
        spent_s = host_s(lambda: call(gradients), 1)
        return spent_s, spent_s

    return Candidate(model, reduce)


def bucketed(model: Model, comm: pr.Communicator, cap_mb: float) -> Candidate:
    """Return the candidate that reduces while backward runs."""
    bucketer = pr.GradientBucketer(model.params, comm=comm, bucket_cap_mb=cap_mb, overlap=True)

    def reduce() -> tuple[float, float]:
        bucketer.wait()
        stats = bucketer.stats()
        return stats.communication_s, stats.exposed_s

    return Candidate(model, reduce)


def make_candidate(name: str, model: Model, comm: pr.Communicator) -> Candidate:
    """Return the candidate of this name."""

    def per_tensor(lists: list[list[Tensor]]) -> None:
        for tensors in zip(*lists, strict=True):
            comm.all_reduce(tensors)

    calls = {"naive": naive, "fused per tensor": per_tensor, "coalesced": comm.all_reduce_coalesced}
    if name in calls:
        return after_backward(model, calls[name])
    cap_mb = name.removeprefix("bucketed, ").removesuffix(" MB")
    return bucketed(model, comm, float(cap_mb))


def run_case(run: Run, case: Case) -> None:
    """Check and time all candidates in turns."""
    make = MODELS[case.name]
    with pr.Communicator(["cpu"] * case.world_size, order="rank") as comm:
        candidates = {
            name: make_candidate(name, make(case.world_size), comm) for name in case.candidates
        }
        correct = check(candidates)
        for candidate in candidates.values():
            candidate.step()
        samples = in_turns(
            {name: candidate.step for name, candidate in candidates.items()},
            rounds=run.effort.rounds,
            budget_s=run.effort.budget_s,
        )
    timings, parts_s = {}, {}
    for name, found in samples.items():
        steps, reductions, exposed = zip(*found, strict=True)
        timings[name] = Timing.of(steps)
        parts_s[name] = {
            "reductions": statistics.median(reductions),
            "exposed": statistics.median(exposed),
        }
    run.add(run.rows(case, timings, correct, limit_s=None, parts_s=parts_s))


def check(candidates: dict[str, Candidate]) -> dict[str, bool]:
    """Say of each whether it leaves the naive sum, bit for bit, in every rank's gradients."""
    for candidate in candidates.values():
        candidate.step()
    want = [p.grad for p in candidates["naive"].model.params[0]]
    return {
        name: all(
            torch.equal(param.grad, grad)
            for params in candidate.model.params
            for param, grad in zip(params, want, strict=True)
        )
        for name, candidate in candidates.items()
    }


def hook_cost_s(num_params: int = 2000, rounds: int = 31) -> float:
    """Return what counting costs: a parameter with a hook against one without, by minima."""
    hooked, other, bare = (
        [torch.zeros(1, requires_grad=True) for _ in range(num_params)] for _ in range(3)
    )

    def backward_s(params: list[Tensor]) -> float:
        for param in params:
            param.grad = None
        return host_s(sum(param * 2.0 for param in params).backward, 1)

    with_hook, without = [], []
    # Two ranks, of which one has gradients: nothing is complete, and hooks do nothing but count.
    with pr.GradientBucketer([hooked, other], overlap=False) as bucketer:
        for _ in range(rounds):
            with_hook.append(backward_s(hooked))
            bucketer.wait()
            without.append(backward_s(bare))
    return (min(with_hook) - min(without)) / num_params


def measure(run: Run) -> None:
    """Measure a hook, then run the cases."""
    run.results.facts["hook_s"] = hook_cost_s(rounds=3 if run.is_smoke else 31)
    for case in run.cases:
        run_case(run, case)


# -- cases -----------------------------------------------------------------------------------------


def cases(models: Sequence[str], ranks: Sequence[int], caps_mb: Sequence[float]) -> list[Case]:
    """Return all models on all numbers of ranks."""
    names = ("naive", "fused per tensor", "coalesced", *(f"bucketed, {c:g} MB" for c in caps_mb))
    return [Case(model, k, names) for model in models for k in ranks]


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return cases(("lenet",), (2,), (1,))
    return cases(tuple(MODELS), (2, 4), (1, 10) if effort == "quick" else (0.1, 1, 10))


BENCHMARK = Benchmark(
    section="bucketing",
    title="Gradients while backward runs",
    about="A training step without the optimiser, gradients checked bit for bit. `exposed` is "
    "the part of the reductions' time after backward.",
    baseline=("coalesced",),
    efforts={"full": Effort(61, 12.0), "quick": Effort(5, 0.5), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
    threads=num_cores(),  # with one, a core would be idle that a reduction could use
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
