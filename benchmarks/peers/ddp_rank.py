"""A rank that trains under DistributedDataParallel: RANK=r WORLD_SIZE=k ddp_rank.py ADDRESS."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2]))  # searched after an installed pyringar

from benchmarks.peers.rank import serve
from benchmarks.peers.torch_rank import RANK, WORLD_SIZE, ProcessGroups
from pyringar.train.model_resnet18 import resnet18


def mlp() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18, width 8": (lambda: resnet18(width=8), (32, 1, 28, 28)),
    "MLP, 25 M parameters": (mlp, (32, 2048)),
}


def step(model: nn.Module, x: Tensor) -> Tensor:
    """Run forward and backward; return all gradients, concatenated."""
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


class DdpStep:
    """A training step of one candidate, with the methods that `serve` calls."""

    def __init__(self, groups: ProcessGroups, candidate: str, model: str) -> None:
        make, shape = MODELS[model]
        torch.manual_seed(0)
        module = make()
        self._x = torch.randn(shape, generator=torch.Generator().manual_seed(RANK))
        self._want = step(module, self._x)
        if candidate != "bare":
            dist.all_reduce(self._want)
            self._want /= WORLD_SIZE
            group = groups.ringar if candidate == "ringar" else dist.group.WORLD
            module = DistributedDataParallel(
                module, process_group=group, gradient_as_bucket_view=True
            )
        self._module, self.barrier = module, groups.comm.barrier
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            step(self._module, self._x)

    def fill(self, shift: int) -> None:
        """Do nothing, because each step computes new gradients."""

    def call(self) -> None:
        """Run a step."""
        self._found = step(self._module, self._x)

    def is_right(self, shift: int) -> bool:
        """Return whether the gradients are the mean of all ranks' gradients without DDP."""
        return torch.allclose(self._found, self._want, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    groups = ProcessGroups(Path(sys.argv[1]).parent)
    serve(sys.argv[1], RANK, "DDP", lambda candidate, model: DdpStep(groups, candidate, model))
    groups.close()
