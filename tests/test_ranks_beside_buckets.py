"""Ranks that compute at the same time: buckets leave during backward, with the bits of turns."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
from test_ranks_beside import assert_equal, gradients, torch_threads
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.parallel.lockstep import RankThreads
from pyringar.parallel.shards import split_batch
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.synthetic import synthetic_images

__all__ = ["torch_threads"]  # a fixture

SMALL = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0002}  # a layer or two


class Acts(torch.autograd.Function):
    """Calls ``react()`` in backward, in the thread of a rank, before the layers below."""

    @staticmethod
    def forward(ctx, x, react):
        ctx.react = react
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.react()
        return grad, None


class Layers(nn.Module):
    """Uses its layers in another order than that in which they are parameters, some twice."""

    react = staticmethod(lambda: None)  # a class of its own for each test

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.unused = nn.Linear(8, 2)

    def forward(self, x):
        x = Acts.apply(self.first(x), type(self).react)
        for i in (3, 0, 5, 1, 3, 2, 4):
            x = torch.tanh(self.layers[i](x)) + x
        return self.last(x)


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return type("Layers", (Layers,), {})()


def batch(n=9):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)


def loss_of(net):
    X, y = batch()  # noqa: N806
    return F.cross_entropy(net(X), y)


def step(net, optimizer):
    optimizer.zero_grad()
    loss_of(net).backward()
    optimizer.step()


def state(net):
    return [t.detach().clone() for replica in net.replicas for t in replica.parameters()]


def optimizer_of(net):
    return net.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(module, k, in_turns, run=step, comm=None, **options):
    """Parameters of all ranks after four steps, and the plan of the buckets."""
    with pr.DataParallel(
        module, ["cpu"] * k, in_turns=in_turns, comm=comm, **SMALL, **options
    ) as net:
        optimizer = optimizer_of(net)
        for _ in range(4):
            run(net, optimizer)
        return state(net), net.bucketer.buckets


def accumulate(net, optimizer):
    optimizer.zero_grad(set_to_none=False)
    with net.no_sync():
        loss_of(net).backward()
    loss_of(net).backward()
    optimizer.step()


def backward_twice(net, optimizer):
    optimizer.zero_grad()
    loss = loss_of(net)
    with net.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def penalise(net, optimizer):
    optimizer.zero_grad()
    penalty = sum((p * p).sum() for p in net.replicas[0].layers[0].parameters())
    (loss_of(net) + 0.01 * penalty).backward()
    optimizer.step()


class TestBits:
    @pytest.mark.parametrize("k", [2, 3])
    @pytest.mark.parametrize("run", [step, accumulate, backward_twice, penalise])
    def test_are_those_of_turns(self, torch_threads, layers, k, run):
        torch_threads(1)
        (found, plan), (expected, other) = (trained(layers, k, t, run) for t in (None, True))
        assert len(plan) > 3
        assert plan == other or run is penalise  # whose parameters get the other part last
        assert_equal(found, expected)

    @pytest.mark.parametrize("k", [3, 4])
    def test_of_a_ring_and_the_plan_are_those_of_turns(self, torch_threads, make_comm, layers, k):
        """A ring's bits depend on the buckets, which follow the order of the first step."""
        torch_threads(1)
        results = []
        for in_turns in (None, True):
            results.append(trained(layers, k, in_turns, comm=make_comm(k, algorithm="ring")))
        (found, plan), (expected, other) = results
        assert plan == other != [sorted(bucket, reverse=True) for bucket in plan]
        assert_equal(found, expected)

    def test_gradients_alone_are_returned_and_not_accumulated(self, torch_threads, layers):
        torch_threads(1)
        found = []
        for in_turns in (None, True):
            with pr.DataParallel(layers, ["cpu"] * 2, in_turns=in_turns, **SMALL) as net:
                optimizer = optimizer_of(net)
                step(net, optimizer)
                optimizer.zero_grad()
                some = [r.layers[i].weight for r in net.replicas for i in (4, 1)]
                found.append(torch.autograd.grad(loss_of(net), some))
                assert all(grad is None for grad in gradients(net))
                loss = loss_of(net)
                loss.backward(inputs=some)
                net.wait()
                found[-1] = [*found[-1], *(p.grad.clone() for p in some)]
                assert sum(grad is not None for grad in gradients(net)) == 2
                step(net, optimizer)
                found[-1] += state(net)
        assert_equal(*found)

    def test_of_a_module_with_a_pass_of_its_own_in_backward(self, torch_threads):
        torch_threads(1)
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(4, 8), Recomputes(), nn.Linear(8, 3))
        results = [trained(module, 2, in_turns)[0] for in_turns in (None, True)]
        assert_equal(*results)


