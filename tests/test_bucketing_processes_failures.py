"""Does every process learn that one rank changed gradients under way, or failed?"""

from __future__ import annotations

import pytest
import torch
from bucketing_nets import (
    EACH,
    Net,
    armed,
    error_of,
    step_of,
    summed,
    vectors,
)
from ranks import Crew

import pyringar as pr

K = 2


@pytest.fixture(scope="module")
def pool():
    pool = Crew(K)
    yield pool
    pool.close()


def change_as_rank(rank, world_size, store, how, options):
    """Rank 1 changes what has left, or is about to; both clear, and repeat the step."""
    net, x = Net(rank), vectors(1, world_size=K)[rank]
    with (
        pr.ProcessCommunicator(store, rank, world_size, order="rank") as comm,
        pr.GradientBucketer([net], comm=comm, **options) as bucketer,
    ):
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
def test_gradients_that_one_rank_changed_are_an_error_on_all(pool, how, options):
    expected = summed([Net(rank) for rank in range(K)], vectors(1, world_size=K))
    for (kind, text), grads in pool.check(change_as_rank, how, options):
        assert kind is pr.RingarError
        assert "changed or cleared after they had left" in text
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def fail_as_rank(rank, world_size, store, how):
    """Rank 1 fails when all buckets but the last have left."""
    net, xs = Net(rank), vectors(1, world_size=K)
    with (
        pr.ProcessCommunicator(store, rank, world_size, order="rank") as comm,
        pr.GradientBucketer([net], comm=comm, **EACH) as bucketer,
    ):
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
def test_a_pass_that_fails_before_the_last_bucket_is_told_to_all_and_all_can_go_on(pool, how):
    expected = summed([Net(rank) for rank in range(K)], vectors(1, world_size=K))
    for grads in pool.check(fail_as_rank, how):
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
