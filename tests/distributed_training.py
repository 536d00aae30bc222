"""Training cases of ``test_distributed.py``, compared with replicas averaged in one process."""

import copy
from collections.abc import Callable
from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pyringar.distributed

STEPS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small_buckets": {"bucket_cap_mb": 0.001},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused_bucket_view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        )
        self.spare = nn.Linear(10, 10)

    def forward(self, x: Tensor, with_spare: bool = True) -> Tensor:
        y = self.body(x)
        return self.spare(y) if with_spare else y


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 1, 8, 8, generator=generator)


def reference(size: int, with_spare: Callable[[int], bool]) -> list[Net]:
    replicas = [copy.deepcopy(make_net(0)) for _ in range(size)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.1, momentum=0.9) for r in replicas]
    for step in range(STEPS):
        buffers = [b.clone() for b in replicas[0].buffers()]
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for buffer, value in zip(replica.buffers(), buffers, strict=True):
                buffer.copy_(value)
            optimizer.zero_grad()
            replica(batch(rank, step), with_spare(step)).square().mean().backward()
        for same in zip(*(r.parameters() for r in replicas), strict=True):
            grads = [p.grad for p in same if p.grad is not None]
            if grads:
                mean = oracle.reduced([g * (1 / size) for g in grads], "sum")
                for p in same:
                    p.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    return replicas


def train(model: nn.Module, rank: int, with_spare: Callable[[int], bool], optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step), with_spare(step)).square().mean().backward()
        optimizer.step()


def assert_trained(model: nn.Module, wanted: nn.Module, size: int, context: str) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        oracle.assert_bits(ours.detach(), theirs.detach(), (context, name))
        gathered = [torch.empty_like(ours) for _ in range(size)]
        dist.all_gather(gathered, ours.detach())
        oracle.assert_all_ranks(gathered, gathered[0], (context, name))


def check_variant(rank: int, size: int, name: str, register_hook: bool = False) -> None:
    def with_spare(step: int) -> bool:
        return not (name.startswith("unused") and step != 1)

    ddp = DistributedDataParallel(make_net(rank), **VARIANTS[name])
    if register_hook:
        state = pyringar.distributed.HookState()
        ddp.register_comm_hook(state, pyringar.distributed.ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    train(ddp, rank, with_spare, optimizer)
    wanted = reference(size, with_spare)[rank]
    assert_trained(ddp.module, wanted, size, name)


def data_parallel(rank: int, size: int) -> None:
    for name in VARIANTS:
        check_variant(rank, size, name)


def data_parallel_hook(rank: int, size: int) -> None:
    assert dist.get_backend() == "gloo"
    check_variant(rank, size, "plain", register_hook=True)
    check_variant(rank, size, "small_buckets", register_hook=True)


def accumulation(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(make_net(rank), broadcast_buffers=False)
    alone = make_net(0)
    with ddp.no_sync():
        ddp(batch(rank, 0)).sum().backward()
    ddp(batch(rank, 1)).sum().backward()
    parts = []
    for r in range(size):
        net = copy.deepcopy(alone)
        for step in (0, 1):
            net(batch(r, step)).sum().backward()
        parts.append([p.grad for p in net.parameters()])
    for p, *grads in zip(ddp.module.parameters(), *parts, strict=True):
        oracle.assert_bits(p.grad, oracle.reduced([g * (1 / size) for g in grads], "sum"))


def fully_sharded(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 7))

    sharded = net()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    plain = net()
    ours = torch.optim.SGD(sharded.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs = [torch.randn(4, 16, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    params = list(plain.parameters())
    for _ in range(STEPS):
        ours.zero_grad()
        sharded(inputs[rank]).square().mean().backward()
        ours.step()
        by_rank = [torch.autograd.grad(plain(x).square().mean(), params) for x in inputs]
        for param, *grads in zip(params, *by_rank, strict=True):
            param.grad = oracle.reduced(grads, "mean")
        theirs.step()
    for p, wanted in zip(sharded.parameters(), params, strict=True):
        assert torch.equal(p.full_tensor(), wanted)


def zero_redundancy(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(make_net(rank))
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    train(ddp, rank, lambda step: True, optimizer)
    assert_trained(ddp.module, reference(size, lambda step: True)[rank], size, "ZeRO")
    optimizer.consolidate_state_dict(to=0)


def uneven_batches(rank: int, size: int) -> None:
    for by_all in (True, False):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        with ddp.join(divide_by_initial_world_size=by_all):
            for step in range(2 + rank):
                ddp.zero_grad()
                ddp(torch.ones(3, 4)).sum().backward()
                left = size - max(0, step - 1)  # ranks that still have batches
                assert (ddp.module.weight.grad == 3 * left / (size if by_all else left)).all()
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        assert total.item() == size


CASES = {
    case.__name__: case
    for case in (
        data_parallel,
        accumulation,
        zero_redundancy,
        fully_sharded,
        uneven_batches,
    )
}
