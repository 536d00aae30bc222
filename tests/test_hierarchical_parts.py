"""Machines with any numbers of ranks: who meets whom, in which order sums are, parts by rank."""

from __future__ import annotations

import itertools
import os
import random
import time
from functools import partial

import oracle
import pytest
import torch
from cases import mostly_slow
from ranks import Crew
from torch import Tensor

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator
from pyringar.distributed.machines import Machines
from pyringar.distributed.sockets import SocketInter

PLACES = ["aabb", "abab", "abbb", "aaba", "abca", "abcd", "aaaa"]
# Sizes of a rank's part: none, one, odd, more than a piece.
SIZES = (0, 1, 7, 3001)


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


@pytest.fixture
def in_machine_order(monkeypatch):
    """`oracle.reduced` adds as these machines do."""

    def use(machines: str) -> None:
        monkeypatch.setattr(oracle, "machines", machines)

    return use


def join(rank, world_size, store, machines, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    options = {"timeout": 20.0, "piece_bytes": 4000, **options}
    return HierarchicalCommunicator(store, rank, world_size, **options)


# -- who meets whom --------------------------------------------------------------------------------


def layouts(most: int):
    """All numbers of ranks on one to three machines, ranks in turns and one after the other."""
    for num in (1, 2, 3):
        for sizes in itertools.product(range(1, most + 1), repeat=num):
            ranks = iter(range(sum(sizes)))
            yield [[next(ranks) for _ in range(size)] for size in sizes]
            left, dealt = list(sizes), [[] for _ in sizes]
            for rank in range(sum(sizes)):
                node = max(range(num), key=lambda i: left[i])
                dealt[node].append(rank)
                left[node] -= 1
            yield dealt


def test_every_rank_is_carried_by_one_on_each_other_machine_that_knows_it():
    for nodes in layouts(5):
        places = [Machines.of(nodes, rank) for rank in range(sum(map(len, nodes)))]
        for place in places:
            assert place.rank in place.here
            for node in place.others:
                carried = [places[rank].carried(place.node) for rank in nodes[node]]
                assert [place.rank in ranks for ranks in carried].count(True) == 1
                assert place.rank in places[place.carrier(node)].carried(place.node)
                assert len(place.carried(node)) <= place.num_slots(node)
            (column,) = [ranks for ranks in place.columns if place.rank in ranks]
            assert set(place.peers) <= set(column) - {place.rank}
            assert all(place.rank in places[peer].peers for peer in place.peers)
            assert {place.where(peer) for peer in place.peers} == set(place.others)


def many_machines(num_layouts: int):
    """Four to nine machines of random numbers of ranks, dealt at random."""
    dice = random.Random(7)
    for _ in range(num_layouts):
        machine_of = [*range(dice.randint(4, 9))]
        machine_of += [dice.choice(machine_of) for _ in range(dice.randint(0, 12))]
        dice.shuffle(machine_of)
        nodes = [[r for r, m in enumerate(machine_of) if m == node] for node in set(machine_of)]
        yield sorted(nodes)


def test_a_broadcast_comes_to_every_machine_once_over_connections_that_are_there():
    for nodes in itertools.chain(layouts(4), many_machines(100)):
        places = [Machines.of(nodes, rank) for rank in range(sum(map(len, nodes)))]
        for root in range(len(places)):
            reached = []
            for place in places:
                heads, parent, children = place.tree(root)
                if heads[place.node] != place.rank:
                    continue
                reached += children
                assert (parent is None) == (place.rank == root)
                for child in children:
                    assert places[heads[child]].tree(root)[1] == place.node
                    assert heads[child] in place.peers, (nodes, root, place.rank)
            assert sorted([*reached, places[0].where(root)]) == list(range(len(nodes)))


# -- parts by rank ---------------------------------------------------------------------------------


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    return oracle.random(numel, dtype, rank)


def scattered_as_rank(rank, world_size, store, machines, op):
    with join(rank, world_size, store, machines) as comm:
        found = {}
        for dtype in oracle.DTYPES:
            for numel in SIZES:
                mine = values(numel * world_size, dtype, rank)
                kept = mine.clone()
                output = torch.empty(numel, dtype=dtype)
                comm.reduce_scatter(output, mine, op)
                assert oracle.same_bits(mine, kept), "its input is left alone"
                found[dtype, numel] = output
        whole = oracle.random(12 * world_size, torch.float32, rank)
        canvas = torch.zeros(4, 6)
        work = comm.reduce_scatter(
            canvas[:, ::2], whole.view(-1, 12).t().contiguous().t(), op, async_op=True
        )
        assert work.wait()
        assert not canvas[:, 1::2].any()
        found["strided"] = canvas[:, ::2].clone()
        return found


@pytest.mark.parametrize("op", mostly_slow(["sum", "mean", "max", "prod"], "mean"))
@pytest.mark.parametrize("machines", PLACES)
def test_reduce_scatter(pool, machines, op, in_machine_order):
    in_machine_order(machines)
    answers = pool.check(scattered_as_rank, machines, op)
    for dtype in oracle.DTYPES:
        for numel in SIZES:
            parts = [values(numel * 4, dtype, rank) for rank in range(4)]
            wanted = oracle.reduced(parts, op)
            for rank, found in enumerate(answers):
                part = wanted[rank * numel : (rank + 1) * numel]
                oracle.assert_bits(found[dtype, numel], part, (machines, dtype, numel, rank))
    wanted = oracle.reduced([oracle.random(48, torch.float32, rank) for rank in range(4)], op)
    for rank, found in enumerate(answers):
        oracle.assert_bits(found["strided"], wanted[12 * rank : 12 * rank + 12].view(4, 3))


def gathered_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        found = {}
        for dtype in oracle.DTYPES:
            for numel in SIZES:
                output = torch.empty(world_size * numel, dtype=dtype)
                comm.all_gather(output, values(numel, dtype, rank))
                found[dtype, numel] = output
        canvas = torch.zeros(world_size * 3, 4)
        turned = values(12, torch.float32, rank).view(4, 3).t()
        assert comm.all_gather(canvas[:, ::2], turned[:, :2], async_op=True).wait()
        assert not canvas[:, 1::2].any()
        found["strided"] = canvas[:, ::2].clone()
        place = torch.empty(world_size * 5)
        mine = place[5 * rank : 5 * rank + 5]
        mine.copy_(values(5, torch.float32, rank))
        comm.all_gather(place, mine)
        found["in place"] = place
        return found


@pytest.mark.parametrize("machines", PLACES)
def test_all_gather(pool, machines):
    for found in pool.check(gathered_as_rank, machines):
        for dtype in oracle.DTYPES:
            for numel in SIZES:
                wanted = torch.cat([values(numel, dtype, rank) for rank in range(4)])
                assert oracle.same_bits(found[dtype, numel], wanted), (machines, dtype, numel)
        turned = [values(12, torch.float32, r).view(4, 3).t()[:, :2] for r in range(4)]
        assert oracle.same_bits(found["strided"], torch.cat(turned))
        wanted = torch.cat([values(5, torch.float32, rank) for rank in range(4)])
        assert oracle.same_bits(found["in place"], wanted)


def reduced_as_rank(rank, world_size, store, machines, op):
    with join(rank, world_size, store, machines) as comm:
        found = []
        for dtype in oracle.DTYPES:
            for numel in (1, 5, 4099):
                mine = values(numel, dtype, rank)
                comm.all_reduce(mine, op)
                found.append(mine)
        roots = [torch.tensor([float(rank)]) for _ in range(world_size)]
        for root, tensor in enumerate(roots):
            comm.broadcast(tensor, root)
        comm.barrier()
        return found, [tensor.item() for tensor in roots]


@pytest.mark.parametrize("op", mostly_slow(["sum", "mean", "min"], "mean"))
@pytest.mark.parametrize("machines", PLACES)
def test_all_reduce_adds_ranks_then_machines_wherever_pieces_end(
    pool, machines, op, in_machine_order
):
    in_machine_order(machines)
    answers = pool.check(reduced_as_rank, machines, op)
    at = 0
    for dtype in oracle.DTYPES:
        for numel in (1, 5, 4099):
            parts = [values(numel, dtype, rank) for rank in range(4)]
            got = [found[at] for found, _ in answers]
            oracle.assert_all_ranks(got, oracle.reduced(parts, op), (machines, dtype, numel))
            at += 1
    assert [roots for _, roots in answers] == [[0.0, 1.0, 2.0, 3.0]] * 4


# -- tensors that lie in another way on each rank --------------------------------------------------

LIES = {
    "contiguous": lambda x: x.clone(),
    "spread": lambda x: torch.zeros(len(x), 3)[:, 1].copy_(x),
    "shifted": lambda x: torch.zeros(len(x) + 1)[1:].copy_(x),
    "negated": lambda x: torch.complex(x, -x).conj().imag,
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


@pytest.mark.parametrize("machines", mostly_slow(["aabb", "aaba", "abbb", "abca", "aaaa"], "aabb"))
def test_where_tensors_lie_on_other_ranks_changes_no_bit(pool, machines, in_machine_order):
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


# -- what is refused -------------------------------------------------------------------------------


def refused_as_rank(rank, world_size, store):
    texts = []
    with join(rank, world_size, store, "aabb") as comm:
        for call in (
            lambda: comm.reduce_scatter(torch.empty(3), torch.empty(11)),
            lambda: comm.reduce_scatter(torch.empty(3), torch.empty(12).double()),
            lambda: comm.reduce_scatter(torch.empty(1).expand(3), torch.empty(12)),
            lambda: comm.all_gather(torch.empty(11), torch.empty(3)),
            lambda: comm.all_gather(torch.empty(12), "x"),
            lambda: comm.set_timeout(0),
        ):
            with pytest.raises(pr.ArgumentError) as error:
                call()
            texts.append(str(error.value))
        assert comm.timeout_s == 20.0
        comm.set_timeout(15)
        assert comm.timeout_s == 15.0
        comm.check_peers(range(world_size))
        comm.barrier()  # nobody was told
        texts.append([member.rank for member in comm.members])
    with pytest.raises(pr.RingarError, match="closed"):
        comm.reduce_scatter(torch.empty(1), torch.empty(4))
    return texts


def test_wrong_arguments_are_named(pool):
    words = [
        "reduce_scatter: input has 11 elements of torch.float32 and output 3",
        "reduce_scatter: input has 12 elements of torch.float64",
        "output of shape (3,) overlaps itself",
        "all_gather: input has 3 elements of torch.float32 and output 11",
        "input is a str, expected a tensor",
        "timeout is 0",
    ]
    for *texts, ranks in pool.check(refused_as_rank):
        for text, word in zip(texts, words, strict=True):
            assert word in text
        assert ranks == [0, 1, 2, 3]


# -- while others wait -----------------------------------------------------------------------------


class SlowWire:
    """An inter over which 4,000 bytes take 0.3 s."""

    def __init__(self, inner: SocketInter) -> None:
        self._inner = inner

    def exchange(self, sent, received):
        arrived = self._inner.exchange(sent, received)
        nbytes = sum(tensor.numel() * tensor.itemsize for _, tensor in received)

        def arrive() -> None:
            time.sleep(0.3 * nbytes / 4000)
            arrived()

        return arrive

    def __getattr__(self, name):
        return getattr(self._inner, name)


def slowly_as_rank(rank, world_size, store):
    inter = SlowWire(SocketInter(store, rank, [(rank + 2) % 4], 1.0))
    with join(rank, world_size, store, "aabb", inter=inter, timeout=1.0) as comm:
        tensor = values(5000, torch.float32, rank)
        comm.broadcast(tensor, 0)
        return tensor


def test_a_broadcast_that_takes_longer_than_the_timeout_is_seen_to_go_on(pool):
    for got in pool.check(slowly_as_rank):
        assert oracle.same_bits(got, values(5000, torch.float32, 0))


def left_as_rank(rank, world_size, store):
    """Rank 0 meets that machine b is gone, and leaves rank 1, which waits for it inside."""
    comm = join(rank, world_size, store, "aabb")
    comm.barrier()
    if rank >= 2:
        comm.close()
        store.set(f"left {rank}", "")
        return None
    store.wait(["left 2", "left 3"])
    links = comm._links
    if rank == 1:
        links._different_here("this")
    waits = [
        lambda: links.compare("this")(),
        lambda: links.share_inside(torch.empty(2), torch.ones(1)),
    ]
    with pytest.raises(pr.PeerLostError) as error:
        waits[rank]()
    comm._break_off(error.value)
    comm.close()
    return str(error.value)


def test_who_waits_inside_is_told_of_a_machine_that_is_gone(pool):
    for text in pool.check(left_as_rank)[:2]:
        assert "has ranks [2, 3]" in text, text


def stood_still_as_rank(rank, world_size, store):
    """Machine b is late; rank 0 meets that, and leaves rank 1, which waits for it inside."""
    comm = join(rank, world_size, store, "aabb")
    comm.barrier()
    if rank >= 2:
        store.wait(["told"])
        comm.abort()
        return None
    links = comm._links
    if rank == 1:
        links._different_here("this")
        call = partial(links.share_inside, torch.empty(2), torch.ones(1))
    else:
        comm.set_timeout(0.3)
        call = links.compare("this")
    with pytest.raises((pr.PeerLostError, pr.CollectiveTimeout)) as error:
        call()
    comm._break_off(error.value)
    comm.close()
    if rank == 1:
        store.set("told", "")
    return str(error.value)


def test_who_waits_inside_is_told_why_another_rank_has_left(pool):
    late, told = pool.check(stood_still_as_rank)[:2]
    assert "timed out: nothing came or went in 0.3 s" in late
    assert "has left the group: this over 2 machines: rank 0 waited for ranks [2]" in told, told
    assert "timed out: nothing came or went" in told, told
