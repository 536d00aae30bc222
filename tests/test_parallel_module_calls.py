"""What a call of DataParallel sees of the module, splits, refuses, and survives."""

from __future__ import annotations

import collections
import copy
import os
import signal
import threading
import time
import types

import numpy as np
import pytest
import torch
from parallel_nets import CAPS, assert_same, backward, images, make_conv, make_mlp, make_pair, rows
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.parallel.shards import shard_sizes

# -- what a call sees of the module ----------------------------------------------------------------


@CAPS
def test_changes_after_wrapping_count(cap_mb):
    plain, net, _ = make_pair("conv", 3, bucket_cap_mb=cap_mb)
    for module in (plain, net.module):
        module[4].weight.data.mul_(3)
        module[4].bias.data = torch.ones(3, dtype=torch.float64)
        module[1] = nn.BatchNorm2d(4).double().eval()
        module[2] = nn.Hardtanh(-0.1, 0.1)
        module.append(nn.Softmax(1))
        module.half()
        module.double()
    for module in (plain, net):
        backward(module, images(7))
    assert_same(net, plain)


@pytest.mark.parametrize("k", [2, 3])
def test_writes_of_rank_0_stay(k):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            with torch.no_grad():
                self.w.mul_(2)
                self.b.mul_(2)
            return x * self.w * self.b

    net = pr.DataParallel(Counts(), ["cpu"] * k)
    for step in range(1, 3):
        found = net(torch.ones(6, 2))
        # Every rank begins with the module's values; rank 0's writes are the module's.
        assert net.module.w.tolist() == net.module.b.tolist() == [2.0**step] * 2
        assert set(found.flatten().tolist()) == {4.0**step}


def test_memory_of_copies_is_kept():
    _, net, _ = make_pair("mlp", 3)
    net(rows(6)[0])

    def memory():
        entries = net._copies[1]._entries.values()
        return {copy.data_ptr() for entry in entries for copy in entry.copies}

    before = memory()
    for _ in range(3):
        backward(net, rows(6))
        torch.optim.SGD(net.parameters(), 0.1).step()
    assert memory() == before
    net.module[2] = nn.Linear(7, 3).double()
    net(rows(6)[0])
    assert len(net._copies[1]._entries) == len(list(net.parameters()))


def test_step_between_forward_and_backward_raises():
    plain, net, _ = make_pair("mlp", 2)
    for module in (plain, net):
        X, y = rows(6)  # noqa: N806
        out = module(X)
        with torch.no_grad():
            for param in module.parameters():
                param.add_(1)
        module(X)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            F.cross_entropy(out, y).backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    plain, net, batch = make_pair("branches", 2)
    with mode():
        torch.testing.assert_close(net(batch(5)[0]), plain(batch(5)[0]))
    for module in (plain, net):
        backward(module, batch(5))
    assert_same(net, plain)


def test_hooks_run_once_per_rank():
    _, net, batch = make_pair("mlp", 3)
    calls = []
    net.module[0].register_forward_hook(lambda part, args, out: calls.append(len(args[0])))
    net.module[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    net.module[0].weight.register_hook(lambda grad: calls.append("gradient"))
    backward(net, batch(8))
    assert calls == [3, 3, 2, *["backward"] * 3, "gradient"]


def test_cached_parametrizations_are_right():
    made = []
    for _ in range(2):  # a deep copy would share the original's cache
        torch.manual_seed(0)
        made.append(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)).double())
    plain, net = made[0], pr.DataParallel(made[1], ["cpu"] * 2)
    with nn.utils.parametrize.cached():
        for module in (plain, net):
            (module(rows(6)[0]) + module(rows(6, seed=5)[0])).sum().backward()
    assert_same(net, plain)


def test_sparse_complex_and_odd_gradients():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(5, 3, sparse=True)
            self.c = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, i):
            return (self.e(i) * self.c.abs() + (self.a + self.b)).sum(1)

    torch.manual_seed(0)
    plain = Odd()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    for module in (plain, net):
        module(torch.arange(5)).square().sum().backward()
        module.get_parameter("e.weight" if module is plain else "module.e.weight")
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert mine.grad.layout == other.grad.layout
        torch.testing.assert_close(
            mine.grad.to_dense(), other.grad.to_dense(), rtol=1e-5, atol=1e-5
        )


def double_weights(net):
    for param in net.parameters():
        param.data.mul_(2)


