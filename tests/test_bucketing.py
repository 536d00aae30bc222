"""Are gradients reduced to the same bits in all that training does?"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from bucketing_nets import (
    EACH,
    EARLY,
    NETS,
    Backwards,
    Branches,
    Mixed,
    assert_next_step_is_right,
    assert_reduced,
    backward_one_by_one,
    backward_together,
    clear,
    hooks_on,
    inputs,
    loss_of,
    make_net,
    nets_of,
    reduced,
    summed,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pyringar as pr
from pyringar.engine import load

K = 3


def replicas_of(net: nn.Module, world_size: int = K) -> list[nn.Module]:
    return [copy.deepcopy(net) for _ in range(world_size)]


def grads_of(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


# -- the plan --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=30),
    st.randoms(use_true_random=False),
    st.integers(1, 60),
    st.integers(1, 120),
)
def test_plan_keeps_caps_and_kinds(items, random, first_cap, cap):
    order = list(range(len(items)))
    random.shuffle(order)
    plan = load.engine().plan_buckets(items, order, first_cap, cap)
    assert sorted(itertools.chain(*plan)) == list(range(len(items)))
    num_full, kinds_of_rest = 0, []
    for bucket in plan:
        (kind,) = {items[i][1] for i in bucket}
        assert sorted(bucket, key=order.index) == bucket
        size, limit = sum(items[i][0] for i in bucket), cap if num_full else first_cap
        if size < limit:
            kinds_of_rest.append(kind)
            continue
        assert not kinds_of_rest, "a full bucket comes after the rest"
        assert size - items[bucket[-1]][0] < max(first_cap, cap)
        num_full += 1
    assert len(kinds_of_rest) == len(set(kinds_of_rest))


def test_plan_has_small_first_bucket():
    plan = load.engine().plan_buckets([(1, 0), (2, 0), (90, 0), (3, 0)], [3, 2, 1, 0], 3, 50)
    assert plan == [[3], [2], [1, 0]]


def test_plan_follows_order_of_gradients():
    nets = replicas_of(Backwards())
    with pr.GradientBucketer(nets, **EACH) as bucketer:
        assert bucketer.buckets == [[3], [2], [1], [0]]
        backward_one_by_one(nets, inputs())
        bucketer.wait()
        # `one` is 0 and 1, and comes last in forward: it is ready first.
        assert [b[0] for b in bucketer.buckets][:2] in ([1, 0], [0, 1])


def test_bucket_has_one_dtype():
    with pr.GradientBucketer([Mixed()]) as bucketer:
        assert [sorted(b) for b in bucketer.buckets] == [[2, 3], [0, 1]]


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [1e-6, 2e-3, 10])
@pytest.mark.parametrize(
    ("net", "world_size"),
    [("plain", 1), ("plain", 2), ("plain", 4), ("plain", 5), *((net, K) for net in NETS)],
)
def test_bits_do_not_depend_on_buckets(net, world_size, cap, overlap):
    nets = [NETS[net]() for _ in range(world_size)]
    xs = inputs(world_size)
    options = {"bucket_cap_mb": cap, "first_bucket_mb": cap / 2, "overlap": overlap}
    with pr.GradientBucketer(nets, **options) as bucketer:
        for set_to_none in (True, False, False):
            expected = summed(nets, xs)
            assert_next_step_is_right(nets, xs, bucketer, expected, set_to_none=set_to_none)


@pytest.mark.parametrize("order", ["reversed", "together", "from threads"])
def test_order_of_backward_does_not_matter(order):
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    options = {"bucket_cap_mb": 1e-3, "first_bucket_mb": 1e-3, "overlap": True}
    with pr.GradientBucketer(nets, **options) as bucketer:
        for _ in range(5):
            clear(nets)
            if order == "reversed":
                backward_one_by_one(nets[::-1], xs[::-1])
            elif order == "together":
                backward_together(nets, xs)
            else:
                run_threads([loss_of(net, x).backward for net, x in zip(nets, xs, strict=True)])
            bucketer.wait()
            assert_reduced(nets, expected)


def run_threads(calls) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("algorithm", ["fused", "direct", "ring"])
def test_every_algorithm_and_op(algorithm, op):
    nets, xs = replicas_of(make_net(), 2), inputs(2)
    expected = summed(nets, xs, op)
    with (
        pr.Communicator(["cpu"] * 2, algorithm=algorithm) as comm,
        pr.GradientBucketer(nets, comm=comm, op=op, bucket_cap_mb=1e-3) as bucketer,
    ):
        backward_one_by_one(nets, xs)
        bucketer.wait()
        bucketer.close()
        comm.all_reduce([torch.ones(1), torch.ones(1)])  # still open: the caller made it
    assert_reduced(nets, expected)


def test_lists_of_parameters():
    params = [
        [torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)] for _ in "ab"
    ]
    with pr.GradientBucketer(params) as bucketer:
        sum((p * (rank + 1)).sum() for rank, ps in enumerate(params) for p in ps).backward()
        bucketer.wait()
    assert all(torch.equal(p.grad, torch.full_like(p, 3)) for ps in params for p in ps)


# -- overlap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "is_early"), [(None, False), (False, False), (True, True)])
def test_cpu_lists_overlap_on_request(overlap, is_early):
    nets = replicas_of(make_net(), 2)
    with pr.GradientBucketer(nets, **EACH, overlap=overlap) as bucketer:
        backward_one_by_one(nets, inputs(2))
        assert ("6 of 6 buckets launched" in repr(bucketer)) == is_early
        bucketer.wait()


@pytest.mark.parametrize("overlap", [True, False])
def test_stats_of_a_step(overlap):
    nets = replicas_of(make_net())
    options = {"bucket_cap_mb": 2e-3, "first_bucket_mb": 1e-3, "overlap": overlap}
    with pr.GradientBucketer(nets, **options) as bucketer:
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


@pytest.mark.parametrize("options", [{}, EARLY])
@pytest.mark.parametrize("used", [("a", "a", "a"), ("ab", "a", "b"), ("abc", "ab", "a")])
def test_unused_parameters_count_as_zeros(used, options):
    nets, xs = replicas_of(Branches()), inputs()
    with pr.GradientBucketer(nets, **options) as bucketer:
        for _ in range(2):
            copies = replicas_of(nets[0])
            clear([*nets, *copies])
            for group in (nets, copies):
                for net, x, names in zip(group, xs, used, strict=True):
                    net(x, names).backward()
            bucketer.wait()
            assert_reduced(nets, reduced([grads_of(net) for net in copies]))


class Ignores(torch.autograd.Function):
    """Takes a parameter, and has no gradient for it."""

    @staticmethod
    def forward(ctx, x, _):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("options", [{}, EARLY])
@pytest.mark.parametrize("users", [(), (1,), (0, 1, 2)])
def test_missing_gradient_counts_as_unused(users, options):
    """torch calls the hooks of a parameter for which a pass has no gradient."""
    nets, xs = replicas_of(make_net()), inputs()
    scales = [nn.Parameter(torch.ones(5)) for _ in range(K)]
    params = [[*net.parameters(), own] for net, own in zip(nets, scales, strict=True)]
    with pr.GradientBucketer(params, **options) as bucketer:
        for clears in (True, True, False):
            copies = replicas_of(nets[0])
            for param in itertools.chain(*params) if clears else ():
                param.grad = None
            for net, before in zip(copies, nets if not clears else (), strict=False):
                for p, q in zip(net.parameters(), before.parameters(), strict=True):
                    p.grad = q.grad.clone() if net is copies[0] else None
            for rank, (net, other, x) in enumerate(zip(nets, copies, xs, strict=True)):
                other(x).square().sum().backward()
                out = net(x)
                out = out * scales[rank] if rank in users else Ignores.apply(out, scales[rank])
                out.square().sum().backward()
            bucketer.wait()
            assert_reduced(nets, reduced([grads_of(net) for net in copies]))
            for own in scales:
                assert (own.grad is None) == (not users)
                assert own.grad is None or torch.equal(own.grad, scales[0].grad)


@pytest.mark.parametrize("how", ["in place", "assign", "shape", "thawed"])
def test_replaced_parameters_are_refused(how):
    nets, xs = replicas_of(NETS["frozen"]()), inputs()
    with pr.GradientBucketer(nets) as bucketer:
        backward_one_by_one(nets, xs)
        bucketer.wait()
        other = make_net(seed=9).state_dict()
        for net in nets:
            if how in ("in place", "assign"):
                state = {n: t.clone() for n, t in other.items()}
                net.load_state_dict(state, assign=how == "assign")
            elif how == "shape":
                net[4] = nn.Linear(40, 7)
            else:
                net[2].requires_grad_(True)
        if how == "in place":
            assert_next_step_is_right(nets, xs, bucketer, summed(nets, xs))
            return
        clear(nets)
        backward_one_by_one(nets, xs)
        with pytest.raises(pr.ArgumentError, match=r"of replicas\[0\].*make a new Gradient"):
            bucketer.wait()


# -- other ways to run backward --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_that_makes_a_graph():
    nets, xs = nets_of(), vectors(1)
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        for _ in range(2):
            clear(nets)
            for net, x in zip(nets, xs, strict=True):
                net(x).backward(create_graph=True)
            bucketer.wait()
            assert_reduced(nets, expected)
            assert nets[0].late.grad.requires_grad
    clear(nets)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, EARLY])
def test_compiled_module(options):
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **options) as bucketer:
        compiled = [torch.compile(net) for net in nets]
        for step in range(3):
            if step < 2:
                clear(nets)
            backward_one_by_one(compiled, xs)
            bucketer.wait()
            for net in nets:
                for param, want in zip(net.parameters(), expected, strict=True):
                    torch.testing.assert_close(param.grad, want * (1 if step < 2 else 2))
    for column in zip(*(net.parameters() for net in nets), strict=True):
        assert all(torch.equal(column[0].grad, p.grad) for p in column)


@pytest.mark.parametrize("compiler", ["identity", pytest.param("eager", marks=pytest.mark.slow)])
def test_compiled_autograd_reduces_in_wait(compiler):
    import torch._dynamo.compiled_autograd as compiled_autograd

    def run(gm):
        return gm if compiler == "identity" else torch.compile(gm, backend="eager")

    nets, xs = [nn.Linear(6, 3) for _ in range(2)], inputs(2)
    nets[1].load_state_dict(nets[0].state_dict())
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        for step in range(3):
            if step < 2:
                clear(nets)
            with compiled_autograd._enable(run):
                backward_one_by_one(nets, xs)
            bucketer.wait()
            for net in nets:
                for param, want in zip(net.parameters(), expected, strict=True):
                    torch.testing.assert_close(param.grad, want * (1 if step < 2 else 2))


@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_that_change_gradients(is_first):
    """Hooks made before the bucketer's count; a change by a later hook is an error."""
    nets, xs = nets_of(), vectors(1)
    expected = [grad * 2 for grad in summed(nets, xs)]

    def add_hooks() -> None:
        for net in nets:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))

    if is_first:
        add_hooks()
    with pr.GradientBucketer(nets, **EARLY) as bucketer:
        if not is_first:
            add_hooks()
        backward_one_by_one(nets, xs)
        if is_first:
            bucketer.wait()
            assert_reduced(nets, expected)
        else:
            with pytest.raises(pr.RingarError, match="register hooks that change gradients"):
                bucketer.wait()


