"""Checks for tests with one rank per process."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import assert_bits, inputs, reduced
from rank_processes import RankGroup

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")

# The longest delay that other programs on this machine may cause.
BUSY_S = 1.0
# Survivors raise within PROMPT_S after a death, and within LATE_S after a timeout expires.
PROMPT_S = 1.0 + BUSY_S
LATE_S = 0.5 + BUSY_S
LARGE = 200_000  # elements: several pieces, and a rank waits twice per piece
SMALL = 100  # elements: a rank waits once


def least_growth(free: Sequence[int]) -> int:
    """Return the least growth of used memory between samples of free memory, in bytes.

    A leak grows between any two samples; the memory of other processes also shrinks.
    """
    return min(before - after for before, after in itertools.pairwise(free))


@functools.cache
def parts_of(numel: int, world_size: int) -> list[torch.Tensor]:
    return inputs(numel, torch.float32, world_size, seed=3)


def reduce(state, numel: int = SMALL, calls: int = 1) -> None:
    parts = parts_of(numel, state.world_size)
    for _ in range(calls):
        state.tensor = parts[state.rank].clone()
        state.before = state.tensor.clone()
        state.comm.all_reduce(state.tensor)
        assert_bits(state.tensor, reduced(parts, "sum"))


def open_memories(state=None) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in found if "memfd:pyringar" in link]


def mapped_memories(state=None) -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.strip() for line in maps if "memfd:pyringar" in line]


def named_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "ringar" in name}


def leave_nothing(state) -> None:
    if hasattr(state, "comm"):
        state.comm.close()
        del state.comm
    gc.collect()
    assert open_memories() + mapped_memories() == []


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def settled(read: Callable[[], Any], want: object) -> Any:
    """Poll ``read`` until it returns ``want``, at most 5 s; return its value."""
    deadline = time.monotonic() + 5
    while (value := read()) != want and time.monotonic() < deadline:
        time.sleep(0.01)
    return value


def error_of(call: Callable[[], object]) -> tuple[str, list[str], str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        return names[0], names, str(error), time.monotonic() - began
    return "none", [], "", time.monotonic() - began


def stop_in(state, phase: str, seconds: float = 50.0) -> None:
    """Delay this rank in ``phase`` of its next call."""
    state.comm._group.delay(phase, seconds)


def assert_all_lost(
    group: RankGroup,
    survivors: Sequence[int],
    dead: int,
    died_at: float,
    within_s: float = PROMPT_S,
) -> None:
    for outcome in group.outcomes(survivors):
        assert outcome.error == "PeerLostError", outcome
        assert group.name(dead) in outcome.text, outcome.text
        assert outcome.at - died_at < within_s, f"{outcome.at - died_at:.2f} s"
