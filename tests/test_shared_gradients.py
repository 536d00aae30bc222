"""Gradients that backward leaves in memory of others: is every sum right, and each its own?"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from bucketing_nets import EACH, assert_reduced, clear
from cases import mostly_slow
from ranks import Crew
from torch import Tensor, nn

import pyringar as pr

N = 12  # features

# From a parameter of this shape to N numbers, or to rows of N.
USES = {
    "whole": ((N,), lambda p: p),
    "view": ((3, 4), lambda p: p.view(N)),
    "unsqueeze": ((N,), lambda p: p.unsqueeze(0)),
    "squeeze": ((1, N), lambda p: p.squeeze(0)),
    "squeeze last": ((N, 1), lambda p: p.squeeze(1)),
    "expand": ((1, N), lambda p: p.expand(1, N)),
    "transpose": ((N, 1), lambda p: p.t()),
    "reshape": ((2, 6), lambda p: p.reshape(1, N)),
    "narrow": ((20,), lambda p: p.narrow(0, 4, N)),
    "chunk": ((2 * N,), lambda p: sum(p.chunk(2))),
    "cat": ((2, 6), lambda p: torch.cat([p[0], p[1]])),
}


class Shared(nn.Module):
    """Adds views of parameters, some of them twice, between layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        self.uses = [[draw.choice(list(USES)) for _ in range(draw.randint(1, 3))] for _ in range(3)]
        self.terms = nn.ParameterList(
            nn.Parameter(torch.randn(USES[use][0])) for uses in self.uses for use in uses
        )
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(N - 5))
        self.is_tied = draw.random() < 0.5
        self.keeps = draw.random() < 0.5  # a residual connection

    def forward(self, x: Tensor) -> Tensor:
        terms = iter(self.terms)
        for layer, uses in zip(self.layers, self.uses, strict=True):
            before, x = x, layer(x)
            for use in uses:
                x = x + USES[use][1](next(terms))
            x = x.tanh() + before if self.keeps else x.tanh()
            if self.is_tied:
                x = x + self.terms[0].flatten()[:N]
        return x + torch.cat([self.a, self.b])


