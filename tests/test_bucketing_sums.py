"""Reduced gradients are not reduced again: random programs match the plain module."""

import random

import pytest
import torch
from bucketing_nets import EACH, EARLY, assert_steps, grads_of
from torch import Tensor, nn

import pyringar as pr

BRANCHES = "abc"
LATE = {"overlap": False}


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in BRANCHES:
            setattr(self, name, nn.Linear(3, 2, bias=False))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return sum(getattr(self, name)(x).sum() for name in used)


def batch(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-3, 4, (2, 3), generator=generator) * 12.0  # divisible by 1 to 4


class PlainRanks:
    no_sync = staticmethod(torch.enable_grad)

    def __init__(self, k: int, op: str) -> None:
        self.k, self.nets = k, [Linears()]
        self.divisor = k if op == "mean" else 1

    def backward(self, seed: int, used_by: dict[int, str]) -> None:
        for rank, used in used_by.items():
            if used:
                # Gradients are linear in the batch, and the division of its integers is exact.
                self.nets[0](batch(seed, rank) / self.divisor, used).backward()

    def wait(self) -> None:
        """Do nothing: backward() of the plain module adds the gradients of all ranks."""

    def grads(self) -> list[Tensor | None]:
        return grads_of(self.nets[0])


class BucketedRanks:
    def __init__(self, k: int, ranks: range, bucketer: pr.GradientBucketer, nets: list) -> None:
        self.k, self.ranks, self.nets = k, ranks, nets
        self.wait, self.no_sync = bucketer.wait, bucketer.no_sync

    def backward(self, seed: int, used_by: dict[int, str]) -> None:
        for rank, net in zip(self.ranks, self.nets, strict=True):
            if used_by.get(rank):
                net(batch(seed, rank), used_by[rank]).backward()

    def grads(self) -> list[Tensor | None]:
        found = [[p.grad for p in net.parameters()] for net in self.nets]
        for column in zip(*found, strict=True):
            assert len({grad is None for grad in column}) == 1
            assert all(grad is None or torch.equal(grad, column[0]) for grad in column)
        return grads_of(self.nets[0])


AnyRanks = PlainRanks | BucketedRanks


def random_program(seed: int):
    def play(ranks: AnyRanks):
        draw = random.Random(seed)

        def used_by() -> dict[int, str]:
            return {r: "".join(b for b in BRANCHES if draw.random() < 0.6) for r in range(ranks.k)}

        for step in range(6):
            for number in range(draw.randint(0, 2)):
                with ranks.no_sync():
                    ranks.backward(10 * step + number, used_by())
            if draw.random() < 0.8:
                ranks.backward(10 * step + 9, used_by())
            for _ in range(draw.randint(1, 2)):
                ranks.wait()
                yield ranks.grads()
            for branch in BRANCHES:
                action = draw.choice(["keep", "none", "zero", "negate", "replace"])
                for net in ranks.nets:
                    param = getattr(net, branch).weight
                    if action in ("none", "zero"):
                        getattr(net, branch).zero_grad(set_to_none=action == "none")
                    elif param.grad is not None and action == "negate":
                        param.grad.neg_()
                    elif param.grad is not None and action == "replace":
                        param.grad = param.grad * 2

    return play


PROGRAMS = {f"random {seed}": random_program(seed) for seed in range(14)}


def play_as_rank(rank, world_size, store, op, options):
    found = {}
    with pr.ProcessCommunicator(store, rank, world_size) as comm:
        for name, play in list(PROGRAMS.items())[:6]:
            nets = [Linears()]
            with pr.GradientBucketer(nets, comm=comm, op=op, **options) as bucketer:
                ranks = BucketedRanks(world_size, range(rank, rank + 1), bucketer, nets)
                found[name] = list(play(ranks))
    return found


@pytest.mark.parametrize("options", [{}, EARLY, {"overlap": True}], ids=["late", "each", "one"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(("name", "k"), [(n, 1 + i % 4) for i, n in enumerate(PROGRAMS)])
def test_local_ranks_match_plain_module(name, k, op, options):
    nets = [Linears() for _ in range(k)]
    with pr.GradientBucketer(nets, op=op, **options) as bucketer:
        got = list(PROGRAMS[name](BucketedRanks(k, range(k), bucketer, nets)))
    assert_steps(got, list(PROGRAMS[name](PlainRanks(k, op))))


@pytest.mark.parametrize(
    ("k", "op", "options"),
    [(2, "sum", EACH), (3, "mean", EACH), (2, "mean", LATE), (3, "sum", LATE)],
)
def test_process_ranks_match_plain_module(rank_group_of, k, op, options):
    for found in rank_group_of(k).check(play_as_rank, op, options):
        for name, got in found.items():
            assert_steps(got, list(PROGRAMS[name](PlainRanks(k, op))))


def test_autograd_grad_keeps_reduced_gradients():
    nets = [Linears() for _ in range(3)]
    with pr.GradientBucketer(nets) as bucketer:
        for net in nets:
            net(torch.rand(2, 3), "abc").backward()
        bucketer.wait()
        params = [[*net.parameters()] for net in nets]
        sums = [param.grad.clone() for param in params[0]]
        for net, mine in zip(nets, params, strict=True):
            torch.autograd.grad(net(torch.rand(2, 3), "abc"), mine)
        for _ in range(2):
            for mine in params:
                assert all(map(torch.equal, (param.grad for param in mine), sums))
            bucketer.wait()
