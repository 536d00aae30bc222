"""Prepared calls: a repeated call validates its arguments again if its tensors have changed."""

import gc
import random as python_random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from oracle import assert_all_ranks, assert_bits, folded, inputs
from pairs import K, RankPair, make_pair
from promises import parameters
from torch import nn

import pyringar as pr


@pytest.fixture(params=parameters(__name__, "bind", "repeated"), scope="module")
def pair(request):
    with make_pair(request.param, order="rank") as made:
        yield made


@pytest.fixture(params=["threads", "processes"], scope="module")
def cpu_pair(request):
    with make_pair(request.param, order="rank") as made:
        yield made


def ranks(pair, *shape, seed=0):
    device = pair.devices[0] if isinstance(pair, pr.Communicator) else "cpu"
    parts = inputs(torch.Size(shape).numel(), torch.float32, K, seed)
    return [part.to(device, copy=True).view(shape) for part in parts]


def copies(tensors):
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def assert_reduces(pair, tensors, op="sum", **options):
    for _ in range(2):
        before = copies(tensors)
        pair.all_reduce(tensors, op, **options)
        assert_all_ranks(copies(tensors), folded(before, op, options.get("order") or "rank"), op)
        for rank, tensor in enumerate(tensors):
            tensor.detach().mul_(rank + 2)


def test_repeated_call_follows_changed_arguments(pair):
    tensors = ranks(pair, 1031)
    for op in ("sum", "mean", "max", "sum"):
        before = tensors[0]._version
        assert_reduces(pair, tensors, op)
        assert tensors[0]._version == before + 4, "two calls and two writes"
        assert_reduces(pair, tuple(tensors), op)
    assert_reduces(pair, tensors, order="tree")
    assert_reduces(pair, tensors, algorithm="direct")


def test_repeated_call_follows_new_memory(pair):
    tensors = ranks(pair, 33)
    assert_reduces(pair, tensors)
    old = tensors[1].data
    kept = old.clone()
    tensors[1].data = ranks(pair, 33, seed=5)[1]
    assert_reduces(pair, tensors)
    assert torch.equal(old.view(torch.int32), kept.view(torch.int32))
    tensors[0].set_(ranks(pair, 33, seed=6)[0])
    assert_reduces(pair, tensors)
    tensors = ranks(pair, 0)
    for numel in (5, 3000, 7, 1):
        for rank, tensor in enumerate(tensors):
            tensor.resize_(numel).fill_(rank + numel)
        pair.all_reduce(tensors)
        assert [tensor.tolist() for tensor in tensors] == [[2.0 * numel + 1] * numel] * K


@pytest.mark.parametrize("is_new_object", [True, False], ids=["new object", "new data"])
def test_repeated_call_detects_negation(pair, is_new_object):
    base = ranks(pair, 8)
    views = [tensor.view(8) for tensor in base]
    for turn in range(40):
        first = torch._neg_view(base[0]) if turn % 2 else base[0].view(8)
        if is_new_object:  # the new view may reuse the address of the old view
            views = []
            views = [first, base[1].view(8)]
        else:
            views[0].data = first
        assert_reduces(pair, views)


def test_repeated_call_with_bad_tensors_raises(pair):
    tensors = ranks(pair, 9)
    assert_reduces(pair, tensors)
    for tensor in tensors:
        tensor.requires_grad_()
    for bad in (tensors, [None, None], [tensors[0].bool()] * K, [tensors[0][:1].expand(9)] * K):
        with pytest.raises((pr.ArgumentError, pr.UnsupportedError)):
            pair.all_reduce(bad)
    with torch.no_grad():
        assert_reduces(pair, tensors)


def test_prepared_call_does_not_keep_tensors(pair):
    tensors = ranks(pair, 4096)
    pair.all_reduce(tensors)
    watches = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    gc.collect()
    assert [watch() for watch in watches] == [None] * K