@CAPS
@pytest.mark.parametrize("is_frozen", [False, True])
def test_values_of_pending_backward_stay(is_frozen, cap_mb):
    """Weights are changed through .data, used, and restored, as for an average of them."""
    plain, net, _ = make_pair("conv", 3, bucket_cap_mb=cap_mb)
    for module in (plain, net):
        module.requires_grad_(not is_frozen)
        X = images(7)[0].requires_grad_()  # noqa: N806
        pending = module(X)
        saved = [param.data.clone() for param in module.parameters()]
        double_weights(module)
        module(images(7)[0])
        for param, value in zip(module.parameters(), saved, strict=True):
            param.data.copy_(value)
        (pending.square().sum() + module(X).sum()).backward()
        module.input_grad = X.grad
    torch.testing.assert_close(net.input_grad, plain.input_grad)
    assert_same(net, plain)


def test_batch_written_before_backward_raises():
    for module in make_pair("mlp", 3)[:2]:
        X = rows(7)[0]  # noqa: N806
        out = module(X)
        X.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@CAPS
def test_hooks_of_unused_parameters_stay_silent(cap_mb):
    plain, net, _ = make_pair("branches", 2, bucket_cap_mb=cap_mb)
    calls = {plain: [], net: []}
    for module in (plain, net):
        for i, param in enumerate(module.parameters()):
            if param.requires_grad:
                param.register_hook(lambda grad, m=module, i=i: calls[m].append(("grad", i)))
                param.register_post_accumulate_grad_hook(
                    lambda _, m=module, i=i: calls[m].append(("done", i))
                )
        backward(module, rows(6))
    assert sorted(calls[net]) == sorted(calls[plain])
    assert_same(net, plain)


