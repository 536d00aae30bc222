"""Synchronised batch norm is the undivided module's: outputs, gradients, running statistics."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import pyringar as pr
from pyringar.parallel.rank_threads import meet, run_in_lockstep, run_ranks


class Net(nn.Module):
    """Two batch norms, of which the second sees what the first made of all ranks' samples."""

    def __init__(self, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)
        self.bn1, self.bn2 = nn.BatchNorm2d(3, **options), nn.BatchNorm2d(4, **options)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x) + 10))  # a mean that hides the variance from bad sums
        return self.fc(self.bn2(self.conv2(x)).mean((2, 3)))


def batch_of(n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 2, 7, 7, generator=generator, dtype=dtype)  # noqa: N806
    return X * 2 + 1, torch.randint(3, (n,), generator=generator)


def compare(module, net, X, y, tolerance):  # noqa: N803
    """One forward and backward pass of both; everything that comes out must agree."""
    ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    found, expected = net(ours), module(theirs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    net.zero_grad()
    module.zero_grad()
    F.cross_entropy(found, y).backward()
    F.cross_entropy(expected, y).backward()
    scale = max(float(p.grad.abs().max()) for p in module.parameters())
    for a, b in zip(net.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance * scale)
    for a, b in zip(net.buffers(), module.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_ranks", "n", "weights"), [(1, 6, None), (2, 7, None), (3, 9, (1, 5, 0)), (4, 2, None)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_any_split_is_the_undivided_module(num_ranks, n, weights, dtype, tolerance):
    torch.manual_seed(0)
    module = Net().to(dtype)
    nn.init.uniform_(module.bn1.weight, 0.5, 2)
    devices = ["cpu"] * num_ranks
    net = pr.DataParallel(module, devices, weights=weights, batchnorm="sync")
    for step in range(2):
        compare(module, net, *batch_of(n, dtype, step), tolerance)
    net.eval()
    X, _ = batch_of(n, dtype)  # noqa: N806
    torch.testing.assert_close(net(X), module.eval()(X), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_options_of_the_layer_are_heeded(options):
    torch.manual_seed(0)
    module = Net(**options).double()
    net = pr.DataParallel(module, ["cpu"] * 3, batchnorm="sync")
    for step in range(2):
        compare(module, net, *batch_of(5, torch.float64, step), 1e-12)


def test_rows_without_pixels_and_the_module_itself_may_be_normalised():
    module = nn.BatchNorm1d(4).double()
    X = torch.randn(5, 4, dtype=torch.float64)  # noqa: N806
    net = pr.DataParallel(module, ["cpu"] * 5, batchnorm="sync")  # one row per rank
    torch.testing.assert_close(net(X), module(X), rtol=1e-13, atol=1e-13)


def test_frozen_layers_keep_their_statistics():
    module = Net().double()
    module.bn1.eval()
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")
    compare(module, net, *batch_of(6, torch.float64), 1e-12)
    assert not net.module.bn1.running_mean.any()


def test_classes_and_names_are_those_of_the_plain_module():
    module = Net()
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")
    assert type(net.module.bn1) is nn.BatchNorm2d
    assert [*net.state_dict()] == [f"module.{name}" for name in module.state_dict()]


def test_autocast_reaches_the_ranks():
    net = pr.DataParallel(Net(), ["cpu"] * 2, batchnorm="sync")
    X, _ = batch_of(4, torch.float32)  # noqa: N806
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X).dtype == torch.bfloat16
    with torch.no_grad():
        assert not net(X).requires_grad


def test_hooks_on_saved_tensors_and_flushed_denormals_reach_the_ranks():
    """The threads are there already when settings change."""
    seen = []

    class Tiny(nn.Module):
        def forward(self, x):
            seen.append((torch.full((1,), 1e-30) * 1e-10).item() == 0)
            return x

    saved = []
    module = nn.Sequential(Tiny(), nn.Linear(3, 2), nn.BatchNorm1d(2))
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")
    X = torch.rand(6, 3)  # noqa: N806
    net(X)
    flushes = torch.set_flush_denormal(True)
    net(X)
    torch.set_flush_denormal(False)
    net(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        net(X)
    assert seen == [False] * 2 + [flushes] * 2 + [False] * 4
    assert any(t.shape == (3, 3) for t in saved), "the shard of a rank, which its thread saved"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_have_the_same_bits_whatever_the_threads_did_before(num_ranks):
    """autograd orders work by counters of the threads that recorded it."""
    found = []
    X, y = batch_of(9, torch.float32)  # noqa: N806
    for history in range(6):
        torch.manual_seed(0)
        net = pr.DataParallel(Net(), ["cpu"] * num_ranks, batchnorm="sync")
        net.eval()
        for _ in range(history):
            net(X[: 1 + history % 2])  # recorded by some of the ranks' threads only
        net.train()
        F.cross_entropy(net(X), y).backward()
        found.append([p.grad.clone() for p in net.parameters()])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.equal(got, want)


def test_random_numbers_are_drawn_in_the_same_order_every_time():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(6), nn.Dropout())
    net = pr.DataParallel(module, ["cpu"] * 3, batchnorm="sync")
    X = torch.rand(12, 6)  # noqa: N806
    outputs = []
    for _ in range(5):
        torch.manual_seed(0)
        outputs.append(net(X))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_too_few_values_are_refused():
    module = nn.BatchNorm1d(4)
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")
    net.module.register_forward_pre_hook(lambda part, args: (args[0][:1],))
    with pytest.raises(ValueError, match=r"more than (one|1) value per channel"):
        net(torch.rand(1, 4))


class Fails(nn.Module):
    def forward(self, x):
        if (x == 99).any():
            raise ValueError("planted")
        return x


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_rank_that_fails_ends_the_others_and_the_next_call_works(at):
    module = nn.Sequential(nn.BatchNorm1d(2), Fails())
    module = nn.Sequential(Fails(), module)
    net = pr.DataParallel(module, ["cpu"] * 3, batchnorm="sync")
    X = torch.rand(6, 2)  # noqa: N806
    expected = net(X)
    wrong = X.clone()
    wrong[at] = 99
    with pytest.raises(ValueError, match="planted"):
        net(wrong)
    assert torch.equal(net(X), expected)


def test_ranks_that_take_different_ways_are_an_error_and_no_hang():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2 = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            if x[0, 0] < 0:
                return x
            return self.bn1(x) if x[0, 0] > 5 else self.bn2(x)

    net = pr.DataParallel(Moody(), ["cpu"] * 2, batchnorm="sync")
    rows = torch.tensor([[1.0, 1], [2, 3], [3, 4], [4, 4]])
    for first, last in ((-1.0, 1.0), (1.0, -1.0), (9.0, 1.0)):
        rows[0, 0], rows[2, 0] = first, last
        with pytest.raises(pr.RingarError, match="the ranks meet at different places"):
            net(rows)
    rows[0, 0], rows[2, 0] = 1.0, 1.0
    assert net(rows).shape == (4, 2)


def test_checkpointing_is_refused_with_a_reason():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x):
            return checkpoint(self.bn, x, use_reentrant=False)

    net = pr.DataParallel(Checkpointed(), ["cpu"] * 2, batchnorm="sync")
    output = net(torch.rand(4, 3))
    with pytest.raises(pr.RingarError, match="checkpoint"):
        output.sum().backward()


@pytest.mark.parametrize(
    "X", [torch.ones(6, 1), torch.ones(6, 4, dtype=torch.int64)], ids=["one", "int"]
)
def test_inputs_that_torch_refuses_are_refused(X):  # noqa: N803
    net = pr.DataParallel(nn.BatchNorm1d(4), ["cpu"] * 2, batchnorm="sync")
    with pytest.raises(pr.ArgumentError, match="expected 4 channels of floating point"):
        net(X)


def test_modes_and_compiled_modules_are_refused():
    net = pr.DataParallel(nn.BatchNorm1d(4), ["cpu"] * 2, batchnorm="sync")
    with torch.device("cpu"), pytest.raises(pr.UnsupportedError, match="modes"):
        net(torch.rand(6, 4))
    net.module.compile(backend="eager")
    with pytest.raises(pr.UnsupportedError, match="compiled"):
        net(torch.rand(6, 4))


def test_replaced_forward_is_refused():
    module = nn.BatchNorm1d(4)
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")
    module.forward = lambda x: x
    with pytest.raises(pr.UnsupportedError, match="forward pass of its own"):
        net(torch.rand(6, 4))


def test_a_layer_with_a_forward_pass_of_its_own_is_refused():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x

    module = nn.Sequential(nn.Linear(2, 2), Own(2))
    with pytest.raises(pr.UnsupportedError, match="'1' is a Own"):
        pr.DataParallel(module, ["cpu"] * 2, batchnorm="sync")


CPUS = [torch.device("cpu")] * 3


def test_results_come_by_rank():
    threads = set()

    def part(rank):
        threads.add(threading.current_thread())
        return rank, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    calls = {rank: partial(part, rank) for rank in (0, 2)}
    with torch.inference_mode():
        assert run_in_lockstep(calls, CPUS) == {0: (0, False, True), 2: (2, False, True)}
    assert threading.current_thread() not in threads
    assert run_ranks(calls, CPUS) == {0: (0, True, False), 2: (2, True, False)}
    assert threading.current_thread() in threads


@pytest.mark.parametrize("run", [run_in_lockstep, run_ranks])
def test_first_error_in_rank_order_is_raised(run):
    def fail(rank):
        raise ValueError(rank)

    with pytest.raises(ValueError, match="0"):
        run({rank: partial(fail, rank) for rank in range(2)}, CPUS)


def test_each_gpu_has_one_thread(monkeypatch):
    """One thread per device, whose ranks run in order; devices stand for GPUs."""
    devices = [torch.device("meta", rank % 2) for rank in range(4)]
    seen = {}

    def part(rank):
        seen[rank] = threading.current_thread()
        return rank

    calls = {rank: partial(part, rank) for rank in range(4)}
    assert run_ranks(calls, devices) == {rank: rank for rank in range(4)}
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert threading.current_thread() not in seen.values()
    with torch.device("cpu"):  # a mode of the caller's thread
        run_ranks(calls, devices)
    assert set(seen.values()) == {threading.current_thread()}


def test_no_thread_left_for_a_rank(monkeypatch):
    """The error names the limit, other ranks have ended, and the next run works."""
    start, names, ended = threading.Thread.start, [], []

    def start_one(thread):
        names.append(thread.name)
        if len(names) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def meets(rank):
        try:
            return meet("here", rank, lambda offers: offers)
        finally:
            ended.append(rank)

    calls = {rank: partial(meets, rank) for rank in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(pr.RingarError, match=r"'pyringar rank'.*ulimit"):
            run_in_lockstep(calls, CPUS)
    assert ended == [0]
    assert run_in_lockstep(calls, CPUS) == {0: 0, 1: 1, 2: 2}


def test_ranks_meet_in_order_at_every_place():
    seen = []

    def part(rank):
        for place in ("a", "b"):
            seen.append((place, rank))
            total = meet(place, rank, lambda offers: [sum(offers)] * len(offers))
        return total

    results = run_in_lockstep({rank: partial(part, rank) for rank in range(3)}, CPUS)
    assert results == dict.fromkeys(range(3), 3)
    assert seen == [(place, rank) for place in ("a", "b") for rank in range(3)]


def test_signal_handler_may_call_module():
    class Raises(nn.Module):
        def forward(self, x):
            if not calls:
                calls.append(1)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                time.sleep(0.2)
            return x

    calls, found = [], []
    net = pr.DataParallel(nn.Sequential(Raises(), nn.BatchNorm1d(2)), ["cpu"] * 2, batchnorm="sync")
    X = torch.rand(6, 2)  # noqa: N806
    previous = signal.signal(signal.SIGUSR1, lambda *_: found.append(net(X)))
    try:
        interrupted = net(X)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    torch.testing.assert_close(interrupted, found[0])
