"""Does a bucketer whose ranks are processes give the bits of one that has them all?

And does every rank learn that one rank changed gradients under way, or failed?
"""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from bucketing_nets import (
    EACH,
    NETS,
    Branches,
    Explode,
    Net,
    TwoLayers,
    armed,
    error_of,
    inputs,
    loss_of,
    make_net,
    step_of,
    summed,
    vectors,
)
from cases import mostly_slow
from ranks import Crew, Died
from torch import Tensor, nn

import pyringar as pr


@pytest.fixture(scope="module")
def pools():
    """``pools(k)``: k processes, for all tests that leave them alive."""
    made: dict[int, Crew] = {}

    def get(world_size: int) -> Crew:
        if world_size not in made:
            made[world_size] = Crew(world_size)
        return made[world_size]

    yield get
    for pool in made.values():
        pool.close()


class Fragile(TwoLayers):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.two(Explode.apply(x, "here") if self.where == "middle" else x)
        return Explode.apply(x, "here") if self.where == "end" else x


def frozen() -> nn.Module:
    net = make_net()
    net[2].requires_grad_(False)
    return net


Grads = list[Tensor | None]
Play = Callable[[list[nn.Module], list[int], int, pr.GradientBucketer], list[Grads]]


def grads_of(net: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@contextmanager
def bucketer_of(store, rank, world_size, net, options, **comm_options):
    """One rank's bucketer, and its communicator."""
    with (
        pr.ProcessCommunicator(store, rank, world_size, **comm_options) as comm,
        pr.GradientBucketer([net], comm=comm, **options) as bucketer,
    ):
        yield bucketer


# -- what is played, alike by one process for all ranks and by one for each ------------------------


def plain_steps(nets, ranks, world_size, bucketer):
    for seed in range(3):
        for net, rank in zip(nets, ranks, strict=True):
            net.zero_grad()
            loss_of(net, inputs(world_size, seed)[rank]).backward()
        bucketer.wait()
        yield [grads_of(net) for net in nets]


def accumulation(nets, ranks, world_size, bucketer):
    for _ in range(2):
        for net in nets:
            net.zero_grad()
        with bucketer.no_sync():
            for net, rank in zip(nets, ranks, strict=True):
                loss_of(net, inputs(world_size, 1)[rank]).backward()
        for net, rank in zip(nets, ranks, strict=True):
            loss_of(net, inputs(world_size, 2)[rank]).backward()
        bucketer.wait()
        yield [grads_of(net) for net in nets]


def branches(nets, ranks, world_size, bucketer):
    for used in (("ab", "a", "b"), ("a", "a", "a"), ("abc", "ab", "c"), ("b", "", "b"), ("", "c")):
        for net, rank in zip(nets, ranks, strict=True):
            net.zero_grad()
            names = used[rank % len(used)]
            if names:
                net(inputs(world_size, 3)[rank], names).backward()
        bucketer.wait()
        yield [grads_of(net) for net in nets]


def waits_without_backward(nets, ranks, world_size, bucketer):
    """Nothing to wait for; accumulated only; a rank without a pass; twice the same."""
    bucketer.wait()
    yield [grads_of(net) for net in nets]
    with bucketer.no_sync():
        for net, rank in zip(nets, ranks, strict=True):
            loss_of(net, inputs(world_size, 1)[rank]).backward()
    bucketer.wait()
    yield [grads_of(net) for net in nets]
    for net, rank in zip(nets, ranks, strict=True):
        if rank == world_size - 1:
            loss_of(net, inputs(world_size, 2)[rank]).backward()
    bucketer.wait()
    yield [grads_of(net) for net in nets]
    bucketer.wait()
    yield [grads_of(net) for net in nets]


def replaced_parameters(nets, ranks, world_size, bucketer):
    for assign in (True, False):
        other = make_net(seed=9 + assign).state_dict()
        for net in nets:
            net.load_state_dict({n: t.clone() for n, t in other.items()}, assign=assign)
        yield from plain_steps(nets, ranks, world_size, bucketer)


def keep_zeros(nets, ranks, world_size, bucketer):
    for seed in range(3):
        for net, rank in zip(nets, ranks, strict=True):
            net.zero_grad(set_to_none=False)
            loss_of(net, inputs(world_size, seed)[rank]).backward()
        bucketer.wait()
        yield [grads_of(net) for net in nets]


def scaled(nets, ranks, world_size, bucketer):
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in nets]
    for net, rank, scaler in zip(nets, ranks, scalers, strict=True):
        x = inputs(world_size, 1)[rank]
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).square().sum() * (float("inf") if rank == 1 else 1.0)
        scaler.scale(loss).backward()
    bucketer.wait()
    for scaler, optimizer in zip(scalers, optimizers, strict=True):
        scaler.unscale_(optimizer)
    yield [grads_of(net) for net in nets]


