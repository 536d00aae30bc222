"""Are several machines one group: right sums, equal bits, few bytes on the wire, and no hang?

Here machines are names that processes give themselves; in `test_two_machines.py` they are networks.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from cases import mostly_slow
from oracle import DTYPES, FLOATS
from ranks import Crew
from torch import Tensor, nn

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.sockets import SocketInter
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.group import Processes
from pyringar.train.synthetic import synthetic_images

TWO_BY_TWO = "aabb"
INTERLEAVED = "abab"


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


def join(rank, world_size, store, machines=TWO_BY_TWO, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    return HierarchicalCommunicator(store, rank, world_size, **{"timeout": 20.0, **options})


def whole(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) % 5 + rank).to(dtype)


def floats(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def by_machine(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over two machines of two ranks."""
    a, b, c, d = tensors
    return (a + b) + (c + d)


# -- sums ------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 1001, 70_000)


def sums_as_rank(rank, world_size, store, machines, op):
    with join(rank, world_size, store, machines, piece_bytes=65_536) as comm:
        results = {}
        for dtype in DTYPES:
            tensors = [whole(numel, rank, dtype) for numel in SIZES]
            comm.all_reduce_coalesced(tensors, op)
            results[dtype] = tensors
        single = whole(3, rank, torch.float32).view(3, 1)
        comm.all_reduce(single, op)
        return results, single, comm.nodes


@pytest.mark.parametrize("op", mostly_slow(["sum", "mean", "max", "min", "prod"], "sum", "max"))
@pytest.mark.parametrize("machines", [TWO_BY_TWO, INTERLEAVED, "aaaa", "abcd", "abbb"])
def test_whole_numbers_are_exact(pool, machines, op):
    answers = pool.check(sums_as_rank, machines, op)
    for dtype in DTYPES:
        for at, numel in enumerate(SIZES):
            expected = [whole(numel, rank, dtype) for rank in range(4)]
            pr.allreduce(expected, op)
            for results, _, _ in answers:
                assert torch.equal(results[dtype][at], expected[0]), (dtype, numel)
    expected = [whole(3, rank, torch.float32).view(3, 1) for rank in range(4)]
    pr.allreduce(expected, op)
    assert all(torch.equal(single, expected[0]) for _, single, _ in answers)
    places = [[r for r in range(4) if machines[r] == m] for m in dict.fromkeys(machines)]
    assert answers[0][2] == places


def reduced_as_rank(rank, world_size, store, make, dtype, op="sum", **options):
    with join(rank, world_size, store, **options) as comm:
        tensor = make(rank, dtype)
        comm.all_reduce(tensor, op)
        return tensor