def test_random_repeated_calls_are_exact(pair):
    draw = python_random.Random(7)
    pool = [ranks(pair, 64, seed=seed) for seed in range(4)]
    for step in range(300):
        begin, end = draw.choice([0, 0, 0, 1, 8]), draw.choice([64, 64, 64, 33])
        tensors = [tensor[begin:end] for tensor in draw.choice(pool)]
        if draw.random() < 0.2:
            tensors.reverse()
        before = copies(tensors)
        op = draw.choice(["sum", "max", "mean"])
        pair.all_reduce(tensors, op)
        assert_all_ranks(copies(tensors), folded(before, op, "rank"), step)
        for rank, tensor in enumerate(tensors):
            tensor.copy_(before[rank]).add_(rank)


def bind(pair, kind, tensors):
    if kind == "bind":
        return pair.bind(tensors)
    return pair.bind_coalesced([[tensor] for tensor in tensors])


KINDS = pytest.mark.parametrize("kind", ["bind", "bind_coalesced"])


def replace(tensor, new):
    tensor.data = new


CHANGES = {
    "data": lambda t: replace(t, torch.ones_like(t)),
    "data of another dtype": lambda t: replace(t, t.data.view(torch.int32)),
    "set_": lambda t: t.set_(torch.ones_like(t)),
    "resize_ to more": lambda t: t.resize_(1_000_000),
    "resize_ to less": lambda t: t.resize_(3),
    "storage of nothing": lambda t: t.untyped_storage().resize_(0),
    "storage of less": lambda t: t.untyped_storage().resize_(512),
    "storage of more": lambda t: t.untyped_storage().resize_(1_000_000),
    "share_memory_": lambda t: t.share_memory_(),
    "transpose_": lambda t: t.transpose_(0, 1),
}


@KINDS
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
def test_bound_call_detects_changed_tensor(pair, kind, how, is_view):
    base = ranks(pair, 17, 16)
    if how == "share_memory_" and base[0].is_cuda:
        pytest.skip("it does nothing on a GPU")
    tensors = [tensor[1:] if is_view else tensor[:16] for tensor in base]
    call = bind(pair, kind, tensors)
    call()
    before = copies(tensors)
    old = [tensor.detach().view(16, 16) for tensor in tensors]
    for tensor in tensors:  # on all ranks, since an unchanged rank would wait
        CHANGES[how](tensor)
    name = r"(tensors?(\[0\])?|lists\[0\]\[0\])"
    for _ in range(2):
        with pytest.raises(pr.ArgumentError, match=rf"^bind: {name} has new memory or layout"):
            call()
    if "storage" not in how and how != "share_memory_":
        for tensor, kept in zip(old, before, strict=True):
            assert_bits(tensor, kept)
    others = ranks(pair, 16, 16, seed=3)
    wanted = folded(copies(others), "sum", "rank")
    bind(pair, kind, others)()
    assert_all_ranks(copies(others), wanted, how)


def test_bound_call_names_changed_tensor(comm_of):
    lists = [[torch.ones(2), torch.ones(3)] for _ in range(3)]
    call = comm_of(3).bind_coalesced(lists)
    lists[1][1].resize_(1000)
    with pytest.raises(pr.ArgumentError, match=r"^bind: lists\[1\]\[1\] has new memory or"):
        call()
    assert lists[0][0].tolist() == [1, 1], "nothing was reduced"


@KINDS
def test_deleted_bound_call_frees_tensors(cpu_pair, kind):
    tensors = [torch.ones(4) for _ in range(K)]
    watches = [weakref.ref(tensor) for tensor in tensors]
    call = bind(cpu_pair, kind, tensors)
    del tensors
    gc.collect()
    assert all(watch() is not None for watch in watches)
    del call
    gc.collect()
    assert all(watch() is None for watch in watches)


