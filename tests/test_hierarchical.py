"""Are several machines one group: right bits, few bytes between them, and errors on all ranks?

Here machines are names that processes give themselves; in `test_two_machines.py` they are networks.
"""

from __future__ import annotations

import itertools
import os
import time
from functools import partial

import oracle
import pytest
import torch
from cases import mostly_slow
from ranks import Crew
from torch import Tensor, nn

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator, between
from pyringar.distributed.hierarchical import communicator_for
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.group import Processes
from pyringar.train.synthetic import synthetic_images

TWO_BY_TWO = "aabb"
INTERLEAVED = "abab"
PLACES = [TWO_BY_TWO, INTERLEAVED, "abbb", "aaba", "abca", "abcd", "aaaa"]
# Of a rank's part: none, one, odd, more than a piece.
SIZES = (0, 1, 7, 3001)


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


@pytest.fixture
def in_machine_order(monkeypatch):
    """`oracle.reduced` adds as these machines do."""
    return lambda machines: monkeypatch.setattr(oracle, "machines", machines)


def join(rank, world_size, store, machines=TWO_BY_TWO, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    between.PIECE_ELEMENTS = 1000
    return HierarchicalCommunicator(store, rank, world_size, **{"timeout": 20.0, **options})


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    return oracle.random(numel, dtype, rank)


def floats(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


# -- bits ------------------------------------------------------------------------------------------


def sums_as_rank(rank, world_size, store, machines, op):
    with join(rank, world_size, store, machines) as comm:
        found = {}
        for dtype, numel in itertools.product(oracle.DTYPES, SIZES):
            mine = values(numel * world_size, dtype, rank)
            kept, part = mine.clone(), torch.empty(numel, dtype=dtype)
            comm.reduce_scatter(part, mine, op)
            assert oracle.same_bits(mine, kept), "its input is left alone"
            comm.all_reduce(mine, op)
            uneven = values(numel + 1, dtype, rank)
            comm.all_reduce(uneven, op)
            found[dtype, numel] = part, mine, uneven
        listed = [values(numel, dtype, rank) for numel in (3, 700) for dtype in oracle.DTYPES]
        comm.all_reduce_coalesced(listed, op)
        return found, listed, comm.nodes


@pytest.mark.parametrize("op", mostly_slow(list(oracle.OPS), "mean"))
@pytest.mark.parametrize("machines", PLACES)
def test_sums_have_promised_bits(pool, machines, op, in_machine_order):
    in_machine_order(machines)
    answers = pool.check(sums_as_rank, machines, op)

    def wanted(numel: int, dtype: torch.dtype) -> Tensor:
        return oracle.reduced([values(numel, dtype, rank) for rank in range(4)], op)

    for dtype, numel in itertools.product(oracle.DTYPES, SIZES):
        parts, whole, uneven = zip(*(found[dtype, numel] for found, *_ in answers), strict=True)
        case = (machines, dtype, numel)
        oracle.assert_all_ranks(whole, wanted(4 * numel, dtype), case)
        oracle.assert_all_ranks(uneven, wanted(numel + 1, dtype), case)
        oracle.assert_bits(torch.cat(parts), wanted(4 * numel, dtype), case)
    for at, (numel, dtype) in enumerate(itertools.product((3, 700), oracle.DTYPES)):
        lists = [listed[at] for _, listed, _ in answers]
        oracle.assert_all_ranks(lists, wanted(numel, dtype), (machines, dtype, numel))
    places = [[r for r in range(4) if machines[r] == m] for m in dict.fromkeys(machines)]
    assert answers[0][-1] == places


def copies_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        found = {}
        for dtype, numel in itertools.product(oracle.DTYPES, SIZES):
            gathered = torch.empty(world_size * numel, dtype=dtype)
            comm.all_gather(gathered, values(numel, dtype, rank))
            sent = [values(numel, dtype, rank) for _ in range(world_size)]
            for root, tensor in enumerate(sent):
                comm.broadcast(tensor, root)
            found[dtype, numel] = [gathered, torch.cat(sent)]
        place = torch.empty(world_size * 5)
        mine = place[5 * rank : 5 * rank + 5]
        mine.copy_(values(5, torch.float32, rank))
        comm.all_gather(place, mine)
        return found, place


@pytest.mark.parametrize("machines", PLACES)
def test_gathers_and_broadcasts_copy_all(pool, machines):
    for found, place in pool.check(copies_as_rank, machines):
        for (dtype, numel), results in found.items():
            wanted = torch.cat([values(numel, dtype, rank) for rank in range(4)])
            for result in results:
                assert oracle.same_bits(result, wanted), (machines, dtype, numel)
        wanted = torch.cat([values(5, torch.float32, rank) for rank in range(4)])
        assert oracle.same_bits(place, wanted)


def masked(rank: int, dtype: torch.dtype) -> Tensor:
    """Small numbers, and large ones that cancel: what is left tells the order."""
    tensor = floats(5001, rank).to(dtype)
    for i, j in itertools.combinations(range(4), 2):
        at = slice(7 * i + 3 * j, None, 29)
        tensor[at] = {i: 2.0**100, j: -(2.0**100)}.get(rank, 1.0 + rank)
    return tensor


def tree_as_rank(rank, world_size, store, machines, dtype, op):
    with join(rank, world_size, store, machines, order="tree") as comm:
        tensor, part = masked(rank, dtype), torch.empty(1250, dtype=dtype)
        comm.reduce_scatter(part, tensor[:5000], op)
        comm.all_reduce(tensor, op)
        return tensor, part


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("machines", [TWO_BY_TWO, "abcd", "aaaa"])
def test_tree_order_gives_bits_of_one_machine(pool, machines, op):
    for dtype in (torch.float32, torch.bfloat16):
        wanted = oracle.tree_reduced([masked(rank, dtype) for rank in range(4)], op)
        answers = pool.check(tree_as_rank, machines, dtype, op)
        oracle.assert_all_ranks([tensor for tensor, _ in answers], wanted)
        oracle.assert_bits(torch.cat([part for _, part in answers]), wanted[:5000])


# -- tensors that lie in another way on each rank --------------------------------------------------

LIES = {
    "contiguous": lambda x: x.clone(),
    "spread": lambda x: torch.zeros(len(x), 3)[:, 1].copy_(x),
    "shifted": lambda x: torch.zeros(len(x) + 1)[1:].copy_(x),
    "negated": lambda x: torch._neg_view(-x),
}


def lying(rank: int, shift: int, numel: int, seed: int = 0) -> Tensor:
    """Floats of ``rank``, that lie in one of four ways: on four ranks in all of them."""
    how = list(LIES.values())[(rank + shift) % len(LIES)]
    return how(values(numel, torch.float32, rank + 10 * seed))


def lies_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        found = {}
        for shift, numel in itertools.product(range(4), (1, 2, 7, 4097)):
            alone, listed = (lying(rank, shift, numel) for _ in range(2))
            many = [lying(rank, shift + i, numel + i, i) for i in range(3)]
            comm.all_reduce(alone)
            comm.all_reduce([listed])
            comm.all_reduce(many, async_op=True).wait()
            sent = lying(rank, shift, numel)
            comm.broadcast(sent, shift)
            parts, part = lying(rank, shift, 4 * numel, 4), lying(rank, shift + 1, numel)
            comm.reduce_scatter(part, parts)
            comm.all_gather(parts, lying(rank, shift, numel))
            tensors = [alone, listed, *many, sent, part, parts]
            found[shift, numel] = [t.resolve_neg().contiguous() for t in tensors]
        return found


@pytest.mark.parametrize(
    "machines", mostly_slow(["aabb", "abca", "aaba", "abbb", "aaaa"], "aabb", "abca")
)
def test_strides_of_other_ranks_change_no_bit(pool, machines, in_machine_order):
    in_machine_order(machines)
    answers = pool.check(lies_as_rank, machines)

    def summed(numel: int, seed: int) -> Tensor:
        parts = [values(numel, torch.float32, rank + 10 * seed) for rank in range(4)]
        return oracle.reduced(parts, "sum")

    for shift, numel in answers[0]:
        single, scattered = summed(numel, 0), summed(4 * numel, 4)
        many = [summed(numel + i, i) for i in range(3)]
        sent = values(numel, torch.float32, shift)
        gathered = torch.cat([values(numel, torch.float32, rank) for rank in range(4)])
        for rank, found in enumerate(answers):
            part = scattered[rank * numel : (rank + 1) * numel]
            wanted = [single, single, *many, sent, part, gathered]
            for what, (got, want) in enumerate(zip(found[shift, numel], wanted, strict=True)):
                oracle.assert_bits(got, want, (machines, shift, numel, rank, what))


def modes_as_rank(rank, world_size, store):
    """A change that torch counts late would look like the user's, to the bucketer."""
    with join(rank, world_size, store) as comm:
        tensors = [floats(1001, rank).requires_grad_(), floats(12, rank).view(3, 4).t()]
        with torch.inference_mode():
            tensors.append(floats(7, rank))
            work = comm.all_reduce_coalesced(tensors, async_op=True)
            versions = [t._version for t in tensors[:2]]
            assert work.wait()
            assert work.is_completed()
            assert work.exception() is None
            assert work.finished_ns() > 0
            comm.broadcast(tensors[2], 3)
            alone, parts = floats(7, rank), torch.zeros(28)
        comm.all_reduce(alone)  # begun outside
        comm.all_gather(parts, alone)
        comm.reduce_scatter(alone, parts)
        oracle.machines = TWO_BY_TWO
        wanted = oracle.reduced([floats(7, rank) for rank in range(4)], "sum")
        assert torch.equal(alone, 4 * wanted)
        return [t.detach().clone() for t in tensors], versions, [t._version for t in tensors[:2]]


def test_writes_are_counted_at_once(pool, in_machine_order):
    in_machine_order(TWO_BY_TWO)
    for tensors, early, late in pool.check(modes_as_rank):
        assert early == late == [1, 1]
        for tensor, numel in zip(tensors, (1001, 12, 7), strict=True):
            wanted = oracle.reduced([floats(numel, rank) for rank in range(4)], "sum")
            assert torch.equal(tensor, wanted.view(3, 4).t() if numel == 12 else wanted)


def barrier_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        comm.barrier()
        if rank == 3:
            time.sleep(0.3)
        before = time.monotonic()
        comm.barrier()
        return before, time.monotonic()


def test_barrier_waits_for_all(pool):
    times = pool.check(barrier_as_rank)
    assert min(after for _, after in times) >= max(before for before, _ in times)


# -- what crosses ----------------------------------------------------------------------------------


def sent_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        parts, whole = torch.empty(1000), floats(4000, rank)
        calls = {
            "barrier": comm.barrier,
            "all_reduce": lambda: comm.all_reduce(whole),
            "reduce_scatter": lambda: comm.reduce_scatter(parts, whole),
            "all_gather": lambda: comm.all_gather(whole, parts),
            "broadcast": lambda: comm.broadcast(whole, 0),
        }
        found = {}
        for name, call in calls.items():
            before = comm.stats()
            call()
            after = comm.stats()
            assert after["hierarchical"]["calls"] == before["hierarchical"]["calls"] + 1
            found[name] = after["inter"]["bytes"] - before["inter"]["bytes"]
        told = found.pop("barrier")
        return {name: nbytes - told for name, nbytes in found.items()}, told


def test_equal_machines_send_equal_parts(pool):
    """Flat gloo is handed all 16,000 bytes by every rank."""
    for rank, (found, told) in enumerate(pool.check(sent_as_rank, TWO_BY_TWO)):
        assert told == 128  # a description of the call
        assert found.pop("broadcast") == (8000 if rank < 2 else 0)
        assert found == {"all_reduce": 8000, "reduce_scatter": 4000, "all_gather": 4000}


def test_first_ranks_of_unequal_machines_send(pool):
    answers = pool.check(sent_as_rank, "abbb")
    wanted = [(12_000, 4000, 16_000), (4000, 12_000, 0)]
    for (found, _), (scattered, gathered, broadcast) in zip(answers[:2], wanted, strict=True):
        assert found["all_reduce"] == 16_000
        assert found["reduce_scatter"] == scattered
        assert found["all_gather"] == gathered
        assert found["broadcast"] == broadcast
    for found, told in answers[2:]:
        assert (*found.values(), told) == (0, 0, 0, 0, 0)


def overlapped_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        events, exchange = [], comm._column.exchange

        def recorded(sent, received):
            number = len([event for event, _ in events if event == "begin"])
            events.append(("begin", number))
            wait = exchange(sent, received)
            return lambda: (events.append(("wait", number)), wait())

        comm._column.exchange = recorded
        comm.all_reduce(floats(4000, rank))
        return events


def test_pieces_cross_while_next_is_summed(pool):
    for events in pool.check(overlapped_as_rank):
        for number in range(1, 8):  # 0 compares the calls
            assert events.index(("begin", number + 1)) < events.index(("wait", number)), events


# -- what differs, what is refused -----------------------------------------------------------------


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
}


def differ_as_rank(rank, world_size, store, machines, what, odd):
    is_odd = rank in odd
    with join(rank, world_size, store, machines) as comm:
        mine = {"size": floats(101, rank), "dtype": floats(100, rank).double()}
        mine |= {"half": floats(100, rank).bfloat16()}
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


ODD = {
    "machine": (TWO_BY_TWO, (2, 3)),
    "column": (TWO_BY_TWO, (1, 3)),
    "rank": (TWO_BY_TWO, (3,)),
    "rank in no column": ("abbb", (3,)),
    "rank alone on its machine": ("abbb", (0,)),
}


@pytest.mark.parametrize(("machines", "odd"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_raise_on_all_ranks(pool, machines, what, odd):
    for first, second, is_untouched in pool.check(differ_as_rank, machines, what, odd):
        assert first[0] is pr.ArgumentError, first
        assert "call different things" in first[1]
        assert all(words in first[1] for words in DIFFERENT[what]), first
        assert first[2] < 5, first
        assert "cannot be used again" in second[1]
        assert second[0] is first[0], "a call after it fails as it did"
        assert is_untouched


def refuse_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        tensor, parts = floats(3, rank), torch.ones(12)
        calls = {
            "is a str, expected a dense tensor": lambda: comm.all_reduce("x"),
            "complex64": lambda: comm.all_reduce(torch.zeros(2, dtype=torch.complex64)),
            "order is 'rank'": lambda: comm.all_reduce(tensor, order="rank"),
            "algorithm is 'ring'": lambda: comm.all_reduce(tensor, algorithm="ring"),
            "op is 'avg'": lambda: comm.all_reduce(tensor, "avg"),
            "root is 4": lambda: comm.broadcast(tensor, 4),
            "expected a list": lambda: comm.all_reduce_coalesced(tensor),
            "nbytes is -1": lambda: comm.plan(-1),
            "tensors[0] requires grad": lambda: comm.all_reduce(
                tensor.clone().requires_grad_() * 2
            ),
            "reduce_scatter: input has 11 elements of torch.float32 and output 3": (
                lambda: comm.reduce_scatter(tensor, torch.empty(11))
            ),
            "reduce_scatter: input has 12 elements of torch.float64": (
                lambda: comm.reduce_scatter(tensor, parts.double())
            ),
            "output of shape (3,) overlaps itself": (
                lambda: comm.reduce_scatter(torch.empty(1).expand(3), parts)
            ),
            "all_gather: input has 3 elements of torch.float32 and output 11": (
                lambda: comm.all_gather(torch.empty(11), tensor)
            ),
            "input is a str, expected a dense tensor": lambda: comm.all_gather(parts, "x"),
            "timeout is 0": lambda: comm.set_timeout(0),
        }
        found = {words: caught(call)[1] for words, call in calls.items()}
        assert comm.timeout_s == 20.0
        comm.set_timeout(15)
        assert comm.timeout_s == 15.0
        comm.check_peers(range(world_size))
        comm.all_reduce(tensor)  # still usable
        assert [member.rank for member in comm.members] == [0, 1, 2, 3]
        text = str(comm.plan(10_000_000)), repr(comm)
    return (
        found,
        text,
        [caught(comm.all_reduce, tensor), caught(comm.reduce_scatter, tensor, parts)],
    )


def test_wrong_arguments_change_nothing(pool):
    for found, (plan, text), closed in pool.check(refuse_as_rank):
        for words, message in found.items():
            assert words in message
        assert "2 machines of 2 ranks" in plan
        assert "machine 0 of 2" in text or "machine 1 of 2" in text
        assert all("closed" in message for _, message, _ in closed)


def refuse_order_as_rank(rank, world_size, store, machines, order):
    return caught(partial(join, rank, world_size, store, machines, order=order))[:2]


@pytest.mark.parametrize(
    ("machines", "order", "words"),
    [
        (INTERLEAVED, "tree", "consecutive ranks"),
        ("abbb", "tree", "equally many and a power of two"),
        (TWO_BY_TWO, "rank", "expected 'any', or 'tree'"),
        (TWO_BY_TWO, "exact", "expected 'any', or 'tree'"),
    ],
)
def test_impossible_order_is_refused(pool, machines, order, words):
    for kind, text in pool.check(refuse_order_as_rank, machines, order):
        assert kind is pr.ArgumentError
        assert f"order is '{order}' and the ranks are on 2 machines: [0" in text
        assert words in text


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
        join(rank, world_size, store) as comm,
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


def test_bucketer_has_promised_bits(pool, in_machine_order):
    in_machine_order(TWO_BY_TWO)
    answers = pool.check(bucketer_as_rank)
    for seed in range(3):
        by_rank = [gradients(seed, rank) for rank in range(4)]
        wanted = [oracle.reduced(same, "sum") for same in zip(*by_rank, strict=True)]
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
def test_training_matches_one_machine(pool, options):
    with Trainer(TrainConfig(ranks=4, **options), garments()) as trainer:
        alone = trainer.run()
    answers = pool.check(train_as_rank, options)
    for params, losses, algorithm, digest in answers:
        assert algorithm == "hierarchical"
        assert digest == answers[0][3] != ""
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        for ours, theirs in zip(params, alone.params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
