"""DataParallel behaves like the plain module: bits, optimizers, hooks, errors, threads, signals."""

import collections
import copy
import gc
import os
import pickle
import signal
import sys
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from oracle import reduced, tree_reduced
from parallel_nets import (
    CAPS,
    NETS,
    Tied,
    assert_same,
    backward,
    images,
    make_conv,
    make_mlp,
    make_pair,
    rows,
    tokens,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal, shard_sizes


@CAPS
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("order", "add"), [("rank", reduced), ("tree", tree_reduced)])
@pytest.mark.parametrize(("make", "batch"), [(make_conv, images), (Tied, tokens)])
def test_gradient_bits_follow_order(make, batch, k, dtype, order, add, cap_mb):
    torch.manual_seed(0)
    module, (X, y) = make().to(dtype), batch(11)  # noqa: N806
    X = X.to(dtype) if X.is_floating_point() else X  # noqa: N806
    net = pr.DataParallel(copy.deepcopy(module), ["cpu"] * k, order=order, bucket_cap_mb=cap_mb)
    copies = [copy.deepcopy(module) for _ in range(k)]
    shards = torch.split(X, shard_sizes(11, k))
    by_hand = torch.cat([mine(shard) for mine, shard in zip(copies, shards, strict=True)])
    F.cross_entropy(by_hand, y).backward()
    found = net(X)
    assert torch.equal(found, by_hand)
    F.cross_entropy(found, y).backward()
    for param, *parts in zip(net.parameters(), *(m.parameters() for m in copies), strict=True):
        assert torch.equal(param.grad, add([part.grad for part in parts], "sum"))
    for buffer, wanted in zip(net.buffers(), copies[0].buffers(), strict=True):
        assert torch.equal(buffer, wanted)


OPTIMIZERS = {  # LBFGS is the case of pytorch#30439
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "AdamW groups": lambda params: torch.optim.AdamW([{"params": [p]} for p in params], 0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3),
}


@pytest.mark.parametrize(("k", "cap_mb"), [(1, None), (2, 1e-6), (3, None)])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ten_steps_match_plain_module(name, kind, k, cap_mb):
    plain, net, batch = make_pair(name, k, bucket_cap_mb=cap_mb)
    if name == "branches" and kind == "LBFGS":
        plain.unused.requires_grad_(False)
        net.module.unused.requires_grad_(False)
    trained = [[p for p in module.parameters() if p.requires_grad] for module in (plain, net)]
    optimizers = list(map(OPTIMIZERS[kind], trained))
    for step in range(10):
        for module, optimizer in zip((plain, net), optimizers, strict=True):

            def closure(module=module, optimizer=optimizer, n=5 + step):
                optimizer.zero_grad()
                return backward(module, batch(n))

            optimizer.step(closure)
    assert_same(net, plain, 1e-9)
    wanted = {f"module.{key}": value for key, value in plain.state_dict().items()}
    torch.testing.assert_close(dict(net.state_dict()), wanted, rtol=0, atol=1e-9)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=1e-6, atol=1e-9)
    assert states[1]["param_groups"] == states[0]["param_groups"]