def a_second_backward(nets, ranks, world_size, bucketer):
    losses = [
        net(inputs(world_size, 1)[rank]).square().sum()
        for net, rank in zip(nets, ranks, strict=True)
    ]
    torch.autograd.backward(losses, retain_graph=True)
    with pytest.raises(pr.RingarError, match=r"parameter \d of rank \d.*call wait\(\)"):
        torch.autograd.backward(losses)
    with pytest.raises(pr.RingarError, match="backward pass failed"):
        bucketer.wait()
    yield from plain_steps(nets, ranks, world_size, bucketer)


CASES = {
    **{name: (make, plain_steps) for name, make in NETS.items()},
    "accumulation": (make_net, accumulation),
    "unused": (Branches, branches),
    "without backward": (make_net, waits_without_backward),
    "frozen": (frozen, plain_steps),
    "bfloat16": (lambda: make_net().to(torch.bfloat16), plain_steps),
    "replaced": (make_net, replaced_parameters),
    "kept zeros": (make_net, keep_zeros),
    "scaled": (make_net, scaled),
}
# Without overlap no bucket has left, and both passes add up.
OVERLAPPED = {"a second backward": (make_net, a_second_backward)}


def play_alone(case: str, world_size: int, options: dict) -> list[list[Grads]]:
    """One process with all ranks: the reference. By step, then by rank."""
    make, play = {**CASES, **OVERLAPPED}[case]
    nets = [make() for _ in range(world_size)]
    with pr.GradientBucketer(nets, **options) as bucketer:
        return list(play(nets, list(range(world_size)), world_size, bucketer))


def play_as_rank(rank, world_size, store, case, options):
    make, play = {**CASES, **OVERLAPPED}[case]
    net = make()
    with bucketer_of(store, rank, world_size, net, options, order="rank") as bucketer:
        steps = [step[0] for step in play([net], [rank], world_size, bucketer)]
        return steps, bucketer.buckets


def assert_same(got: list[Grads], wanted: list[Grads]) -> None:
    assert len(got) == len(wanted)
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert (a is None) == (b is None), (step, i)
            if a is not None and b is not None:
                assert a.stride() == b.stride(), (step, i)
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), (step, i)


@pytest.mark.parametrize("world_size", mostly_slow([2, 3], 2))
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_one_process_with_all_ranks(pools, case, world_size):
    for options in (
        {},
        EACH,
        {**EACH, "overlap": False},
        {"bucket_cap_mb": 2e-3, "first_bucket_mb": 1e-3},
    ):
        wanted = play_alone(case, world_size, options)
        answers = pools(world_size).check(play_as_rank, case, options)
        for rank, (got, buckets) in enumerate(answers):
            assert_same(got, [step[rank] for step in wanted])
            assert buckets == answers[0][1]


@pytest.mark.parametrize("op", ["mean", "max"])
def test_other_reductions(pools, op):
    options = {**EACH, "op": op}
    for case in ("unused", "accumulation", "bfloat16"):
        wanted = play_alone(case, 3, options)
        for rank, (got, _) in enumerate(pools(3).check(play_as_rank, case, options)):
            assert_same(got, [step[rank] for step in wanted])


