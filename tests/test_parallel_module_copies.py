"""Can ``DataParallel`` be copied, pickled and walked through as a module?"""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from programs import run_programs
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def batch(n=12):
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(n, 5, generator=generator)  # noqa: N806
    return X, torch.randint(3, (n,), generator=generator)


def parallel(**options):
    return pr.DataParallel(make_net(), ["cpu"] * 3, **options)


def by_torch_save(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(net, steps=2):
    optimizer = net.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    X, y = batch()  # noqa: N806
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
    pr.check_replicas_equal([list(replica.parameters()) for replica in net.replicas])
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


COPIES = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), by_torch_save]


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_a_copy_trains_like_the_original_and_apart_from_it(make, batchnorm):
    with parallel(batchnorm=batchnorm, weights=(1, 2, 1), bucket_cap_mb=1e-4) as net:
        train(net)
        net.eval()
        net.train()  # running statistics are rank 0's, as a copy has them
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        with make(net) as twin:
            assert twin.devices == net.devices
            assert len(twin.replicas) == 3
            assert len(twin.bucketer.buckets) == len(net.bucketer.buckets)
            trained = train(twin)
            assert_same(net.state_dict(), before)
            assert_same(train(net), trained)


def test_a_copy_in_the_middle_of_a_step_has_no_part_in_it():
    with parallel() as net:
        X, y = batch()  # noqa: N806
        F.cross_entropy(net(X), y).backward()
        with copy.deepcopy(net) as twin:
            assert all(param.grad is None for param in twin.parameters())
            twin.wait()
        net.wait()


@pytest.mark.parametrize("make", COPIES)
def test_rank_0s_module_alone_is_the_plain_module(make):
    """Also with synchronised batch norms, whose forward passes need all ranks."""
    with parallel(batchnorm="sync") as net:
        module = make(net.module)
        X, _ = batch()  # noqa: N806
        module.load_state_dict(make_net().state_dict())
        assert torch.equal(module(X), make_net()(X))


def test_averages_are_those_of_the_module_and_of_all_ranks_an_error():
    averaged_model = torch.optim.swa_utils.AveragedModel
    X, _ = batch()  # noqa: N806
    with parallel() as net:
        of_module, of_all = averaged_model(net.module), averaged_model(net)
        train(net)
        of_module.update_parameters(net.module)
        assert_same(of_module.module.state_dict(), net.state_dict())
        of_all.update_parameters(net)
        of_all.eval()
        with pytest.raises(pr.RingarError, match=r"on rank 0 and not on rank 1.*net\.module"):
            of_all(X)
        of_all.module.close()


def test_over_processes_a_copy_is_refused():
    store = torch.distributed.HashStore()
    with (
        pr.ProcessCommunicator(store, 0, 1) as comm,
        pr.DataParallel(make_net(), ["cpu"], comm=comm) as net,
        pytest.raises(pr.UnsupportedError, match=r"copy or save net\.module"),
    ):
        copy.deepcopy(net)


def test_what_is_set_in_a_loop_over_modules_is_set_on_all_ranks():
    with parallel() as net:
        for part in net.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        before = [replica[1].running_mean.clone() for replica in net.replicas]
        net(batch()[0])
        for replica, mean in zip(net.replicas, before, strict=True):
            assert not replica[1].training
            assert torch.equal(replica[1].running_mean, mean)


def draw(part):
    if isinstance(part, nn.Linear):
        nn.init.normal_(part.weight)


@pytest.mark.parametrize("change", ["loop", "children", "load and loop"])
def test_parameters_drawn_for_each_rank_are_an_error(change):
    """All ranks' parameters change equally often, yet to other values."""
    X, _ = batch()  # noqa: N806
    with parallel() as net:
        if change == "load and loop":
            train(net)
            net.load_state_dict(net.state_dict())
        if change == "children":
            for child in net.children():
                child.apply(draw)
        else:
            for part in net.modules():
                draw(part)
        for _ in range(2):
            with pytest.raises(pr.RingarError, match=r"different values.*net\.apply"):
                net(X)
        net.apply(draw)
        train(net)


def test_parameters_set_alike_in_a_loop_are_taken():
    with parallel() as net:
        for part in net.modules():
            if isinstance(part, nn.Linear):
                nn.init.constant_(part.weight, 0.5)
                nn.init.constant_(part.bias, float("nan"))
        net(batch()[0])
        for part in net.modules():
            if isinstance(part, nn.Linear):
                nn.init.eye_(part.weight)
                nn.init.zeros_(part.bias)
        train(net)


