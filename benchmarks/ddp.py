"""Time a step of DistributedDataParallel on the backends gloo and ringar, in the same processes.

A step is forward, backward and the all-reduces of DDP, without the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bench import Benchmark, Case, Run
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.timing import Effort, Sampler, host_s
from pyringar.train.model_resnet18 import resnet18

CANDIDATES = ("bare", "gloo", "ringar")


def mlp() -> nn.Module:
    """Return 25 million parameters in six matrices."""
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
    """Run forward and backward."""
    model.zero_grad()
    model(x).square().mean().backward()


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients end to end."""
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


class StepWorker(Worker):
    """One rank, with a module per candidate."""

    def wrapped(self, candidate: str, module: nn.Module) -> nn.Module:
        """Return the module with the candidate's all-reduces."""
        if candidate == "bare":
            return module
        group = self.group if candidate == "ringar" else dist.group.WORLD
        return DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check all candidates, then time their steps in turns."""
        make, shape = MODELS[case.name]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.rank))
        models: dict[str, nn.Module] = {}
        for name in case.candidates:
            torch.manual_seed(0)
            models[name] = self.wrapped(name, make())
        for _ in range(3):  # DDP makes its buckets anew after the first
            for model in models.values():
                step(model, x)
        want = gradients(models["gloo"])
        right = {
            name: name == "bare" or torch.allclose(gradients(model), want, rtol=1e-3, atol=1e-5)
            for name, model in models.items()
        }

        def sampler(model: nn.Module) -> Sampler:
            def sample() -> Sequence[float]:
                step(model, x)
                self.comm.barrier()
                return [host_s(lambda: step(model, x))]

            return sample

        return self.time({name: sampler(m) for name, m in models.items()}, right, effort)


def measure(run: Run) -> None:
    """Run the models in the same processes."""
    answers = run_cases(StepWorker, run.cases, run.effort, deadline_s=600.0)
    for case, (timings, correct) in zip(run.cases, answers, strict=True):
        bare_s = timings["bare"].median_s
        parts_s = {
            name: {"communication": timings[name].median_s - bare_s} for name in CANDIDATES[1:]
        }
        run.add(case, timings, correct, limit_s=bare_s, parts_s=parts_s)


def cases_of(effort: str) -> list[Case]:
    """Return the models, on two ranks."""
    return [Case(name, 2, CANDIDATES) for name in list(MODELS)[: 1 if effort == "trial" else None]]


BENCHMARK = Benchmark(
    section="ddp",
    title="DistributedDataParallel",
    about="A step without the optimizer, time of the slowest rank. `communication` is the step "
    "less the same step without DDP, which is the limit.",
    efforts={"full": Effort(31, 60.0), "quick": Effort(7, 10.0), "trial": Effort(2, 60.0)},
    cases=cases_of,
    measure=measure,
    ours="ringar",
    peers=("gloo",),
    limit="bare",
)
