"""Do DDP and FSDP2 end with the bits of processes on ranks that are threads, whoever goes next?"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import mostly_slow
from ranks import run_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr

STEPS, SEEDS = 3, range(10)


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Sigmoid(), nn.Linear(120, 84), nn.Sigmoid(), nn.Linear(84, 10)),
    )


class Transformer(nn.Module):
    """Two layers over 16 tokens, with dropout: each rank draws its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


MODELS: dict[str, Any] = {"lenet": lenet, "transformer": Transformer}


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    for part in model.children():
        if any(True for _ in part.parameters()) and not isinstance(part, nn.ModuleList):
            fully_shard(part)
    fully_shard(model)
    return model


def train(rank: int, size: int, name: str, wrapper: str, seed: int) -> bytes:
    """Train for some steps; the bits of all parameters."""
    torch.manual_seed(seed)
    model = wrapped(MODELS[name](), wrapper)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(1000 * seed + rank)  # of dropout, and of the data
    for _ in range(STEPS):
        x, y = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    whole = [p.full_tensor() if wrapper == "fsdp2" else p for p in model.parameters()]
    return b"".join(p.detach().numpy().tobytes() for p in whole)


def train_all(rank: int, size: int, name: str, wrapper: str) -> list[bytes]:
    return [train(rank, size, name, wrapper, seed) for seed in SEEDS]


@functools.cache
def of_processes(size: int, name: str, wrapper: str) -> list[list[bytes]]:
    """By rank and seed, as torchrun gives them."""
    return run_group(train_all, size, name, wrapper)


def in_thread(size: int, name: str, wrapper: str, seed: int) -> bytes:
    dist.init_process_group("ringar")
    return train(dist.get_rank(), size, name, wrapper, seed)


@pytest.mark.parametrize(
    ("size", "name", "wrapper"),
    mostly_slow(
        itertools.product([1, 2, 4], MODELS, ["ddp", "fsdp2"]),
        *((2, "lenet", "fsdp2"), (2, "transformer", "ddp")),
    ),
)
def test_threads_have_the_bits_of_processes(size, name, wrapper):
    wanted = of_processes(size, name, wrapper)
    for seed in SEEDS:
        found = pr.launch(in_thread, size, args=(size, name, wrapper, seed), seed=seed)
        assert all(isinstance(bits, list) for bits in wanted), wanted
        assert found == [bits[seed] for bits in wanted], f"seed {seed}"
    assert len({bits[0] for bits in wanted}) == 1, "all ranks hold the same"
    assert len(set(wanted[0])) == len(SEEDS), "seeds differ"


def test_parallel_ranks_have_the_bits_too():
    """Dropout is the exception: random numbers are shared then."""
    for wrapper in ("ddp", "fsdp2"):
        turns = pr.launch(train_own_data, 4, args=("lenet", wrapper))
        assert pr.launch(train_own_data, 4, args=("lenet", wrapper), parallel=True) == turns


def train_own_data(name: str, wrapper: str) -> bytes:
    dist.init_process_group("ringar")
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=torch.Generator().manual_seed(1))
    model = wrapped(model, wrapper)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 1, 28, 28, generator=generator)).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if wrapper == "fsdp2" else p for p in model.parameters()]
    return b"".join(p.detach().numpy().tobytes() for p in whole)
