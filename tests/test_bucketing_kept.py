"""Does a bucketer see gradients that lie elsewhere, and let go of memory that is replaced?"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from bucketing_nets import (
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    clear,
    inputs,
    loss_of,
    make_net,
    summed,
)
from oracle import assert_bits, expected
from torch import Tensor, nn

import pyringar as pr

K = 3


def watches_of(tensors: list[Tensor]) -> list[weakref.ref]:
    return [weakref.ref(tensor) for tensor in tensors] + [
        weakref.ref(tensor.untyped_storage()) for tensor in tensors
    ]


@pytest.fixture
def nets() -> list[nn.Module]:
    net = make_net()
    return [copy.deepcopy(net) for _ in range(K)]


@pytest.fixture
def comm():
    with pr.Communicator(["cpu"] * K, order="rank") as comm:
        yield comm


def grads_of(nets: list[nn.Module]) -> list[Tensor]:
    return [param.grad for net in nets for param in net.parameters()]


def step(nets, bucketer, *, seed: int = 0, set_to_none: bool = False) -> None:
    xs = inputs(seed=seed)
    assert_next_step_is_right(nets, xs, bucketer, set_to_none=set_to_none)


def warm_bucketer(nets, comm, **options) -> pr.GradientBucketer:
    bucketer = pr.GradientBucketer(nets, comm=comm, **options)
    step(nets, bucketer, set_to_none=True)
    for seed in range(3):
        step(nets, bucketer, seed=seed)
    return bucketer


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda param: setattr(param, "grad", param.grad.clone()),
        lambda param: setattr(param.grad, "data", param.grad.clone()),
        lambda param: param.grad.set_(param.grad.clone()),
        lambda param: setattr(param.grad, "data", torch.empty_like(param).t().clone().t()),
        lambda param: setattr(param, "grad", torch._neg_view(param.grad)),
        lambda param: setattr(param, "grad", param.grad.detach()),
        lambda param: setattr(param, "grad", None),
    ],
    ids=["new", "data", "set_", "strides", "negated", "alias", "none"],
)
def test_gradient_that_lies_elsewhere_is_reduced(nets, comm, which, change):
    with warm_bucketer(nets, comm) as bucketer:
        with torch.no_grad():
            param = list(nets[1].parameters())[which]
            change(param)
        for seed in range(4):
            step(nets, bucketer, seed=seed)


def test_memory_goes_with_gradients(nets, comm):
    """Without the garbage collector; a gradient that is kept keeps no other gradient."""
    gc.collect()
    gc.disable()
    try:
        with warm_bucketer(nets, comm) as bucketer:
            kept = [param.grad for param in nets[0].parameters()]
            watches = watches_of(grads_of(nets[1:]))
            clear(nets)
            assert all(watch() is None for watch in watches)
            step(nets, bucketer, seed=7, set_to_none=True)
            assert len(kept) == 6
    finally:
        gc.enable()


def test_autograd_notices_reduced_gradients(nets, comm):
    with warm_bucketer(nets, comm, overlap=False) as bucketer:
        clear(nets, set_to_none=False)
        weight = torch.ones(5, requires_grad=True)
        backward_one_by_one(nets, inputs())
        loss = (weight * nets[0][4].bias.grad).sum()
        bucketer.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_with_a_graph(nets, comm, overlap):
    xs = inputs()
    with warm_bucketer(nets, comm, overlap=overlap) as bucketer:
        wanted = summed(nets, xs)
        for create_graph in (True, False, True, True, False):
            clear(nets, set_to_none=False)
            for net, x in zip(nets, xs, strict=True):
                loss_of(net, x).backward(create_graph=create_graph)
            bucketer.wait()
            assert_reduced(nets, wanted)
            assert nets[0][0].bias.grad.requires_grad or not create_graph
        clear(nets)


def test_closed_communicator_raises_in_launch(nets):
    comm = pr.Communicator(["cpu"] * K, order="rank")
    with warm_bucketer(nets, comm, overlap=True):
        clear(nets, set_to_none=False)
        comm.close()
        with pytest.raises(pr.RingarError, match="closed"):
            backward_one_by_one(nets, inputs())


@pytest.mark.parametrize("order", ["tree", "exact"])
def test_buckets_keep_the_order_of_the_communicator(order):
    nets, xs = [make_net() for _ in range(6)], inputs(6)
    parts = [
        torch.autograd.grad(loss_of(net, x), [*net.parameters()])
        for net, x in zip(nets, xs, strict=True)
    ]
    with (
        pr.Communicator(["cpu"] * 6, order=order) as comm,
        pr.GradientBucketer(nets, comm=comm, bucket_cap_mb=0.002) as bucketer,
    ):
        backward_one_by_one(nets, xs)
        bucketer.wait()
    for i, terms in enumerate(zip(*parts, strict=True)):
        wanted = expected([term.flatten() for term in terms], "sum", "fused", order)
        for net in nets:
            assert_bits([*net.parameters()][i].grad.flatten(), wanted)
