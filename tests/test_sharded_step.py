"""`ShardedStep`: gradients, buffers and loss are those of one tree over the shards, bit for bit."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from cases import mostly_slow
from oracle import assert_bits
from ranks import Crew
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.distributed.hierarchical import communicator_for
from pyringar.parallel.shards import check_replicas_equal


def tree(parts):
    """T(lo, hi): the oracle, written as the promise is."""
    if len(parts) == 1:
        return parts[0].clone()
    mid = 1
    while 2 * mid < len(parts):
        mid *= 2
    return tree(parts[:mid]) + tree(parts[mid:])


class Net(nn.Module):
    """Batch norm, constants that no sum survives, and a parameter that not every shard uses."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.spare = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        worst = [float("-inf"), torch.finfo(torch.float32).max, 0.1]
        self.register_buffer("mask", torch.tensor(worst))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.to(dtype)
        self.mask = self.mask.float()  # of a dtype of its own

    def forward(self, x, shard):
        self.seen.fill_(True)
        scores = self.body(x) + self.frozen
        return scores * self.spare if shard % 3 == 0 else scores


def make(num_ranks, dtype=torch.float32):
    torch.manual_seed(5)
    return pr.replicate(Net(dtype), ["cpu"] * num_ranks)


def batch(n, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator).to(dtype)
    return x, torch.arange(n) % 3


def losses_of(x, y, num_shards):
    xs, ys = pr.split_batch(x, y, ["cpu"] * num_shards)

    def loss_of(net, shard):
        if len(xs[shard]) < 2:  # of which batch norm cannot learn
            return None
        return F.cross_entropy(net(xs[shard], shard).float(), ys[shard], reduction="sum")

    return loss_of


def expected(net, loss_of, num_shards):
    """Gradients, buffers and loss by definition: a copy of the module for every shard."""
    nets = [copy.deepcopy(net) for _ in range(num_shards)]
    losses = [loss_of(own, shard) for shard, own in enumerate(nets)]
    for loss in losses:
        if loss is not None:
            loss.backward()
    grads = []
    for params in zip(*(own.parameters() for own in nets), strict=True):
        if params[0].requires_grad:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            wide = torch.promote_types(params[0].dtype, torch.float32)
            grads.append(tree([part.to(wide) for part in parts]).to(params[0].dtype))
    buffers = []
    for was, *now in zip(net.buffers(), *(own.buffers() for own in nets), strict=True):
        changed = [not torch.equal(new, was) for new in now]
        if not any(changed):
            buffers.append(was.clone())
            continue
        wide = torch.promote_types(was.dtype, torch.float32)
        wide = wide if was.is_floating_point() else torch.int64
        parts = [
            new.to(wide) if c else torch.zeros_like(new, dtype=wide)
            for new, c in zip(now, changed, strict=True)
        ]
        total = tree(parts)
        mean = total / sum(changed) if was.is_floating_point() else total // sum(changed)
        buffers.append(mean.to(was.dtype))
    none = torch.zeros((), dtype=torch.float64)
    loss = tree([none if x is None else x.detach().double() for x in losses])
    return grads, buffers, loss


def grads_of(net):
    return [param.grad for param in net.parameters() if param.requires_grad]