@KINDS
@pytest.mark.parametrize("is_view", [False, True])
def test_bound_call_increments_tensor_version(cpu_pair, kind, is_view):
    base = [torch.arange(1.0, 7.0).view(2, 3) for _ in range(K)]
    tensors = [one[0] if is_view else one for one in base]
    weight = torch.ones(tensors[0].shape, requires_grad=True)
    call = bind(cpu_pair, kind, tensors)
    for _ in range(3):
        versions = [one._version for one in base]
        loss = (weight * tensors[0]).sum()
        call()
        assert [one._version for one in base] == [version + 1 for version in versions]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_bind_accepts_parameters_and_inference_tensors(cpu_pair):
    parameters = [nn.Parameter(torch.ones(2, 1, 3)) for _ in range(K)]
    with torch.no_grad():
        call = cpu_pair.bind_coalesced([[one] for one in parameters])
        cpu_pair.all_reduce(parameters)
    call()
    assert parameters[0].tolist() == [[[4] * 3]] * 2
    with torch.inference_mode():
        tensors = [torch.ones(3) for _ in range(K)]
        cpu_pair.all_reduce(tensors, torch.distributed.ReduceOp.SUM)
    cpu_pair.bind(tensors)()
    assert tensors[1].tolist() == [4, 4, 4]


def test_bound_call_of_collected_communicator_raises(make_comm):
    lists = [[torch.ones(3)], [torch.ones(3)]]
    call = pr.Communicator(["cpu"] * 2).bind_coalesced(lists)
    gc.collect()
    with pytest.raises(pr.RingarError, match="closed"):
        call()


@pytest.mark.parametrize(
    ("made", "named", "order"),
    [
        ({}, "auto", "rank"),
        ({}, "ring", "ring"),
        ({"algorithm": "ring"}, None, "ring"),
        ({"algorithm": "ring"}, "auto", "rank"),
        ({"algorithm": "ring"}, "fused", "rank"),
        ({"order": "tree"}, "auto", "tree"),
        ({"order": "tree"}, "direct", "tree"),
        ({"order": "exact"}, "fused", "exact"),
        ({"algorithm": "naive"}, "auto", "rank"),
    ],
)
def test_call_runs_named_algorithm(made, named, order):
    with pr.Communicator(["cpu"] * 5, **made) as comm:
        parts = inputs(70_001, torch.float32, 5, 3)
        wanted = folded(parts, "sum", order)
        for _ in range(3):  # the third call is prepared
            tensors = [part.clone() for part in parts]
            comm.all_reduce(tensors, algorithm=named)
            assert_all_ranks(tensors, wanted, (made, named))
        lists = [[part.clone()] for part in parts]
        comm.all_reduce_coalesced(lists, algorithm=named)
        assert_all_ranks([mine[0] for mine in lists], wanted, (made, named))
        used = {"auto": "fused", None: made.get("algorithm")}.get(named, named)
        assert comm.stats()[used]["calls"] == 4


@pytest.mark.parametrize("is_bound", [False, True])
def test_timed_out_call_increments_version(is_bound):
    versions = []

    def call(rank):
        tensor, comm = torch.ones(3), pair.comms[rank]
        reduce = comm.bind(tensor) if is_bound else lambda: comm.all_reduce(tensor)
        deadline = time.monotonic() + 20
        while rank == 1 and len(versions) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2 if rank == 0 else 0):
            with pytest.raises(pr.CollectiveTimeout):
                reduce()
            versions.append(tensor._version)  # the second call raises at once

    with RankPair(timeout=0.5) as pair:
        pair.on_ranks(call)
    assert versions == [1, 1]


def test_ranks_may_mix_layouts_not_shapes():
    with RankPair() as pair:
        tensors = [torch.arange(6.0), torch.ones(6, 2)[:, 0]]
        pair.all_reduce(tensors, "mean")
        assert all(t.tolist() == [0.5, 1, 1.5, 2, 2.5, 3] for t in tensors)
        with pytest.raises(pr.ArgumentError, match="ranks call different things"):
            pair.all_reduce([torch.ones(6), torch.ones(2, 3)])


def test_two_threads_may_share_communicator():
    def call(rank, _):
        for _ in range(200):
            pair.comms[rank].all_reduce(tensor := torch.ones(8))
            assert tensor[7] == 2

    def reduce(rank):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(partial(call, rank), range(2)))

    with RankPair() as pair:
        pair.on_ranks(reduce)
