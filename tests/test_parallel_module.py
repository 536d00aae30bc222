"""Is DataParallel the plain module: bits, steps of optimizers, gradients of gradients?"""

from __future__ import annotations

import copy
import pickle
from functools import partial

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
from pyringar.parallel.shards import shard_sizes


@CAPS
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("order", "add"), [("rank", reduced), ("tree", tree_reduced)])
@pytest.mark.parametrize(("make", "batch"), [(make_conv, images), (Tied, tokens)])
def test_gradients_have_bits_of_order(make, batch, k, dtype, order, add, cap_mb):
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


OPTIMIZERS = {  # LBFGS: pytorch#30439
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "AdamW groups": lambda params: torch.optim.AdamW([{"params": [p]} for p in params], 0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3),
}


@pytest.mark.parametrize(("k", "cap_mb"), [(1, None), (2, 1e-6), (3, None)])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ten_steps_are_the_plain_modules(name, kind, k, cap_mb):
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
def test_checkpoints_are_right(is_reentrant, is_outside, cap_mb):
    run = partial(checkpoint, use_reentrant=is_reentrant)
    plain, (X, y) = Checkpointed(run), rows(7)  # noqa: N806
    X.requires_grad_()
    inner = make_mlp() if is_outside else Checkpointed(run)
    net = pr.DataParallel(inner, ["cpu"] * 2, bucket_cap_mb=cap_mb)
    for call in (plain, partial(run, net) if is_outside else net):
        (F.cross_entropy(call(X), y) + F.cross_entropy(call(X * 2), y)).backward()
    assert_same(net, plain)


@CAPS
def test_gradients_of_gradients(cap_mb):
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