def test_a_second_backward_is_an_error_and_the_next_step_is_right(pools):
    wanted = play_alone("a second backward", 2, EACH)
    answers = pools(2).check(play_as_rank, "a second backward", EACH)
    for rank, (got, _) in enumerate(answers):
        assert_same(got, [step[rank] for step in wanted])


# -- order -----------------------------------------------------------------------------------------


def plan_and_times(rank, world_size, store):
    """Rank 0 uses the layers in one order, the others in another."""
    torch.manual_seed(0)
    net = Branches()
    with bucketer_of(store, rank, world_size, net, EACH) as bucketer:
        for _ in range(2):
            net.zero_grad()
            x = torch.randn(4, 6)
            names = "cab" if rank == 0 else "bca"
            out = x
            for name in names:
                out = torch.tanh(getattr(net, name)(out))
            out.sum().backward()
            bucketer.wait()
        return bucketer.buckets, bucketer.stats()


def test_the_plan_is_rank_0s_and_buckets_leave_in_its_order(pools):
    answers = pools(2).check(plan_and_times)
    plans = [plan for plan, _ in answers]
    assert plans[0] == plans[1]
    # Rank 0 runs c, a, b: in backward b (2 and 3) comes first, then a, then c.
    layers = [bucket[0] // 2 for bucket in plans[0]]
    assert layers == [1, 1, 0, 0, 2, 2]
    for _, stats in answers:
        launched = [bucket.launched_s for bucket in stats.buckets]
        assert launched == sorted(launched)
        assert all(b.ready_s <= b.launched_s <= b.done_s for b in stats.buckets)


def overlap_as_rank(rank, world_size, store):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(24)])
    shares = []
    with (
        pr.ProcessCommunicator(store, rank, world_size) as comm,
        pr.GradientBucketer([net], comm=comm, bucket_cap_mb=0.5, first_bucket_mb=0.2) as bucketer,
    ):
        for _ in range(4):
            (net(torch.randn(256, 256)).square().sum() * 1e-9).backward()
            bucketer.wait()
            stats = bucketer.stats()
            shares.append(stats.buckets[0].launched_s / stats.backward_s)
    return shares


def test_the_first_bucket_leaves_before_half_of_backward_is_over(pools):
    for shares in pools(2).check(overlap_as_rank):
        assert min(shares) < 0.5, shares


# -- what differs, what fails ----------------------------------------------------------------------


def differ_as_rank(rank, world_size, store, what):
    net = make_net()
    options = dict(EACH)
    if what == "number":
        net = net[: 4 - 2 * rank]
    if what == "shape" and rank == 1:
        net[0] = nn.Linear(7, 30)
    if what == "dtype" and rank == 1:
        net[4].double()
    if what == "cap" and rank == 1:
        options["bucket_cap_mb"] = 7
    if what == "op":
        options["op"] = ("sum", "mean")[rank]
    with (
        pr.ProcessCommunicator(store, rank, world_size) as comm,
        pytest.raises(pr.ArgumentError) as caught,
    ):
        pr.GradientBucketer([net], comm=comm, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("number", "differ in its number of parameters: 4 here, 2 there"),
        ("shape", "the shape or dtype of parameter 0 ((30, 6) torch.float32)"),
        ("dtype", "the shape or dtype of parameter 4"),
        ("cap", "its bucket_cap_mb: 1 here, 7000000 there"),
        ("op", "its op: 0 here, 1 there"),
    ],
)
def test_ranks_that_differ_are_named_on_all_ranks(pools, what, words):
    answers = pools(2).check(differ_as_rank, what)
    assert words in answers[0]
    assert all("of the bucketer and rank" in answer for answer in answers)