class Checkpointed(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.net, self.run = make_mlp(), run

    def forward(self, x):
        return self.run(self.net, x)


@CAPS
@pytest.mark.parametrize(
    ("is_reentrant", "is_outside"), [(True, False), (False, False), (True, True)]
)
def test_checkpointing_matches_plain_module(is_reentrant, is_outside, cap_mb):
    run = partial(checkpoint, use_reentrant=is_reentrant)
    plain, (X, y) = Checkpointed(run), rows(7)  # noqa: N806
    X.requires_grad_()
    inner = make_mlp() if is_outside else Checkpointed(run)
    net = pr.DataParallel(inner, ["cpu"] * 2, bucket_cap_mb=cap_mb)
    for call in (plain, partial(run, net) if is_outside else net):
        (F.cross_entropy(call(X), y) + F.cross_entropy(call(X * 2), y)).backward()
    assert_same(net, plain)


@CAPS
def test_double_backward_matches_plain_module(cap_mb):
    plain, net, _ = make_pair("mlp", 3, bucket_cap_mb=cap_mb)
    for module in (plain, net):
        X, y = rows(7)  # noqa: N806
        X.requires_grad_()
        loss = F.cross_entropy(module(X), y)
        grads = torch.autograd.grad(loss, [X, *module.parameters()], create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        total.backward(inputs=[*module.parameters()])
    assert_same(net, plain)


@pytest.mark.parametrize("how", ["module", "in place", "net"])
def test_compiled_module_matches_plain_module(how):
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


def test_copies_share_no_parameters():
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


@CAPS
def test_changes_after_wrapping_take_effect(cap_mb):
    plain, net, _ = make_pair("conv", 3, bucket_cap_mb=cap_mb)
    net(images(7)[0])
    for module in (plain, net.module):
        module[4].weight.data.mul_(3)
        module[4].bias.data = torch.ones(3)
        module[1] = nn.BatchNorm2d(4).eval()
        module[2] = nn.Hardtanh(-0.1, 0.1)
        module.append(nn.Softmax(1))
        module.float()
    for module in (plain, net):
        backward(module, images(7, torch.float32))
    assert_same(net, plain, 1e-6)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(5))
        self.register_buffer("a", torch.ones(5))
        self.register_buffer("b", torch.ones(5))

    def forward(self, x):
        with torch.no_grad():
            self.w.mul_(2)
        self.a.mul_(2)
        self.b = self.b * 3
        return x * self.w * self.a * self.b


@pytest.mark.parametrize("weights", [None, (0, 1, 1)])
@pytest.mark.parametrize("how", [None, 1e-6, "compiled"])
def test_writes_of_first_rank_persist(how, weights):
    plain, cap_mb = Writes(), None if how == "compiled" else how
    net = pr.DataParallel(Writes(), ["cpu"] * 3, weights=weights, bucket_cap_mb=cap_mb)
    if how == "compiled":
        net.module.compile(backend="eager")
    for _ in range(2):
        X = rows(7, torch.float32)[0]  # noqa: N806
        assert torch.equal(net(X), plain(X))
        check_replicas_equal([[*m.state_dict().values()] for m in (net, plain)])


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_replicas_reuse_memory(batchnorm):
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    net = pr.DataParallel(module, ["cpu"] * 3, batchnorm=batchnorm)
    addresses = []

    def record(part, _):
        addresses.append({p.data_ptr(): getattr(p, "tag", None) for p in part.parameters()})

    net.module.register_forward_pre_hook(record)
    net.module[0].weight.tag = "kept"
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            backward(net, rows(6))
            torch.optim.SGD(net.parameters(), 0.1).step()
    finally:
        gc.enable()
    assert addresses[:3] == addresses[3:6] == addresses[6:]
    assert all("kept" in mine.values() for mine in addresses)
    old = weakref.ref(net.module[2].weight)
    net.module[2] = nn.Linear(7, 3).double()
    net(rows(6)[0])
    gc.collect()
    assert old() is None


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.first, self.second = nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = copy.deepcopy(self.act)(torch.func.vmap(self.first)(x))
        slope = torch.func.vmap(torch.func.jacrev(self.second))(hidden)
        return self.second(hidden) + slope.sum(2)


@pytest.mark.parametrize("cap_mb", [None, 1e-6])
def test_forward_may_use_func_transforms(cap_mb):
    plain = Nested().double()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 2, bucket_cap_mb=cap_mb)
    backward(net, rows(6))
    backward(plain, rows(6))
    assert_same(net, plain, 1e-12)


def test_write_before_backward_raises():
    for module in make_pair("mlp", 3)[:2]:
        out = module(rows(7)[0])
        with torch.no_grad():
            [*module.parameters()][2].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_hooks_run_once_per_rank():
    _, net, batch = make_pair("mlp", 3)
    calls = []
    net.module[0].register_forward_hook(lambda part, args, out: calls.append(len(args[0])))
    net.module[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    net.module[0].weight.register_hook(lambda grad: calls.append("gradient"))
    backward(net, batch(8))
    assert calls == [3, 3, 2, *["backward"] * 3, "gradient"]


class OddGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 3, sparse=True)
        self.c = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.a, self.b, self.w = (nn.Parameter(torch.randn(3)) for _ in range(3))
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, i):
        if i[0] == 2:
            return (self.e(i) * self.w * self.c.abs()) @ self.graph + (self.a + self.b)
        return (self.e.weight[i] if i[0] == 4 else 0) + self.a.expand(len(i), 3) * 1.5


