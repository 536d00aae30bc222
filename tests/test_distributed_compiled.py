"""Does torch.compile leave the backend `ringar` alone where compiled programs call it?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def calls(x: Tensor) -> Tensor:
    dist.broadcast(x, 0, async_op=True).wait()
    rows = [torch.zeros(3, dtype=torch.int16) for _ in range(2)]
    dist.all_gather(rows, (x + dist.get_rank()).to(torch.int16))
    return torch.stack(rows)


def gradients(rank: int, wraps: Any) -> Tensor:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    program = wraps(net)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        program(torch.randn(6, 4, generator=generator)).pow(3).sum().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def compiled(rank: int, size: int) -> Any:
    def compiles(program: Any) -> Any:
        return torch.compile(program, backend="eager")

    rows = compiles(calls)(torch.arange(3.0) + 10 * rank)
    same = torch.equal(gradients(rank, compiles), gradients(rank, lambda net: net))
    return rows.tolist(), same


@pytest.mark.slow
def test_compiled_programs():
    results = run_group(compiled, 2, timeout_s=60, limit_s=120)
    assert results == [([[0, 1, 2], [1, 2, 3]], True)] * 2, results
