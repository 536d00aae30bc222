"""Are gradients reduced while backward runs, with the same bits, in all that training does?"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from bucketing_nets import (
    EACH,
    NETS,
    Backwards,
    Branches,
    Mixed,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    backward_together,
    clear,
    inputs,
    loss_of,
    make_net,
    summed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pyringar as pr
from pyringar.engine import load

K = 3


def replicas_of(net: nn.Module, world_size: int = K) -> list[nn.Module]:
    return [copy.deepcopy(net) for _ in range(world_size)]


def sums_of(nets: list[nn.Module], op: str = "sum") -> list[Tensor]:
    """The gradients of nets without hooks, reduced by a communicator."""
    with pr.Communicator(["cpu"] * len(nets)) as comm:
        comm.all_reduce_coalesced([[p.grad for p in net.parameters()] for net in nets], op)
    return [p.grad for p in nets[0].parameters()]


# -- the plan --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=30),
    st.randoms(use_true_random=False),
    st.integers(1, 60),
    st.integers(1, 120),
)
def test_a_plan_holds_every_parameter_once_and_keeps_its_caps(items, random, first_cap, cap):
    order = list(range(len(items)))
    random.shuffle(order)
    plan = load.engine().plan_buckets(items, order, first_cap, cap)
    assert sorted(itertools.chain(*plan)) == list(range(len(items)))
    assert all(plan)
    closed, open_kinds = 0, []
    for bucket in plan:
        kinds = {items[i][1] for i in bucket}
        assert len(kinds) == 1
        assert sorted(bucket, key=order.index) == bucket
        size, limit = sum(items[i][0] for i in bucket), first_cap if closed == 0 else cap
        if size < limit:
            open_kinds.append(kinds.pop())
            continue
        assert not open_kinds, "a bucket that is full comes after the rest"
        assert size - items[bucket[-1]][0] < max(first_cap, cap)
        closed += 1
    assert len(open_kinds) == len(set(open_kinds))


def test_a_small_first_bucket_and_a_large_tensor_alone():
    plan = load.engine().plan_buckets([(1, 0), (2, 0), (90, 0), (3, 0)], [3, 2, 1, 0], 3, 50)
    assert plan == [[3], [2], [1, 0]]


def test_the_plan_follows_the_order_in_which_gradients_came():
    nets = replicas_of(Backwards())
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        assert bucketer.buckets == [[3], [2], [1], [0]]
        backward_one_by_one(nets, inputs())
        bucketer.wait()
        # `one` is 0 and 1, and comes last in forward: it is ready first.
        assert [b[0] for b in bucketer.buckets][:2] in ([1, 0], [0, 1])


def test_mixed_dtypes_share_no_bucket():
    with pr.GradientBucketer([Mixed()]) as bucketer:
        assert [sorted(b) for b in bucketer.buckets] == [[2, 3], [0, 1]]


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [1e-6, 2e-3, 10])
@pytest.mark.parametrize(
    ("net", "world_size"), [("plain", 1), ("plain", 2), ("plain", 5), *((net, K) for net in NETS)]
)
def test_bits_do_not_depend_on_buckets_or_overlap(net, world_size, cap, overlap):
    nets = [NETS[net]() for _ in range(world_size)]
    xs = inputs(world_size)
    options = {"bucket_cap_mb": cap, "first_bucket_mb": cap / 2, "overlap": overlap}
    with pr.GradientBucketer(nets, **options) as bucketer:
        for set_to_none in (True, False, False):
            expected = summed(nets, xs)
            assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=set_to_none)


@pytest.mark.parametrize("order", ["together", "from threads"])
def test_backward_of_all_replicas(order):
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3, first_bucket_mb=1e-3) as bucketer:
        for _ in range(5):
            clear(nets)
            if order == "together":
                backward_together(nets, xs)
            else:
                losses = [loss_of(net, x) for net, x in zip(nets, xs, strict=True)]
                threads = [threading.Thread(target=loss.backward) for loss in losses]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            bucketer.wait()
            assert_reduced(nets, expected)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("algorithm", ["fused", "direct", "ring"])
def test_every_engine_and_reduction(algorithm, op):
    nets, local, xs = replicas_of(make_net(), 2), replicas_of(make_net(), 2), inputs(2)
    backward_one_by_one(local, xs)
    with (
        pr.Communicator(["cpu"] * 2, algorithm=algorithm) as comm,
        pr.GradientBucketer(nets, comm=comm, op=op, bucket_cap_mb=1e-3) as bucketer,
    ):
        backward_one_by_one(nets, xs)
        bucketer.wait()
        bucketer.close()
        comm.all_reduce([torch.ones(1), torch.ones(1)])  # still open: it is the caller's
    assert_reduced(nets, sums_of(local, op))


def test_lists_of_parameters():
    params = [
        [torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)] for _ in "ab"
    ]
    with pr.GradientBucketer(params) as bucketer:
        sum((p * (rank + 1)).sum() for rank, ps in enumerate(params) for p in ps).backward()
        bucketer.wait()
    assert all(torch.equal(p.grad, torch.full_like(p, 3)) for ps in params for p in ps)


# -- overlap ---------------------------------------------------------------------------------------


def test_the_first_bucket_leaves_before_half_of_backward_is_over():
    torch.manual_seed(0)
    nets = replicas_of(nn.Sequential(*[nn.Linear(256, 256) for _ in range(24)]), 2)
    xs = [torch.randn(256, 256) for _ in nets]
    shares = []
    with pr.GradientBucketer(nets, bucket_cap_mb=0.5, first_bucket_mb=0.2) as bucketer:
        for _ in range(4):
            losses = [loss_of(net, x) * 1e-9 for net, x in zip(nets, xs, strict=True)]
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            bucketer.wait()
            stats = bucketer.stats()
            assert stats.buckets[0].launched_s is not None
            shares.append(stats.buckets[0].launched_s / stats.backward_s)
    assert min(shares) < 0.5, shares


def test_stats_say_what_happened():
    nets = replicas_of(make_net())
    with pr.GradientBucketer(nets, bucket_cap_mb=2e-3, first_bucket_mb=1e-3) as bucketer:
        assert bucketer.stats().buckets == ()
        backward_one_by_one(nets, inputs())
        bucketer.wait()
        stats = bucketer.stats()
    assert sum(b.nbytes for b in stats.buckets) == sum(
        p.numel() * p.element_size() for p in nets[0].parameters()
    )
    assert sorted(i for b in stats.buckets for i in b.params) == list(range(6))
    for bucket in stats.buckets:
        assert 0 <= bucket.ready_s <= bucket.launched_s <= bucket.done_s
    assert stats.exposed_s >= 0
    assert stats.backward_s > 0
    assert stats.communication_s > 0


# -- what training does ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_accumulation_without_sync(op):
    nets, local = replicas_of(make_net()), replicas_of(make_net())
    for seed in (1, 2):
        backward_one_by_one(local, inputs(seed=seed))
    with pr.GradientBucketer(nets, op=op, bucket_cap_mb=1e-3) as bucketer:
        with bucketer.no_sync():
            backward_one_by_one(nets, inputs(seed=1))
        backward_one_by_one(nets, inputs(seed=2))
        bucketer.wait()
    assert_reduced(nets, sums_of(local, op))


def test_a_wait_without_backward_changes_nothing():
    nets = replicas_of(make_net())

    def assert_wait_changes_nothing() -> None:
        before = [param.grad.clone() for net in nets for param in net.parameters()]
        bucketer.wait()
        after = [param.grad for net in nets for param in net.parameters()]
        assert all(map(torch.equal, after, before))

    with pr.GradientBucketer(nets) as bucketer:
        bucketer.wait()
        with bucketer.no_sync():
            backward_one_by_one(nets, inputs())
        assert_wait_changes_nothing()
        backward_one_by_one(nets, inputs())
        bucketer.wait()
        assert_wait_changes_nothing()


@pytest.mark.parametrize("used", [("a", "a", "a"), ("ab", "a", "b"), ("abc", "ab", "a")])
def test_unused_parameters(used):
    nets, xs = replicas_of(Branches()), inputs()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-4, first_bucket_mb=1e-4) as bucketer:
        for _ in range(2):
            copies = replicas_of(nets[0])
            clear([*nets, *copies])
            for group in (nets, copies):
                for net, x, names in zip(group, xs, used, strict=True):
                    net(x, names).backward()
            bucketer.wait()
            for i, column in enumerate(zip(*(net.parameters() for net in copies), strict=True)):
                mine = [list(net.parameters())[i].grad for net in nets]
                if all(p.grad is None for p in column):
                    assert mine == [None] * K
                    continue
                total = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in column)
                assert all(torch.equal(g, total) for g in mine)


class Ignores(torch.autograd.Function):
    """Has a parameter for an input, and no gradient for it."""

    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("options", [{}, EACH])
@pytest.mark.parametrize("who", [(), (1,), (0, 1, 2)])
def test_parameters_that_backward_comes_to_without_a_gradient(who, options):
    """As if unused; torch calls their hooks all the same."""
    nets, xs = replicas_of(make_net()), inputs()
    copies = replicas_of(nets[0])
    late = [nn.Parameter(torch.ones(5)) for _ in range(K)]
    params = [[*net.parameters(), own] for net, own in zip(nets, late, strict=True)]
    with pr.GradientBucketer(params, **options) as bucketer:
        for _ in range(3):
            clear([*nets, *copies])
            for rank, (net, other, x) in enumerate(zip(nets, copies, xs, strict=True)):
                late[rank].grad = None
                other(x).square().sum().backward()
                out = net(x)
                out = out * late[rank] if rank in who else Ignores.apply(out, late[rank])
                out.square().sum().backward()
            bucketer.wait()
            assert_reduced(nets, sums_of(copies))
            for own in late:
                assert (own.grad is None) == (not who)
                assert own.grad is None or torch.equal(own.grad, late[0].grad)


def test_frozen_parameters_are_left_alone():
    nets = replicas_of(make_net())
    for net in nets:
        net[2].requires_grad_(False)
    with pr.GradientBucketer(nets) as bucketer:
        backward_one_by_one(nets, inputs())
        bucketer.wait()
    assert all(p.grad is None for net in nets for p in net[2].parameters())
    assert torch.equal(nets[0][0].weight.grad, nets[2][0].weight.grad)


@pytest.mark.parametrize("how", ["assign", "double"])
def test_parameters_that_are_replaced_or_changed_in_place(how):
    nets, xs = replicas_of(make_net()), inputs()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        backward_one_by_one(nets, xs)
        bucketer.wait()
        other = make_net(seed=9).state_dict()
        clear(nets)
        for net in nets:
            net.load_state_dict({n: t.clone() for n, t in other.items()}, assign=how == "assign")
        for _ in range(2):  # found in the first step, overlapped in the second
            clear(nets)
            expected = summed(nets, xs)
            backward_one_by_one(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_parameters_that_changed_their_shape_are_refused():
    nets, xs = replicas_of(make_net()), inputs()
    with pr.GradientBucketer(nets) as bucketer:
        for net in nets:
            net[4] = nn.Linear(40, 7)
        backward_one_by_one(nets, xs)
        with pytest.raises(pr.ArgumentError, match="make a new GradientBucketer"):
            bucketer.wait()


def test_a_second_backward_before_wait_is_an_error_and_the_next_step_is_right():
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        losses = [loss_of(net, x) for net, x in zip(nets, xs, strict=True)]
        torch.autograd.backward(losses, retain_graph=True)
        with pytest.raises(pr.RingarError, match=r"parameter \d of rank \d.*call wait\(\)"):
            torch.autograd.backward(losses)
        with pytest.raises(pr.RingarError, match="backward pass failed"):
            bucketer.wait()
        for _ in range(2):
            assert_next_step_is_right(nets, xs, bucketer, expected)


def test_a_step_that_nobody_waited_for_is_forgotten_with_its_gradients():
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        backward_one_by_one(nets, inputs(seed=5))
        clear(nets)
        backward_one_by_one(nets, xs)
        bucketer.wait()
    assert_reduced(nets, expected)


def test_loss_scaling():
    nets, xs = replicas_of(make_net()), inputs()
    plain = summed(nets, xs)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in nets]
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        for scaler, net, x in zip(scalers, nets, xs, strict=True):
            scaler.scale(loss_of(net, x)).backward()
        bucketer.wait()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
    for net in nets:
        for param, want in zip(net.parameters(), plain, strict=True):
            torch.testing.assert_close(param.grad, want)


def test_infinities_reach_every_replica():
    nets, xs = replicas_of(make_net()), inputs()
    with pr.GradientBucketer(nets) as bucketer:
        for rank, (net, x) in enumerate(zip(nets, xs, strict=True)):
            (loss_of(net, x) * (float("inf") if rank == 1 else 1.0)).backward()
        bucketer.wait()
    for net in nets:
        assert not torch.isfinite(net[4].weight.grad).all()


def test_bfloat16_parameters():
    nets, local = (replicas_of(make_net().to(torch.bfloat16)) for _ in range(2))
    backward_one_by_one(local, inputs())
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        backward_one_by_one(nets, inputs())
        bucketer.wait()
    assert_reduced(nets, sums_of(local))


def test_sparse_gradients_are_refused_by_name_and_the_next_step_is_right():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 6, sparse=True)
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, look: bool = False) -> Tensor:
            return self.layer(x + (self.table(torch.zeros(4, dtype=torch.long)) if look else 0))

    nets, xs = replicas_of(Lookup(), 2), inputs(2)

    def looked_up() -> None:
        for net, x in zip(nets, xs, strict=True):
            net(x, look=True).sum().backward()

    with pr.GradientBucketer(nets, **EACH) as bucketer:
        with pytest.raises(pr.UnsupportedError, match="sparse"):
            looked_up()
        clear(nets)
        expected = summed(nets, xs)
        backward_one_by_one(nets, xs)
        bucketer.wait()
        for net in nets:
            assert torch.equal(net.layer.weight.grad, expected[1])


def test_a_hook_that_drops_gradients_is_named():
    nets, xs = replicas_of(make_net()), inputs()
    for param in nets[0].parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with (
        pr.GradientBucketer(nets, **EACH),
        pytest.raises(pr.RingarError, match="was gone before it was reduced"),
    ):
        backward_one_by_one(nets, xs)


@pytest.mark.slow
def test_a_compiled_module():
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        compiled = [torch.compile(net) for net in nets]
        for _ in range(2):
            clear(nets)
            backward_one_by_one(compiled, xs)
            bucketer.wait()
            for net in nets:
                for param, want in zip(net.parameters(), expected, strict=True):
                    torch.testing.assert_close(param.grad, want)
    for column in zip(*(net.parameters() for net in nets), strict=True):
        assert all(torch.equal(column[0].grad, p.grad) for p in column)


# -- life ------------------------------------------------------------------------------------------


def hooks_on(net: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in net.parameters())


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_hooks_go_with_the_bucketer(how):
    nets, xs = replicas_of(make_net()), inputs()
    bucketer = pr.GradientBucketer(nets)
    watch = weakref.ref(bucketer)
    backward_one_by_one(nets, xs)
    bucketer.wait()
    assert hooks_on(nets[0]) == 6
    if how == "close":
        bucketer.close()
        bucketer.close()
    else:
        del bucketer
        gc.collect()
        assert watch() is None
    assert [hooks_on(net) for net in nets] == [0] * K
    clear(nets)
    backward_one_by_one(nets, xs)
    assert not torch.equal(nets[0][0].weight.grad, nets[1][0].weight.grad)


def test_garbage_in_the_middle_of_a_step_leaves_nothing_under_way():
    nets, xs = replicas_of(make_net()), inputs()
    bucketer = pr.GradientBucketer(nets, bucket_cap_mb=1e-6)
    backward_one_by_one(nets, xs)
    del bucketer
    gc.collect()
    assert hooks_on(nets[0]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda n: {"replicas": n[0]}, "replicas is a Sequential, expected a list"),
        (lambda n: {"replicas": []}, "expected a list with one module"),
        (lambda n: {"replicas": [n[0], nn.Linear(2, 2)]}, r"replicas\[1\] has 2 parameters"),
        (
            lambda n: {"replicas": [nn.Linear(2, 3), nn.Linear(3, 2)]},
            r"parameter 0 of replicas\[1\] is \(2, 3\)",
        ),
        (lambda n: {"replicas": n, "bucket_cap_mb": 0}, "bucket_cap_mb is 0, expected a positive"),
        (lambda n: {"replicas": n, "first_bucket_mb": "1"}, "first_bucket_mb is '1'"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(pr.ArgumentError, match=words):
        pr.GradientBucketer(**arguments(replicas_of(make_net())))


def test_a_communicator_of_another_size_is_refused():
    with (
        pr.Communicator(["cpu"] * 2) as comm,
        pytest.raises(pr.ArgumentError, match="comm has 2 ranks for 3 replicas"),
    ):
        pr.GradientBucketer(replicas_of(make_net()), comm=comm)
