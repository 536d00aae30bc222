"""Nets, batches and comparisons with the plain module for tests of DataParallel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr


def make_mlp(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_conv(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).to(dtype)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.rnn(self.embedding(tokens))[0]).mean(1)


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        with torch.no_grad():
            shift = self.used(x)
        hidden = self.frozen(x) * self.scale + self.used(x) + shift
        return self.out(hidden.masked_fill(~self.mask, 0.0))


def rows(n, dtype=torch.float64, seed=3, width=5):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, width, generator=generator, dtype=dtype)  # noqa: N806
    return X, torch.randint(3, (n,), generator=generator)


def images(n, dtype=torch.float64):
    X, y = rows(n, dtype, width=72)  # noqa: N806
    return X.view(n, 2, 6, 6), y


def tokens(n):
    generator = torch.Generator().manual_seed(4)
    X = torch.randint(5, (n, 4), generator=generator)  # noqa: N806
    return X, torch.randint(5, (n,), generator=generator)


NETS = {
    "mlp": (make_mlp, rows),
    "conv": (lambda: make_conv().eval(), images),
    "tied": (lambda: Tied().double(), tokens),
    "branches": (lambda: PartlyUsed().double(), rows),
}
CAPS = pytest.mark.parametrize("cap_mb", [None, 1e-6], ids=["one bucket", "many buckets"])


def make_pair(name, k, **options):
    make, batch = NETS[name]
    torch.manual_seed(0)
    plain = make()
    return plain, pr.DataParallel(copy.deepcopy(plain), ["cpu"] * k, **options), batch


def backward(net, batch, factor=1.0):
    X, y = batch  # noqa: N806
    loss = F.cross_entropy(net(X), y) * factor
    loss.backward()
    return loss


def assert_same(found, wanted, atol=1e-12):
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=atol)
