"""ShardedStep: gradients, buffers and loss have the bits of a tree reduction of the shards."""

import copy
import os
import random
import re

import numpy as np
import pytest
import torch
from case_marks import mostly_slow
from oracle import assert_bits, tree_reduced
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyringar as pr
from pyringar.distributed.hierarchical import communicator_for
from pyringar.parallel.shards import check_replicas_equal


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.spare = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        worst = torch.tensor([float("-inf"), torch.finfo(torch.float32).max, 0.1])
        self.register_buffer("mask", worst)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("numbers", torch.zeros((), dtype=torch.int64))
        self.to(dtype)
        self.mask = self.mask.float()  # float32 for every dtype of the parameters

    def forward(self, x, shard):
        self.seen.fill_(True)
        self.numbers += shard
        scores = self.body(x) + self.frozen
        return scores * self.spare if shard % 3 == 0 else scores


def make(num_ranks, dtype=torch.float32):
    torch.manual_seed(5)
    return pr.replicate(Net(dtype), ["cpu"] * num_ranks)


def losses_of(n, num_shards, dtype=torch.float32):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).to(dtype)
    xs, ys = pr.split_batch(x, torch.arange(n) % 3, ["cpu"] * num_shards)

    def loss_of(net, shard):
        if len(xs[shard]) < 2:  # batch norm needs two samples
            return None
        return F.cross_entropy(net(xs[shard], shard).float(), ys[shard], reduction="sum")

    return loss_of


