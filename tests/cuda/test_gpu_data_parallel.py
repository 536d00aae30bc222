"""GPU: DataParallel equals the plain module: overlap, streams, graphs, one GPU or two."""

from __future__ import annotations

import copy

import gpu
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal

pytestmark = gpu.needed
CAPS = pytest.mark.parametrize("cap_mb", [None, 1e-6], ids=["one bucket", "bucket per parameter"])
two = pytest.param("two GPUs", marks=gpu.two)


class Net(nn.Module):
    """Convolution, batch norm in eval mode, an LSTM, and tied weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6).eval()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.out, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.out.weight

    def forward(self, x):
        hidden = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        return self.tied(self.out(self.lstm(hidden)[0])).mean(1)


def make_net(device):
    torch.manual_seed(0)
    return Net().double().to(device)


def batch_of(n, device):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64)  # noqa: N806
    return X.to(device), torch.randint(8, (n,), generator=generator).to(device)


def devices_of(gpus, device):
    return ["cuda:0", "cuda:1", "cuda:0"] if gpus == "two GPUs" else [device] * 3


def train(net, device, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        X, y = batch_of(7, device)  # noqa: N806
        F.cross_entropy(net(X), y).backward()
        optimizer.step()


def assert_same(found, wanted, atol=1e-12):
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=atol)


@CAPS
@pytest.mark.parametrize("gpus", ["one GPU", two])
def test_training_steps_match_plain_module(device, gpus, cap_mb):
    plain = make_net(device)
    net = pr.DataParallel(copy.deepcopy(plain), devices_of(gpus, device), bucket_cap_mb=cap_mb)
    train(plain, device)
    train(net, device)
    assert_same(net, plain)


@pytest.mark.parametrize("gpus", ["one GPU", two])
def test_training_steps_are_reproducible(device, gpus):
    found = []
    for cap_mb in (None, None, 1e-6):
        net = pr.DataParallel(make_net(device), devices_of(gpus, device), bucket_cap_mb=cap_mb)
        with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
            train(net, device)
        found.append([param.detach().cpu() for param in net.parameters()])
    check_replicas_equal(found)


@pytest.mark.parametrize("gpus", ["one GPU", two])
@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_batchnorm_statistics_match_plain_module(device, gpus, batchnorm):
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double().to(device)
    devices = devices_of(gpus, device)
    net = pr.DataParallel(copy.deepcopy(plain), devices, batchnorm=batchnorm)
    X = torch.randn(9, 4, dtype=torch.float64, device=device)  # noqa: N806
    wanted = plain(X if batchnorm == "sync" else X[:3])
    found = net(X)
    torch.testing.assert_close(found[: len(wanted)], wanted)
    for mine, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


@gpu.only
@pytest.mark.parametrize("gpus", ["one GPU", two])
def test_backward_runs_on_side_stream(device, gpus):
    plain = make_net(device)
    net = pr.DataParallel(copy.deepcopy(plain), devices_of(gpus, device), bucket_cap_mb=1e-6)
    train(plain, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.cuda._sleep(gpu.SLEEP_CYCLES)
        train(net, device)
    torch.cuda.current_stream().wait_stream(side)
    assert_same(net, plain)


@gpu.only
def test_cuda_graph_captures_training_step(device):
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().to(device)
    net = pr.DataParallel(copy.deepcopy(plain), [device] * 3)
    X = torch.randn(6, 4, dtype=torch.float64, device=device)  # noqa: N806
    graph = gpu.captured(lambda: net(X).square().mean().backward())
    for _ in range(2):
        values = torch.randn(6, 4, dtype=torch.float64, device=device)
        X.copy_(values)
        with torch.no_grad():
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                mine.add_(0.01)
                other.copy_(mine)
        net.zero_grad(set_to_none=False)
        graph.replay()
        plain.zero_grad()
        plain(values).square().mean().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)


@gpu.only
def test_device_numbers_are_accepted(device):
    net = pr.DataParallel(nn.Linear(2, 2).to(device), [0, 0])
    assert net.devices == (torch.device("cuda:0"),) * 2
    assert net(torch.ones(4, 2)).device == torch.device("cuda:0")  # inputs may be on the CPU
    with pytest.raises(pr.ArgumentError, match=r"'weight' on cpu, expected cuda:0"):
        pr.DataParallel(nn.Linear(2, 2), [device] * 2)(torch.ones(4, 2))


@gpu.two
def test_error_notes_name_failed_rank():
    class Fails(nn.Linear):
        def forward(self, x):
            if x.device.index == 1 and x.shape[0] == 1:
                raise ValueError("planted")
            return super().forward(x)

    net = pr.DataParallel(Fails(2, 2).to("cuda:0"), ["cuda:0", "cuda:1"], output_device=1)
    assert net(torch.ones(4, 2)).device == torch.device("cuda:1")
    with pytest.raises(ValueError, match="planted") as failed:
        net(torch.ones(2, 2))
    assert "(rank 1 of 2, on cuda:1)" in failed.value.__notes__
