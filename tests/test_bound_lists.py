"""Are lists that are checked once reduced to the same bits, and let go with their tensors?"""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

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
NATIVE = ("fused", "direct", "ring")


def parts_of(k: int) -> list[list[Tensor]]:
    """``parts[i][rank]``: sizes around a pack, dtypes, nothing at all, more dimensions than fit."""
    generator = torch.Generator().manual_seed(k)
    shapes = [(5,), (0,), (), (1,), (4099,), (3, 1, 5), (2,) * 7, (0, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64]
    return [
        [
            (torch.randn(shape, generator=generator) * 9).to(dtypes[i % len(dtypes)])
            for _ in range(k)
        ]
        for i, shape in enumerate(shapes * 2)
    ]


def lists_of(parts: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in mine] for mine in zip(*parts, strict=True)]


def watches_of(tensors: list[Tensor]) -> list[weakref.ref]:
    return [weakref.ref(tensor) for tensor in tensors] + [
        weakref.ref(tensor.untyped_storage()) for tensor in tensors
    ]


# -- bind_coalesced --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_bits(k, algorithm, op):
    parts = parts_of(k)
    with pr.Communicator(["cpu"] * k) as comm:
        lists = lists_of(parts)
        call = comm.bind_coalesced(lists, op, algorithm=algorithm)
        for _ in range(3):
            assert call() is None
            for i, part in enumerate(parts):
                flats = [tensor.flatten() for tensor in part]
                wanted = expected(flats, op, algorithm if k > 1 else "fused").view(part[0].shape)
                for rank in range(k):
                    assert_bits(lists[rank][i], wanted, f"tensor {i} of rank {rank}")
                parts[i] = [wanted] * k


@pytest.mark.parametrize("lists", [[[], []], [(), ()]])
def test_empty_lists(lists):
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind_coalesced(lists)
        assert call() is None
        assert comm.stats()["fused"]["calls"] == 1


def test_what_is_wrong_is_told_when_it_is_bound():
    one = [torch.ones(3), torch.ones(4)]
    with pr.Communicator(["cpu"] * 2) as comm:
        for lists, words in (
            ([one], r"bind_coalesced: lists has 1 entry, expected 2"),
            ([one, one[:1]], r"bind_coalesced: lists\[1\] has 1 entry, expected 2"),
            ([one, one], r"bind_coalesced: lists\[1\]\[(\d)\] shares memory with lists\[0\]\[\1\]"),
            ([one, [torch.ones(3), torch.ones(5)]], r"bind_coalesced: lists\[1\]\[1\] has shape"),
            ([one, [torch.ones(3), None]], r"bind_coalesced: lists\[1\]\[1\] is None"),
            (
                [one, [torch.ones(3), torch.ones(4, requires_grad=True)]],
                r"bind_coalesced: lists\[1\]\[1\] requires grad",
            ),
        ):
            with pytest.raises(pr.ArgumentError, match=words):
                comm.bind_coalesced(lists)
    assert one[0].tolist() == [1, 1, 1]


def test_the_lists_themselves_may_change():
    lists = [[torch.ones(3)], [torch.ones(3)]]
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind_coalesced(lists)
        kept, other = lists[0][0], torch.full((3,), 7.0)
        lists[0][0] = other
        lists[1].clear()
        gc.collect()
        call()
    assert kept.tolist() == [2, 2, 2]
    assert other.tolist() == [7, 7, 7]


@pytest.mark.parametrize("how", ["data", "set_", "resized and back"])
def test_memory_that_was_bound_is_kept_and_reduced(how):
    """As documented; only a storage that grows frees it."""
    numel = 100_000
    lists = [[torch.ones(5), torch.ones(numel)] for _ in range(2)]
    tensor, new = lists[0][1], torch.full((numel,), 7.0)
    old = tensor.detach()
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind_coalesced(lists)
        if how == "data":
            tensor.data = new
        elif how == "set_":
            tensor.set_(new)
        else:
            tensor.resize_(0)
            tensor.resize_(numel)
        del lists
        gc.collect()
        call()
    assert torch.equal(new, torch.full((numel,), 7.0))
    assert torch.equal(old, torch.full((numel,), 2.0))


