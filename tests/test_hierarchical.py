"""Are several machines one group: right bits, few bytes between them, and errors on all ranks?

Here machines are names that processes give themselves; in `test_two_machines.py` they are networks.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from functools import partial

import oracle
import pytest
import torch
from cases import mostly_slow
from ranks import Crew
from torch import Tensor

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator, between
from pyringar.distributed.hierarchical import communicator_for
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.group import Processes
from pyringar.train.synthetic import synthetic_images

TWO_BY_TWO = "aabb"
INTERLEAVED = "abab"
UNEVEN = "abca"
PLACES = [TWO_BY_TWO, INTERLEAVED, "abbb", "aaba", UNEVEN, "abcd", "aaaa"]
# Of a rank's part: none, one, odd, more than a piece.
SIZES = (0, 1, 7, 1201)


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


@pytest.fixture
def in_machine_order(monkeypatch):
    return lambda machines: monkeypatch.setattr(oracle, "machines", machines)


def join(rank, world_size, store, machines=TWO_BY_TWO, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    between.PIECE_ELEMENTS = 1000
    return HierarchicalCommunicator(store, rank, world_size, **{"timeout": 20.0, **options})


@functools.cache
def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    return oracle.random(numel, dtype, rank)


def floats(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


# -- bits ------------------------------------------------------------------------------------------


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "spread": lambda x: x.new_zeros(len(x), 3)[:, 1].copy_(x),
    "shifted": lambda x: x.new_zeros(len(x) + 1)[1:].copy_(x),
    "negated": lambda x: torch._neg_view(-x),
}


def laid_out(numel: int, dtype: torch.dtype, rank: int, shift: int) -> Tensor:
    name = list(LAYOUTS)[(rank + shift) % len(LAYOUTS)]
    if name == "negated" and dtype is torch.bfloat16:  # to negate it changes the bits of NaN
        name = "contiguous"
    return LAYOUTS[name](values(numel, dtype, rank))


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.resolve_neg().contiguous() for tensor in tensors]


def cases() -> list[tuple[int, torch.dtype, int]]:
    pairs = itertools.product(oracle.DTYPES, SIZES)
    every = [(i + i // 4, dtype, numel) for i, (dtype, numel) in enumerate(pairs)]
    return [case for case in every if case[0] % 2 == 0]  # of a dtype two sizes, of the next others


def sums_as_rank(rank, world_size, store, machines, op, order):
    with join(rank, world_size, store, machines, order=order) as comm:
        found = {}
        for shift, dtype, numel in cases():
            mine = laid_out(numel * world_size, dtype, rank, shift)
            kept, part = mine.clone(), laid_out(numel, dtype, rank, shift + 1)
            comm.reduce_scatter(part, mine, op)
            assert oracle.same_bits(*whole([mine, kept])), "its input is left alone"
            comm.all_reduce(mine, op)
            uneven = laid_out(numel + 1, dtype, rank, shift)
            comm.all_reduce([uneven], op)
            found[dtype, numel] = whole([part, mine, uneven])
        pairs = itertools.product((3, 700), oracle.DTYPES)
        listed = [laid_out(numel, dtype, rank, i) for i, (numel, dtype) in enumerate(pairs)]
        comm.all_reduce_coalesced(listed, op, async_op=True).wait()
        return found, whole(listed), comm.nodes


SUMS = list(itertools.product(PLACES, oracle.OPS, ["any"]))
TREES = list(itertools.product([TWO_BY_TWO, "abcd", "aaaa"], ["sum", "mean", "prod"], ["tree"]))
PLAIN = [case for case in SUMS + TREES if case[1] == "mean" and case[0] in (TWO_BY_TWO, UNEVEN)]


@pytest.mark.parametrize(("machines", "op", "order"), mostly_slow(SUMS + TREES, *PLAIN))
def test_sums_have_promised_bits(pool, machines, op, order, in_machine_order):
    in_machine_order(machines)
    answers = pool.check(sums_as_rank, machines, op, order)
    reduced = oracle.tree_reduced if order == "tree" else oracle.reduced

    def wanted(numel: int, dtype: torch.dtype) -> Tensor:
        return reduced([values(numel, dtype, rank) for rank in range(4)], op)

    for _, dtype, numel in cases():
        parts, sums, uneven = zip(*(found[dtype, numel] for found, *_ in answers), strict=True)
        case = (machines, dtype, numel)
        oracle.assert_all_ranks(sums, wanted(4 * numel, dtype), case)
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
        for shift, dtype, numel in cases():
            gathered = laid_out(world_size * numel, dtype, rank, shift)
            comm.all_gather(gathered, laid_out(numel, dtype, rank, shift + 1))
            sent = [laid_out(numel, dtype, rank, shift + i) for i in range(world_size)]
            for root, tensor in enumerate(sent):
                comm.broadcast(tensor, root)
            found[dtype, numel] = whole([gathered, torch.cat(sent)])
        place = torch.empty(world_size * 5)
        mine = place[5 * rank : 5 * rank + 5]
        mine.copy_(values(5, torch.float32, rank))
        comm.all_gather(place, mine)
        return found, place


@pytest.mark.parametrize("machines", mostly_slow(PLACES, TWO_BY_TWO, UNEVEN))
def test_gathers_and_broadcasts_copy_all(pool, machines):
    for found, place in pool.check(copies_as_rank, machines):
        for (dtype, numel), results in found.items():
            wanted = torch.cat([values(numel, dtype, rank) for rank in range(4)])
            for result in results:
                assert oracle.same_bits(result, wanted), (machines, dtype, numel)
        wanted = torch.cat([values(5, torch.float32, rank) for rank in range(4)])
        assert oracle.same_bits(place, wanted)


# -- modes of torch -------------------------------------------------------------------------------


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
            alone, parts = torch.full((7,), 1.0 + rank), torch.zeros(28)
        comm.all_reduce(alone)  # begun outside
        comm.all_gather(parts, alone)
        comm.reduce_scatter(alone, parts)
        assert alone.tolist() == [40.0] * 7
        return [t.detach().clone() for t in tensors], versions, [t._version for t in tensors[:2]]


def test_writes_are_counted_at_once(pool, in_machine_order):
    in_machine_order(TWO_BY_TWO)
    for tensors, early, late in pool.check(modes_as_rank):
        assert early == late == [1, 1]
        for tensor, numel in zip(tensors, (1001, 12, 7), strict=True):
            wanted = oracle.reduced([floats(numel, rank) for rank in range(4)], "sum")
            assert torch.equal(tensor, wanted.view(3, 4).t() if numel == 12 else wanted)


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
        told = found["barrier"]  # a description of the call
        return told, *[nbytes - told for name, nbytes in found.items() if name != "barrier"]


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        (TWO_BY_TWO, [(128, 8000, 4000, 4000, 8000)] * 2 + [(128, 8000, 4000, 4000, 0)] * 2),
        (
            "abbb",
            [(128, 16_000, 12_000, 4000, 16_000), (384, 16_000, 4000, 12_000, 0)] + [(0,) * 5] * 2,
        ),
    ],
)
def test_machines_send_no_more_than_needed(pool, machines, wanted):
    """In the order of the calls above; flat gloo is handed 16,000 bytes by every rank."""
    assert pool.check(sent_as_rank, machines) == wanted


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
            "order is 'rank'": lambda: comm.all_reduce(tensor, order="rank"),
            "algorithm is 'ring'": lambda: comm.all_reduce(tensor, algorithm="ring"),
            "op is 'avg'": lambda: comm.all_reduce(tensor, "avg"),
            "root is 4": lambda: comm.broadcast(tensor, 4),
            "expected a list": lambda: comm.all_reduce_coalesced(tensor),
            "nbytes is -1": lambda: comm.plan(-1),
            "tensors requires grad": lambda: comm.all_reduce(tensor.clone().requires_grad_() * 2),
            "reduce_scatter: inputs has 11 torch.float32 elements and outputs has 3": (
                lambda: comm.reduce_scatter(tensor, torch.empty(11))
            ),
            "outputs has dtype torch.float32, but inputs has torch.float64": (
                lambda: comm.reduce_scatter(tensor, parts.double())
            ),
            "inputs is a str, expected a dense tensor": lambda: comm.all_gather(parts, "x"),
            "tensors[1] shares memory with tensors[0]": (
                lambda: comm.all_reduce_coalesced([parts[:7], parts[5:]])
            ),
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
    return found, text, caught(comm.all_reduce, tensor)


def test_wrong_arguments_change_nothing(pool):
    for found, (plan, text), closed in pool.check(refuse_as_rank):
        for words, message in found.items():
            assert words in message
        assert "2 machines of 2 ranks" in plan
        assert "machine 0 of 2" in text or "machine 1 of 2" in text
        assert "closed" in closed[1]


def choose_as_rank(rank, world_size, store, machines, order):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    try:
        with communicator_for(store, rank, world_size, timeout=20.0, order=order) as comm:
            return type(comm).__name__, ""
    except pr.RingarError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("machines", "order", "kind", "words"),
    [
        ("aaaa", "any", "ProcessCommunicator", ""),
        (TWO_BY_TWO, "any", "HierarchicalCommunicator", ""),
        (INTERLEAVED, "tree", "ArgumentError", "consecutive ranks"),
        ("abbb", "tree", "ArgumentError", "equally many and a power of two"),
        (TWO_BY_TWO, "rank", "ArgumentError", "expected 'any', or 'tree'"),
        (TWO_BY_TWO, "exact", "ArgumentError", "expected 'any', or 'tree'"),
    ],
)
def test_machines_and_order_choose_communicator(pool, machines, order, kind, words):
    for chosen, text in pool.check(choose_as_rank, machines, order):
        assert chosen == kind
        assert words in text
        if words:
            assert f"order is '{order}' and the ranks are on 2 machines: [0" in text


# -- training --------------------------------------------------------------------------------------


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