def expected(net, loss_of, num_shards):
    nets = [copy.deepcopy(net) for _ in range(num_shards)]
    losses = [loss_of(own, shard) for shard, own in enumerate(nets)]
    for loss in losses:
        if loss is not None:
            loss.backward()
    grads = []
    for params in zip(*(own.parameters() for own in nets), strict=True):
        if params[0].requires_grad:
            wide = torch.promote_types(params[0].dtype, torch.float32)
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad).to(wide) for p in params]
            grads.append(tree_reduced(parts, "sum").to(params[0].dtype))
    buffers = []
    for was, *now in zip(net.buffers(), *(own.buffers() for own in nets), strict=True):
        is_float = was.is_floating_point()
        wide = torch.promote_types(was.dtype, torch.float32) if is_float else torch.int64
        unchanged = torch.zeros_like(was, dtype=wide)
        parts = [unchanged if torch.equal(new, was) else new.to(wide) for new in now]
        total, count = tree_reduced(parts, "sum"), sum(part is not unchanged for part in parts)
        if count == 0:
            buffers.append(was.clone())
        else:
            buffers.append((total / count if is_float else total // count).to(was.dtype))
    no_loss = torch.zeros((), dtype=torch.float64)
    wide_losses = [no_loss if x is None else x.detach().double() for x in losses]
    return grads, buffers, tree_reduced(wide_losses, "sum")


def check(replicas, loss, wanted):
    grads, buffers, wanted_loss = wanted
    assert_bits(loss, wanted_loss)
    for replica in replicas:
        check_replicas_equal([[*grads_of(replica), *replica.buffers()], [*grads, *buffers]])


def grads_of(net):
    return [param.grad for param in net.parameters() if param.requires_grad]


CASES = [(S, k) for S in range(1, 17) for k in range(1, S + 1)]
FITTING = [(S, k) for S, k in CASES if k == 1 or (S % k == 0 and (S // k).bit_count() == 1)]


@pytest.mark.parametrize(
    ("num_shards", "num_ranks"), mostly_slow(FITTING, *(case for case in FITTING if case[0] <= 8))
)
def test_result_equals_tree_reduction(num_shards, num_ranks):
    replicas = make(num_ranks)
    with pr.ShardedStep(replicas, num_shards) as step:
        for n in (5 * num_shards, 3 * num_shards + 1, 2, 1):  # also fewer samples than shards
            loss_of = losses_of(n, num_shards)
            wanted = expected(replicas[0], loss_of, num_shards)
            check(replicas, step(loss_of), wanted)
            for replica in replicas:
                assert replica.frozen.grad is None
                torch.optim.SGD(replica.parameters(), lr=0.1).step()
    assert step.num_steps == 4
    assert replicas[-1].body[1].num_batches_tracked == (3 if num_shards == 1 else 2)


@pytest.mark.parametrize(("num_shards", "num_ranks"), [c for c in CASES if c not in FITTING])
def test_wrong_number_of_ranks_raises(num_shards, num_ranks):
    fitting = ", ".join(str(k) for S, k in FITTING if num_shards == S)
    words = f"num_shards is {num_shards} on {num_ranks} ranks, .* fit on {fitting} ranks"
    with pytest.raises(pr.ArgumentError, match=words):
        pr.ShardedStep(make(num_ranks), num_shards)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_in_float32(dtype, num_ranks):
    replicas = make(num_ranks, dtype)
    loss_of = losses_of(37, 8, dtype)
    wanted = expected(replicas[0], loss_of, 8)
    with pr.ShardedStep(replicas, 8) as step:
        check(replicas, step(loss_of), wanted)


def test_shared_gradients_are_summed():
    """Backward stores the gradients of both parameters in the same memory."""
    params = [torch.randn(6, requires_grad=True), torch.randn(2, 3, requires_grad=True)]
    factors = [torch.randn(3, 2) for _ in range(4)]
    wanted = tree_reduced(factors, "sum")

    def loss_of(own, shard):
        return ((own[0].view(3, 2) + own[1].view(3, 2)) * factors[shard]).sum()

    for replicas in ([params], [params, pr.get_params(params, "cpu")]):
        with pr.ShardedStep(replicas, 4) as step:
            step(loss_of)
        for own in replicas:
            assert_bits(own[0].grad, wanted.view(6))
            assert_bits(own[1].grad, wanted.view(2, 3))


def test_thread_count_is_set_and_restored(two_torch_threads):
    seen = []
    for options in ({}, {"num_threads": 2}):
        for k in (1, 2):
            with pr.ShardedStep(make(k), 8, **options) as step:
                step(lambda net, shard: seen.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 2
    assert seen == [1] * 16 + [2] * 16


class Holder(nn.Module):
    """A complex weight, and a buffer that all shards except shard 1 change."""

    def __init__(self, values):
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("held", values.clone())

    def forward(self, shard):
        if shard != 1:
            self.held.copy_((self.held.to(torch.complex128) * (shard + 2)).to(self.held.dtype))
        return ((self.weight * (1 + shard) + 1j) ** 2).abs().sum()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "dtype",
    ["complex64", "complex128", "bool", "uint8", "uint16", "uint32", "int64", "float8_e4m3fn"],
)
def test_buffers_are_averaged(dtype, num_ranks):
    dtype, numbers = getattr(torch, dtype), torch.tensor([1, 0, 3], dtype=torch.complex128)
    if dtype.is_complex:
        numbers = numbers * (1 - 2j)
    values = numbers.to(dtype)
    replicas = pr.replicate(Holder(values), ["cpu"] * num_ranks)
    with pr.ShardedStep(replicas, 4) as step:
        step(lambda net, shard: net(shard))
    parts = []
    for shard in range(4):
        alone = Holder(values)
        alone(shard).backward()
        parts.append(alone.weight.grad)
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    mean = numbers * 11 / 3  # shards 0, 2 and 3 multiply the buffer by 2, 4 and 5
    if dtype == torch.bool:
        mean = numbers.bool()
    elif not (dtype.is_complex or dtype.is_floating_point):
        mean = mean.real.floor()
    for replica in replicas:
        assert torch.equal(torch.view_as_real(replica.weight.grad), torch.view_as_real(wanted))
        assert torch.equal(replica.held, mean.to(dtype))


def test_unsummable_buffer_dtype_raises():
    net = nn.Linear(1, 1)
    net.register_buffer("held", torch.ones(3, dtype=torch.uint64))
    with pytest.raises(pr.UnsupportedError, match=r"buffer 'held' has dtype torch.uint64"):
        pr.ShardedStep([net], 4)(lambda net, shard: net.weight.sum())


DRAWS = {
    "torch": lambda net, shard: F.dropout(net.weight, 0.5).square().sum(),
    "numpy": lambda net, shard: net.weight.sum() * np.random.rand(),
    "random": lambda net, shard: net.weight.sum() * random.gauss(0, 1),
}


def test_seeded_random_draws_ignore_rank_count():
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tobytes()

    torch.manual_seed(0)
    net, before, found = nn.Linear(3, 3), states(), []
    for k in (1, 2, 4, 8):
        replicas, results = pr.replicate(net, ["cpu"] * k), []
        with pr.ShardedStep(replicas, 8, seed=3) as step:
            for kind in [*DRAWS] * 2:
                results += [step(DRAWS[kind]), replicas[-1].weight.grad.clone()]
        found.append(results)
    check_replicas_equal(found)
    assert states() == before
    assert len({total.item() for total in found[0][::2]}) == 6
    with pr.ShardedStep(pr.replicate(net, ["cpu"]), 8, seed=3) as resumed:
        resumed.num_steps = 1  # the seed of a step depends on num_steps
        assert resumed(DRAWS["numpy"]) == found[0][2]


def test_shards_draw_different_random_numbers():
    draws = []
    with pr.ShardedStep(pr.replicate(nn.Linear(3, 3), ["cpu"] * 2), 8, seed=3) as step:
        step(lambda net, shard: draws.append(torch.rand(()).item()))
    assert len(set(draws)) == 8


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", DRAWS)
def test_random_draws_without_seed_raise(kind, num_ranks):
    replicas = pr.replicate(nn.Linear(3, 3), ["cpu"] * num_ranks)
    with pr.ShardedStep(replicas, 4) as step:
        for _ in range(2):  # the second step must raise too
            with pytest.raises(pr.UnsupportedError, match=r"random numbers .* give seed"):
                step(DRAWS[kind])
        step(lambda net, shard: net.weight.sum())


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_failed_shard_changes_nothing(num_ranks):
    replicas = make(num_ranks)
    loss_of = losses_of(32, 4)

    def failing(net, shard):
        loss = loss_of(net, shard)
        if shard == 3:
            loss.backward()
            raise KeyError("the last one")
        return loss

    before = [b.clone() for b in replicas[0].buffers()]
    wanted = expected(replicas[0], loss_of, 4)
    with pr.ShardedStep(replicas, 4) as step:
        with pytest.raises(KeyError):
            step(failing)
        check_replicas_equal([before, *(list(replica.buffers()) for replica in replicas)])
        assert all(grad is None for replica in replicas for grad in grads_of(replica))
        check(replicas, step(loss_of), wanted)


def test_wrong_arguments_raise():
    for loss in (torch.ones(2), torch.ones((), dtype=torch.complex64), 1.0):
        with pytest.raises(pr.ArgumentError, match=r"the loss of shard 0 is .*, expected one real"):
            pr.ShardedStep([nn.Linear(1, 1)], 2)(lambda *_, loss=loss: loss)
    with pytest.raises(pr.ArgumentError, match=r"0 of replicas\[1\] is \(1, 2\)"):
        pr.ShardedStep([nn.Linear(1, 1), nn.Linear(2, 1)], 4)
    with (
        pr.Communicator(["cpu"] * 3) as comm,
        pytest.raises(pr.ArgumentError, match="2 entries, but comm has 3 of its 3 ranks"),
    ):
        pr.ShardedStep(make(2), 4, comm=comm)


def test_different_replicas_raise():
    replicas = make(2)
    replicas[1].body[1].running_mean += 1e-3
    with pr.ShardedStep(replicas, 4) as step:
        with pytest.raises(pr.RingarError, match=r"shape \(5,\), on rank 1 differs from rank 0"):
            step(losses_of(16, 4))
        assert grads_of(replicas[0])[0] is None


def step_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    torch.set_num_threads(1 + rank % 2)
    (net,) = make(1)
    with communicator_for(store, rank, world_size, timeout=20.0, order="tree") as comm:
        step = pr.ShardedStep([net], 8, comm=comm)
        assert step.shards == [range(2 * rank, 2 * rank + 2)]
        loss = step(losses_of(37, 8))
        with pytest.raises(pr.ArgumentError, match="replicas has 2 entries, but comm has 1 of its"):
            pr.ShardedStep(make(2), 8, comm=comm)
    return loss, grads_of(net), list(net.buffers())


@pytest.mark.parametrize("machines", ["aaaa", "aabb", "abcd"])
def test_rank_processes_equal_tree_reduction(new_rank_group, machines):
    (net,) = make(1)
    wanted_grads, wanted_buffers, wanted_loss = expected(net, losses_of(37, 8), 8)
    for loss, grads, buffers in new_rank_group(4).check(step_as_rank, machines):
        assert_bits(loss, wanted_loss)
        check_replicas_equal([[*wanted_grads, *wanted_buffers], [*grads, *buffers]])


def differ_as_rank(rank, world_size, store, name, values):
    os.environ["PYRINGAR_NODE_ID"] = "a"
    (net,) = make(1)
    options = {"num_shards": 8, name: values[rank]}
    with torch.no_grad():
        net.spare += options.pop("offset", 0)
    made = pr.ProcessCommunicator(store, rank, world_size, timeout=20.0)
    with made as comm, pytest.raises(pr.ArgumentError) as caught:
        pr.ShardedStep([net], **options, comm=comm)(losses_of(37, 8))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("num_threads", (1, 1, 2, 1), "rank 2 has 8 shards, seed None, 2 torch threads"),
        ("num_shards", (8, 8, 8, 6), "rank 3 has 6 shards"),
        ("seed", (1, 1, None, 1), "rank 2 has 8 shards, seed None, .* but rank 0 .* seed 1"),
        ("offset", (0, 0, 0, 1), "^rank 3 has parameters and buffers "),
    ],
)
def test_differences_between_processes_raise(new_rank_group, name, values, words):
    texts = new_rank_group(4).check(differ_as_rank, name, values)
    assert len(set(texts)) == 1
    assert re.search(words, texts[0])
