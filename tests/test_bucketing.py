"""GradientBucketer with all ranks in one process: buckets, bits, statistics, hooks."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from bucketing_nets import (
    EACH,
    EARLY,
    NETS,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    clear,
    hooks_on,
    inputs,
    loss_of,
    make_net,
    nets_of,
    summed,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pyringar as pr
from pyringar.engine import load

K = 3


def replicas_of(net: nn.Module, world_size: int = K) -> list[nn.Module]:
    return [copy.deepcopy(net) for _ in range(world_size)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=30),
    st.randoms(use_true_random=False),
    st.integers(1, 60),
    st.integers(1, 120),
)
def test_bucket_plan_respects_caps_and_dtypes(items, random, first_cap, cap):
    order = list(range(len(items)))
    random.shuffle(order)
    plan = load.engine().plan_buckets(items, order, first_cap, cap)
    assert sorted(itertools.chain(*plan)) == list(range(len(items)))
    num_full, kinds_not_full = 0, []
    for bucket in plan:
        (kind,) = {items[i][1] for i in bucket}
        assert sorted(bucket, key=order.index) == bucket
        size, limit = sum(items[i][0] for i in bucket), cap if num_full else first_cap
        if size < limit:
            kinds_not_full.append(kind)
            continue
        assert not kinds_not_full, "a full bucket comes after a bucket that is not full"
        assert size - items[bucket[-1]][0] < max(first_cap, cap)
        num_full += 1
    assert len(kinds_not_full) == len(set(kinds_not_full))


def test_buckets_hold_one_dtype():
    params = [torch.zeros(n, requires_grad=True) for n in (4, 300_000, 300_000)]
    params.insert(1, torch.zeros(4, dtype=torch.float64, requires_grad=True))
    with pr.GradientBucketer([params]) as bucketer:
        assert [sorted(b) for b in bucketer.buckets] == [[3], [0, 2], [1]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [1e-6, 2e-3, 10])
@pytest.mark.parametrize(
    ("net", "world_size"),
    [("plain", 1), ("plain", 2), ("plain", 4), ("plain", 5), *((net, K) for net in NETS)],
)
def test_bucket_cap_does_not_change_bits(net, world_size, cap, overlap):
    nets = [NETS[net]() for _ in range(world_size)]
    xs = inputs(world_size)
    options = {"bucket_cap_mb": cap, "overlap": overlap}
    with pr.GradientBucketer(nets, **options) as bucketer:
        for set_to_none in (True, False, False):
            assert_next_step_is_right(nets, xs, bucketer, set_to_none=set_to_none)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.14 has grad_dtype")
@pytest.mark.parametrize("unused", [None, 0, 1])
def test_reduction_keeps_grad_dtype(unused):
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    for param in params:
        param.grad_dtype = torch.float32
    with pr.GradientBucketer([[param] for param in params]) as bucketer:
        for rank, param in enumerate(params):
            if rank != unused:
                param.sum().backward()
        bucketer.wait()
    for param in params:
        assert torch.equal(param.grad, torch.full((3,), 2.0 if unused is None else 1.0))


@pytest.mark.parametrize(("overlap", "is_early"), [(None, False), (False, False), (True, True)])
def test_stats_times_are_ordered(overlap, is_early):
    nets = replicas_of(make_net())
    with pr.GradientBucketer(nets, **EACH, overlap=overlap) as bucketer:
        assert bucketer.stats().buckets == ()
        backward_one_by_one(nets, inputs())
        assert ("6 of 6 buckets launched" in repr(bucketer)) == is_early
        bucketer.wait()
        stats = bucketer.stats()
    sizes = [4 * param.numel() for param in nets[0].parameters()]
    found = sorted((bucket.params, bucket.nbytes) for bucket in stats.buckets)
    assert found == [((i,), nbytes) for i, nbytes in enumerate(sizes)]
    for bucket in stats.buckets:
        assert 0 <= bucket.ready_s <= bucket.launched_s <= bucket.done_s
        assert (bucket.launched_s <= stats.backward_s) == is_early
    assert stats.exposed_s > 0
    assert stats.communication_s > 0


class IgnoresScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("options", [{}, EARLY])
@pytest.mark.parametrize("users", [(), (1,), (0, 1, 2)])
def test_missing_gradient_counts_as_unused(users, options):
    """Torch also calls the hooks of a parameter whose gradient is None."""
    params = [[nn.Parameter(torch.full((5,), 2.0)) for _ in "ab"] for _ in range(K)]
    with pr.GradientBucketer(params, **options) as bucketer:
        for step in range(3):
            for used, scale in params if step < 2 else ():
                used.grad = scale.grad = None
            for rank, (used, scale) in enumerate(params):
                out = used * scale if rank in users else IgnoresScale.apply(used, scale)
                out.sum().backward()
            bucketer.wait()
            times = max(1, step)  # the third step accumulates
            for used, scale in params:
                assert torch.equal(used.grad, torch.full((5,), times * (K + len(users))))
                assert (scale.grad is None) == (not users)
                assert scale.grad is None or scale.grad.eq(2 * times * len(users)).all()


REPLACES = {
    "assign": lambda net: net.load_state_dict(make_net(seed=9).state_dict(), assign=True),
    "shape": lambda net: setattr(net, "4", nn.Linear(40, 7)),
    "thawed": lambda net: net[2].requires_grad_(True),
    "frozen": lambda net: net[4].requires_grad_(False),
}


@pytest.mark.parametrize("how", REPLACES)
def test_replaced_parameters_raise(how):
    nets = replicas_of(NETS["frozen"]())
    with pr.GradientBucketer(nets) as bucketer:
        for net in nets:
            REPLACES[how](net)
        backward_one_by_one(nets, inputs())
        with pytest.raises(pr.ArgumentError, match=r"of replicas\[0\].*make a new Gradient"):
            bucketer.wait()


@pytest.mark.parametrize("compiler", ["identity", pytest.param("eager", marks=pytest.mark.slow)])
def test_wait_reduces_compiled_autograd_gradients(compiler):
    import torch._dynamo.compiled_autograd as compiled_autograd

    def run(gm):
        return gm if compiler == "identity" else torch.compile(gm, backend="eager")

    nets, xs = replicas_of(nn.Linear(6, 3), 2), inputs(2)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        for _ in range(2):
            clear(nets)
            with compiled_autograd._enable(run):
                backward_one_by_one(nets, xs)
            bucketer.wait()
            for net in nets:
                for param, want in zip(net.parameters(), expected, strict=True):
                    torch.testing.assert_close(param.grad, want)


def test_earlier_hooks_may_change_gradients():
    nets, xs = nets_of(), vectors(1)
    expected = [grad * 2 for grad in summed(nets, xs)]
    for param in itertools.chain(*(net.parameters() for net in nets)):
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        backward_one_by_one(nets, xs)
        bucketer.wait()
        assert_reduced(nets, expected)


def warm_bucketer(nets, **options) -> pr.GradientBucketer:
    bucketer = pr.GradientBucketer(nets, **options)
    for seed in range(4):
        assert_next_step_is_right(nets, inputs(seed=seed), bucketer, set_to_none=seed == 0)
    return bucketer


MOVES = {
    "new": lambda param: setattr(param, "grad", param.grad.clone()),
    "data": lambda param: setattr(param.grad, "data", param.grad.clone()),
    "set_": lambda param: param.grad.set_(param.grad.clone()),
    "strides": lambda param: setattr(param.grad, "data", param.detach().t().clone().t()),
    "negated": lambda param: setattr(param, "grad", torch._neg_view(param.grad)),
    "alias": lambda param: setattr(param, "grad", param.grad.detach()),
    "none": lambda param: setattr(param, "grad", None),
}


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("how", MOVES)
def test_moved_gradient_is_reduced(how, which):
    nets = replicas_of(make_net())
    with warm_bucketer(nets) as bucketer:
        with torch.no_grad():
            MOVES[how](list(nets[1].parameters())[which])
        for seed in range(4):
            xs = inputs(seed=seed)
            assert_next_step_is_right(nets, xs, bucketer, set_to_none=False)


def test_cleared_gradients_free_memory():
    """Memory is freed without the garbage collector, even if other gradients stay referenced."""
    nets = replicas_of(make_net())
    gc.collect()
    gc.disable()
    try:
        with warm_bucketer(nets) as bucketer:
            kept = [param.grad for param in nets[0].parameters()]
            grads = [param.grad for net in nets[1:] for param in net.parameters()]
            watches = [weakref.ref(tensor) for tensor in grads]
            watches += [weakref.ref(tensor.untyped_storage()) for tensor in grads]
            del grads
            clear(nets)
            assert all(watch() is None for watch in watches)
            assert_next_step_is_right(nets, inputs(seed=7), bucketer)
            assert len(kept) == 6
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("overlap", [True, False])
def test_create_graph_gradients_are_reduced(overlap):
    nets, xs = replicas_of(make_net()), inputs()
    with warm_bucketer(nets, overlap=overlap) as bucketer:
        wanted = summed(nets, xs)
        for create_graph in (True, False, True, True, False):
            clear(nets, set_to_none=False)
            for net, x in zip(nets, xs, strict=True):
                loss_of(net, x).backward(create_graph=create_graph)
            bucketer.wait()
            assert_reduced(nets, wanted)
            assert nets[0][0].bias.grad.requires_grad or not create_graph
        clear(nets)


@pytest.mark.parametrize("options", [{}, EARLY])
@pytest.mark.parametrize("how", ["close", "garbage", "garbage in a step"])
def test_closed_bucketer_removes_hooks(how, options):
    nets, xs = replicas_of(make_net()), inputs()
    bucketer = pr.GradientBucketer(nets, **options)
    watch = weakref.ref(bucketer)
    backward_one_by_one(nets, xs)
    if how != "garbage in a step":
        bucketer.wait()
    assert hooks_on(nets) > 0
    if how == "close":
        bucketer.close()
        bucketer.close()
    else:
        del bucketer
        gc.collect()
        assert watch() is None
    assert hooks_on(nets) == 0
    clear(nets)
    backward_one_by_one(nets, xs)
    assert not torch.equal(nets[0][0].weight.grad, nets[1][0].weight.grad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda n: {"replicas": [n[0], nn.Linear(2, 2)]}, r"replicas\[1\] has 2 trained param"),
        (lambda n: {"replicas": [nn.Linear(2, 3), nn.Linear(3, 2)]}, r"0 of replicas\[1\] is \(2"),
        (lambda n: {"replicas": n, "bucket_cap_mb": 0}, "bucket_cap_mb is 0, expected a positive"),
        (
            lambda n: {"replicas": n, "comm": pr.Communicator(["cpu"])},
            "has 3 entries, but comm has 1 of",
        ),
    ],
)
def test_wrong_arguments_raise(arguments, words):
    with pytest.raises(pr.ArgumentError, match=words):
        pr.GradientBucketer(**arguments(replicas_of(make_net())))