def test_nothing_is_kept_by_what_is_gone():
    lists = [[torch.ones(4)], [torch.ones(4)]]
    watches = watches_of([mine[0] for mine in lists])
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind_coalesced(lists)
        del lists
        gc.collect()
        assert all(watch() is not None for watch in watches)
        del call
        gc.collect()
        assert all(watch() is None for watch in watches)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("kind", ["bind", "bind_coalesced"])
def test_autograd_notices_every_write(kind, view):
    """Whatever holds the tensors: Python alone, a view's base, a graph."""
    base = [torch.arange(1.0, 7.0).view(2, 3) for _ in range(2)]
    tensors = [b[0] if view else b for b in base]
    weight = torch.ones(tensors[0].shape, requires_grad=True)
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind(tensors) if kind == "bind" else comm.bind_coalesced([[t] for t in tensors])
        for _ in range(3):
            versions = [b._version for b in base]
            loss = (weight * tensors[0]).sum()
            call()
            assert [b._version for b in base] == [version + 1 for version in versions]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_tensor_that_requires_grad_later_is_still_written_and_noticed():
    lists = [[torch.ones(3)], [torch.ones(3)]]
    with pr.Communicator(["cpu"] * 2) as comm:
        call = comm.bind_coalesced(lists)
        leaf = lists[0][0].requires_grad_()
        loss = leaf.square().sum()
        call()
        assert leaf.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_parameters_and_inference_tensors():
    with pr.Communicator(["cpu"] * 2) as comm:
        params = [[nn.Parameter(torch.ones(2, 1, 3))] for _ in range(2)]
        with torch.no_grad():
            call = comm.bind_coalesced(params)
        call()
        assert params[0][0].tolist() == [[[2] * 3]] * 2
        with torch.inference_mode():
            lists = [[torch.ones(3)] for _ in range(2)]
        comm.bind_coalesced(lists)()
        assert lists[1][0].tolist() == [2, 2, 2]


def test_a_negated_view_is_written_with_its_sign():
    tensors = [torch._neg_view(torch.full((3,), float(rank))) for rank in range(2)]
    with pr.Communicator(["cpu"] * 2) as comm:
        comm.bind_coalesced([[t] for t in tensors])()
    assert [t.tolist() for t in tensors] == [[-1] * 3] * 2


def test_a_closed_communicator_refuses_and_writes_nothing():
    lists = [[torch.ones(3)], [torch.ones(3)]]
    comm = pr.Communicator(["cpu"] * 2)
    call = comm.bind_coalesced(lists)
    comm.close()
    version = lists[0][0]._version
    for _ in range(2):
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert lists[0][0].tolist() == [1, 1, 1]
    assert lists[0][0]._version == version


def test_a_bound_list_outlives_the_name_of_its_communicator():
    lists = [[torch.ones(3)], [torch.ones(3)]]
    call = pr.Communicator(["cpu"] * 2).bind_coalesced(lists)
    gc.collect()
    with pytest.raises(pr.RingarError, match="closed"):
        call()


def test_many_threads_call_their_own_and_one_that_they_share():
    def work(seed: int) -> None:
        tensors = [[torch.full((1 + 97 * seed,), 1.0 + r)] * 1 for r in range(K)]
        own = comm.bind_coalesced(tensors, "max", algorithm=NATIVE[seed % 3])
        for _ in range(50):
            own()
            shared()
            assert all(torch.all(mine[0] == K) for mine in tensors), seed

    with pr.Communicator(["cpu"] * K) as comm, ThreadPoolExecutor(4) as threads:
        lists = [[torch.zeros(1000), torch.arange(7.0)[::2] * 0] for _ in range(K)]
        shared = comm.bind_coalesced(lists)
        list(threads.map(work, range(4)))
        assert comm.stats()["fused"]["calls"] >= 200