class Positions(nn.Module):
    """Of which a first bucket of the default size leaves while its memory is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(16, 1024), nn.Linear(1024, 10)
        self.positions = nn.Parameter(0.02 * torch.randn(256, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x) + self.positions.unsqueeze(0)).tanh().mean(1))


class TwoViews(nn.Module):
    """Whose parameters' gradients lie in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(4.0).view(1, 4))
        self.b = nn.Parameter(torch.arange(4.0).view(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.view(4) + self.b.view(4))


class OneView(TwoViews):
    """Where torch copies one of them, if it comes while the other is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a + self.b.view(4))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(1, 3, 4)) + self.a.unsqueeze(0) + self.b


def rows(k: int, per_rank: int, *shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k * per_rank, *shape, generator=generator)


def of_plain_passes(net: nn.Module, shards: list[Tensor], passes: int = 1) -> list[Tensor]:
    """What passes with gradients of their own give, added; ranks in their order."""
    total: list[Tensor] = []
    for shard in shards:
        plain = copy.deepcopy(net)
        plain(shard).square().sum().backward()
        grads = [param.grad * passes for param in plain.parameters()]  # 1 and 2: exact
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    return total


def assert_apart(net: nn.Module) -> None:
    storages = {param.grad.untyped_storage().data_ptr() for param in net.parameters()}
    assert len(storages) == len(list(net.parameters()))


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("caps", [EACH, {}], ids=["small", "default"])
@pytest.mark.parametrize("in_turns", [True, None], ids=["turns", "threads"])
@pytest.mark.parametrize("k", mostly_slow([1, 2, 3, 4], 2))
def test_data_parallel(k, in_turns, caps):
    for seed in range(8):
        net, batch = Shared(seed), rows(k, 1 + seed % 2, N)
        expected = of_plain_passes(net, list(batch.chunk(k)))
        ranks = pr.DataParallel(net, ["cpu"] * k, in_turns=in_turns, gather=False, **caps)
        with ranks:
            for step in range(4):
                ranks.zero_grad(set_to_none=step < 2)
                sum(out.square().sum() for out in ranks(batch)).backward()
                ranks.wait()
                assert_reduced(ranks.replicas, expected)


@pytest.mark.parametrize("in_turns", [True, None], ids=["turns", "threads"])
def test_positions_with_all_defaults(in_turns):
    net, batch = Positions(), rows(2, 1, 256, 16)
    expected = of_plain_passes(net, list(batch.chunk(2)))
    with pr.DataParallel(net, ["cpu"] * 2, in_turns=in_turns) as ranks:
        for _ in range(5):
            ranks.zero_grad()
            ranks(batch).square().sum().backward()
            ranks.wait()
            assert_reduced(ranks.replicas, expected)


@pytest.mark.parametrize("caps", [EACH, {}, {"overlap": False}], ids=["small", "default", "wait"])
def test_a_bucketer_by_hand_that_accumulates(caps):
    """Each pass has gradients of its own, where torch would add to the memory of two twice."""
    for make in (TwoViews, lambda: Shared(3), lambda: Shared(4)):
        nets = [make() for _ in range(3)]
        shards = list(rows(3, 1, 4 if make is TwoViews else N).chunk(3))
        expected = of_plain_passes(nets[0], shards, passes=2)
        with pr.GradientBucketer(nets, **caps) as bucketer:
            for _ in range(3):
                clear(nets)
                with bucketer.no_sync():
                    for net, shard in zip(nets, shards, strict=True):
                        net(shard).square().sum().backward()
                for net, shard in zip(nets, shards, strict=True):
                    net(shard).square().sum().backward()
                bucketer.wait()
                assert_reduced(nets, expected)
                for net in nets:
                    assert_apart(net)


@pytest.mark.parametrize("caps", [EACH, {}], ids=["small", "default"])
@pytest.mark.parametrize("in_turns", [True, None], ids=["turns", "threads"])
@pytest.mark.parametrize("kind", [TwoViews, OneView, Tokens])
def test_gradients_of_two_parameters_in_one_memory(kind, in_turns, caps):
    net, batch = kind(), rows(2, 3, 4)
    expected = of_plain_passes(net, list(batch.chunk(2)))
    with pr.DataParallel(net, ["cpu"] * 2, in_turns=in_turns, **caps) as ranks:
        for _ in range(5):
            ranks.zero_grad()
            ranks(batch).square().sum().backward()
            ranks.wait()
            assert_reduced(ranks.replicas, expected)
            for replica in ranks.replicas:
                assert_apart(replica)


def as_rank(rank, world_size, store, caps):
    torch.set_num_threads(1)
    found = []
    with pr.ProcessCommunicator(store, rank, world_size, order="rank") as comm:
        for seed in range(8):
            net, shard = Shared(seed), rows(world_size, 1, N).chunk(world_size)[rank]
            with pr.GradientBucketer([net], comm=comm, **caps) as bucketer:
                for _ in range(3):
                    net.zero_grad()
                    net(shard).square().sum().backward()
                    bucketer.wait()
            found.append([param.grad for param in net.parameters()])
    return found


@pytest.mark.parametrize("caps", [EACH, {}], ids=["small", "default"])
def test_one_process_for_each_rank(caps):
    crew = Crew(2)
    try:
        answers = crew.check(as_rank, caps)
    finally:
        crew.close()
    for found in answers:
        for seed, grads in enumerate(found):
            expected = of_plain_passes(Shared(seed), list(rows(2, 1, N).chunk(2)))
            assert all(map(torch.equal, grads, expected)), seed


def test_the_users_own_tensors_are_let_alone():
    """Neither the gradient that backward begins with nor one that a hook kept is reduced."""
    nets = [nn.ParameterList([torch.ones(4)]) for _ in range(2)]
    with pr.GradientBucketer(nets) as bucketer:
        given = [torch.full((4,), rank + 1.0) for rank in range(2)]
        for net, grad in zip(nets, given, strict=True):
            net[0].view(4).backward(grad)
        bucketer.wait()
    assert_reduced(nets, [torch.full((4,), 3.0)])
    assert [grad[0].item() for grad in given] == [1, 2]


@pytest.mark.parametrize("of", ["views", "before", "kept"])
def test_gradients_that_the_user_shares_stay_where_they_are(of):
    """Parts of a flat buffer that torch knows as views, or that were there, or shared later."""
    nets = [Shared(0) for _ in range(2)]
    shards = list(rows(2, 2, N).chunk(2))
    expected = of_plain_passes(nets[0], shards)
    flats = []

    def start(net: nn.Module) -> None:
        params = list(net.parameters())
        flat = torch.zeros(sum(map(Tensor.numel, params)))
        flats.append(flat)
        parts = flat.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            grad = part.view_as(param)
            param.grad = grad.detach() if of == "before" else grad

    if of == "before":
        list(map(start, nets))
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        if of == "views":
            list(map(start, nets))
        kept: list[list[Tensor]] = []
        for _ in range(4):
            for flat in flats:
                flat.zero_()
            for net, shard in zip(nets, shards, strict=True):
                if of == "kept":
                    net.zero_grad(set_to_none=False)
                net(shard).square().sum().backward()
            bucketer.wait()
            assert_reduced(nets, expected)
            if of == "kept":
                kept = kept or [[p.grad.detach() for p in net.parameters()] for net in nets]
                flats = [torch.cat([part.flatten() for part in parts]) for parts in kept]
            for flat in flats:
                assert torch.equal(flat, torch.cat([grad.flatten() for grad in expected]))


def test_what_most_layers_leave_is_not_copied():
    """Fails, too, where torch has another way to count who uses a memory."""
    nets = [
        nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(144, N), nn.LayerNorm(N), nn.Linear(N, N)),
        )
        for _ in range(2)
    ]
    left: list[Tensor] = []
    for param in nets[0].parameters():
        param.register_post_accumulate_grad_hook(lambda p: left.append(p.grad))
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        for _ in range(3):
            clear(nets)
            left.clear()
            for net in nets:
                net(torch.ones(2, 1, 8, 8)).square().sum().backward()
            bucketer.wait()
            now = {id(param.grad) for param in nets[0].parameters()}
            assert {id(grad) for grad in left} == now
