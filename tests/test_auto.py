"""Does `auto` take what its table says, by place, order and size?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyringar as pr
from pyringar.comm import communicator
from pyringar.comm.auto import choose
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
    assert {place: choose(place)[0] for place in PLACES} == taken


def test_unknown_places_are_refused():
    with pytest.raises(pr.ArgumentError, match="place is 'moon', expected one of host, gpu, gpus"):
        choose("moon")


def test_a_plan_says_what_is_taken_and_why(make_comm):
    plan = make_comm(4).plan(4000)
    assert (plan.algorithm, plan.reason) == choose("host")


class Group:
    """What stands in for an engine between GPUs: notes what it was told to run."""

    def __init__(self):
        self.taken = []

    def bind(self, tensors, op, algorithm, order):
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
    monkeypatch.setattr(communicator, "_make_group", lambda *arguments: Group())
    with pr.Communicator(["cpu"] * 2) as comm:
        yield comm


@pytest.mark.parametrize("order", ["any", "rank"])
def test_between_gpus_every_call_takes_what_lets_no_kernel_wait(between_gpus, order):
    comm = between_gpus
    for numel in (2, 1 << 20):
        whole, half = ([torch.zeros(n) for _ in range(2)] for n in (numel, numel // 2))
        comm.all_reduce(whole, order=order)
        comm.all_reduce_coalesced([half, half], order=order)
        comm.bind(whole, order=order)
        comm.reduce_scatter(half, whole)
        comm.all_gather(whole, half)
        comm.all_reduce([np.zeros(numel, np.float32)] * 2, order=order)
    assert comm._group.taken == ["direct"] * 12


@pytest.mark.parametrize("algorithm", ["auto", ("fused", 5, "ring"), ["fused"], 3])
def test_the_engine_knows_names_only(algorithm):
    group = load.engine().Group(2, 5.0)
    tensors = [torch.ones(3) for _ in range(2)]
    with pytest.raises(pr.ArgumentError, match="expected one of fused, direct, ring"):
        group.all_reduce(tensors, "sum", algorithm, "rank", None)
    assert all((t == 1).all() for t in tensors)
    group.close()
