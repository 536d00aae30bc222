"""Nets, inputs, oracles and failing backward passes for tests of GradientBucketer."""

import copy
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import pytest
import torch
from oracle import reduced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyringar as pr

EACH = {"bucket_cap_mb": 1e-6}  # one bucket per parameter
EARLY = {**EACH, "overlap": True}  # launch buckets during backward, also on the CPU


class Explode(torch.autograd.Function):
    armed: object = None

    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Explode.armed == ctx.rank:
            raise ValueError("planted")
        return grad, None


@contextmanager
def armed(rank: object):
    Explode.armed = rank
    try:
        with pytest.raises(ValueError, match="planted"):
            yield
    finally:
        Explode.armed = None


class Net(nn.Module):
    """Backward computes ``late.grad``, may then fail, then computes ``early.grad``."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rank = rank
        self.early = nn.Parameter(torch.randn(40, generator=generator))
        self.late = nn.Parameter(torch.randn(40, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (Explode.apply((self.early * x).tanh(), self.rank) * self.late).sum()


def nets_of(world_size: int = 3) -> list[Net]:
    return [Net(rank) for rank in range(world_size)]


def vectors(seed: int, world_size: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(40, generator=generator) for _ in range(world_size)]


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5), nn.Tanh()
    )


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Backwards(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.tanh(self.two(x)))


class Tied(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.two.weight = self.one.weight


class Mixed(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.two.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).double())


class Views(nn.Module):
    """Backward returns both gradients as views of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(1, 6))
        self.b = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.view(6) + self.b.view(6))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = make_net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(1), nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 8, (1, 2)), nn.ReLU()
    )
    return net.append(nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    net = make_net()
    net[2].requires_grad_(False)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_net,
    "backwards": Backwards,
    "tied": Tied,
    "mixed": Mixed,
    "views": Views,
    "frozen": frozen,
    "bfloat16": lambda: make_net().to(torch.bfloat16),
    "channels_last": channels_last,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "checkpoint": lambda: Checkpointed(reentrant=False),
}


def inputs(world_size: int = 3, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator) for _ in range(world_size)]


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x.to(next(net.parameters()).dtype) if x.ndim > 1 else x)
    return out.square().sum() if out.ndim else out


def backward_one_by_one(nets: Sequence[nn.Module], xs: Sequence[Tensor]) -> None:
    for net, x in zip(nets, xs, strict=True):
        loss_of(net, x).backward()


def backward_together(nets: Sequence[nn.Module], xs: Sequence[Tensor]) -> None:
    torch.autograd.backward([loss_of(net, x) for net, x in zip(nets, xs, strict=True)])


def clear(nets: Sequence[nn.Module], *, set_to_none: bool = True) -> None:
    for net in nets:
        net.zero_grad(set_to_none=set_to_none)


def step_of(net: nn.Module, bucketer: pr.GradientBucketer, x: Tensor) -> None:
    net.zero_grad()
    loss_of(net, x).backward()
    bucketer.wait()


def summed(nets: Sequence[nn.Module], xs: Sequence[Tensor], op: str = "sum") -> list[Tensor | None]:
    """Return the expected sums: run backward on copies without hooks, add in rank order."""
    copies = [copy.deepcopy(net) for net in nets]
    clear(copies)
    backward_one_by_one(copies, xs)
    found: list[Tensor | None] = []
    for column in zip(*(net.parameters() for net in copies), strict=True):
        grads = [param.grad for param in column]
        found.append(None if grads[0] is None else reduced(grads, op))
    return found


def assert_reduced(nets: Sequence[nn.Module], expected: Sequence[Tensor | None]) -> None:
    for rank, net in enumerate(nets):
        for i, (param, want) in enumerate(zip(net.parameters(), expected, strict=True)):
            assert (param.grad is None) == (want is None), (rank, i)
            assert want is None or torch.equal(param.grad, want), (rank, i)


def grads_of(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def assert_steps(got, wanted) -> None:
    """Assert that the gradients after each step, from `grads_of`, have equal bits."""
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert (a is None) == (b is None), (step, i)
            assert a is None or a.stride() == b.stride(), (step, i)
            assert a is None or torch.equal(a, b), (step, i, a, b)


def assert_next_step_is_right(nets, xs, bucketer, *, set_to_none: bool = True) -> None:
    expected = summed(nets, xs)
    clear(nets, set_to_none=set_to_none)
    backward_one_by_one(nets, xs)
    bucketer.wait()
    assert_reduced(nets, expected)


def assert_closed(bucketer: pr.GradientBucketer, nets: Sequence[nn.Module], reason: str) -> None:
    for _ in range(2):
        with pytest.raises(pr.RingarError, match=f"is closed: .*{reason}"):
            bucketer.wait()
        with pytest.raises(pr.RingarError, match="is closed"), bucketer.no_sync():
            pass
    assert hooks_on(nets) == 0


def hooks_on(nets: Sequence[nn.Module]) -> int:
    params = [param for net in nets for param in net.parameters()]
    return sum(
        len(hooks or {})
        for param in params
        for hooks in (param._post_accumulate_grad_hooks, param._backward_hooks)
    )


def error_of(function: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises((ValueError, pr.RingarError)) as caught:
        function()
    return type(caught.value), str(caught.value)
