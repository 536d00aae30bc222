"""Are gradients reduced while backward runs, with the same bits, in all that training does?"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyringar as pr
from pyringar.engine import load

K = 3


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5), nn.Tanh()
    )


def replicas_of(net: nn.Module, world_size: int = K) -> list[nn.Module]:
    return [copy.deepcopy(net) for _ in range(world_size)]


def inputs(world_size: int = K, seed: int = 1, width: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, width, generator=generator) for _ in range(world_size)]


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()


def gradients(nets: list[nn.Module]) -> list[list[Tensor | None]]:
    return [[None if p.grad is None else p.grad.clone() for p in net.parameters()] for net in nets]


def summed(nets: list[nn.Module], xs: list[Tensor], loss: Callable = loss_of) -> list[Tensor]:
    """The oracle: backward without hooks on copies, then rank order, tensor by tensor."""
    copies = [copy.deepcopy(net) for net in nets]
    for net, x in zip(copies, xs, strict=True):
        net.zero_grad()
        loss(net, x).backward()
    sums = []
    for column in zip(*(net.parameters() for net in copies), strict=True):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in column]
        total = grads[0].clone()
        for grad in grads[1:]:
            total += grad
        sums.append(total)
    return sums


def assert_reduced(nets: list[nn.Module], expected: list[Tensor]) -> None:
    for rank, net in enumerate(nets):
        for i, (param, want) in enumerate(zip(net.parameters(), expected, strict=True)):
            assert param.grad is not None, (rank, i)
            assert torch.equal(param.grad, want), (rank, i)


def step(nets: list[nn.Module], xs: list[Tensor], loss: Callable = loss_of) -> None:
    for net, x in zip(nets, xs, strict=True):
        loss(net, x).backward()


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
    class Backwards(nn.Module):
        """Uses its layers in another order than they were registered."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    nets = replicas_of(Backwards())
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as bucketer:
        assert bucketer.buckets == [[3], [2], [1], [0]]
        step(nets, inputs(width=8))
        bucketer.wait()
        # `last` is 0 and 1: its bias is ready first.
        assert [b[0] for b in bucketer.buckets][:2] in ([1, 0], [0, 1])


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cap", [1e-6, 2e-3, 10])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_bits_do_not_depend_on_buckets_or_overlap(world_size, cap, overlap):
    nets = replicas_of(make_net(), world_size)
    xs = inputs(world_size)
    with pr.GradientBucketer(
        nets, bucket_cap_mb=cap, first_bucket_mb=cap / 2, overlap=overlap
    ) as bucketer:
        for _ in range(3):
            expected = summed(nets, xs)
            for net in nets:
                net.zero_grad()
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


@pytest.mark.parametrize("order", ["one by one", "together", "from threads"])
def test_backward_of_all_replicas(order):
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3, first_bucket_mb=1e-3) as bucketer:
        for _ in range(5):
            for net in nets:
                net.zero_grad()
            losses = [loss_of(net, x) for net, x in zip(nets, xs, strict=True)]
            if order == "together":
                torch.autograd.backward(losses)
            elif order == "one by one":
                for loss in losses:
                    loss.backward()
            else:
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
    nets, xs = replicas_of(make_net(), 2), inputs(2)
    expected = replicas_of(make_net(), 2)
    step(expected, xs)
    with pr.Communicator(["cpu"] * 2, algorithm=algorithm) as comm:
        comm.all_reduce_coalesced([[p.grad for p in net.parameters()] for net in expected], op)
        with pr.GradientBucketer(nets, comm=comm, op=op, bucket_cap_mb=1e-3) as bucketer:
            step(nets, xs)
            bucketer.wait()
        comm.all_reduce([torch.ones(1), torch.ones(1)])  # still open: it is the caller's
    assert_reduced(nets, [p.grad for p in expected[0].parameters()])


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
        step(nets, inputs())
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
    nets, first, second = replicas_of(make_net()), inputs(seed=1), inputs(seed=2)
    local = replicas_of(make_net())
    step(local, first)
    step(local, second)
    with pr.Communicator(["cpu"] * K) as comm:
        comm.all_reduce_coalesced([[p.grad for p in net.parameters()] for net in local], op)
    with pr.GradientBucketer(nets, op=op, bucket_cap_mb=1e-3) as bucketer:
        with bucketer.no_sync():
            step(nets, first)
        step(nets, second)
        bucketer.wait()
    assert_reduced(nets, [p.grad for p in local[0].parameters()])