def test_an_optimizer_of_all_ranks_parameters_that_waits_for_no_sums_is_an_error():
    X, y = batch()  # noqa: N806
    with parallel(overlap=False) as net:
        params = [p for part in net.modules() for p in part.parameters(recurse=False)]
        optimizer = torch.optim.SGD(params, lr=0.1)
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(pr.RingarError, match=r"different values.*net\.optimizer"):
            net(X)


def test_modules_are_walked_through_once_each():
    with parallel() as net:
        found = list(net.modules())
        assert found[0] is net
        wanted = [part for replica in net.replicas for part in replica.modules()]
        assert [id(part) for part in found[1:]] == [id(part) for part in wanted]
        names = dict(net.named_modules())
        assert names["3"] is net.replicas[0][3]
        assert names["replicas.2.3"] is net.replicas[2][3]
        assert list(net.children()) == list(net.replicas)
        assert dict(nn.ModuleList([net]).named_modules())["0.replicas.1"] is net.replicas[1]


def test_a_module_that_holds_one_has_its_parameters():
    with parallel() as net:
        outer = nn.Sequential(net)
        names = [name for name, _ in outer.named_parameters()]
        assert names[:4] == [f"0.{name}" for name, _ in net.named_parameters()][:4]
        assert len(names) == 3 * len(list(net.parameters()))
        assert list(outer.state_dict()) == [f"0.{name}" for name in net.state_dict()]


@pytest.mark.parametrize("assign", [False, True])
def test_a_module_that_holds_one_loads_what_it_saved(assign):
    holder = nn.Sequential(nn.Linear(5, 5), parallel())
    with holder[1] as net:
        state = {name: value + 1 for name, value in holder.state_dict().items()}
        holder.load_state_dict(state, assign=assign)
        assert_same(holder.state_dict(), state)
        for replica in net.replicas:
            assert_same(
                {f"1.{name}": value for name, value in replica.state_dict().items()},
                {name: value for name, value in state.items() if name.startswith("1.")},
            )
        net(batch()[0])
        del state["1.0.weight"]
        with pytest.raises(RuntimeError, match=r'Missing key.*"1\.0\.weight"'):
            holder.load_state_dict(state)
        state["1.0.weight"], state["1.other"] = torch.zeros(6, 5), torch.zeros(1)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"1\.other"'):
            holder.load_state_dict(state)
        del state["1.other"]
        state["1.0.weight"] = torch.zeros(2, 5)
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
            holder.load_state_dict(state)


def test_the_mode_of_every_module_is_kept_by_evaluation():
    with parallel() as net:
        net.replicas[2][1].eval()
        pr.evaluate_accuracy_gpus([net], [batch()])
        modes = [[part.training for part in replica.modules()] for replica in net.replicas]
        assert modes[0] == modes[1] == [True] * 5
        assert modes[2] == [True, True, False, True, True]


class Waits(nn.Module):
    """Says that it runs, and goes on when it is told to."""

    def __init__(self):
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __deepcopy__(self, memo):
        return self  # the same on all ranks

    def forward(self, x):
        self.inside.set()
        assert self.go.wait(60)
        return x


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_after_an_interrupted_call_the_next_one_is_right(num_interrupts):
    """With a second interrupt the call does not wait for what still runs."""
    gate = Waits()
    module = nn.Sequential(nn.Linear(4, 4), gate, nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pr.DataParallel(module, ["cpu"] * 3, batchnorm="sync") as net:
        X = torch.randn(9, 4)  # noqa: N806
        expected = net(X)

        def interrupt():
            assert gate.inside.wait(60)
            for _ in range(num_interrupts):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
            gate.go.set()

        gate.inside.clear()
        gate.go.clear()
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            net(X)
        for _ in range(3):
            assert torch.equal(net(X), expected)
        thread.join()


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_a_forked_child_answers_and_does_not_hang(batchnorm):
    """In a program: torch may abort in a child of a process whose threads it has used."""
    program = """
import os, signal, sys
import torch
from test_parallel_module_copies import batch, parallel
with parallel(batchnorm=sys.argv[1]) as net:
    expected = net(batch()[0])
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(net(batch()[0]), expected) else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    (ended,) = run_programs(program, [batchnorm])
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
