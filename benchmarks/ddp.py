"""Time DDP's training step on the backends gloo and ringar, in the same processes, interleaved.

    python benchmarks/ddp.py --json out.jsonl

A step is forward, backward and DDP's all-reduces, without the optimiser; its time is that of the
slowest rank. On as many cores as ranks nothing can overlap: communication costs what it computes
and waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import Benchmark, Case, Effort, Run, run_as_script
from benchmarks.candidates import CANDIDATES, names_in
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.timing import host_s, in_turns
from pyringar.train.model_resnet18 import resnet18


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
    """Run forward and backward; gradients are made anew."""
    model.zero_grad()
    model(x).square().mean().backward()


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients end to end."""
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


class StepWorker(Worker):
    """One rank: makes a module for each candidate and times their steps."""

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check all candidates, then time their steps in turns."""
        make, shape = MODELS[case.name]
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.rank))
        models: dict[str, nn.Module] = {}
        for name in case.candidates:
            torch.manual_seed(0)
            models[name] = CANDIDATES[name].calls["ddp"](make(), self.group)
        for _ in range(3):  # DDP makes its buckets anew after the first
            for model in models.values():
                step(model, x)
        want = gradients(models["gloo"])
        correct = {
            name: name == "bare" or torch.allclose(gradients(model), want, rtol=1e-3, atol=1e-5)
            for name, model in models.items()
        }

        def sampler(model: nn.Module) -> Callable[[], float]:
            def sample() -> float:
                step(model, x)
                self.comm.barrier()
                return host_s(lambda: step(model, x), 1)

            return sample

        samples = in_turns(
            {name: sampler(model) for name, model in models.items()},
            rounds=effort.rounds,
            budget_s=effort.budget_s,
            agree=self.agree,
        )
        least = self.over_ranks([float(right) for right in correct.values()], "min")
        return self.slowest(samples), {n: bool(r) for n, r in zip(correct, least, strict=True)}


def measure(run: Run) -> None:
    """Run the models one after the other."""
    for case, timings, correct in run_cases(StepWorker, run.cases, run.effort):
        bare_s = timings["bare"].median_s
        parts_s = {
            name: {"communication": timing.median_s - bare_s}
            for name, timing in timings.items()
            if name != "bare"
        }
        run.add(run.rows(case, timings, correct, limit_s=bare_s, parts_s=parts_s))


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    names = list(MODELS)[: 1 if effort == "smoke" else None]
    return [Case(name, 2, names_in("ddp")) for name in names]


BENCHMARK = Benchmark(
    section="ddp",
    title="DistributedDataParallel",
    about="A step without the optimiser, time of the slowest rank. `communication` is the step "
    "less the same step without DDP, which is the limit.",
    baseline=("gloo",),
    limit="bare",
    efforts={"full": Effort(31, 300.0), "quick": Effort(7, 60.0), "smoke": Effort(2, 60.0)},
    cases=cases_of,
    measure=measure,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
