"""Ranks that compute at the same time: the bits of turns, in DataParallel, training and steps."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import time
import types
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import pyringar as pr
from pyringar.parallel.lockstep import RankThreads, are_side_by_side
from pyringar.parallel.shards import check_replicas_equal, get_params, split_batch
from pyringar.train import ImageData, TrainConfig, Trainer, lenet, lenet_params, train_batch
from pyringar.train.model_resnet18 import resnet18
from pyringar.train.step import EagerStep, SideBySide
from pyringar.train.synthetic import synthetic_images


@pytest.fixture(autouse=True)
def torch_threads():
    """``torch_threads(n)``: how many torch has from now on; 2 at first."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def batch_of(n, shape=(1, 28, 28), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator), torch.randint(10, (n,), generator=generator)


class Meet(torch.autograd.Function):
    """Forward and backward that end only where all ranks are in them at once."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        barrier.wait(20)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(20)
        return grad, None


class MeetingNet(nn.Module):
    barriers: ClassVar[dict[str, threading.Barrier]] = {}  # not copied with a module

    def __init__(self, name="", is_on=False):
        super().__init__()
        self.linear, self.name, self.is_on = nn.Linear(4, 3), name, is_on

    def forward(self, x):
        out = self.linear(x)
        return Meet.apply(out, self.barriers[self.name]) if self.is_on else out


SHARED = []  # what modules use that is not theirs


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(n=6, seed=2):
    X, y = batch_of(n, (4,), seed)  # noqa: N806
    return X, y % 3


def gradients(net):
    return [param.grad for param in net.parameters()]


def step(net, optimizer, X, y):  # noqa: N803
    optimizer.zero_grad()
    F.cross_entropy(net(X), y).backward()
    optimizer.step()


def trained(module, k, X, y, *, steps=3, **options):  # noqa: N803
    """Parameters and buffers of all ranks after some steps."""
    with pr.DataParallel(module, ["cpu"] * k, **options) as net:
        optimizer = net.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
        for _ in range(steps):
            step(net, optimizer, X, y)
        return [
            t.detach().clone() for replica in net.replicas for t in replica.state_dict().values()
        ]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TestBits:
    """Ranks in threads have the bits of ranks in turns with as many torch threads."""

    @pytest.mark.parametrize(
        ("total", "each", "options"),
        [
            (2, 1, {"ranks": 2}),
            (2, 1, {"ranks": 5, "weights": (1, 0, 2, 1, 1)}),
            (4, 2, {"ranks": 2, "amp": True}),
            (2, 1, {"ranks": 2, "overlap": False, "dtype": "float64", "allreduce": "ring"}),
            (2, 1, {"ranks": 2, "model": "resnet18", "width": 4}),
            *(
                pytest.param(
                    *(total, each, {"ranks": ranks, "model": "resnet18", "width": 4}),
                    marks=pytest.mark.slow,
                )
                for total, each, ranks in ((4, 2, 2), (3, 1, 4))
            ),
        ],
    )
    def test_of_training(self, torch_threads, total, each, options):
        images, labels = synthetic_images(44, 5)
        data = ImageData("synthetic", images, labels, images[:8], labels[:8])

        def run(num_threads, **more):
            torch_threads(num_threads)
            config = TrainConfig(epochs=1, batch_size=16, bucket_cap_mb=0.1, **options, **more)
            with Trainer(config, data) as trainer:
                result = trainer.run()
                assert torch.get_num_threads() == num_threads
            return [*result.params, *result.state.values(), *itertools.chain(*trainer.replicas)]

        assert_equal(run(total), run(each, in_turns=True))

    @pytest.mark.parametrize(("total", "each", "k"), [(2, 1, 2), (4, 2, 2), (2, 1, 4)])
    def test_of_data_parallel(self, torch_threads, total, each, k):
        X, y = batch_of(18)  # noqa: N806
        module = resnet18(width=4, seed=0)
        torch_threads(total)
        found = trained(module, k, X, y)
        torch_threads(each)
        assert_equal(found, trained(module, k, X, y, in_turns=True))

    @pytest.mark.parametrize("has_comm", [False, True])
    def test_of_train_batch(self, torch_threads, make_comm, has_comm):
        images, labels = batch_of(13)
        found = []
        for total, in_turns in ((2, False), (1, True)):
            torch_threads(total)
            params = lenet_params(generator=torch.Generator().manual_seed(0))
            replicas = [get_params(params, "cpu") for _ in range(3)]
            comm = make_comm(3) if has_comm else None
            before = threading.active_count()
            for _ in range(3):
                train_batch(
                    *(images, labels, replicas, ["cpu"] * 3, 0.1), comm=comm, in_turns=in_turns
                )
            found += replicas
            if not has_comm:
                assert threading.active_count() <= before
        check_replicas_equal(found)

    def test_of_what_goes_round_the_loss(self):
        """A penalty on rank 0's parameters, gradients asked for by name, and their gradients."""
        X, y = rows()  # noqa: N806

        def penalty(net):
            loss = F.cross_entropy(net(X), y) + 0.1 * sum(
                p.square().sum() for p in net.parameters()
            )
            loss.backward()

        def named(net):
            params = [p for replica in net.replicas for p in replica.parameters()]
            grads = torch.autograd.grad(F.cross_entropy(net(X), y), params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

        def some(net):
            params = [replica[0].weight for replica in net.replicas]
            F.cross_entropy(net(X), y).backward(inputs=params)

        def twice(net):
            loss = F.cross_entropy(net(X), y)
            with net.no_sync():
                loss.backward(retain_graph=True)
            loss.backward()

        def with_graph(net):
            F.cross_entropy(net(X), y).backward(create_graph=True)

        for do in (penalty, named, some, twice, with_graph):
            found = []
            for in_turns in (None, True):
                torch.set_num_threads(1)
                with pr.DataParallel(mlp(), ["cpu"] * 2, in_turns=in_turns) as net:
                    net(X)  # the first call is tried in turns
                    do(net)
                    net.wait()
                    found.append([g for r in net.replicas for g in gradients(r) if g is not None])
            assert_equal(*found)
            assert found[0], do

    @pytest.mark.parametrize("what", ["outside", "plain tensor", "kept", "scalar", "in place"])
    def test_of_graphs_that_go_beyond_outputs_and_parameters(self, torch_threads, what):
        torch_threads(1)
        X, y = rows()  # noqa: N806

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.kept = mlp(), None
                self.plain = torch.ones(3, requires_grad=True)

            def forward(self, x, scale=1):
                out = self.net(x) * scale
                if what == "outside":
                    return out * next(iter(SHARED))
                if what == "plain tensor":
                    return out * self.plain
                self.kept = out.square().sum() if what == "kept" else None
                return out

        found = []
        for in_turns in (None, True):
            SHARED[:] = [torch.full((3,), 2.0, requires_grad=True)]
            scale = torch.tensor(3.0, requires_grad=what == "scalar")
            with pr.DataParallel(
                Net(), ["cpu"] * 2, in_turns=in_turns, gather=what != "in place"
            ) as net:
                net(X, torch.tensor(3.0))  # which tells nothing of a scale with gradients
                for _ in range(2):
                    net.zero_grad()
                    outs = net(X, scale)
                    if what == "in place":
                        outs = torch.cat([out.mul_(2) for out in outs])
                    loss = F.cross_entropy(outs, y)
                    if what == "kept":
                        loss = loss + sum(replica.kept for replica in net.replicas)
                    loss.backward()
                    net.wait()
                others = [SHARED[0].grad, scale.grad, *(r.plain.grad for r in net.replicas)]
            found.append([*gradients(net), *(g for g in others if g is not None)])
        assert_equal(*found)
        assert len(found[0]) == 4 + {"outside": 1, "scalar": 1, "plain tensor": 2}.get(what, 0)

    @pytest.mark.parametrize(
        ("num_lists", "may_run"),
        [(1000, True), pytest.param(100_000, False, marks=pytest.mark.slow)],
    )
    def test_of_modules_that_hold_too_much_to_look_through_are_in_turns(self, num_lists, may_run):
        module = mlp()
        module.table = [[i] for i in range(num_lists)]
        X, _ = rows()  # noqa: N806
        with pr.DataParallel(module, ["cpu"] * 2) as net:
            net(X)
            assert net._beside.may_run([X]) == may_run

    @pytest.mark.parametrize("where", ["list in a dict", "object", "deque", "output"])
    def test_of_graphs_that_are_kept_somewhere_deep(self, torch_threads, where):
        torch_threads(1)
        X, y = rows()  # noqa: N806

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.kept = mlp(), types.SimpleNamespace()
                self.net.register_forward_hook(self.note)

            def note(self, part, args, out):
                self.kept.it = None if where == "output" else out.square().sum()

            def forward(self, x):
                out = self.net(x)
                kept, self.last = self.kept.it, None
                if where in ("list in a dict", "deque"):
                    kept = {"list": [kept]} if where != "deque" else collections.deque([kept])
                    self.last, self.kept.it = kept, None
                return out, types.SimpleNamespace(same=out) if where == "output" else None

        def term(replica, other):
            if where == "output":
                return other.same.square().sum()
            found = replica.last or [replica.kept.it]
            return found["list"][0] if isinstance(found, dict) else found[0]

        found = []
        for in_turns in (None, True):
            with pr.DataParallel(Net(), ["cpu"] * 2, in_turns=in_turns, gather=False) as net:
                for _ in range(2):
                    net.zero_grad()
                    outs, others = zip(*net(X), strict=True)
                    loss = F.cross_entropy(torch.cat(outs), y)
                    (loss + sum(map(term, net.replicas, others))).backward()
                    net.wait()
                found.append(gradients(net))
                assert in_turns or not net._beside.may_run([X])
        assert_equal(*found)

    def test_of_weights_that_two_calls_share(self, torch_threads):
        torch_threads(1)
        X, y = rows()  # noqa: N806
        module = mlp()
        nn.utils.parametrizations.weight_norm(module[0])
        found = []
        for in_turns in (None, True):
            with pr.DataParallel(module, ["cpu"] * 2, in_turns=in_turns) as net:
                net(X)
                with nn.utils.parametrize.cached():
                    (F.cross_entropy(net(X), y) + net(X).square().sum()).backward()
                net.wait()
                found.append(gradients(net))
        assert_equal(*found)

    def test_of_an_output_that_cannot_take_other_tensors(self, torch_threads):
        class Scores(dict):
            def __init__(self, scores):
                super().__init__(scores=scores)

        class Net(nn.Sequential):
            def forward(self, x):
                out = super().forward(x)
                return out, Scores(out.square())

        torch_threads(1)
        X, y = rows()  # noqa: N806
        found = []
        for in_turns in (None, True):
            module = Net(*mlp())
            with pr.DataParallel(module, ["cpu"] * 2, in_turns=in_turns, gather=False) as net:
                for _ in range(2):
                    net.zero_grad()
                    outs, others = zip(*net(X), strict=True)
                    loss = F.cross_entropy(torch.cat(outs), y)
                    (loss + sum(other["scores"].sum() for other in others)).backward()
                    net.wait()
                found.append(gradients(net))
        assert_equal(*found)

    @pytest.mark.parametrize("what", ["gradients of gradients", "what a module keeps"])
    def test_what_needs_turns_is_an_error_and_not_another_gradient(self, what):
        X, y = rows()  # noqa: N806
        with pr.DataParallel(mlp(), ["cpu"] * 2) as net:
            kept = []
            net.module[0].register_forward_hook(lambda part, args, out: kept.append(out))
            loss = F.cross_entropy(net(X), y)
            if what == "gradients of gradients":
                kept = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            with pytest.raises(RuntimeError, match="second time"):
                (loss + sum(t.square().sum() for t in kept)).backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_of_activation_checkpoints(self, torch_threads, reentrant):
        class Recomputes(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

            def forward(self, x):
                hidden = self.first(x)
                return checkpoint(lambda h: self.second(h.tanh()), hidden, use_reentrant=reentrant)

        torch_threads(1)
        torch.manual_seed(0)
        module = Recomputes()
        found = trained(module, 2, *rows())
        assert_equal(found, trained(module, 2, *rows(), in_turns=True))

    def test_of_what_requires_gradients_from_the_second_call_on(self, torch_threads):
        torch_threads(1)
        X, y = rows()  # noqa: N806

        class Prompted(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()

            def forward(self, x):
                return self.net(x) * SHARED[0]

        found = []
        for in_turns in (None, True):
            SHARED[:] = [torch.full((3,), 2.0)]
            with pr.DataParallel(Prompted(), ["cpu"] * 2, in_turns=in_turns) as net:
                net(X)
                SHARED[0].requires_grad_(True)
                F.cross_entropy(net(X), y).backward()
                net.wait()
                found.append([SHARED[0].grad, *gradients(net)])
        assert_equal(*found)

    def test_of_a_checkpoint_around_all_ranks(self, torch_threads):
        torch_threads(1)
        X, y = rows()  # noqa: N806
        found = []
        for in_turns in (None, True):
            with pr.DataParallel(mlp(), ["cpu"] * 2, in_turns=in_turns) as net:
                for _ in range(5):
                    net.zero_grad()
                    F.cross_entropy(checkpoint(net, X, use_reentrant=False), y).backward()
                    net.wait()
                found.append(gradients(net))
        assert_equal(*found)

    @pytest.mark.parametrize("whose", ["caller's", "module's", "nobody's"])
    def test_of_a_parameter_that_is_used_twice_under_autocast(self, torch_threads, whose):
        """Whether it is cast once or twice must not depend on when another rank has ended."""

        def casting(is_on):
            return torch.autocast("cpu", torch.bfloat16, enabled=True) if is_on else nullcontext()

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                with casting(whose == "module's"):
                    hidden = self.linear(x).tanh()
                    if threading.current_thread().name.startswith("pyringar-rank-0"):
                        time.sleep(0.3)
                    return self.linear(hidden).float()

        torch_threads(1)
        torch.manual_seed(0)
        module, (X, y) = Twice(), rows()  # noqa: N806
        found = []
        for in_turns in (None, True):
            with pr.DataParallel(module, ["cpu"] * 2, in_turns=in_turns) as net:
                for _ in range(2):
                    net.zero_grad()
                    with casting(whose == "caller's"):
                        out = net(X)
                    F.cross_entropy(out, y).backward()
                    net.wait()
                found.append([g for replica in net.replicas for g in gradients(replica)])
                is_beside = not in_turns and net._beside.may_run([X])
                assert is_beside == (not in_turns and whose != "module's")
        assert_equal(*found)


class TestAtTheSameTime:
    @pytest.mark.parametrize("k", [2, 4])
    def test_in_data_parallel(self, k):
        MeetingNet.barriers["net"] = threading.Barrier(k)
        X, y = rows(2 * k)  # noqa: N806
        with pr.DataParallel(MeetingNet("net"), ["cpu"] * k) as net:
            optimizer = net.optimizer(torch.optim.SGD, lr=0.1)
            step(net, optimizer, X, y)
            for replica in net.replicas:
                replica.is_on = True
            step(net, optimizer, X, y)
            check_replicas_equal([list(replica.parameters()) for replica in net.replicas])

    def test_in_a_step(self):
        barrier = threading.Barrier(3)
        params = lenet_params()
        replicas = [get_params(params, "cpu") for _ in range(3)]
        names = []

        def score(rank, X):  # noqa: N803
            names.append(threading.current_thread().name)
            return Meet.apply(lenet(X, replicas[rank]), barrier)

        threads = RankThreads([torch.device("cpu")] * 3)
        with pr.GradientBucketer(replicas, bucket_cap_mb=0.1) as bucketer:
            split = functools.partial(split_batch, devices=["cpu"] * 3)
            run = EagerStep(
                *(replicas, None, bucketer.wait, split),
                beside=SideBySide(threads, score, bucketer.together),
            )
            for _ in range(3):
                run(*batch_of(7), 0.1)
                assert not any(map(bool, run(*batch_of(7), 0.1)))
            stats = bucketer.stats()
        threads.close()
        assert all(bucket.launched_s < stats.backward_s for bucket in stats.buckets)
        assert {name[:15] for name in names} == {f"pyringar-rank-{rank}" for rank in range(3)}

    def test_each_has_its_share_of_the_threads_and_the_caller_all(self, torch_threads):
        torch_threads(4)
        threads = RankThreads([torch.device("cpu")] * 2)
        counts = dict.fromkeys(range(2), torch.get_num_threads)
        assert threads.share() == 2
        assert threads.run(counts, num_threads=2) == {0: 2, 1: 2}
        found = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [4], "what a thread that starts later gets"
        torch_threads(1)
        assert threads.share() == 1
        assert threads.run(counts) == {0: 1, 1: 1}
        assert torch.get_num_threads() == 1
        threads.close()

    def test_on_gpus_only_where_that_is_asked_for(self):
        cpu, first, second = map(torch.device, ("cpu", "cuda:0", "cuda:1"))
        assert are_side_by_side([cpu, cpu])
        assert not are_side_by_side([cpu])
        assert not are_side_by_side([cpu, cpu], in_turns=True)
        assert not are_side_by_side([first, second])
        assert not are_side_by_side([cpu, first])
        assert are_side_by_side([first, second], in_turns=False)
        with pytest.raises(pr.ArgumentError, match="2 ranks share cuda:0"):
            are_side_by_side([first, cpu, first], in_turns=False)

    def test_a_data_parallel_on_gpus_refuses(self, monkeypatch):
        gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
        monkeypatch.setattr("pyringar.parallel.module.check_devices", lambda devices: gpus)
        with pytest.raises(pr.UnsupportedError, match="in_turns is False, but a rank is on cuda:0"):
            pr.DataParallel(mlp(), gpus, in_turns=False)
