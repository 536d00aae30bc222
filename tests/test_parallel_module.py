"""Is DataParallel the plain module: outputs, gradients, steps, buffers, state, for any ranks?"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pyringar as pr
from pyringar.parallel.shards import shard_sizes


def make_mlp(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_conv(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).to(dtype)


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.rnn(self.embedding(tokens))[0]).mean(1)


class Branches(nn.Module):
    """A frozen layer, a layer used under no_grad first, an unused one, and buffers."""

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
    return torch.randint(5, (n, 4), generator=generator), torch.randint(
        5, (n,), generator=generator
    )


NETS = {
    "mlp": (make_mlp, rows),
    "conv": (lambda: make_conv().eval(), images),
    "tied": (lambda: Tied().double(), tokens),
    "branches": (lambda: Branches().double(), rows),
}
CAPS = pytest.mark.parametrize("cap_mb", [None, 1e-6], ids=["one bucket", "a bucket each"])


def make_pair(name, k, seed=0, **options):
    make, batch = NETS[name]
    torch.manual_seed(seed)
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


# -- bits ------------------------------------------------------------------------------------------


def tree_sum(parts):
    if len(parts) == 1:
        return parts[0]
    mid = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:mid]) + tree_sum(parts[mid:])


def rank_sum(parts):
    return sum(parts[1:], start=parts[0])


@CAPS
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("order", "add"), [("rank", rank_sum), ("tree", tree_sum)])
def test_gradients_have_bits_of_order(k, dtype, order, add, cap_mb):
    module, (X, y) = make_conv(dtype), images(11, dtype)  # noqa: N806
    net = pr.DataParallel(copy.deepcopy(module), ["cpu"] * k, order=order, bucket_cap_mb=cap_mb)
    copies = [copy.deepcopy(module) for _ in range(k)]
    shards = torch.split(X, shard_sizes(11, k))
    by_hand = torch.cat([mine(shard) for mine, shard in zip(copies, shards, strict=True)])
    F.cross_entropy(by_hand, y).backward()
    found = net(X)
    assert torch.equal(found, by_hand)
    F.cross_entropy(found, y).backward()
    for param, *parts in zip(net.parameters(), *(m.parameters() for m in copies), strict=True):
        assert torch.equal(param.grad, add([part.grad for part in parts]))
    for buffer, wanted in zip(net.buffers(), copies[0].buffers(), strict=True):
        assert torch.equal(buffer, wanted)


# -- the plain module, ten steps -------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), 0.01),
    "AdamW groups": lambda net: torch.optim.AdamW(
        [{"params": [p]} for p in net.parameters() if p.requires_grad], 0.01, weight_decay=0.1
    ),
    "LBFGS": lambda net: torch.optim.LBFGS(
        [p for p in net.parameters() if p.requires_grad], 0.1, max_iter=3
    ),
}


@CAPS
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ten_steps_are_the_plain_modules(name, kind, k, cap_mb):
    plain, net, batch = make_pair(name, k, bucket_cap_mb=cap_mb)
    if name == "branches" and kind == "LBFGS":
        plain.unused.requires_grad_(False)
        net.module.unused.requires_grad_(False)
    optimizers = [OPTIMIZERS[kind](plain), OPTIMIZERS[kind](net)]
    for step in range(10):
        for module, optimizer in zip((plain, net), optimizers, strict=True):

            def closure(module=module, optimizer=optimizer, n=5 + step):
                optimizer.zero_grad()
                return backward(module, batch(n))

            optimizer.step(closure)
    assert_same(net, plain, 1e-9)
    wanted, found = plain.state_dict(), net.state_dict()
    assert [*found] == [f"module.{key}" for key in wanted]
    for key, value in wanted.items():
        torch.testing.assert_close(found[f"module.{key}"], value, rtol=0, atol=1e-9)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=1e-6, atol=1e-9)
    assert states[1]["param_groups"] == states[0]["param_groups"]


@pytest.mark.parametrize("options", [{}, {"device_ids": ["cpu", "cpu"]}, {"weights": (3, 1)}])
def test_fallback_of_torchs_is_this(options):
    module, (X, y) = make_mlp(), rows(9)  # noqa: N806
    torchs = nn.DataParallel(copy.deepcopy(module))  # without a GPU: the module itself
    ours = pr.DataParallel(
        module, **({"devices": ["cpu"] * 2} if "weights" in options else {}), **options
    )
    for net in (torchs, ours):
        backward(net, (X, y))
    assert [*ours.state_dict()] == [*torchs.state_dict()]
    assert_same(ours, torchs)
    assert ours.module is module


def test_gradient_scaler_skips_and_unscales():
    plain, net, _ = make_pair("mlp", 2)
    scalers, optimizers = [], []
    for module in (plain.float(), net.float()):
        scalers.append(torch.amp.GradScaler("cpu", init_scale=1024.0))
        optimizers.append(torch.optim.SGD(module.parameters(), 0.1))
    for factor in (1.0, float("inf"), 1.0):
        for module, scaler, optimizer in zip((plain, net), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            X, y = rows(6, torch.float32)  # noqa: N806
            with torch.autocast("cpu", torch.bfloat16):
                scores = module(X)
            scaler.scale(F.cross_entropy(scores.float(), y) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_same(net, plain, 1e-2)


def run_reentrant(module, x):
    return checkpoint(module, x, use_reentrant=True)


def run_not_reentrant(module, x):
    return checkpoint(module, x, use_reentrant=False)


def run_sequential(module, x):
    return checkpoint_sequential(module, 2, x, use_reentrant=False)


class Checkpointed(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.net, self.run = make_mlp(), run

    def forward(self, x):
        return self.run(self.net, x)


@CAPS
@pytest.mark.parametrize("run", [run_reentrant, run_not_reentrant, run_sequential])
@pytest.mark.parametrize("is_outside", [False, True])
def test_checkpoints_are_right(run, is_outside, cap_mb):
    plain, (X, y) = Checkpointed(run), rows(7)  # noqa: N806
    X.requires_grad_()
    inner = Checkpointed(run) if not is_outside else make_mlp()
    net = pr.DataParallel(inner, ["cpu"] * 2, bucket_cap_mb=cap_mb)
    call = net
    if is_outside and run is not run_sequential:
        call = lambda x: run(net, x)  # noqa: E731
    for module in (plain, call):
        (F.cross_entropy(module(X), y) + F.cross_entropy(module(X * 2), y)).backward()
    assert_same(net, plain)


@CAPS
def test_gradients_of_gradients(cap_mb):
    plain, net, _ = make_pair("mlp", 3, bucket_cap_mb=cap_mb)
    for module in (plain, net):
        X, y = rows(7)  # noqa: N806
        X.requires_grad_()
        loss = F.cross_entropy(module(X), y)
        grads = torch.autograd.grad(loss, [X, *module.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    assert_same(net, plain)


def test_functional_call_and_func_grad():
    plain, net, _ = make_pair("mlp", 2)
    X, y = rows(6)  # noqa: N806
    values = {name: param * 2 for name, param in plain.named_parameters()}
    others = {f"module.{name}": value for name, value in values.items()}

    def loss_of(module, given):
        return F.cross_entropy(torch.func.functional_call(module, given, (X,)), y)

    torch.testing.assert_close(loss_of(net, others), loss_of(plain, values))
    wanted = torch.func.grad(loss_of, argnums=1)(plain, values)
    found = torch.func.grad(loss_of, argnums=1)(net, others)
    torch.testing.assert_close([*found.values()], [*wanted.values()])


@pytest.mark.parametrize("how", ["module", "in place", "net"])
def test_compiled_modules_are_right(how):
    plain, net, _ = make_pair("conv", 2)
    batch = images(6)
    if how == "module":
        net = pr.DataParallel(torch.compile(net.module, backend="aot_eager"), ["cpu"] * 2)
    elif how == "in place":
        net.module.compile(backend="aot_eager")
    else:
        net = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        for module in (plain, net):
            backward(module, batch)
    assert_same(net, plain)


def test_accumulation_and_partial_zero_grad():
    plain, net, _ = make_pair("mlp", 2)
    for module in (plain, net):
        for seed in range(3):
            backward(module, rows(5, seed=seed))
            if seed == 1:
                next(module.parameters()).grad = None
    assert_same(net, plain)


def test_gan_steps_one_of_two():
    torch.manual_seed(0)
    plain = [nn.Linear(5, 5), nn.Linear(5, 1)]
    nets = [pr.DataParallel(copy.deepcopy(one), ["cpu"] * 2) for one in plain]
    for maker, critic in (plain, nets):
        optimizers = [torch.optim.Adam(one.parameters(), 0.01) for one in (maker, critic)]
        for step in range(6):
            X, _ = rows(6, torch.float32, seed=step)  # noqa: N806
            for param in critic.parameters():
                param.requires_grad_(step % 2 == 0)
                param.data.clamp_(-0.3, 0.3)  # leaves no trace in version counters
            made = maker(X)
            loss = critic(made).mean() - critic(X).mean()
            optimizers[step % 2 == 0].zero_grad()
            (loss if step % 2 == 0 else -loss).backward()
            optimizers[step % 2 == 0].step()
    for one, net in zip(plain, nets, strict=True):
        assert_same(net, one, 1e-5)


def test_averaged_model_and_copies():
    _, net, _ = make_pair("conv", 2)
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    backward(net, images(6))
    optimizer.step()
    average.update_parameters(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), average.module):
        before = [param.clone() for param in net.parameters()]
        nn.init.zeros_(next(twin.parameters()))
        assert (twin(images(6)[0]) - net(images(6)[0])).abs().max() > 0
        assert all(map(torch.equal, before, net.parameters()))
        twin.load_state_dict(net.state_dict())
        assert torch.equal(twin(images(6)[0]), net(images(6)[0]))


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
    before = {id(t) for entry in net._copies[1]._entries.values() for t in entry.copies}
    for _ in range(3):
        backward(net, rows(6))
        torch.optim.SGD(net.parameters(), 0.1).step()
    entries = net._copies[1]._entries.values()
    assert {id(t) for entry in entries for t in entry.copies} == before
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