def refuse_as_rank(rank, world_size, store):
    net = make_net()
    found = []
    with pr.ProcessCommunicator(store, rank, world_size) as comm:
        for replicas, op in (([net, net], "sum"), ([net], "min"), ([net], "prod")):
            with pytest.raises(pr.RingarError) as caught:
                pr.GradientBucketer(replicas, comm=comm, op=op)
            found.append((type(caught.value), str(caught.value)))
        comm.barrier()  # still usable
    return found


def test_what_cannot_be_is_refused(pools):
    for two, *ops in pools(2).check(refuse_as_rank):
        assert two[0] is pr.ArgumentError
        assert "replicas has 2 entries" in two[1]
        for (kind, text), op in zip(ops, ("min", "prod"), strict=True):
            assert kind is pr.UnsupportedError
            assert f"op is '{op}'" in text


def fail_as_rank(rank, world_size, store, how):
    """Rank 1 breaks off the second step; afterwards both make new communicators and go on."""
    net = Fragile("middle")
    xs = [inputs(world_size, seed)[rank] for seed in range(3)]
    with bucketer_of(store, rank, world_size, net, EACH, timeout=20.0, order="rank") as bucketer:
        step_of(net, bucketer, xs[0])
        began, errors = time.monotonic(), []
        if rank == 1:
            net.zero_grad()
            with armed("here"):
                loss_of(net, xs[1]).backward()
            if how == "wait":
                errors.append(error_of(bucketer.wait))
            elif how == "repeat":
                errors.append(error_of(lambda: step_of(net, bucketer, xs[1])))
            else:
                bucketer.close()
        else:
            errors.append(error_of(lambda: step_of(net, bucketer, xs[1])))
        seconds = time.monotonic() - began
        if how != "close":
            errors.append(error_of(lambda: step_of(net, bucketer, xs[2])))
            errors.append(error_of(bucketer.wait))
    with bucketer_of(store, rank, world_size, net, EACH, order="rank") as bucketer:
        step_of(net, bucketer, xs[1])
        return errors, seconds, grads_of(net)


@pytest.mark.parametrize("how", ["wait", "repeat", "close"])
def test_a_step_broken_off_after_buckets_left_is_told_to_all(pools, how):
    (others, others_s, grads), (own, own_s, own_grads) = pools(2).check(fail_as_rank, how)
    assert others[0][0] is pr.PeerLostError
    assert "rank 1" in others[0][1]
    assert "has left the group" in others[0][1]
    assert max(own_s, others_s) < 10, "sooner than the deadline"
    for kind, text in (*others[1:], *own):
        assert issubclass(kind, pr.RingarError)
        words = ("backward pass failed", "cannot be used again", "make a new communicator")
        assert any(word in text for word in words), text
    nets = [Fragile("middle") for _ in range(2)]
    with pr.GradientBucketer(nets) as bucketer:
        for net, x in zip(nets, inputs(2, 1), strict=True):
            loss_of(net, x).backward()
        bucketer.wait()
    assert_same([grads, own_grads], [grads_of(nets[0])] * 2)


def fail_early_as_rank(rank, world_size, store):
    net = Fragile("end")
    with bucketer_of(store, rank, world_size, net, EACH, order="rank") as bucketer:
        for _ in range(2):
            if rank == 1:
                with armed("here"):
                    loss_of(net, inputs(2, 1)[rank]).backward()
            step_of(net, bucketer, inputs(2, 1)[rank])
        return grads_of(net)


def test_a_backward_that_fails_before_buckets_left_can_be_repeated(pools):
    first, second = pools(2).check(fail_early_as_rank)
    assert_same([first], [second])
    assert all(grad is not None for grad in first)


def forget_as_rank(rank, world_size, store):
    net = make_net()
    with bucketer_of(store, rank, world_size, net, EACH, timeout=5.0):
        loss_of(net, inputs(2, 1)[rank]).backward()
        net.zero_grad()
        return error_of(loss_of(net, inputs(2, 2)[rank]).backward)


def test_a_step_that_was_not_waited_for_is_an_error(pools):
    for kind, text in pools(2).check(forget_as_rank):
        assert kind is pr.RingarError
        assert "the step before was not waited for" in text