# -- life ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EARLY])
@pytest.mark.parametrize("how", ["close", "garbage", "garbage in a step"])
def test_hooks_go_with_bucketer(how, options):
    nets, xs = replicas_of(make_net()), inputs()
    bucketer = pr.GradientBucketer(nets, **options)
    watch = weakref.ref(bucketer)
    backward_one_by_one(nets, xs)
    if how != "garbage in a step":
        bucketer.wait()
    assert hooks_on(nets[:1]) == 6  # one per parameter; other ranks have two
    assert hooks_on(nets) == 6 + 2 * 12
    if how == "close":
        bucketer.close()
        bucketer.close()
        with pytest.raises(pr.RingarError, match=r"is closed: close\(\) was called"):
            bucketer.wait()
    else:
        del bucketer
        gc.collect()
        assert watch() is None
    assert hooks_on(nets) == 0
    clear(nets)
    backward_one_by_one(nets, xs)
    assert not torch.equal(nets[0][0].weight.grad, nets[1][0].weight.grad)


def test_failed_constructor_leaves_no_hook():
    leaf = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError):
            pr.GradientBucketer([[leaf, leaf * 2]])
    assert not leaf._post_accumulate_grad_hooks


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
        (lambda n: {"replicas": n, "comm": pr.Communicator(["cpu"])}, "comm has 1 ranks for 3"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(pr.ArgumentError, match=words):
        pr.GradientBucketer(**arguments(replicas_of(make_net())))
