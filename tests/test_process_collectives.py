"""One rank per process: barriers, two groups at once, members, and mixed layouts."""

from __future__ import annotations

import os

import torch
from oracle import assert_bits, inputs, reduced
from process_checks import crc
from ranks import another, on_ranks

# -- groups ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_two_communicators_at_once(state):
    k = state.world_size
    with another(state) as other:
        found = []
        for turn in range(20):
            parts = inputs(1000 * turn, torch.float32, k, seed=turn)
            one, two = parts[state.rank].clone(), parts[state.rank].clone()
            # Not in the same order on all ranks: the one does not wait for the other.
            first = state.comm.all_reduce(one, async_op=True)
            second = other.all_reduce(two, async_op=True)
            for work in (first, second) if state.rank % 2 else (second, first):
                work.wait()
            assert_bits(one, reduced(parts, "sum"))
            assert_bits(two, reduced(parts, "sum"))
            found += [crc(one), crc(two)]
        return found


def on_rank_describe(state) -> list:
    comm = state.comm
    assert comm.rank == state.rank
    assert comm.world_size == state.world_size
    assert [m.rank for m in comm.members] == list(range(state.world_size))
    assert comm.members[state.rank].pid == os.getpid()
    assert f"rank {state.rank} of {state.world_size}" in repr(comm)
    return [m.pid for m in comm.members]


def test_members_plan_and_repr(crew_of):
    crew = crew_of(3)
    assert crew.agree(on_rank_describe) == [rank.pid for rank in crew.ranks]
