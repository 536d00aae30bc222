"""GPU: torch.distributed on ranks of `pr.launch`."""

from __future__ import annotations

import subprocess
import sys

import gpu
import pytest
import torch
import torch.distributed as dist
from oracle import DTYPES, assert_bits, expected, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr

pytestmark = gpu.needed
K = 4


def on_ranks(device, program, **options):
    devices = [device] * K
    return pr.launch(program, K, devices=devices, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_are_bit_exact(device, dtype):
    parts = [random(1027, dtype, rank) for rank in range(K)]
    wanted = expected(parts, "sum", "fused")

    def program():
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        mine = parts[rank].to(device, copy=True)
        dist.all_reduce(mine)
        assert_bits(mine.cpu(), wanted, dtype)
        every = torch.empty(K * 1027, dtype=dtype, device=device)
        dist.all_gather_into_tensor(every, parts[rank].to(device))
        assert_bits(every.cpu(), torch.cat(parts), dtype)
        part = torch.empty(1027, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, torch.cat([parts[rank]] * K).to(device))
        assert_bits(part.cpu(), wanted, dtype)
        dist.broadcast(mine, 2)
        dist.barrier()

    on_ranks(device, program)


def train(device, wrap):
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(16, 64, device=device)).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten().cpu() for p in whole])


@pytest.mark.parametrize("seed", range(3))
def test_fully_sharded_matches_data_parallel(device, seed):
    kind = torch.device(device).type

    def wrap(net):
        fully_shard(net, mesh=init_device_mesh(kind, (K,)))
        return net

    found = on_ranks(device, lambda: train(device, wrap), seed=seed)
    assert all(torch.equal(params, found[0]) for params in found)
    data_parallel = on_ranks(device, lambda: train(device, DistributedDataParallel), seed=seed)
    assert all(torch.equal(params, data_parallel[0]) for params in data_parallel)
    torch.testing.assert_close(found[0], data_parallel[0])


@gpu.only
def test_async_call_follows_current_stream(device):
    def program():
        dist.init_process_group()
        side = torch.cuda.Stream()
        mine = torch.zeros(1 << 20, device=device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(gpu.SLEEP_CYCLES)
            mine.fill_(dist.get_rank() + 1)
            work = dist.all_reduce(mine, async_op=True)
        work.wait()  # makes the current stream wait for the call
        assert (mine == 10).all()

    for seed in range(3):
        on_ranks(device, program, seed=seed)


@gpu.only
def test_each_rank_has_random_generator(device):
    def program(pause):
        dist.init_process_group()
        torch.cuda.manual_seed(dist.get_rank())
        found = []
        for _ in range(3):
            found.append(torch.rand(2, device=device).tolist())
            if pause:
                dist.barrier()
        return found

    alone = on_ranks(device, program, args=(False,))
    assert on_ranks(device, program, args=(True,), seed=5) == alone
    assert alone[0] != alone[1]


def test_processes_may_share_one_gpu(device, tmp_path):
    """Use a new interpreter: a process that has used CUDA cannot use it after fork()."""
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch, pyringar as pr\n"
        "device = sys.argv[1]\n"
        "def program():\n"
        "    comm = pr.ProcessCommunicator(device=device)\n"
        "    x = torch.full((1027,), comm.rank + 1.0, device=device)\n"
        "    comm.all_reduce(x)\n"
        "    comm.close()\n"
        "    return x.tolist()\n"
        "sums = pr.launch(program, 3, devices=[device] * 3, processes=True)\n"
        "assert sums == [[6.0] * 1027] * 3\n"
    )
    command = [sys.executable, script, str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