class Multiplies(nn.Module):
    """Changes a buffer in place, another by assignment, and uses both."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 3)
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.ones(3))

    def forward(self, x):
        self.a.mul_(2)
        self.b = self.b * 3
        return self.l(x) * self.a * self.b


@pytest.mark.parametrize("how", [None, 1e-6, "compiled"])
def test_ranks_begin_with_the_same_buffers(how):
    torch.manual_seed(0)
    plain = Multiplies()
    net = pr.DataParallel(
        copy.deepcopy(plain), ["cpu"] * 3, bucket_cap_mb=how if how != "compiled" else None
    )
    if how == "compiled":
        net.module.compile(backend="eager")
    for _ in range(2):
        X = rows(7, torch.float32)[0]  # noqa: N806
        torch.testing.assert_close(net(X), plain(X))
    assert torch.equal(net.module.a, plain.a)


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_first_rank_with_samples_keeps_statistics(batchnorm):
    net = pr.DataParallel(nn.BatchNorm1d(3), ["cpu"] * 3, weights=(0, 1, 1), batchnorm=batchnorm)
    plain = nn.BatchNorm1d(3)
    X = torch.randn(8, 3)  # noqa: N806
    plain(X if batchnorm == "sync" else X[:4])
    net(X)
    torch.testing.assert_close(net.module.running_mean, plain.running_mean)


def test_parametrized_rnn_and_sparse_buffer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 4, batch_first=True)
            self.register_buffer("graph", torch.eye(4).to_sparse())

        def forward(self, x):
            return self.rnn(x.unsqueeze(1))[0].squeeze(1) @ self.graph

    torch.manual_seed(0)
    plain = Net()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 2)
    X = rows(6, torch.float32)[0]  # noqa: N806
    torch.testing.assert_close(net(X), plain(X))
    nn.utils.parametrize.register_parametrization(net.module.rnn, "weight_hh_l0", nn.Tanh())
    assert net(X).shape == (6, 4)


def test_gradients_that_some_ranks_lack():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(9, 3, sparse=True)
            self.d, self.w = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, i):
            if i[0] == 2:
                return self.e(i) * self.w
            return (self.e.weight[i] if i[0] == 4 else 0) + self.d.expand(len(i), 3) * 1.5

    torch.manual_seed(0)
    plain = Sometimes()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    indices = torch.tensor([0, 1, 2, 3, 4, 5])
    net(indices).square().sum().backward()
    torch.cat([plain(part) for part in indices.chunk(3)]).square().sum().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


def test_transforms_are_right_or_refused():
    plain, net, _ = make_pair("mlp", 2)
    X = rows(4)[0]  # noqa: N806
    for call in (
        lambda m: torch.func.jvp(m, (X,), (X,)),
        lambda m: torch.func.vmap(m)(X.unsqueeze(1)),
        lambda m: torch.func.jacfwd(m)(X),
    ):
        call(plain)
        with pytest.raises(pr.UnsupportedError, match=r"forward-mode|vmap"):
            call(net)
    values = dict(plain.named_parameters())
    others = {f"module.{name}": value for name, value in values.items()}
    for call in (
        lambda m, _: torch.func.vjp(m, X)[1](torch.ones(4, 3, dtype=torch.float64)),
        lambda m, _: torch.func.jacrev(m)(X),
        lambda m, given: [
            *torch.func.jacrev(lambda g: torch.func.functional_call(m, g, (X,)))(given).values()
        ],
        lambda m, _: torch.autograd.grad(
            m(X), [*m.parameters()], torch.ones(2, 4, 3, dtype=torch.float64), is_grads_batched=True
        ),
    ):
        torch.testing.assert_close(call(net, others), call(plain, values))
    torch.testing.assert_close(net(X), plain(X))


# -- calls -----------------------------------------------------------------------------------------


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_mlp()

    def forward(self, x, scale, *, bias):
        return self.layer(x.T).T * scale + bias


@pytest.mark.parametrize("dim", [1, -1])
def test_dim_of_samples(dim):
    X, _ = rows(7)  # noqa: N806
    net = pr.DataParallel(Transposed(), ["cpu"] * 3, dim=dim)
    found = net(X.T, torch.tensor(2.0), bias=torch.ones(1, 7))
    torch.testing.assert_close(found, Transposed()(X.T, 2.0, bias=1.0))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_fewer_samples_than_ranks(n):
    plain, net, _ = make_pair("mlp", 4)
    torch.testing.assert_close(net(rows(n)[0]), plain(rows(n)[0]))
    for module in (plain, net):
        module(rows(n)[0]).square().sum().backward()
    assert_same(net, plain)


@pytest.mark.parametrize("weights", [(3, 1), (1, 0, 2), (0, 1)])
def test_weights_share_the_batch(weights):
    plain, net, _ = make_pair("mlp", len(weights), weights=weights)
    sizes = []
    net.module.register_forward_hook(lambda part, args, out: sizes.append(len(args[0])))
    for module in (plain, net):
        backward(module, rows(12))
    assert_same(net, plain)
    assert sizes == [n for n in shard_sizes(12, len(weights), weights) if n]


@CAPS
def test_gradients_reach_inputs(cap_mb):
    plain, net, _ = make_pair("mlp", 3, bucket_cap_mb=cap_mb)
    X, y = rows(7)  # noqa: N806
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for module, x in zip((plain, net), inputs, strict=True):
        backward(module, (x * 2, y))
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-14)


def test_losses_of_ranks_are_stacked():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_mlp()

        def forward(self, x, y):
            return F.cross_entropy(self.net(x), y, reduction="sum")

    plain = WithLoss()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 4)
    assert net(*rows(9)).shape == (4,)
    for module in (plain, net):
        module(*rows(9)).sum().backward()
    assert_same(net, plain)


def test_wrong_calls_are_named():
    net = pr.DataParallel(nn.Bilinear(2, 2, 2), ["cpu"] * 2)
    with pytest.raises(pr.ArgumentError, match="no tensor with a dimension 0"):
        net(torch.tensor(1.0), input2=3)
    with pytest.raises(pr.ArgumentError, match=r"args\[0\] \(3, 2\), input2 \(4, 2\); expected"):
        net(torch.rand(3, 2), input2=torch.rand(4, 2))
    words = nn.Identity()
    words.forward = lambda x: "words"
    with pytest.raises(pr.ArgumentError, match="output is a str"):
        pr.DataParallel(words, ["cpu"] * 2)(torch.ones(2))
    with pytest.raises(pr.ArgumentError, match=r"lazy parameter '0\.weight'"):
        pr.DataParallel(nn.Sequential(nn.LazyLinear(2)), ["cpu"] * 2)(torch.ones(4, 2))
    with pytest.raises(pr.ArgumentError, match=r"'weight' on meta, expected cpu"):
        pr.DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)(torch.ones(4, 2))
    with pytest.raises(pr.ArgumentError, match="both devices and device_ids"):
        pr.DataParallel(nn.Linear(2, 2), ["cpu"], device_ids=["cpu"])


def test_one_rank_is_the_module_itself():
    seen = []

    class Takes(nn.Module):
        def forward(self, *args, **kwargs):
            seen.append((args, kwargs))
            return "anything"

    net = pr.DataParallel(Takes(), ["cpu"])
    data = [torch.ones(3), {"a": torch.ones(2)}, object()]
    assert net(*data, key=data[0]) == net() == "anything"
    assert all(mine is given for mine, given in zip(seen[0][0], data, strict=True))
    assert seen[0][1]["key"] is data[0]


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


def test_odd_arguments_are_read_with_care():
    class First(nn.Module):
        def forward(self, x, *others, **kwargs):
            return x

    net, x = pr.DataParallel(First(), ["cpu"] * 2), torch.ones(4, 2)
    numbers = list(range(20_000))
    begin = time.perf_counter()
    for other in (
        np.arange(3),
        [np.arange(5)],
        AttributeDict(a=1),
        numbers,
        dict.fromkeys(numbers),
    ):
        assert net(x, other, key=[other]).shape == (4, 2)
    assert time.perf_counter() - begin < 10
    assert isinstance(net(AttributeDict(x=x)), AttributeDict)
    for sparse in (x.to_sparse(), torch.nested.nested_tensor([x])):
        with pytest.raises(pr.ArgumentError, match=r"args\[1\]\['a'\] is a .* tensor"):
            net(x, {"a": sparse})
    hidden = collections.UserDict(y=1)
    hidden.extra = x
    with pytest.raises(pr.ArgumentError, match=r"args\[1\] is an UserDict with a tensor of 4"):
        net(x, hidden)
    with pytest.raises(pr.ArgumentError, match=r"args\[1\] is a mappingproxy with a tensor of 4"):
        net(x, types.MappingProxyType({"x": x}))


@pytest.mark.parametrize("rank", [0, 2])
def test_error_names_rank(rank):
    class Fails(nn.Module):
        def forward(self, x):
            if x[0, 0] == 2 * rank:
                raise ValueError("planted")
            return x

    net = pr.DataParallel(Fails(), ["cpu"] * 3)
    with pytest.raises(ValueError, match="planted") as failed:
        net(torch.arange(6.0).view(6, 1))
    if hasattr(failed.value, "__notes__"):
        assert failed.value.__notes__ == [f"(rank {rank} of 3, on cpu)"]
    assert net(torch.full((6, 1), 9.0)).shape == (6, 1)


# -- order of the reductions -----------------------------------------------------------------------


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


def test_reductions_start_before_earlier_layers():
    events = []

    class Layer(nn.Linear):
        def forward(self, x):
            return _Noted.apply(super().forward(x), lambda: events.append(self.number))

    net = nn.Sequential(*(Layer(4, 4) for _ in range(4)))
    for number, layer in enumerate(net):
        layer.number = number
        layer.weight.register_hook(lambda _, n=number: events.append(f"reduced {n}"))
    backward(pr.DataParallel(net, ["cpu"] * 2, bucket_cap_mb=1e-6), rows(6, torch.float32, width=4))
    # Rank 1 ran last, so its backward is first; rank 0's meets the reductions.
    wanted = [3, 2, 1, 0, *(event for n in (3, 2, 1, 0) for event in (n, f"reduced {n}"))]
    assert events == wanted


# -- threads, signals, forks -----------------------------------------------------------------------


def test_calls_from_several_threads():
    plain, net, _ = make_pair("mlp", 2)
    found, batches = {}, [rows(4 + i, seed=i)[0] for i in range(5)]

    def call(i):
        found[i] = net(batches[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, X in enumerate(batches):  # noqa: N806
        torch.testing.assert_close(found[i], plain(X))
    sum(out.square().sum() for out in found.values()).backward()
    sum(plain(X).square().sum() for X in batches).backward()
    assert_same(net, plain)


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_interrupted_call_leaves_net_usable(batchnorm):
    class Waits(nn.Module):
        def forward(self, x):
            if self.waits:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
            return x

    net = pr.DataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Waits()), ["cpu"] * 2, batchnorm=batchnorm
    )
    net.module[2].waits = True
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        net(torch.rand(4, 2))
    assert time.monotonic() - begin < 5
    net.module[2].waits = False
    net(torch.rand(4, 2)).sum().backward()
    assert net.module[0].weight.grad is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_forked_child_answers(batchnorm):
    net = pr.DataParallel(make_conv().float(), ["cpu"] * 2, batchnorm=batchnorm)
    wanted = net.eval()(images(4, torch.float32)[0])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads stayed in the parent
            status = int(not torch.allclose(net(images(4, torch.float32)[0]), wanted))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
