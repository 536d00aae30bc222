"""Gradients that share memory after backward: GradientBucketer copies them and sums correctly."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bucketing_nets import (
    EARLY,
    assert_reduced,
    backward_one_by_one,
    clear,
    inputs,
    make_net,
    summed,
)
from case_marks import mostly_slow
from torch import Tensor, nn

import pyringar as pr

N = 12  # features

# Each row: the shape of a parameter, and a function that maps it to shape (N,) or (1, N).
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
        self.keeps = draw.random() < 0.5  # whether layers have residual connections

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


def rows(k: int, per_rank: int) -> Tensor:
    return torch.randn(k * per_rank, N, generator=torch.Generator().manual_seed(1))


def run_backward(nets: list[nn.Module], shards: list[Tensor], *, in_threads: bool) -> None:
    losses = [net(shard).square().sum() for net, shard in zip(nets, shards, strict=True)]
    with ThreadPoolExecutor(len(nets) if in_threads else 1) as threads:
        list(threads.map(Tensor.backward, losses))


@pytest.mark.parametrize("options", [EARLY, {"overlap": True}, {"overlap": False}])
@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("k", mostly_slow([1, 2, 3, 4], 3))
def test_shared_gradients_are_copied(k, passes, in_threads, options):
    """Without copies, a second backward would add to the shared memory twice."""
    for seed in range(5):
        nets, shards = [Shared(seed) for _ in range(k)], list(rows(k, 1 + seed % 2).chunk(k))
        expected = [grad * passes for grad in summed(nets, shards)]  # factors 1 and 2 are exact
        with pr.GradientBucketer(nets, **options) as bucketer:
            for step in range(4):
                clear(nets, set_to_none=step < 2)
                for _ in range(passes - 1):
                    with bucketer.no_sync():
                        run_backward(nets, shards, in_threads=in_threads)
                run_backward(nets, shards, in_threads=in_threads)
                bucketer.wait()
                assert_reduced(nets, expected)
                for grads in ([param.grad for param in net.parameters()] for net in nets):
                    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)


def test_backward_argument_stays_unchanged():
    nets = [nn.ParameterList([torch.ones(4)]) for _ in range(2)]
    with pr.GradientBucketer(nets) as bucketer:
        given = [torch.full((4,), rank + 1.0) for rank in range(2)]
        for net, grad in zip(nets, given, strict=True):
            net[0].view(4).backward(grad)
        bucketer.wait()
    assert_reduced(nets, [torch.full((4,), 3.0)])
    assert [grad[0].item() for grad in given] == [1, 2]


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("options", [{}, EARLY])
def test_user_buffer_holds_gradients(is_view, options):
    nets, shards = [Shared(0) for _ in range(2)], list(rows(2, 2).chunk(2))
    expected = summed(nets, shards)
    flats = []

    def give_buffers():
        for net in nets:
            params = list(net.parameters())
            flats.append(torch.zeros(sum(map(Tensor.numel, params))))
            parts = flats[-1].split([param.numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                grad = part.view_as(param)
                param.grad = grad if is_view else grad.detach()

    if not is_view:
        give_buffers()
    with pr.GradientBucketer(nets, **options) as bucketer:
        if is_view:
            give_buffers()
        for _ in range(4):
            for flat in flats:
                flat.zero_()
            run_backward(nets, shards, in_threads=False)
            bucketer.wait()
            assert_reduced(nets, expected)
            for flat in flats:
                assert torch.equal(flat, torch.cat([grad.flatten() for grad in expected]))


def test_unshared_gradients_are_not_copied():
    """Also fails if a torch release changes the use count of a storage, which shows sharing."""
    nets = [make_net() for _ in range(2)]
    left: list[Tensor] = []
    for param in nets[0].parameters():
        param.register_post_accumulate_grad_hook(lambda p: left.append(p.grad))
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        for _ in range(3):
            clear(nets)
            left.clear()
            backward_one_by_one(nets, inputs(2))
            bucketer.wait()
            now = {id(param.grad) for param in nets[0].parameters()}
            assert {id(grad) for grad in left} == now
