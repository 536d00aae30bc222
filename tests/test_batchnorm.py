"""Synchronised batch norm matches the plain module: outputs, gradients, running statistics."""

from __future__ import annotations

import copy
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.parallel.rank_runs import meet, run_in_lockstep, run_ranks
from pyringar.parallel.shards import check_replicas_equal


class Net(nn.Module):
    """Two batch norms; the second depends on the first one's statistics of all ranks."""

    def __init__(self, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)
        self.bn1, self.bn2 = nn.BatchNorm2d(3, **options), nn.BatchNorm2d(4, **options)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x) + 10))  # a large mean cancels in naive formulas
        return self.fc(self.bn2(self.conv2(x)).mean((2, 3)))


def batch_of(n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, 7, 7, generator=generator, dtype=dtype)  # noqa: N806
    return X * 2 + 1, torch.randint(3, (n,), generator=generator)


def synced(module, num_ranks=2, **options):
    return pr.DataParallel(module, ["cpu"] * num_ranks, batchnorm="sync", **options)


def without_bias():
    module = Net()
    module.bn1.register_parameter("bias", None)
    return module


def frozen():
    module = Net()
    module.bn1.eval()
    return module


MAKES = {
    "plain": Net,
    "cumulative": partial(Net, momentum=None),
    "not affine": partial(Net, affine=False),
    "no statistics": partial(Net, track_running_stats=False),
    "no bias": without_bias,  # pytorch#54495
    "frozen": frozen,
}
SPLITS = [(2, 7, None), (3, 9, (0, 5, 1)), (4, 2, None)]


@pytest.mark.parametrize(("num_ranks", "n", "weights"), SPLITS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_any_batch_split_matches_plain_module(make, num_ranks, n, weights, dtype, tolerance):
    torch.manual_seed(0)
    plain = make().to(dtype)
    for name, param in plain.named_parameters():
        if "bn" in name:
            nn.init.uniform_(param, 0.5, 2)
    net = synced(copy.deepcopy(plain), num_ranks, weights=weights)
    for step in range(3):
        if step == 2:
            net.eval()
            plain.eval()
        found = []
        for module in (plain, net):
            X, y = batch_of(n, dtype, step)  # noqa: N806
            X.requires_grad_()
            module.zero_grad()
            scores = module(X)
            F.cross_entropy(scores, y).backward()
            found.append([scores.detach(), X.grad, *(param.grad for param in module.parameters())])
        for mine, wanted in zip(*found, strict=True):
            atol = tolerance * max(1, float(wanted.abs().max()))
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=atol)
        for mine, wanted in zip(net.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)


CPUS = [torch.device("cpu")] * 3


def current_settings():
    X = torch.ones(2, requires_grad=True)  # noqa: N806
    with torch.enable_grad():
        Y = X.square()  # noqa: N806
        if Y.requires_grad:
            Y.sum().backward()
    return (
        None if X.grad is None else X.grad.tolist(),  # hooks on saved tensors change the gradient
        (torch.full((1,), 1e-30) * 1e-10).item(),  # 0.0 if denormals are flushed
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@contextmanager
def flushed_denormals():
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "setting",
    [
        flushed_denormals,
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.float16),
        partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t * 3, lambda t: t),
        nullcontext,
    ],
)
def test_rank_threads_inherit_torch_settings(setting):
    with setting():
        wanted = dict.fromkeys((0, 2), current_settings())
        assert run_in_lockstep(dict.fromkeys((0, 2), current_settings), CPUS) == wanted


def test_same_seed_repeats_dropout():
    net = synced(nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.BatchNorm1d(6), nn.Dropout()), 3)
    X, found = torch.rand(12, 6), []  # noqa: N806
    for _ in range(5):
        torch.manual_seed(0)
        net.zero_grad()
        output = net(X)
        output.square().sum().backward()
        found.append([output, *(param.grad for param in net.parameters())])
    check_replicas_equal(found)


class Fails(nn.Module):
    def forward(self, x):
        if (x == 99).any():
            raise ValueError("planted")
        return x


