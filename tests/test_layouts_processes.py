"""One rank per process: may each rank's tensors lie as they like, registered ones too?

What runs in the ranks stands here too: functions of a ``state``, see ranks.py.
"""

from __future__ import annotations

import sys

import pytest
import torch
from cases import mostly_slow
from oracle import assert_bits, inputs, reduced

import pyringar as pr

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")

SIZES = (6, 5_000, 200_000)  # one piece, a few, many


def laid(flat: torch.Tensor, how: str) -> torch.Tensor:
    """The same elements, two rows of them, in another place."""
    rows = flat.view(2, -1)
    if how == "transposed":
        return rows.t().contiguous().t()
    if how == "gaps":
        return torch.stack([rows, -rows], 2)[:, :, 0]
    if how == "negated":
        return torch._neg_view(-rows)
    return rows.clone()


KINDS = ("plain", "transposed", "gaps", "negated")


def on_rank_mixed(state, numel: int) -> int:
    """Every mix of two layouts over the ranks, between calls that are not mixed."""
    comm, k, rank = state.comm, state.world_size, state.rank
    parts = inputs(numel, torch.float32, k, seed=4)
    for mine in KINDS:
        for others in KINDS:
            how = mine if rank == 1 or k == 1 else others
            context = f"{mine} beside {others}"
            wanted = reduced(parts, "sum")
            tensor = laid(parts[rank], how)
            comm.all_reduce(tensor)
            assert_bits(tensor.reshape(-1), wanted, context)
            tensor = laid(parts[rank], how)
            comm.all_reduce_coalesced([tensor, torch.ones(3)])
            assert_bits(tensor.reshape(-1), wanted, context)
            tensor = laid(parts[rank], how)
            bound = comm.bind(tensor, "max")
            bound()
            comm.barrier()
            bound()
            work = comm.all_reduce(torch.ones(10), async_op=True)
            comm.broadcast(tensor, k - 1)
            work.wait()
    return numel


@pytest.mark.parametrize("world_size", mostly_slow([1, 2, 3], 2))
def test_mixed_layouts(crew_of, world_size):
    for numel in SIZES:
        crew_of(world_size).run(on_rank_mixed, numel=numel)


def on_rank_broadcast(state) -> None:
    comm, k, rank = state.comm, state.world_size, state.rank
    parts = inputs(600, torch.float64, k, seed=5)
    for shift in range(len(KINDS)):
        for root in range(k):
            tensor = laid(parts[rank], KINDS[(rank + shift) % len(KINDS)])
            comm.broadcast(tensor, root)
            assert_bits(tensor.reshape(-1), parts[root], f"root {root}")


def test_broadcast_into_other_layouts(crew_of):
    crew_of(3).run(on_rank_broadcast)


def on_rank_registered(state) -> dict:
    """Registered tensors at other places, in other strides, on some ranks only: through slots."""
    comm, k, rank = state.comm, state.world_size, state.rank
    for numel in (6, 60_000):
        parts = inputs(numel, torch.float32, k, seed=6)
        wanted = reduced(parts, "sum")
        shared = pr.shared_empty(2 * numel)
        comm.register(shared)
        odd = rank == k - 1
        own = {
            "the same place": shared[:numel],
            "another place": shared[numel:] if odd else shared[:numel],
            "not registered": torch.empty(numel) if odd else shared[:numel],
            "other strides": shared[:numel].view(2, -1).t().reshape(-1) if odd else shared[:numel],
            "gaps": shared[::2] if odd else shared[:numel],
        }
        own["other strides"] = shared[:numel].view(2, -1)
        if odd:
            own["other strides"] = shared[:numel].view(-1, 2).t()
        for name, tensor in own.items():
            tensor.copy_(parts[rank].view(tensor.shape))
            before = comm.stats().get("registered", {}).get("calls", 0)
            comm.all_reduce(tensor)
            used = comm.stats().get("registered", {}).get("calls", 0) - before
            assert used == (name == "the same place"), name
            assert_bits(tensor.reshape(-1), wanted, name)
    return {}


@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_tensors_that_lie_otherwise(crew_of, world_size):
    crew_of(world_size).run(on_rank_registered)


def on_rank_differ_after_mix(state) -> None:
    tensor = torch.arange(600.0).view(20, 30) + state.rank
    state.comm.all_reduce(tensor.t().contiguous().t() if state.rank == 1 else tensor)
    mine = tensor.t() if state.rank == 1 else tensor
    with pytest.raises(pr.ArgumentError, match=r"call different things.*different sizes"):
        state.comm.all_reduce(mine)


def test_other_sizes_are_still_refused(new_crew):
    crew = new_crew(3)
    crew.join()
    crew.run(on_rank_differ_after_mix)