def test_a_wait_without_backward_changes_nothing():
    nets = replicas_of(make_net())
    with pr.GradientBucketer(nets) as bucketer:
        bucketer.wait()
        with bucketer.no_sync():
            step(nets, inputs())
        before = gradients(nets)
        bucketer.wait()
        assert all(
            torch.equal(a, b)
            for x, y in zip(before, gradients(nets), strict=True)
            for a, b in zip(x, y, strict=True)
        )
        step(nets, inputs())
        bucketer.wait()
        after = gradients(nets)
        bucketer.wait()
        assert all(
            torch.equal(a, b)
            for x, y in zip(after, gradients(nets), strict=True)
            for a, b in zip(x, y, strict=True)
        )


class Branches(nn.Module):
    """Two layers, of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return sum(getattr(self, name)(x).square().sum() for name in used)


@pytest.mark.parametrize("used", [("a", "a", "a"), ("ab", "a", "b"), ("abc", "ab", "a")])
def test_unused_parameters(used):
    torch.manual_seed(0)
    nets, xs = replicas_of(Branches()), inputs()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-4, first_bucket_mb=1e-4) as bucketer:
        for _ in range(2):
            copies = replicas_of(nets[0])
            for net in (*nets, *copies):
                net.zero_grad()
            for group in (nets, copies):
                for net, x, names in zip(group, xs, used, strict=True):
                    net(x, names).backward()
            bucketer.wait()
            for i, column in enumerate(zip(*(net.parameters() for net in copies), strict=True)):
                grads = [p.grad for p in column]
                mine = [list(net.parameters())[i].grad for net in nets]
                if all(g is None for g in grads):
                    assert mine == [None] * K
                    continue
                total = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in column)
                assert all(torch.equal(g, total) for g in mine)


def test_shared_parameters():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two = nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    nets, xs = replicas_of(Tied()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as bucketer:
        step(nets, xs)
        bucketer.wait()
    assert_reduced(nets, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        for _ in range(3):
            for net in nets:
                net.zero_grad(set_to_none=set_to_none)
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_frozen_parameters_are_left_alone():
    nets = replicas_of(make_net())
    for net in nets:
        net[2].requires_grad_(False)
    with pr.GradientBucketer(nets) as bucketer:
        step(nets, inputs())
        bucketer.wait()
    assert all(p.grad is None for net in nets for p in net[2].parameters())
    assert torch.equal(nets[0][0].weight.grad, nets[2][0].weight.grad)


@pytest.mark.parametrize("how", ["assign", "double"])
def test_parameters_that_are_replaced_or_changed_in_place(how):
    nets, xs = replicas_of(make_net()), inputs()
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        step(nets, xs)
        bucketer.wait()
        other = make_net(seed=9).state_dict()
        for net in nets:
            net.zero_grad()
            net.load_state_dict({n: t.clone() for n, t in other.items()}, assign=how == "assign")
        for _ in range(2):  # found in the first step, overlapped in the second
            for net in nets:
                net.zero_grad()
            expected = summed(nets, xs)
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_parameters_that_changed_their_shape_are_refused():
    nets, xs = replicas_of(make_net()), inputs()
    with pr.GradientBucketer(nets) as bucketer:
        for net in nets:
            net[4] = nn.Linear(40, 7)
        step(nets, xs)
        with pytest.raises(pr.ArgumentError, match="make a new GradientBucketer"):
            bucketer.wait()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_net()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=reentrant)

    nets = replicas_of(Checkpointed())
    xs = [x.requires_grad_() for x in inputs()]
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3, first_bucket_mb=1e-3) as bucketer:
        for _ in range(2):
            for net in nets:
                net.zero_grad()
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


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
            for net in nets:
                net.zero_grad()
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


class Explode(torch.autograd.Function):
    """Fails in backward while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Explode.armed:
            raise ValueError("planted")
        return grad


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("victim", [0, K - 1])
def test_after_an_exception_inside_backward_the_next_step_is_right(victim, waits):
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(Explode.apply(self.one(x)))

    nets, xs = replicas_of(Fragile()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as bucketer:
        for _ in range(2):
            for rank, (net, x) in enumerate(zip(nets, xs, strict=True)):
                loss = loss_of(net, x)
                Explode.armed = rank == victim
                with pytest.raises(ValueError, match="planted") if Explode.armed else nullcontext():
                    loss.backward()
                if Explode.armed:
                    break
            Explode.armed = False
            if waits:
                with pytest.raises(pr.RingarError, match="backward pass failed"):
                    bucketer.wait()
            for net in nets:
                net.zero_grad()
            step(nets, xs)
            bucketer.wait()
            assert_reduced(nets, expected)


def test_a_step_that_nobody_waited_for_is_forgotten_with_its_gradients():
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        step(nets, inputs(seed=5))
        for net in nets:
            net.zero_grad()
        step(nets, xs)
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
    nets = replicas_of(make_net().to(torch.bfloat16))
    xs = [x.to(torch.bfloat16) for x in inputs()]
    copies = replicas_of(nets[0])
    step(copies, xs)
    with pr.Communicator(["cpu"] * K) as comm:
        comm.all_reduce_coalesced([[p.grad for p in net.parameters()] for net in copies])
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        step(nets, xs)
        bucketer.wait()
    assert_reduced(nets, [p.grad for p in copies[0].parameters()])


def test_mixed_dtypes_share_no_bucket():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).double())

    nets, xs = replicas_of(Mixed()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets) as bucketer:
        assert [sorted(b) for b in bucketer.buckets] == [[2, 3], [0, 1]]
        step(nets, xs)
        bucketer.wait()
    assert_reduced(nets, expected)