def test_unusual_gradients_match_plain_module():
    torch.manual_seed(0)
    plain = OddGradients()
    net = pr.DataParallel(copy.deepcopy(plain), ["cpu"] * 3)
    for first in (range(2, 8), range(6)):  # only rank 0, then only rank 1 has sparse gradients
        indices = torch.tensor(first)
        for module, parts in ((net, [indices]), (plain, indices.chunk(3))):
            module.zero_grad()
            torch.cat([module(part) for part in parts]).square().sum().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                assert mine.grad.layout == other.grad.layout
                torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


@CAPS
@pytest.mark.parametrize("is_frozen", [False, True])
def test_pending_backward_uses_saved_weights(is_frozen, cap_mb):
    """Weights change through .data and back before a pending backward, as in weight averaging."""
    plain, net, _ = make_pair("conv", 3, bucket_cap_mb=cap_mb)
    for module in (plain, net):
        module.requires_grad_(not is_frozen)
        X = images(7)[0].requires_grad_()  # noqa: N806
        pending = module(X)
        saved = [param.data.clone() for param in module.parameters()]
        for param in module.parameters():
            param.data.mul_(2)
        module(images(7)[0])
        for param, value in zip(module.parameters(), saved, strict=True):
            param.data.copy_(value)
        (pending.square().sum() + module(X).sum()).backward()
        module.input_grad = X.grad
    torch.testing.assert_close(net.input_grad, plain.input_grad)
    assert_same(net, plain)


@CAPS
def test_unused_parameter_hooks_do_not_run(cap_mb):
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


def test_func_transforms_match_or_raise():
    plain, net, _ = make_pair("mlp", 2, bucket_cap_mb=1e-6)
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


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = make_mlp()

    def forward(self, x, scale, *, bias):
        return self.layer(x.T).T * scale + bias


@pytest.mark.parametrize("dim", [1, -1])
def test_dim_selects_batch_dimension(dim):
    X, _ = rows(7)  # noqa: N806
    net = pr.DataParallel(Transposed(), ["cpu"] * 3, dim=dim)
    found = net(X.T, torch.tensor(2.0), bias=torch.ones(1, 7))
    torch.testing.assert_close(found, Transposed()(X.T, 2.0, bias=1.0))


@pytest.mark.parametrize("is_loss", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 12])
@pytest.mark.parametrize("weights", [None, (3, 1), (1, 0, 2), (0, 1)])
def test_shards_have_weighted_sizes(n, weights, is_loss):
    k = len(weights) if weights else 4
    plain, net, _ = make_pair("mlp", k, weights=weights)
    sizes = [size for size in shard_sizes(n, k, weights) if size] or [0]
    seen = []
    net.module.register_forward_hook(lambda part, args, out: seen.append(len(args[0])))
    for module in (plain, net.module) if is_loss else ():  # net stacks the ranks' losses
        module.register_forward_hook(lambda part, args, out: out.square().sum())
    outputs = [module(rows(n)[0]) for module in (plain, net)]
    if is_loss:
        assert outputs[1].shape == (len(sizes),)
        outputs[1] = outputs[1].sum()
    torch.testing.assert_close(*outputs)
    for out in outputs:
        (out if is_loss else out.square()).sum().backward()
    assert_same(net, plain)
    assert seen == sizes


def test_unsupported_modules_and_inputs_raise():
    words = nn.Identity()
    words.forward = lambda x: "words"
    lazy, meta = nn.Sequential(nn.LazyLinear(2)), nn.Linear(2, 2, device="meta")
    for module, batch, message in (
        (nn.Identity(), torch.tensor(1.0), "no tensor with a dimension 0"),
        (nn.Identity(), [torch.ones(3), torch.ones(4)], r"args\[0\]\[0\] \(3,\), .*; expected"),
        (words, torch.ones(2), "output is a str"),
        (lazy, torch.ones(4, 2), r"lazy parameter '0\.weight'"),
        (meta, torch.ones(4, 2), r"'weight' on meta, expected cpu"),
    ):
        with pytest.raises(pr.ArgumentError, match=message):
            pr.DataParallel(module, ["cpu"] * 2)(batch)
    with pytest.raises(pr.ArgumentError, match="both devices and device_ids"):
        pr.DataParallel(nn.Linear(2, 2), ["cpu"], device_ids=["cpu"])