def many_floats(rank: int, dtype: torch.dtype) -> Tensor:
    return floats(5001, rank, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_machines_are_added_after_ranks_and_rounded_once(pool, dtype):
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = by_machine([many_floats(rank, dtype).to(wide) for rank in range(4)]).to(dtype)
    for tensor in pool.check(partial(reduced_as_rank, piece_bytes=5000), many_floats, dtype):
        assert torch.equal(tensor, expected)


def masked(rank: int, dtype: torch.dtype) -> Tensor:
    """Small numbers, and large ones that cancel: what is left tells the order."""
    tensor = many_floats(rank, dtype)
    for i, j in itertools.combinations(range(4), 2):
        at = slice(7 * i + 3 * j, None, 29)
        tensor[at] = {i: 2.0**100, j: -(2.0**100)}.get(rank, 1.0 + rank)
    return tensor


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("machines", [TWO_BY_TWO, "abcd", "aaaa"])
def test_in_tree_order_machines_have_the_bits_of_one(pool, machines, op):
    for dtype in (torch.float32, torch.bfloat16):
        expected = [masked(rank, dtype) for rank in range(4)]
        with pr.Communicator(["cpu"] * 4, order="tree") as one:
            one.all_reduce(expected, op)
        run = partial(reduced_as_rank, machines=machines, order="tree", piece_bytes=5000)
        for tensor in pool.check(run, masked, dtype, op):
            assert torch.equal(tensor, expected[0])


def refuse_order_as_rank(rank, world_size, store, machines, order):
    return caught(partial(join, rank, world_size, store, machines, order=order))[:2]


@pytest.mark.parametrize(
    ("machines", "order", "words"),
    [
        (INTERLEAVED, "tree", "that follow each other"),
        ("abbb", "tree", "equally many ranks on each, a power of two"),
        (TWO_BY_TWO, "rank", "expected 'any' or 'tree'"),
        (TWO_BY_TWO, "exact", "expected 'any' or 'tree'"),
    ],
)
def test_an_order_that_machines_do_not_have_is_refused(pool, machines, order, words):
    for kind, text in pool.check(refuse_order_as_rank, machines, order):
        assert kind is pr.ArgumentError
        assert f"order is '{order}' and the ranks are on 2 machines: [0" in text
        assert words in text


def modes_as_rank(rank, world_size, store):
    """A change that torch counts late would look like the user's, to the bucketer."""
    with join(rank, world_size, store) as comm:
        tensors = [floats(1001, rank).requires_grad_(), floats(12, rank).view(3, 4).t()]
        with torch.inference_mode():
            tensors.append(floats(7, rank))
            work = comm.all_reduce_coalesced(tensors, async_op=True)
            versions = [t._version for t in tensors[:2]]
            work.wait()
            comm.broadcast(tensors[2], 3)
            alone, parts = floats(7, rank), torch.zeros(28)
        comm.all_reduce(alone)  # begun outside
        comm.all_gather(parts, alone)
        comm.reduce_scatter(alone, parts)
        assert torch.equal(alone, 4 * by_machine([floats(7, rank) for rank in range(4)]))
        return [t.detach().clone() for t in tensors], versions, [t._version for t in tensors[:2]]


def test_writes_into_any_mode_and_is_counted_by_torch_at_once(pool):
    for tensors, early, late in pool.check(modes_as_rank):
        assert early == late == [1, 1]
        for tensor, numel in zip(tensors, (1001, 12, 7), strict=True):
            wanted = by_machine([floats(numel, rank) for rank in range(4)])
            assert torch.equal(tensor, wanted.view(3, 4).t() if numel == 12 else wanted)


NAN, INF = float("nan"), float("inf")


def extremes(rank: int, dtype: torch.dtype) -> Tensor:
    """A NaN of every rank in turn, of either sign, beside infinities; no NaN; then floats."""
    nans = [NAN if rank == at else value for value in (1, INF, -INF) for at in range(4)]
    negative = [-NAN if rank == at else -INF for at in range(4)]
    plain = [rank - 1.5, -INF if rank else INF, 0.25 * rank, 65504.0 - rank]
    flat = torch.tensor([*nans, *negative, *plain]).to(dtype)
    return torch.cat([flat, floats(999, rank, dtype)])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_of_any_machine_wins(pool, dtype, op):
    parts = [extremes(rank, dtype) for rank in range(4)]
    expected = functools.reduce(torch.maximum if op == "max" else torch.minimum, parts)
    answers = pool.check(reduced_as_rank, extremes, dtype, op)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for tensor in answers:
        assert torch.equal(tensor.isnan(), expected.isnan())
        assert torch.equal(tensor[~tensor.isnan()], expected[~expected.isnan()])
        assert torch.equal(tensor.view(kind), answers[0].view(kind)), "other bits on other ranks"


def layouts_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        canvas = torch.zeros(6, 8)
        tensors = [
            canvas[::2, 1:5],
            floats(24, rank).view(2, 3, 4).permute(2, 0, 1),
            torch.tensor(float(rank)),
            whole(7, rank, torch.int64),
        ]
        tensors[0].copy_(floats(12, rank).view(3, 4))
        version = tensors[1]._version
        work = comm.all_reduce(tensors, async_op=True)
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is None
        assert work.finished_ns() > 0
        assert tensors[1]._version > version
        return tensors, canvas


def test_any_layout_and_mixed_dtypes_in_the_background(pool):
    flat, turned = (by_machine([floats(n, rank) for rank in range(4)]) for n in (12, 24))
    for tensors, canvas in pool.check(layouts_as_rank):
        assert torch.equal(tensors[0], flat.view(3, 4))
        assert torch.equal(tensors[1], turned.view(2, 3, 4).permute(2, 0, 1))
        assert tensors[2] == 6
        assert torch.equal(tensors[3], sum(whole(7, rank, torch.int64) for rank in range(4)))
        assert not canvas[1::2].any()
        assert not canvas[:, 5:].any()


def broadcasts_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        found = []
        for root in range(world_size):
            tensors = [floats(1000, rank), floats(12, rank, torch.bfloat16).view(3, 4).t()]
            tensors.append(torch.tensor(rank))
            for tensor in tensors:
                comm.broadcast(tensor, root)
            found.append(tensors)
        comm.barrier()
        return found


@pytest.mark.parametrize("machines", [TWO_BY_TWO, INTERLEAVED])
def test_broadcast(pool, machines):
    for found in pool.check(broadcasts_as_rank, machines):
        for root, (flat, turned, single) in enumerate(found):
            assert torch.equal(flat, floats(1000, root))
            assert torch.equal(turned, floats(12, root, torch.bfloat16).view(3, 4).t())
            assert single == root


def barrier_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        comm.barrier()
        if rank == 3:
            time.sleep(0.3)
        before = time.monotonic()
        comm.barrier()
        return before, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(pool):
    times = pool.check(barrier_as_rank)
    assert min(after for _, after in times) >= max(before for before, _ in times)


def group_as_rank(rank, world_size, store, machines):
    """With torch.distributed initialised its groups may be taken."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        os.environ["PYRINGAR_NODE_ID"] = machines[rank]
        with HierarchicalCommunicator(timeout=20.0, backend="gloo") as comm:
            tensor = whole(1001, rank, torch.float32)
            comm.all_reduce(tensor)
        dist.barrier()
        return tensor
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("machines", [TWO_BY_TWO, INTERLEAVED, "abba", "abaa"])
def test_the_groups_of_torch_distributed(pool, machines):
    expected = sum(whole(1001, rank, torch.float32) for rank in range(4))
    for tensor in pool.check(group_as_rank, machines):
        assert torch.equal(tensor, expected)


# -- the wire --------------------------------------------------------------------------------------


class Recorder:
    """An inter that notes what it is asked, over another."""

    def __init__(self, inner) -> None:
        self.inner, self.events = inner, []

    def exchange(self, sent, received):
        number = len({number for _, number in self.events})
        self.events.append(("begin", number))
        wait = self.inner.exchange(sent, received)

        def arrive():
            self.events.append(("wait", number))
            return wait()

        return arrive

    def abort(self):
        self.inner.abort()

    def close(self):
        self.inner.close()


def wire_as_rank(rank, world_size, store):
    inter = Recorder(SocketInter(store, rank, [(rank + 2) % 4], 20.0))
    with join(rank, world_size, store, inter=inter, piece_bytes=40_000) as comm:
        tensor = floats(40_000, rank)
        comm.all_reduce(tensor)
        return inter.events, comm.stats()


def test_two_pieces_cross_while_the_next_is_reduced_and_each_rank_sends_its_part(pool):
    for events, stats in pool.check(wire_as_rank):
        assert events == [
            *(("begin", 0), ("wait", 0)),  # whether machines call the same
            *(("begin", 1), ("begin", 2)),  # sums of two pieces go there
            *(("wait", 1), ("begin", 3)),  # results of the first come back
            *(("begin", 4), ("wait", 2), ("begin", 5), ("wait", 3)),
            *(("begin", 6), ("wait", 4), ("begin", 7), ("wait", 5)),
            *(("wait", 6), ("begin", 8), ("wait", 7), ("wait", 8)),
        ]
        # Flat gloo is handed all 160,000 bytes by every rank.
        told_bytes = 256
        assert stats["inter"]["bytes"] == told_bytes + 160_000 / 2
        assert stats["hierarchical"]["bytes"] == 160_000
        assert stats["hierarchical"]["calls"] == 1


# -- what differs, what fails ----------------------------------------------------------------------


def caught(function, *args) -> tuple[type, str, float]:
    began = time.monotonic()
    with pytest.raises(pr.RingarError) as error:
        function(*args)
    return type(error.value), str(error.value), time.monotonic() - began


# What the odd ranks call, and what both sides must read of both calls.
DIFFERENT = {
    "size": ("of 100 torch", "of 101 torch"),
    "dtype": ("float32", "float64"),
    "half": ("float32", "bfloat16"),
    "mean": ("(sum)", "(mean)"),
    "op": ("(sum)", "(max)"),
    "call": ("all_reduce", "barrier"),
    "root": ("broadcast from rank 0", "broadcast from rank 2"),
    "piece": ("in pieces of 4096", "in pieces of 64"),
}


def differ_as_rank(rank, world_size, store, what, odd):
    is_odd = rank in odd
    piece_bytes = 64 if what == "piece" and is_odd else 4096
    with join(rank, world_size, store, piece_bytes=piece_bytes) as comm:
        mine = {"size": floats(101, rank), "dtype": floats(100, rank, torch.double)}
        mine |= {"half": floats(100, rank, torch.bfloat16)}
        tensor = mine.get(what, floats(100, rank)) if is_odd else floats(100, rank)
        before = tensor.clone()
        calls = {
            "call": comm.barrier,
            "op": partial(comm.all_reduce, tensor, "max"),
            "mean": partial(comm.all_reduce, tensor, "mean"),
            "root": partial(comm.broadcast, tensor, 2),
        }
        same = partial(comm.all_reduce, tensor)
        usual = partial(comm.broadcast, tensor, 0) if what == "root" else same
        first = caught(calls.get(what, same) if is_odd else usual)
        return first, caught(comm.all_reduce, tensor), torch.equal(tensor, before)


@pytest.mark.parametrize("odd", [(2, 3), (1, 3), (3,)], ids=["machine", "column", "rank"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told(pool, what, odd):
    for first, second, is_untouched in pool.check(differ_as_rank, what, odd):
        assert first[0] is pr.ArgumentError, first
        assert "call different things" in first[1]
        assert all(words in first[1] for words in DIFFERENT[what]), first
        assert first[2] < 5, first
        assert "cannot be used again" in second[1]
        assert second[0] is first[0], "a call after it fails as it did"
        assert is_untouched


def left_inside_as_rank(rank, world_size, store):
    """Rank 0 has found out, and leaves rank 1 while this still sums inside."""
    with join(rank, world_size, store) as comm:
        links = comm._links
        sum_inside = links.sum_inside

        def is_left(*arguments) -> None:
            sum_inside(*arguments)
            raise pr.PeerLostError("rank 0 has aborted the group")

        if rank == 1:
            links.sum_inside = is_left
        return caught(comm.all_reduce, floats(100, rank), "max" if rank >= 2 else "sum")


def test_who_is_left_inside_is_told_what_the_others_call(pool):
    for kind, text, _ in pool.check(left_inside_as_rank):
        assert kind is pr.ArgumentError, text
        assert "(max)" in text


def refuse_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        tensor = floats(3, rank)
        found = [
            caught(comm.all_reduce, "x"),
            caught(comm.all_reduce, torch.zeros(2, dtype=torch.complex64)),
            caught(partial(comm.all_reduce, tensor, order="rank")),
            caught(partial(comm.all_reduce, tensor, algorithm="ring")),
            caught(comm.all_reduce, tensor, "avg"),
            caught(comm.broadcast, tensor, 4),
            caught(comm.all_reduce_coalesced, tensor),
            caught(comm.plan, -1),
            caught(comm.all_reduce, tensor.clone().requires_grad_() * 2),
        ]
        comm.all_reduce(tensor)  # still usable
        text = str(comm.plan(10_000_000)), repr(comm)
    return found, text, caught(comm.all_reduce, tensor)


def test_wrong_arguments_change_nothing(pool):
    for found, (plan, text), closed in pool.check(refuse_as_rank):
        words = [
            *("is a str, expected a tensor", "torch.complex64", "order is 'rank'"),
            *("algorithm is 'ring'", "op is 'avg'", "root is 4", "expected a list", "nbytes is -1"),
            "tensors[0] requires grad",
        ]
        for (_, message, _), word in zip(found, words, strict=True):
            assert word in message
        assert "2 machines of 2 ranks" in plan
        assert "machine 0 of 2" in text or "machine 1 of 2" in text
        assert "closed" in closed[1]


def choose_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    with communicator_for(store, rank, world_size, timeout=20.0) as comm:
        kind = type(comm).__name__
    wrong = None
    if machines == TWO_BY_TWO:
        wrong = caught(partial(communicator_for, store, rank, world_size, order="rank"))[1]
    return kind, wrong


def test_one_machine_needs_no_hierarchy(pool):
    assert pool.check(choose_as_rank, "aaaa") == [("ProcessCommunicator", None)] * 4
    for kind, wrong in pool.check(choose_as_rank, TWO_BY_TWO):
        assert kind == "HierarchicalCommunicator"
        assert "order is 'rank' and the ranks are on 2 machines" in wrong


def die_as_rank(rank, world_size, store, how):
    comm = join(rank, world_size, store, timeout=2.0)
    comm.all_reduce(floats(100, rank))
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(6)
        comm.close()
        return None
    found = caught(comm.all_reduce, floats(100_000, rank))
    comm.close()
    return found


@pytest.mark.parametrize("how", ["killed", "closed", pytest.param("late", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_is_an_error_on_all_machines(how):
    pool = Crew(4)
    answers = pool.results(die_as_rank, how)
    pool.close()
    for rank in range(3):
        kind, text, seconds = answers[rank]
        assert kind in (pr.PeerLostError, pr.CollectiveTimeout), (rank, text)
        assert seconds < (3 if how != "late" else 6), (rank, text)
    assert "on machine 1 of 2, whose ranks [2, 3] count from 0" in answers[2][1]
    assert "rank 1" in answers[2][1]


# -- training --------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 40), nn.Tanh()).append(
        nn.Linear(40, 5)
    )


def backward(net: nn.Module, seed: int, rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + rank))
    net[: 5 if rank or seed < 2 else 3](x).square().sum().backward()  # unused by rank 0


def bucketer_as_rank(rank, world_size, store):
    net, found = make_net(), []
    options = {"bucket_cap_mb": 1e-3}
    with (
        join(rank, world_size, store, piece_bytes=3000) as comm,
        pr.GradientBucketer([net], comm=comm, **options) as bucketer,
    ):
        for seed in range(3):
            net.zero_grad()
            backward(net, seed, rank)
            bucketer.wait()
            found.append([p.grad.clone() for p in net.parameters()])
        return found, bucketer.buckets, bucketer.stats()


def gradients(seed: int, rank: int) -> list[torch.Tensor]:
    """Of one rank alone; zeros for what it did not use."""
    net = make_net()
    backward(net, seed, rank)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def test_the_bucketer(pool):
    answers = pool.check(bucketer_as_rank)
    for seed in range(3):
        by_rank = [gradients(seed, rank) for rank in range(4)]
        wanted = [by_machine(same) for same in zip(*by_rank, strict=True)]
        for found, buckets, stats in answers:
            assert buckets == answers[0][1]
            assert all(b.done_s >= b.launched_s for b in stats.buckets)
            for ours, theirs in zip(found[seed], wanted, strict=True):
                assert torch.equal(ours, theirs)


def garments() -> ImageData:
    return ImageData("garments", *synthetic_images(60, 1), *synthetic_images(30, 2))


def train_as_rank(rank, world_size, store, options):
    os.environ["PYRINGAR_NODE_ID"] = TWO_BY_TWO[rank]
    config = TrainConfig(ranks=world_size, **options)
    group = Processes(config, store, rank, world_size)
    with Trainer(config, garments(), group=group) as trainer:
        result = trainer.run()
    return result.params, result.losses, result.plan.algorithm, group.digest


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 20, "epochs": 1}, {"model": "resnet18", "width": 4, "epochs": 1}],
    ids=["lenet", "resnet18"],
)
def test_training_is_that_of_one_machine_up_to_rounding(pool, options):
    with Trainer(TrainConfig(ranks=4, **options), garments()) as trainer:
        alone = trainer.run()
    answers = pool.check(train_as_rank, options)
    for params, losses, algorithm, digest in answers:
        assert algorithm == "hierarchical"
        assert digest == answers[0][3] != ""
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        for ours, theirs in zip(params, alone.params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