def test_channels_last_gradients():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    nets = replicas_of(net.to(memory_format=torch.channels_last))
    xs = [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last) for _ in nets]
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        step(nets, xs)
        bucketer.wait()
    assert_reduced(nets, expected)


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

    with pr.GradientBucketer(nets, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as bucketer:
        with pytest.raises(pr.UnsupportedError, match="sparse"):
            looked_up()
        for net in nets:
            net.zero_grad()
        expected = summed(nets, xs)
        step(nets, xs)
        bucketer.wait()
        for net in nets:
            assert torch.equal(net.layer.weight.grad, expected[1])


def test_a_hook_that_drops_gradients_is_named():
    nets, xs = replicas_of(make_net()), inputs()
    for param in nets[0].parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with (
        pr.GradientBucketer(nets, bucket_cap_mb=1e-6, first_bucket_mb=1e-6),
        pytest.raises(pr.RingarError, match="was gone before it was reduced"),
    ):
        step(nets, xs)


@pytest.mark.slow
def test_a_compiled_module():
    nets, xs = replicas_of(make_net()), inputs()
    expected = summed(nets, xs)
    with pr.GradientBucketer(nets, bucket_cap_mb=1e-3) as bucketer:
        compiled = [torch.compile(net) for net in nets]
        for _ in range(2):
            for net in nets:
                net.zero_grad()
            step(compiled, xs)
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
    step(nets, xs)
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
    for net in nets:
        net.zero_grad()
    step(nets, xs)
    assert not torch.equal(nets[0][0].weight.grad, nets[1][0].weight.grad)


def test_garbage_in_the_middle_of_a_step_leaves_nothing_under_way():
    nets, xs = replicas_of(make_net()), inputs()
    bucketer = pr.GradientBucketer(nets, bucket_cap_mb=1e-6)
    step(nets, xs)
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
