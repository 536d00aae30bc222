"""The backend `ringar` on several machines: collectives, groups, training, lost machines."""

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import distributed_cases
import distributed_training
import distributed_works
import oracle
import pytest
import torch
import torch.distributed as dist
from process_checks import error_of
from rank_processes import Died, run_cases, run_group
from test_distributed import check, verdicts

from pyringar.errors import RingarError

# Uneven, interleaved machines: ranks are added in another order than on one machine.
UNEVEN = "aba"
OTHERS = [pytest.param(places, marks=pytest.mark.slow) for places in ("ab", "abb", "abba", "abc")]


@pytest.mark.parametrize("machines", [UNEVEN, *OTHERS])
@pytest.mark.parametrize("case", distributed_cases.CASES)
def test_collectives_have_promised_bits(case, machines):
    check(verdicts("cases", len(machines), machines=machines), case)


@pytest.mark.parametrize("machines", ["abba", *OTHERS[:2]])
@pytest.mark.parametrize("case", distributed_training.CASES)
def test_training_matches_reference(case, machines):
    check(verdicts("training", len(machines), machines=machines), case)


@pytest.mark.parametrize("case", distributed_works.CASES)
def test_work_objects_finish_correctly(case):
    check(verdicts("works", 2, machines="ab"), case)


CHOSEN = [[0, 2], [2, 0], [0, 1], [1, 0], [0, 1, 3], [3, 1, 0, 2], [1, 2, 3], [2], [3, 1]]


def subgroups(rank: int, size: int) -> None:
    made = [dist.new_group(ranks, backend="ringar") for ranks in CHOSEN]
    unsorted = {tuple(r): g for r, g in zip(CHOSEN, made, strict=True) if rank in r}
    for ranks, group in unsorted.items():
        members = dist.get_process_group_ranks(group)
        assert sorted(members) == sorted(ranks)
        place, num = dist.get_rank(group), len(ranks)
        parts = [oracle.random(7 * num, torch.float32, r) for r in members]
        places = "".join(oracle.machines[r] for r in members)
        whole, oracle.machines = oracle.machines, places
        wanted = oracle.reduced(parts, "sum")
        oracle.machines = whole
        mine = parts[place].clone()
        dist.all_reduce(mine, group=group)
        oracle.assert_bits(mine, wanted, ranks)
        output = torch.empty(7)
        dist.reduce_scatter_tensor(output, parts[place], group=group)
        oracle.assert_bits(output, wanted[7 * place : 7 * place + 7], ranks)
        gathered = torch.empty(num * 7 * num)
        dist.all_gather_into_tensor(gathered, parts[place], group=group)
        oracle.assert_bits(gathered, torch.cat(parts), ranks)
        dist.broadcast(mine, members[-1], group=group)
        exchanged = torch.empty(num)
        dist.all_to_all_single(exchanged, torch.full((num,), float(rank)), group=group)
        assert exchanged.tolist() == [float(r) for r in members]
        dist.barrier(group)
    for group in unsorted.values():
        dist.destroy_process_group(group)
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last.item() == size


@pytest.mark.parametrize("machines", ["aabb", pytest.param("abac", marks=pytest.mark.slow)])
def test_subgroups_hold_any_ranks(machines):
    check(run_group(run_cases, 4, [("groups", subgroups)], machines=machines), "groups")


def machine_lost(rank: int, size: int, how: str) -> Any:
    dist.all_reduce(torch.ones(3))
    if oracle.machines[rank] == "b":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)
        return None
    calls = {
        "engine": lambda: dist.all_reduce(torch.ones(1000)),
        "gloo": lambda: dist.all_to_all_single(torch.empty(size), torch.ones(size)),
        "message": lambda: dist.recv(torch.empty(1), size - 1),
    }
    return {name: error_of(call) for name, call in calls.items()}


@pytest.mark.parametrize("how", ["killed", pytest.param("late", marks=pytest.mark.slow)])
def test_lost_machine_is_named(how):
    results = run_group(machine_lost, 4, how, machines="aabb", timeout_s=2.0)
    assert how != "killed" or results[2:] == [Died(-9)] * 2
    for rank, found in enumerate(results[:2]):
        assert isinstance(found, dict), found
        kind, _, text, seconds = found["engine"]
        assert kind == ("PeerLostError" if how == "killed" else "CollectiveTimeout"), text
        assert seconds < 5, text
        assert "machine 1" in text, text
        assert "has ranks [2, 3]" in text, text
        # The error names this rank, or the other rank of its machine if that rank failed first.
        other = rf"rank {1 - rank}(:| \(process| waited for)"
        assert re.search(rf"rank {rank} |{other}", text), text
        for name in ("gloo", "message"):
            assert found[name][0] in ("PeerLostError", "CollectiveTimeout", "RingarError"), found
            assert found[name][3] < 10, (name, found[name])


def subgroup_failures(rank: int, size: int, members: list[int]) -> list[str]:
    """Return the error of calls that differ, then of a call that the last member does not make."""
    texts = []
    last = members[-1]
    for case in ("different", "late"):
        group = dist.new_group(members)
        if case == "late" and rank in members:
            group.set_timeout(timedelta(seconds=1))
        try:
            if case == "different" and rank == last:
                dist.broadcast(torch.ones(2), last, group=group)
            elif rank in members and rank != last:
                dist.all_reduce(torch.ones(2), group=group)
        except RingarError as error:
            texts.append(str(error))
    dist.barrier()
    return texts


@pytest.mark.parametrize(
    ("machines", "members"),
    [
        ("aaaa", [1, 3]),
        ("aabb", [1, 2, 3]),
        pytest.param("abab", [3, 2, 1], marks=pytest.mark.slow),
    ],
)
def test_subgroup_errors_use_global_ranks(machines, members):
    results = run_group(subgroup_failures, 4, members, machines=machines)
    last = members[-1]
    for rank in members:
        different, *late = results[rank]
        calls = re.findall(r"rank (\d) \(process \d+ on \S+\) (?:call \d+, )?([\w ]+)", different)
        broadcasts = [(int(r), call) for r, call in calls if call.startswith("broadcast")]
        assert [(r, call[:24]) for r, call in broadcasts] == [
            (last, f"broadcast from rank {last} of")
        ], different
        assert [int(r) in members[:-1] for r, call in calls if "all_reduce" in call] == [True]
        assert len(late) == (rank != last)
        for text in late:
            late_rank = rf"rank {last} \(process"
            late_machine = rf"ranks \[\d\] of the other machines .* has ranks \[.*{last}.*\]"
            assert re.search(f"waited for ({late_rank}|{late_machine})", text), text


def other_subgroup_failures(rank: int, size: int) -> list[str]:
    """Return the error of reduce beside all_reduce, then of a late call of gloo, in group 1, 3."""
    texts = []
    for case in ("reduce", "gloo"):
        group = dist.new_group([1, 3])
        if case == "gloo" and rank in (1, 3):
            group.set_timeout(timedelta(seconds=1))
        try:
            if case == "reduce" and rank == 3:
                dist.reduce(torch.ones(2), 3, group=group)
            elif case == "reduce" and rank == 1:
                dist.all_reduce(torch.ones(2), group=group)
            elif rank == 1:
                dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group)
        except RingarError as error:
            texts.append(str(error))
    dist.barrier()
    return texts


def test_reduce_and_gloo_errors_use_global_ranks():
    _, first, _, third = run_group(other_subgroup_failures, 4)
    for different in (first[0], third[0]):
        assert "reduce (sum) to rank 3 of 2 float32 elements" in different, different
    assert "rank 1 waited for ranks [3]" in first[1], first
