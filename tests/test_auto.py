"""Does `auto` take what its table says, by place, order and size?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyringar as pr
from pyringar.comm import communicator
from pyringar.comm.auto import RING_FROM_BYTES, choose, depends_on_size
from pyringar.comm.topology import Topology
from pyringar.engine import load

PLACES = ("host", "gpu", "gpus", "mixed", "processes")


@pytest.mark.parametrize(
    ("devices", "place"),
    [
        (["cpu", "cpu"], "host"),
        (["cuda:0", "cuda:0"], "gpu"),
        (["cuda:0", "cuda:1"], "gpus"),
        (["cpu", "cuda:0"], "mixed"),
    ],
)
def test_places(devices, place):
    assert Topology.of([torch.device(d) for d in devices]).place == place


def test_the_table_is_what_documents_say():
    taken = {"host": "fused", "gpu": "fused", "gpus": "direct", "mixed": "direct"}
    taken["processes"] = "direct"
    for place in PLACES:
        for order in ("any", "rank"):
            assert choose(place, order, RING_FROM_BYTES - 1)[0] == taken[place]
            is_ring = (place, order) == ("gpus", "any")
            assert choose(place, order, 2**63)[0] == ("ring" if is_ring else taken[place])
            assert depends_on_size(place, order) is is_ring
    assert choose("gpus", "any", RING_FROM_BYTES)[0] == "ring"


@pytest.mark.parametrize("given", [("moon", "any"), ("host", "best")])
def test_unknown_places_and_orders_are_refused(given):
    with pytest.raises(pr.ArgumentError, match=f"place is '{given[0]}' and order '{given[1]}'"):
        choose(*given, 0)


def test_a_plan_says_what_is_taken_and_why(make_comm):
    plan = make_comm(4).plan(4000)
    assert (plan.algorithm, plan.reason) == choose("host", "any", 4000)


class Group:
    """What stands in for an engine between GPUs: notes what it was told to run."""

    def __init__(self):
        self.taken = []

    def bind(self, tensors, op, algorithm):
        self.taken.append(algorithm)

    def __getattr__(self, name):
        return lambda *arguments: self.taken.append(
            next(a for a in arguments if a in ("direct", "ring", "fused"))
        )

    def close(self):
        return True


@pytest.fixture
def between_gpus(monkeypatch):
    """A communicator that believes its two ranks to be on two GPUs."""
    monkeypatch.setattr(Topology, "place", "gpus")
    monkeypatch.setattr(communicator, "_make_group", lambda devices, timeout: Group())
    with pr.Communicator(["cpu"] * 2) as comm:
        yield comm


@pytest.mark.parametrize("order", ["any", "rank"])
def test_between_gpus_the_bytes_of_one_rank_decide(between_gpus, order):
    comm, half = between_gpus, RING_FROM_BYTES // 8
    for extra in (-1, 0):
        numel = 2 * half + extra
        whole = [torch.zeros(numel) for _ in range(2)]
        comm.all_reduce(whole, order=order)
        comm.all_reduce_coalesced([[torch.zeros(half), torch.zeros(half + extra)]] * 2, order=order)
        comm.bind(whole, order=order)
        comm.all_reduce([np.zeros(numel, np.float32)] * 2, order=order)
    taken = comm._group.taken
    assert taken == ["direct"] * 4 + ["ring" if order == "any" else "direct"] * 4


def test_between_gpus_the_other_collectives_count_a_whole_buffer(between_gpus):
    comm = between_gpus
    for numel in (RING_FROM_BYTES // 4 - 2, RING_FROM_BYTES // 4):
        whole, half = ([torch.zeros(n) for _ in range(2)] for n in (numel, numel // 2))
        comm.reduce_scatter(half, whole)
        comm.all_gather(whole, half)
    assert comm._group.taken == ["direct", "direct", "ring", "ring"]


@pytest.mark.parametrize("bad", [None, [], 7, [None], {}, "ab", [torch.ones(2).to_sparse()]])
def test_what_is_no_data_is_the_engines_to_refuse(between_gpus, bad):
    between_gpus.all_reduce(bad)
    assert between_gpus._group.taken == ["direct"]


@pytest.mark.parametrize("algorithm", ["auto", ("fused", 5, "ring"), ["fused"], 3])
def test_the_engine_knows_names_only(algorithm):
    group = load.engine().Group(2, 5.0)
    tensors = [torch.ones(3) for _ in range(2)]
    with pytest.raises(pr.ArgumentError, match="expected one of fused, direct, ring"):
        group.all_reduce(tensors, "sum", algorithm, None)
    assert all((t == 1).all() for t in tensors)
    group.close()