def test_one_rank_gets_arguments_unchanged():
    module = nn.Identity()
    module.forward = lambda *args, **kwargs: (args, kwargs)
    data = [torch.ones(3), {"a": torch.ones(2)}, object()]
    args, kwargs = pr.DataParallel(module, ["cpu"])(*data, key=data[0])
    assert all(mine is given for mine, given in zip(args, data, strict=True))
    assert kwargs["key"] is data[0]


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


def test_batch_in_unsupported_container_raises():
    module, x = nn.Identity(), torch.ones(4, 2)
    module.forward = lambda x, *others, **kwargs: x
    net = pr.DataParallel(module, ["cpu"] * 2)
    numbers = list(range(20_000))
    trainer = types.SimpleNamespace(optimizer=torch.optim.SGD([nn.Parameter(x)], 0.1), n=x[0])
    trainer.all = [trainer] * 5_000
    for harmless in ([np.arange(5)], AttributeDict(a=1), numbers, trainer, [].append):
        assert net(x, harmless, key=[harmless]).shape == (4, 2)
    assert isinstance(net(AttributeDict(x=x)), AttributeDict)
    hidden = collections.UserDict(y=1)
    hidden.extra = x
    for other, words in (
        ({"a": x.to_sparse()}, r"args\[1\]\['a'\] is a .* tensor"),
        (hidden, r"args\[1\] is an UserDict with a tensor of 4"),
        (types.MappingProxyType({"x": x}), r"args\[1\] is a mappingproxy with a tensor of 4"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            net(x, other)


@pytest.mark.parametrize("rank", [0, 2])
def test_error_note_names_rank(rank):
    def fail(part, args):
        if args[0][0, 0] == 2 * rank:
            raise ValueError("planted")

    net = pr.DataParallel(nn.Identity(), ["cpu"] * 3)
    net.module.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="planted") as failed:
        net(torch.arange(6.0).view(6, 1))
    if sys.version_info >= (3, 11):
        assert failed.value.__notes__ == [f"(rank {rank} of 3, on cpu)"]
    assert net(torch.full((6, 1), 9.0)).shape == (6, 1)


def test_buckets_reduce_during_backward():
    events, net = [], nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for n, layer in enumerate(net):
        layer.register_full_backward_pre_hook(lambda *_, n=n: events.append(n))
        layer.weight.register_hook(lambda _, n=n: events.append(f"reduced {n}"))
    backward(pr.DataParallel(net, ["cpu"] * 2, bucket_cap_mb=1e-6), rows(6, torch.float32, width=4))
    # Rank 1's forward ran last, so its backward runs first. Rank 0 then completes each bucket.
    wanted = [3, 2, 1, 0, *(event for n in (3, 2, 1, 0) for event in (n, f"reduced {n}"))]
    assert events == wanted


def test_threads_may_call_concurrently():
    plain, net, _ = make_pair("mlp", 2)
    batches = [rows(4 + i, seed=i)[0] for i in range(5)]
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(net, batches))
    for i, X in enumerate(batches):  # noqa: N806
        torch.testing.assert_close(found[i], plain(X))
    sum(out.square().sum() for out in found).backward()
    sum(plain(X).square().sum() for X in batches).backward()
    assert_same(net, plain)


@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_interrupted_call_leaves_net_usable(batchnorm):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Identity())
    net = pr.DataParallel(module, ["cpu"] * 2, batchnorm=batchnorm)
    handle = module[2].register_forward_hook(interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        net(torch.rand(4, 2))
    assert time.monotonic() - begin < 5
    handle.remove()
    net(torch.rand(4, 2)).sum().backward()
    assert module[0].weight.grad is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("batchnorm", ["local", "sync"])
def test_forked_child_computes_outputs(batchnorm):
    net = pr.DataParallel(make_conv().float(), ["cpu"] * 2, batchnorm=batchnorm)
    wanted = net.eval()(images(4, torch.float32)[0])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # the child has no OpenMP threads
            status = int(not torch.allclose(net(images(4, torch.float32)[0]), wanted))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