CASES = [(S, k) for S in range(1, 17) for k in range(1, S + 1)]
FITTING = [(S, k) for S, k in CASES if k == 1 or (S % k == 0 and (S // k).bit_count() == 1)]


@pytest.mark.parametrize(
    ("num_shards", "num_ranks"), mostly_slow(FITTING, *(case for case in FITTING if case[0] <= 8))
)
def test_what_is_left_is_one_tree_over_all_shards(num_shards, num_ranks):
    replicas = make(num_ranks)
    with pr.ShardedStep(replicas, num_shards) as step:
        for n in (5 * num_shards, 3 * num_shards + 1, 2, 1):  # also too few for all shards
            loss_of = losses_of(*batch(n, seed=n), num_shards)
            grads, buffers, loss = expected(replicas[0], loss_of, num_shards)
            assert_bits(step(loss_of), loss)
            for replica in replicas:
                check_replicas_equal([grads_of(replica), grads])
                check_replicas_equal([list(replica.buffers()), buffers])
                assert replica.frozen.grad is None
            for replica in replicas:
                with torch.no_grad():
                    for param in replica.parameters():
                        param -= 0.1 * (0 if param.grad is None else param.grad)
    assert step.num_steps == 4
    assert replicas[-1].body[1].num_batches_tracked == (3 if num_shards == 1 else 2)


@pytest.mark.parametrize(("num_shards", "num_ranks"), [c for c in CASES if c not in FITTING])
def test_ranks_that_have_no_branch_of_the_tree_are_refused(num_shards, num_ranks):
    fitting = [k for S, k in FITTING if num_shards == S]
    words = f"num_shards is {num_shards} on {num_ranks} ranks, .* "
    words += f"fit on {', '.join(map(str, fitting))} ranks"
    with pytest.raises(pr.ArgumentError, match=words):
        pr.ShardedStep(make(num_ranks), num_shards)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_added_in_float32_and_rounded_once(dtype, num_ranks):
    replicas = make(num_ranks, dtype)
    loss_of = losses_of(*batch(37, dtype), 8)
    grads, buffers, loss = expected(replicas[0], loss_of, 8)
    with pr.ShardedStep(replicas, 8) as step:
        assert_bits(step(loss_of), loss)
    for replica in replicas:
        check_replicas_equal([[*grads_of(replica), *replica.buffers()], [*grads, *buffers]])


def test_gradients_that_share_memory_do_not_add_up():
    """Backward leaves what it has for a view in the same memory for both of them."""
    params = [torch.randn(6, requires_grad=True), torch.randn(2, 3, requires_grad=True)]
    factors = [torch.randn(3, 2) for _ in range(4)]

    def loss_of(own, shard):
        return ((own[0].view(3, 2) + own[1].view(3, 2)) * factors[shard]).sum()

    for replicas in ([params], [params, [p.detach().clone().requires_grad_() for p in params]]):
        with pr.ShardedStep(replicas, 4) as step:
            step(loss_of)
        for own in replicas:
            assert_bits(own[0].grad, tree(factors).view(6))
            assert_bits(own[1].grad, tree(factors).view(2, 3))


def test_threads_of_the_caller_do_not_count_and_stay(two_torch_threads):
    net = nn.Conv2d(8, 8, 3)
    x = torch.randn(8, 8, 40, 40)
    seen = []

    def loss_of(net, shard):
        seen.append(torch.get_num_threads())
        return net(x[shard : shard + 1]).square().sum()

    for options in ({}, {"num_threads": 2}):
        for k in (1, 2):
            with pr.ShardedStep(pr.replicate(net, ["cpu"] * k), 8, **options) as step:
                step(loss_of)
            assert torch.get_num_threads() == 2
    assert seen == [1] * 16 + [2] * 16


# -- random numbers --------------------------------------------------------------------------------


def dropped(net, shard):
    return F.dropout(net.weight, 0.5).square().sum()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_shard_draws_numbers_of_its_own(num_ranks):
    torch.manual_seed(0)
    replicas = pr.replicate(nn.Linear(30, 30), ["cpu"] * num_ranks)
    before = torch.get_rng_state()
    found = []
    with pr.ShardedStep(replicas, 8, seed=3) as step:
        for _ in range(2):
            found.append((step(dropped).item(), replicas[-1].weight.grad))
    assert torch.equal(torch.get_rng_state(), before)
    assert found[0][0] != found[1][0]
    with pr.ShardedStep(pr.replicate(replicas[0], ["cpu"]), 8, seed=3) as alone:
        alone.num_steps = 1  # as after a checkpoint
        assert alone(dropped).item() == found[1][0]
        assert_bits(next(alone._replicas[0].parameters()).grad, found[1][1])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_a_seed_they_are_refused(num_ranks):
    replicas = pr.replicate(nn.Linear(3, 3), ["cpu"] * num_ranks)
    with pr.ShardedStep(replicas, 4) as step:
        for _ in range(2):  # the first step is the first that works
            with pytest.raises(
                pr.UnsupportedError, match=r"random numbers were drawn .* give seed"
            ):
                step(dropped)
        step(lambda net, shard: net.weight.sum())


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_shard_that_fails_changes_nothing(num_ranks):
    replicas = make(num_ranks)
    loss_of = losses_of(*batch(32), 4)

    def failing(net, shard):
        loss = loss_of(net, shard)
        if shard == 3:
            raise KeyError("the last one")
        return loss

    before = [[b.clone() for b in replica.buffers()] for replica in replicas]
    wanted = expected(replicas[0], loss_of, 4)[0]
    with pr.ShardedStep(replicas, 4) as step:
        with pytest.raises(KeyError):
            step(failing)
        for replica, buffers in zip(replicas, before, strict=True):
            check_replicas_equal([buffers, list(replica.buffers())])
            assert all(grad is None for grad in grads_of(replica))
        step(loss_of)
    check_replicas_equal([wanted, *(grads_of(replica) for replica in replicas)])


@pytest.mark.parametrize(
    ("replicas", "options", "message"),
    [
        (nn.Linear(1, 1), {}, "replicas is a Linear, expected a list"),
        ([nn.Linear(1, 1), nn.Linear(2, 1)], {}, r"parameter 0 of replicas\[1\] is \(1, 2\)"),
        ([nn.Linear(1, 1)], {"num_shards": 2.0}, "num_shards is 2.0, expected a whole number"),
        ([nn.Linear(1, 1)], {"num_threads": 0}, "num_threads is 0, expected a whole number"),
        ([nn.Linear(1, 1)], {"seed": -1}, "seed is -1, expected a whole number"),
        ([nn.Linear(1, 1)], {"comm": "gloo"}, "comm is a str, expected a Communicator"),
    ],
)
def test_wrong_arguments_are_named(replicas, options, message):
    with pytest.raises(pr.ArgumentError, match=message):
        pr.ShardedStep(replicas, **{"num_shards": 4, **options})


def test_a_communicator_of_other_ranks_is_named():
    with pr.Communicator(["cpu"] * 3) as comm:
        words = "replicas has 2 entries, but comm has 3 of its 3 ranks in this process"
        with pytest.raises(pr.ArgumentError, match=words):
            pr.ShardedStep(make(2), 4, comm=comm)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(torch.ones(2), r"of \(2,\)"), (1.0, "a float"), ([], "a list")],
)
def test_a_loss_that_is_none_is_named(loss, words):
    expectation = pytest.raises(pr.ArgumentError, match=f"loss of shard 0 is {words}, expected")
    with pr.ShardedStep(make(1), 2) as step, expectation:
        step(lambda net, shard: loss)


def test_replicas_that_begin_with_other_numbers_are_named():
    replicas = make(2)
    replicas[1].body[1].running_mean += 1e-3
    with pr.ShardedStep(replicas, 4) as step:
        with pytest.raises(pr.RingarError, match=r"shape \(5,\), on rank 1 differs from rank 0"):
            step(losses_of(*batch(16), 4))
        assert grads_of(replicas[0])[0] is None


# -- ranks in processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


def step_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    torch.set_num_threads(1 + rank % 2)
    (net,) = make(1)
    loss_of = losses_of(*batch(37), 8)
    with communicator_for(store, rank, world_size, timeout=20.0, order="tree") as comm:
        step = pr.ShardedStep([net], 8, comm=comm)
        assert step.shards == [range(2 * rank, 2 * rank + 2)]
        loss = step(loss_of)
        with pytest.raises(pr.ArgumentError, match="replicas has 2 entries, but comm has 1 of its"):
            pr.ShardedStep(make(2), 8, comm=comm)
    return loss, grads_of(net), list(net.buffers())


@pytest.mark.parametrize("machines", ["aaaa", "aabb", "abcd"])
def test_ranks_in_processes_complete_the_tree(pool, machines):
    (net,) = make(1)
    loss_of = losses_of(*batch(37), 8)
    grads, buffers, loss = expected(net, loss_of, 8)
    for found in pool.check(step_as_rank, machines):
        assert_bits(found[0], loss)
        check_replicas_equal([grads, found[1]])
        check_replicas_equal([buffers, found[2]])


def differ_as_rank(rank, world_size, store, options):
    os.environ["PYRINGAR_NODE_ID"] = "a"
    made = pr.ProcessCommunicator(store, rank, world_size, timeout=20.0)
    with made as comm, pytest.raises(pr.ArgumentError) as caught:
        pr.ShardedStep([nn.Linear(2, 2)], **options[rank], comm=comm)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("num_threads", (1, 1, 2, 1), "rank 2 has 8 shards, seed None, 2 torch threads"),
        ("num_shards", (8, 8, 8, 6), "rank 3 has 6 shards"),
        ("seed", (1, 1, None, 1), "rank 2 has 8 shards, seed None, .* but rank 0 .* seed 1"),
    ],
)
def test_ranks_that_would_compute_other_bits_are_named_on_all(pool, name, values, words):
    options = [{"num_shards": 8, name: value} for value in values]
    texts = pool.check(differ_as_rank, options)
    assert len(set(texts)) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(texts[0])


def begin_otherwise(rank, world_size, store):
    os.environ["PYRINGAR_NODE_ID"] = "a"
    (net,) = make(1)
    with torch.no_grad():
        net.spare += rank // 3
    with pr.ProcessCommunicator(store, rank, world_size, timeout=20.0) as comm:
        step = pr.ShardedStep([net], 8, comm=comm)
        with pytest.raises(pr.ArgumentError) as caught:
            step(losses_of(*batch(37), 8))
    return str(caught.value)


def test_processes_that_begin_with_other_numbers_are_named_on_all(pool):
    texts = pool.check(begin_otherwise)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 3 has parameters and buffers ")