@pytest.mark.parametrize("at", [0, 5])
def test_failed_rank_ends_all_ranks(at):
    net = synced(nn.Sequential(Fails(), nn.BatchNorm1d(2), Fails()), 3)
    X = torch.rand(6, 2)  # noqa: N806
    expected = net(X)
    wrong = X.clone()
    wrong[at] = 99
    with pytest.raises(ValueError, match="planted"):
        net(wrong)
    assert torch.equal(net(X), expected)


class SelectsLayer(nn.Module):
    """The first number of a shard selects the batch norm; a negative number skips both."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])

    def forward(self, x):
        return x if x[0, 0] < 0 else self.layers[int(x[0, 0])](x)


def test_different_batchnorms_per_rank_raise():
    net = synced(SelectsLayer())
    for first, last in ((-1.0, 1.0), (1.0, -1.0), (0.0, 1.0)):
        with pytest.raises(pr.RingarError, match="all ranks must run the same batch norms"):
            net(torch.tensor([[first, 1], [2, 3], [last, 4], [4, 4]]))
    assert net(torch.ones(4, 2)).shape == (4, 2)


def test_meet_outside_run_in_lockstep_raises():
    with pytest.raises(pr.RingarError, match="checkpoint"):
        meet("here", 0, lambda offers: offers)


class OverridesForward(nn.BatchNorm1d):
    def forward(self, x):
        return x


def test_wrong_inputs_raise():
    for X in (torch.ones(6, 1), torch.ones(6, 4, dtype=torch.int64)):  # noqa: N806
        with pytest.raises(pr.ArgumentError, match="expected 4 channels of floating point"):
            synced(nn.BatchNorm1d(4))(X)
    net = synced(nn.BatchNorm1d(4))
    net.module.register_forward_pre_hook(lambda part, args: args[0][args[0][:, 0] > 0])
    with pytest.raises(pr.ArgumentError, match="more than one value per channel"):
        net(torch.stack([torch.ones(4), -torch.ones(4)]))


def test_unsupported_modules_raise():
    with pytest.raises(pr.UnsupportedError, match="'1' is a OverridesForward"):
        synced(nn.Sequential(nn.Linear(2, 2), OverridesForward(2)))
    with pytest.raises(pr.UnsupportedError, match="DataParallel inside"):
        synced(nn.Sequential(pr.DataParallel(nn.Linear(2, 2), ["cpu"])))
    net, X = synced(nn.BatchNorm1d(4)), torch.rand(6, 4)  # noqa: N806
    with torch.device("cpu"), pytest.raises(pr.UnsupportedError, match="modes"):
        net(X)
    net.module.compile(backend="eager")
    with pytest.raises(pr.UnsupportedError, match="compiled"):
        net(X)
    net.module.forward = lambda x: x
    with pytest.raises(pr.UnsupportedError, match="overrides forward"):
        net(X)


@pytest.mark.parametrize("run", [run_in_lockstep, run_ranks])
def test_lowest_rank_error_is_raised(run):
    def fail(rank):
        raise ValueError(rank)

    with pytest.raises(ValueError, match="0"):
        run({rank: partial(fail, rank) for rank in range(2)}, CPUS)


def test_each_gpu_has_one_thread():
    """Meta devices replace GPUs: ranks on the same device share a thread."""
    devices = [torch.device("meta", rank % 2) for rank in range(4)]
    seen = run_ranks(dict.fromkeys(range(4), threading.current_thread), devices)
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert threading.current_thread() not in seen.values()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_interrupt_waits_for_rank_functions(num_devices):
    def work(rank):
        inside.append(rank)
        if len(inside) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        inside.remove(rank)

    inside = [-1]
    devices = [torch.device("meta", rank % num_devices) for rank in range(2)]
    run = run_ranks if num_devices == 2 else run_in_lockstep
    with pytest.raises(KeyboardInterrupt):
        run({rank: partial(work, rank) for rank in range(2)}, devices)
    assert inside == [-1]
