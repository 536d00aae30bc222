"""plan, stats and guarantee of a group, and the algorithm that ``auto`` selects."""

import pytest
import torch
from oracle import limit_bytes
from pairs import make_pair
from promises import parameters
from rank_processes import another, on_ranks

from pyringar.comm.topology import Topology, choose

MIB, MOST = 2**20, limit_bytes("process_exchange")

GUARANTEES = {
    # Equal bits: run to run, across sizes, across rank counts, across orders of the ranks
    "any": (True, False, False, False),
    "rank": (True, True, False, False),
    "tree": (True, True, True, False),
    "exact": (True, True, False, True),
}


@pytest.mark.parametrize("name", parameters(__name__, "plan"))
@pytest.mark.parametrize("order", GUARANTEES)
def test_guarantee_and_plan_report_order(name, order):
    if (name, order) == ("cuda", "exact"):
        pytest.skip("GPUs have no exact sums")
    with make_pair(name, order=order) as pair:
        comm = pair.comms[0] if name == "processes" else pair
        told = comm.guarantee
        assert comm.plan(100).order == ("rank" if order == "any" else order)
    assert told.order == order
    assert GUARANTEES[order] == (
        told.run_to_run,
        told.across_sizes,
        told.across_rank_counts,
        told.across_orders,
    )


def test_stats_count_calls_of_threads(make_comm):
    comm, lists = make_comm(2, timeout=5), [[torch.ones(1000)], [torch.ones(1000)]]
    firsts = [mine[0] for mine in lists]
    assert comm.stats() == {}
    for algorithm in (None, "ring", "naive"):
        comm.all_reduce(firsts, algorithm=algorithm)
    stats = comm.stats()
    assert stats["fused"] | {"busy_s": 0} == {"calls": 1, "bytes": 4000, "busy_s": 0}
    assert stats["ring"]["busy_s"] > 0
    assert stats["naive"] == {"calls": 1}
    comm.all_reduce_coalesced(lists)
    comm.broadcast_coalesced(lists, 1, async_op=True).wait()
    comm.reduce_coalesced([torch.ones(1000)], lists, async_op=True).wait()
    comm.bind_coalesced([[], []])()
    assert comm.stats()["fused"]["calls"] == 5, "one call for all tensors"
    assert "ranks [0, 1]" in repr(comm)


@on_ranks(3)
def test_stats_count_calls_of_processes(state):
    with another(state) as comm:
        assert comm.stats() == {}
        comm.all_reduce(torch.ones(10))
        comm.all_reduce(torch.ones(100_000))
        comm.barrier()
        ran = {name: [row["calls"], row["bytes"]] for name, row in comm.stats().items()}
    assert ran["direct"] == [1, 400_000]
    assert ran["exchange"][0] >= 2
    return ran


def test_plan_states_steps_and_traffic(make_comm):
    comm = make_comm(3)
    plan = comm.plan(4096)
    assert str(plan).startswith("fused: 0 steps, 24,576 bytes of memory traffic, rank order")
    assert (plan.steps, plan.traffic_bytes, plan.order) == (0, 6 * 4096, "rank")
    ring = make_comm(4, algorithm="ring")
    plan = ring.plan(100)
    assert (plan.steps, plan.order, plan.traffic_bytes) == (6, "ring", 5 * 3 * 100)


def on_rank_plans(state, nbytes, algorithm):
    with another(state, algorithm=algorithm) as comm:
        plan = comm.plan(nbytes)
        comm.all_reduce(torch.ones(nbytes // 4))
        assert [*comm.stats()] == [plan.algorithm], (nbytes, plan)
        return plan.algorithm, plan.steps, plan.traffic_bytes, plan.order


@pytest.mark.parametrize(
    ("world_size", "nbytes", "algorithm", "plan"),
    [
        # The engine splits a call into pieces: 64 KiB with two ranks, 128 KiB with more.
        (1, MIB, "auto", ("exchange", 0, 0, "rank")),
        (2, MIB, "auto", ("exchange", 16, 10 * MIB, "rank")),
        (3, MOST, "auto", ("exchange", 1, 18 * MOST, "rank")),
        (3, MOST + 4, "auto", ("direct", 2, 13 * (MOST + 4), "rank")),
        (3, 2 * MIB, "direct", ("direct", 32, 26 * MIB, "rank")),
    ],
)
def test_process_plan_names_executed_algorithm(rank_group_of, world_size, nbytes, algorithm, plan):
    found = rank_group_of(world_size).agree(on_rank_plans, nbytes=nbytes, algorithm=algorithm)
    assert found == plan


@pytest.mark.parametrize(
    ("devices", "place", "algorithm"),
    [
        (["cpu", "cpu"], "host", "fused"),
        (["cuda:0", "cuda:0"], "gpu", "fused"),
        (["cuda:0", "cuda:1"], "gpus", "direct"),
        (["cpu", "cuda:0"], "mixed", "direct"),
        ([], "processes", "direct"),
    ],
)
def test_auto_algorithm_depends_on_devices(devices, place, algorithm):
    assert not devices or Topology.of([torch.device(d) for d in devices]).place == place
    assert choose(place)[0] == algorithm
