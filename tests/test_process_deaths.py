"""Deaths, timeouts and lost stores of process groups, beyond conformance/test_faults.py."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from process_checks import (
    LARGE,
    LATE_S,
    PROMPT_S,
    SMALL,
    assert_all_lost,
    leave_nothing,
    needs_linux,
    open_memories,
    reduce,
    stop_in,
)
from rank_processes import RankGroup, join, new_store

import pyringar as pr

pytestmark = needs_linux


def begin_call(group: RankGroup, victim: int, phase: str, numel: int, function=reduce) -> list[int]:
    group[victim].call(stop_in, phase=phase, seconds=50.0 if phase == "reduce" else 0.8)
    group.start(function, numel=numel)
    time.sleep(0.3)  # until all ranks wait in the call
    return [rank for rank in range(group.world_size) if rank != victim]


def test_late_death_fails_next_call(joined_rank_group):
    """A small call needs only the announcement of a rank, so it survives a later death."""
    group = joined_rank_group(3)
    group.run(reduce)
    others = begin_call(group, 1, "reduce", SMALL)
    group[1].kill()
    assert [outcome.error for outcome in group.outcomes(others)] == [None] * 2
    group.start(reduce, others)
    assert_all_lost(group, others, 1, time.monotonic())


def test_resumed_rank_raises_earlier_timeout(joined_rank_group):
    group = joined_rank_group(3, timeout=1.0)
    group.run(reduce)
    others = begin_call(group, 0, "idle", SMALL)
    group[0].send(signal.SIGSTOP)
    assert [outcome.error for outcome in group.outcomes(others)] == ["CollectiveTimeout"] * 2
    group[0].send(signal.SIGCONT)
    outcome = group[0].outcome()
    if outcome.error is None:  # all data was there: the next call must raise
        group[0].start(reduce)
        outcome = group[0].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert group.name(0) in outcome.text
    group.run(leave_nothing)
    group.join()
    group.run(reduce, numel=LARGE)


def reduce_and_leave(state, **arguments) -> None:
    try:
        reduce(state, **arguments)
    finally:
        state.comm.close()


def test_error_names_dead_rank_only(joined_rank_group):
    """The first survivor closes at once; later errors must still name the dead rank."""
    group = joined_rank_group(4)
    others = begin_call(group, 1, "reduce", LARGE, reduce_and_leave)
    assert_all_lost(group, others, 1, group[1].kill())


def test_absent_rank_times_out(new_rank_group):
    group = new_rank_group(3)
    group.start_group([0, 2], world_size=3, timeout=1.0)
    for outcome in group.outcomes([0, 2]):
        assert outcome.error == "CollectiveTimeout", outcome
        assert "ranks [1] to join" in outcome.text
        assert "of 3 ranks" in outcome.text
        assert 0.9 < outcome.seconds < 1.0 + LATE_S
    assert group.run(open_memories, [0, 2]) == [[], []]
    group.join([0, 2])
    group.run(reduce, [0, 2])


def join_without_room(state, limit: int, **options) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        join(state, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_segment_without_room_raises(new_rank_group):
    group = new_rank_group(3)
    name = group.start_group([0], join_without_room, world_size=3, limit=100_000)
    group.start_group([1, 2], world_size=3, name=name)
    for rank, outcome in enumerate(group.outcomes()):
        assert outcome.error == "RingarError", outcome
        assert "bytes of shared memory for a group of processes: File too large" in outcome.text
        assert rank == 0 or group.name(0) in outcome.text, outcome.text
        assert outcome.seconds < 5, "they waited for a deadline"
    group.run(leave_nothing)
    group.join()
    group.run(reduce)


def serve(state) -> int:
    state.server = new_store()
    return state.server.port


@pytest.mark.parametrize("event", ["killed", "stopped"])
def test_store_failure_while_joining_raises(new_rank_group, event):
    group = new_rank_group(3)
    group.port = group[0].call(serve)
    group.start_group([1, 2], world_size=3, timeout=2.0 if event == "stopped" else 30.0)
    time.sleep(0.5)
    ended_at = time.monotonic()
    group[0].send(signal.SIGKILL if event == "killed" else signal.SIGSTOP)
    for outcome in group.outcomes([1, 2], 20):
        assert "store" in outcome.text, outcome
        if event == "killed":
            assert outcome.error == "PeerLostError", outcome
            assert outcome.at - ended_at < PROMPT_S
        else:
            assert outcome.error in ("CollectiveTimeout", "PeerLostError"), outcome
            assert outcome.seconds < 2.0 + LATE_S


def test_group_survives_store_death(new_rank_group):
    group = new_rank_group(3)
    group.port = group[0].call(serve)
    group.join([1, 2])
    group[0].kill()
    group.run(reduce, [1, 2], numel=LARGE)
    group.start_group({1: 0, 2: 1})
    for outcome in group.outcomes([1, 2]):
        assert outcome.error == "PeerLostError", outcome
    group.run(reduce, [1, 2])


def used_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run_out_of_memory(state) -> list[str]:
    """Limit the memory of rank 0 during a call that packs its tensor."""
    shape = (8, 4, 1024, 512)  # so large that malloc maps new memory
    tensors = [torch.full(shape, float(10 * i + state.rank)) for i in range(2)]
    if state.rank == 0:
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
    state.comm.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if state.rank == 0:
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + (1 << 20), hard))
    found = []
    for tensor in tensors:
        try:
            state.comm.all_reduce(tensor)
            found.append(f"sum {tensor.flatten()[0].item():g}")
        except (MemoryError, pr.RingarError) as error:
            found.append(f"{type(error).__name__} {error}")
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return found


def test_rank_without_memory_is_named(joined_rank_group):
    group = joined_rank_group(2)
    first, second = group.run(run_out_of_memory)
    assert first[0].startswith("MemoryError"), first
    assert second[0].startswith("RingarError rank 0 (process "), second
    assert "failed before" in first[1]
    assert "failed before" in second[1]