def die_as_rank(rank, world_size, store, when):
    net = make_net()
    comm = pr.ProcessCommunicator(store, rank, world_size, timeout=20.0)
    bucketer = pr.GradientBucketer([net], comm=comm, **EACH)
    step_of(net, bucketer, inputs(world_size, 1)[rank])
    if rank == 1:
        if when == "inside backward":
            net[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss_of(net, inputs(world_size, 2)[rank]).backward()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = error_of(lambda: step_of(net, bucketer, inputs(world_size, 2)[rank]))
    return error, time.monotonic() - began


@pytest.mark.parametrize("when", ["before backward", "inside backward"])
def test_a_rank_that_dies_is_named(when):
    pool = Crew(3)
    answers = pool.results(die_as_rank, when)
    pool.close()
    assert isinstance(answers[1], Died)
    for (kind, text), seconds in (answers[0], answers[2]):
        assert kind is pr.PeerLostError
        assert "rank 1" in text
        assert seconds < 10


def garbage_as_rank(rank, world_size, store):
    net = make_net()
    with pr.ProcessCommunicator(store, rank, world_size) as comm:
        bucketer = pr.GradientBucketer([net], comm=comm, **EACH)
        step_of(net, bucketer, inputs(world_size, 1)[rank])
        watch = weakref.ref(bucketer)
        del bucketer
        gc.collect()
        hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in net.parameters())
        comm.barrier()  # still open: it is the caller's
        return watch() is None, hooks


def test_hooks_go_with_the_bucketer_and_the_communicator_stays(pools):
    assert pools(2).check(garbage_as_rank) == [(True, 0)] * 2


# -- changed gradients, and passes that fail ------------------------------------------------------


def change_as_rank(rank, world_size, store, how, options):
    """Rank 1 changes what has left, or is about to; both clear, and repeat the step."""
    net, x = Net(rank), vectors(1, world_size=2)[rank]
    with bucketer_of(store, rank, world_size, net, options, order="rank") as bucketer:
        step_of(net, bucketer, x)
        net.zero_grad()
        net(x).backward()
        if rank == 1:
            if how == "replace":
                net.late.grad = net.late.grad.clone()
            else:
                net.zero_grad(set_to_none=how == "None")
        error = error_of(bucketer.wait)
        step_of(net, bucketer, x)
        return error, [param.grad for param in net.parameters()]


@pytest.mark.parametrize(
    ("how", "options"), [("None", EACH), ("None", {}), ("zeros", EACH), ("replace", EACH)]
)
def test_gradients_that_one_rank_changed_are_an_error_on_all(pools, how, options):
    expected = summed([Net(rank) for rank in range(2)], vectors(1, world_size=2))
    for (kind, text), grads in pools(2).check(change_as_rank, how, options):
        assert kind is pr.RingarError
        assert "changed or cleared after they had left" in text
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def fail_late_as_rank(rank, world_size, store, how):
    """Rank 1 fails when all buckets but the last have left."""
    net, xs = Net(rank), vectors(1, world_size=2)
    with bucketer_of(store, rank, world_size, net, EACH, order="rank") as bucketer:
        step_of(net, bucketer, xs[rank])
        net.zero_grad()
        if rank == 1:
            with armed(1):
                net(xs[rank]).backward()
            if how == "wait":
                assert "backward pass failed" in error_of(bucketer.wait)[1]
            net.zero_grad(set_to_none=how == "None")
        else:
            net(xs[rank]).backward()
            assert "a rank broke the step off" in error_of(bucketer.wait)[1]
        step_of(net, bucketer, xs[rank])
        return [param.grad for param in net.parameters()]


@pytest.mark.parametrize("how", ["wait", "None", "zeros"])
def test_a_pass_that_fails_before_the_last_bucket_is_told_to_all_and_all_can_go_on(pools, how):
    expected = summed([Net(rank) for rank in range(2)], vectors(1, world_size=2))
    for grads in pools(2).check(fail_late_as_rank, how):
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