class Own(torch.autograd.Function):
    """A checkpoint of the user's: recomputes, with a backward pass inside of backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        (found,) = torch.autograd.grad(out, [x], grad)
        return found, None


class Recomputes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(Own.apply(x, self.layer))


@pytest.mark.parametrize("in_turns", [None, True])
def test_a_parameter_may_have_no_gradient(layers, in_turns):
    with pr.DataParallel(layers, ["cpu"] * 2, in_turns=in_turns, **SMALL) as net:
        optimizer = optimizer_of(net)
        for _ in range(3):
            step(net, optimizer)
            assert {n for n, p in net.named_parameters() if p.grad is None} == {
                "unused.weight",
                "unused.bias",
            }


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.one(x), self.two(x)


@pytest.mark.parametrize("options", [{}, SMALL])
@pytest.mark.parametrize("in_turns", [None, True])
def test_an_output_that_no_loss_uses(in_turns, options):
    torch.manual_seed(0)
    net = pr.DataParallel(TwoHeads(), ["cpu"] * 2, in_turns=in_turns, **options)
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
    x = batch()[0]
    for used in (0, 0, 1, 0):
        optimizer.zero_grad()
        before = [param.detach().clone() for param in net.parameters()]
        net(x)[used].sum().backward()
        optimizer.step()
        changed = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
        assert changed == [used == 0, used == 0, used == 1, used == 1]


class TestOverlap:
    @pytest.mark.parametrize("k", [2, 4])
    def test_buckets_leave_while_ranks_still_compute(self, layers, k):
        seen = []

        def wait_for_a_bucket():
            ends = time.monotonic() + 20
            while not net.bucketer._reducer.native.step.sent and time.monotonic() < ends:
                time.sleep(0.001)
            seen.append(len(net.bucketer._reducer.native.step.sent))

        with pr.DataParallel(layers, ["cpu"] * k, **SMALL) as net:
            optimizer = optimizer_of(net)
            step(net, optimizer)
            type(layers).react = staticmethod(wait_for_a_bucket)
            step(net, optimizer)
        assert len(seen) == k
        assert min(seen) > 0

    def test_late_hooks_of_users_run_once_all_ranks_have_ended(self, layers):
        """They may draw random numbers, which ranks that still compute would seem to have drawn."""
        calls = []

        def note(param):
            calls.append((len(ended), threading.current_thread() is threading.main_thread()))
            torch.rand(1)

        ended = []
        type(layers).react = staticmethod(lambda: (time.sleep(0.02), ended.append(0)))
        with pr.DataParallel(layers, ["cpu"] * 2, **SMALL) as net:
            optimizer = optimizer_of(net)
            step(net, optimizer)
            ended.clear()
            optimizer.zero_grad()
            loss = loss_of(net)
            net.module.last.weight.register_post_accumulate_grad_hook(note)
            loss.backward()
            assert calls == [(2, True)]
            assert not any(net._beside._in_turns.values())

    @pytest.mark.parametrize("late", [0, 1])
    def test_the_plan_is_the_same_whoever_is_first(self, late):
        replicas = [[torch.ones(4, requires_grad=True) for _ in range(3)] for _ in range(2)]

        def backward(rank):
            if rank == late:
                time.sleep(0.1)
            order = (1, 2, 0) if rank == 0 else (0, 1, 2)
            x = torch.ones(4)
            for i in reversed(order):
                x = x * replicas[rank][i]
            x.sum().backward()

        threads = RankThreads([torch.device("cpu")] * 2)
        with pr.GradientBucketer(replicas, bucket_cap_mb=1e-6) as bucketer:
            with bucketer.together():
                threads.run({rank: functools.partial(backward, rank) for rank in range(2)})
            bucketer.wait()
            assert bucketer.buckets == [[1], [2], [0]]
        threads.close()


class TestEvaluation:
    @pytest.mark.parametrize(("in_turns", "names"), [(False, 2), (True, 1)])
    def test_of_training_runs_in_the_ranks_threads(self, monkeypatch, in_turns, names):
        images, labels = synthetic_images(44, 5)
        data = ImageData("synthetic", images, labels, images[:9], labels[:9])
        config = TrainConfig(epochs=1, batch_size=16, ranks=2, in_turns=in_turns)
        seen, threads = [], set()

        def score(X):  # noqa: N803
            threads.add(threading.current_thread().name)
            seen.append((torch.get_num_threads(), torch.is_grad_enabled()))
            return F.one_hot(torch.arange(len(X)) % 10, 10)

        torch_threads = torch.get_num_threads()
        with Trainer(config, data) as trainer:
            monkeypatch.setattr(trainer.model, "evaluators", lambda: [score] * 2)
            accuracy = trainer.evaluate()
        shards = split_batch(images[:9], labels[:9], ["cpu"] * 2)[1]
        right = sum(int((y == torch.arange(len(y)) % 10).sum()) for y in shards)
        assert accuracy == right / 9
        assert len(threads) == names
        each = torch_threads if in_turns else max(1, torch_threads // 2)
        assert seen == [(each, False)] * 2


class TestFailures:
    """After what failed, whoever clears gradients and goes on has the bits of a run without."""

    def check(self, module, fail, expected_error):
        """Train three steps; before the last, ``fail(net)`` makes one that fails."""
        expected, _ = trained(module, 3, None)
        with pr.DataParallel(module, ["cpu"] * 3, **SMALL) as net:
            optimizer = optimizer_of(net)
            for _ in range(3):
                step(net, optimizer)
            undo = fail(net)
            num_threads = torch.get_num_threads()
            with pytest.raises(expected_error, match="planted"):
                step(net, optimizer)
            assert torch.get_num_threads() == num_threads
            undo()
            with pytest.raises(pr.RingarError, match="clear the gradients"):
                net.wait()
            step(net, optimizer)
            assert_equal(state(net), expected)

    def react(self, module, function):
        type(module).react = staticmethod(function)
        return lambda: setattr(type(module), "react", staticmethod(lambda: None))

    all_have_seen_it = threading.Barrier(3)

    def wait_for_a_bucket(self, net):
        ends = time.monotonic() + 20
        while not net.bucketer._reducer.native.step.sent:
            assert time.monotonic() < ends
            time.sleep(0.001)
        self.all_have_seen_it.wait(20)  # before one breaks the step off

    @pytest.mark.parametrize("rank", [0, 2])
    def test_of_a_ranks_backward_after_buckets_have_left(self, layers, rank):
        def fail(net):
            def react():
                self.wait_for_a_bucket(net)
                if threading.current_thread().name == f"pyringar-rank-{rank}":
                    raise ValueError("planted")

            return self.react(layers, react)

        self.check(layers, fail, ValueError)

    def test_of_a_bucket_that_leaves_ends_when_all_ranks_have(self, layers):
        ended = []

        def fail(net):
            ranks = net.bucketer._reducer._ranks
            pack = ranks.pack

            def refuse(*args):
                raise ValueError("planted")

            def react():
                time.sleep(0.1)
                ended.append(0)

            ranks.pack = refuse
            undo = self.react(layers, react)

            def restore():
                assert len(ended) == 3
                ranks.pack = pack
                undo()

            return restore

        self.check(layers, fail, ValueError)

    def test_of_a_handler_that_raises_while_buckets_leave(self, layers):
        ended = []

        def interrupt(number, frame):
            raise KeyboardInterrupt("planted")

        def fail(net):
            def react():
                self.wait_for_a_bucket(net)
                if threading.current_thread().name == "pyringar-rank-1":
                    os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.1)
                ended.append(0)

            before = signal.signal(signal.SIGUSR1, interrupt)
            undo = self.react(layers, react)

            def restore():
                assert len(ended) == 3
                signal.signal(signal.SIGUSR1, before)
                undo()

            return restore

        self.check(layers, fail, KeyboardInterrupt)