# -- gradients that stay from step to step in a bucketer -------------------------------------------


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
    """One step, compared with sums of gradients that no bucketer saw."""
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
def test_a_gradient_that_lies_elsewhere_is_seen(nets, comm, which, change):
    """First of its bucket or not: what backward leaves there is what is reduced."""
    with warm_bucketer(nets, comm) as bucketer:
        with torch.no_grad():
            param = list(nets[1].parameters())[which]
            change(param)
        for seed in range(4):
            step(nets, bucketer, seed=seed)


def test_the_memory_of_gradients_goes_with_them(nets, comm):
    with warm_bucketer(nets, comm) as bucketer:
        watches = watches_of(grads_of(nets))
        assert all(watch() is not None for watch in watches)
        clear(nets)
        gc.collect()
        assert all(watch() is None for watch in watches)
        step(nets, bucketer, seed=7, set_to_none=True)


def test_a_gradient_that_the_user_keeps_keeps_no_others(nets, comm):
    with warm_bucketer(nets, comm) as bucketer:
        kept = [nets[0].get_parameter(name).grad for name, _ in nets[0].named_parameters()]
        watches = watches_of(grads_of(nets[1:]))
        clear(nets)
        step(nets, bucketer, set_to_none=True)
        gc.collect()
        assert all(watch() is None for watch in watches)
        assert len(kept) == 6


def test_garbage_is_needed_for_nothing(nets, comm):
    gc.collect()
    gc.disable()
    try:
        bucketer = warm_bucketer(nets, comm)
        watches = watches_of(grads_of(nets))
        clear(nets)
        assert all(watch() is None for watch in watches)
        step(nets, bucketer)
        bucketer.close()
    finally:
        gc.enable()


def test_accumulation_and_parameters_that_change_sides(nets, comm):
    xs = [inputs(seed=seed) for seed in range(3)]
    with warm_bucketer(nets, comm) as bucketer:
        for set_to_none in (False, True, False, False):
            locals_ = [copy.deepcopy(net) for net in nets]
            clear([*nets, *locals_], set_to_none=set_to_none)
            for x in xs:
                backward_one_by_one(locals_, x)
            with bucketer.no_sync():
                for x in xs[:-1]:
                    backward_one_by_one(nets, x)
            backward_one_by_one(nets, xs[-1])
            bucketer.wait()
            comm.all_reduce_coalesced([[p.grad for p in net.parameters()] for net in locals_])
            assert_reduced(nets, [p.grad for p in locals_[0].parameters()])


def test_change_of_kept_gradient_raises(nets, comm):
    with warm_bucketer(nets, comm, bucket_cap_mb=1e-3, overlap=True) as bucketer:
        clear(nets, set_to_none=False)
        backward_one_by_one(nets, inputs())
        nets[1][4].bias.grad.mul_(2)
        with pytest.raises(pr.RingarError, match="of rank 1 was changed"):
            bucketer.wait()


def test_autograd_notices_that_a_bound_gradient_was_written(nets, comm):
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


@pytest.mark.parametrize("algorithm", ["naive", "sharded", *NATIVE])
def test_every_algorithm_of_the_communicator(nets, algorithm):
    with (
        pr.Communicator(["cpu"] * K, algorithm=algorithm) as comm,
        pr.GradientBucketer(nets, comm=comm) as bucketer,
    ):
        found = []
        for set_to_none in (True, True, False, False, False):
            clear(nets, set_to_none=set_to_none)
            backward_one_by_one(nets, inputs())
            bucketer.wait()
            found.append([grad.clone() for grad in grads_of(nets)])
        assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_closed_communicator_raises_in_launch(nets):
    comm = pr.Communicator(["cpu"] * K, order="rank")
    with warm_bucketer(nets, comm, overlap=True):
        clear(nets, set_to_none=False)
        comm.close()
        with pytest.raises(pr.RingarError, match="closed"):
            backward_one_by_one(nets, inputs())
