"""Faults: an event ends or delays one rank, the victim, and all other ranks must raise."""

import functools
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from oracle import assert_bits, inputs, reduced, same_bits
from process_checks import (
    LARGE,
    LATE_S,
    PROMPT_S,
    SMALL,
    leave_nothing,
    named_shared_memory,
    open_memories,
)
from promises import BODIES
from rank_processes import RankGroup
from running import CallOutcome, outcome_of
from transports import TRANSPORTS, LaunchTransport, TorchCalls

import pyringar as pr

TIMEOUT_S = 1.0
LONG_S = 20.0  # timeout of faults that ranks must detect at once

# Each row: the event on the victim, and the error that the other ranks must raise.
EVENTS = {
    "kill": "PeerLostError",
    "exit": "PeerLostError",  # os._exit(), without cleanup
    "exception": "PeerLostError",  # the program raises an uncaught exception
    "leave": "PeerLostError",  # the victim closes its communicator
    "stop": "CollectiveTimeout",
    "late": "CollectiveTimeout",
}
# Points inside a call where the engine can wait.
ENGINE_PHASES = ("idle", "announce", "reduce", "gather")
PHASES = ("first", "before", "after", "among", *ENGINE_PHASES)


@dataclass(frozen=True)
class Fault:
    """One test case: ``event`` happens on rank ``victim`` of ``k`` ranks.

    Attributes:
        phase: When the event happens: before the "first" call, "before" the failing call, "after" a
            complete call, "among" many calls, or at a point inside a call.
        numel: Elements of the call: `SMALL` for one wait, `LARGE` for several pieces.
    """

    transport: str
    k: int
    victim: int
    phase: str
    event: str
    numel: int

    def __str__(self) -> str:
        size = "-large" if self.numel == LARGE else ""
        place = f"rank {self.victim} of {self.k}"
        return f"{self.transport}-{place}-{self.event}-{self.phase}{size}"

    @property
    def is_prompt(self) -> bool:
        return EVENTS[self.event] == "PeerLostError"

    @property
    def timeout_s(self) -> float:
        return LONG_S if self.is_prompt else TIMEOUT_S

    @property
    def is_plain(self) -> bool:
        """Return whether pytest tests this fault by default. Other faults are marked slow."""
        is_first_group = (self.k, self.victim) == (3, 1)
        if self.phase in ENGINE_PHASES:
            return is_first_group and (self.event == "kill" or self.phase == "idle")
        if self.phase == "before":
            return is_first_group
        is_of_machines = self.transport == "machines" and self.k == 3
        return self.event == "kill" and (is_first_group or is_of_machines)


def all_faults() -> Iterator[Fault]:
    for name in ("processes", "launch", "backend", "machines"):
        events = [*EVENTS] if name != "launch" else ["exception", "leave", "late"]
        groups = [(3, 1), (2, 0), (4, 3)] + ([(3, 2), (4, 1)] if name == "machines" else [])
        for (k, victim), phase, event in itertools.product(groups, PHASES, events):
            is_in_engine = phase in ENGINE_PHASES
            if is_in_engine and (name != "processes" or event not in ("kill", "stop")):
                continue
            if phase == "among" and event not in ("kill", "stop", "exit"):
                continue
            if (name, phase, event) == ("launch", "first", "exception"):
                continue  # other ranks do not start after the exception
            # A small call waits once, for announcements of complete data: skip reduce and gather.
            if phase not in ("reduce", "gather"):
                yield Fault(name, k, victim, phase, event, SMALL)
            if is_in_engine:
                yield Fault(name, k, victim, phase, event, LARGE)


class ProgramError(Exception):
    """Exception that the program of the victim raises."""


def strike_own(state: SimpleNamespace, event: str) -> None:
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif event == "exit":
        os._exit(3)
    elif event == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif event == "exception":
        state.ends = True
        raise ProgramError
    elif event == "leave":
        if hasattr(state.comm, "close"):
            state.comm.close()
        elif not state.is_thread:
            dist.destroy_process_group()
    else:
        if state.is_thread:  # store calls let other ranks run until they wait
            for _ in range(20):
                dist.distributed_c10d._get_default_store().check(["never"])
        is_over = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < is_over:
            time.sleep(0.01)


def suffer(state: SimpleNamespace, fault: Fault) -> CallOutcome | None:
    """Call all_reduce until it raises; return its outcome, or None after an event on the victim."""
    state.is_thread = fault.transport == "launch"
    is_victim = state.rank == fault.victim
    parts = inputs(fault.numel, torch.float32, state.world_size, seed=3)
    wanted = reduced(parts, "sum")
    mine = parts[state.rank].clone()

    def reduce(count: int = 1) -> None:
        for number in range(count):
            mine.copy_(parts[state.rank])
            if (state.rank + number) % 3 == 0:  # the same call as async work
                state.comm.all_reduce(mine, async_op=True).wait()
            else:
                state.comm.all_reduce(mine)
            if fault.transport != "machines":  # the order of additions differs
                assert_bits(mine, wanted)

    reduce(0 if fault.phase == "first" else 2)
    if is_victim and fault.phase in ENGINE_PHASES:
        state.comm._group.delay(fault.phase, 50.0)
    if is_victim and fault.phase in ("among", *ENGINE_PHASES):
        threading.Timer(0.3, strike_own, (state, fault.event)).start()
    elif is_victim:
        if fault.phase == "after":
            reduce()
        strike_own(state, fault.event)
        return None
    told = outcome_of(lambda: reduce(10**6))
    if is_victim:
        return told
    told.is_untouched = same_bits(mine, parts[state.rank])
    told.again = outcome_of(lambda: state.comm.all_reduce(torch.ones(3))).error
    return told


def strike(fault: Fault) -> tuple[list[CallOutcome | None], str]:
    """Run the fault; return the outcome of each rank, and a regex for the name of the victim."""
    name = rf"\branks? \[?{fault.victim}\b"
    if fault.transport == "machines" and not fault.is_prompt:
        name += rf"|has ranks \[[\d, ]*\b{fault.victim}\b"  # names the machine of the victim
    if TRANSPORTS[fault.transport] is LaunchTransport:
        return strike_threads(fault), name
    with RankGroup(fault.k) as group:
        options = {"function": TRANSPORTS[fault.transport].join, "timeout": fault.timeout_s}
        group.join(**options)
        group.start(suffer, fault=fault)
        others = [rank for rank in range(fault.k) if rank != fault.victim]
        told: list[CallOutcome | None] = [None] * fault.k
        for rank, value in zip(others, group.values(others), strict=True):
            told[rank] = value
        if fault.transport != "backend":
            group.run(leave_nothing, others)
        if fault.transport == "processes":
            name = re.escape(group.name(fault.victim))
            group.join(others)  # the same processes can make a new group
            group.run(reduce_again, others)
    assert not named_shared_memory()
    return told, name


def reduce_again(state: SimpleNamespace) -> None:
    parts = inputs(LARGE, torch.float32, state.world_size, seed=4)
    mine = parts[state.rank].clone()
    state.comm.all_reduce(mine)
    assert_bits(mine, reduced(parts, "sum"))
    assert open_memories() == [], "not sealed"
    leave_nothing(state)


def strike_threads(fault: Fault) -> list[CallOutcome | None]:
    told: list[CallOutcome | None] = [None] * fault.k

    def program() -> None:
        dist.init_process_group()
        state = SimpleNamespace(rank=dist.get_rank(), world_size=fault.k)
        state.comm = TorchCalls()
        told[state.rank] = suffer(state, fault)

    run = functools.partial(pr.launch, program, fault.k, timeout=fault.timeout_s)
    try:
        raised = outcome_of(run)
    except ProgramError:
        assert fault.event == "exception", "launch raises the exception itself"
    else:
        raised.again = raised.error
        # launch interrupted the ranks without an outcome: use the error of launch.
        told = [raised if each is None else each for each in told]
    assert pr.launch(lambda: 1, fault.k) == [1] * fault.k, "the process is as before"
    return told


CASES = [
    pytest.param(fault, id=str(fault), marks=[] if fault.is_plain else pytest.mark.slow)
    for fault in all_faults()
]
for row in ("dead", "deadline", "failed", "exit"):
    BODIES[row].append(__name__)


@pytest.mark.parametrize("fault", CASES)
def test_fault_raises_on_other_ranks(fault):
    """Run a fault and compare the errors of the other ranks with the table."""
    told, name = strike(fault)
    for rank, each in enumerate(told):
        if rank == fault.victim:
            continue
        assert each is not None, f"rank {rank} raised no error"
        assert each.error == EVENTS[fault.event], each
        assert re.search(name, each.text), f"{name} is not in {each.text}"
        if (fault.transport, fault.event) != ("launch", "exception"):  # names the exception instead
            assert re.search(rf"all_reduce .*\b{fault.numel}\b", each.text), each.text
        if fault.transport == "processes":
            last = "nothing yet" if fault.phase == "first" else r"its last was call \d+, all_reduce"
            assert re.search(last, each.text), each.text
            if not fault.is_prompt:
                heard = "" if fault.phase == "first" else r", last heard of [\d.]+ s ago"
                assert re.search(rf"for {TIMEOUT_S:g} s; .*{heard}", each.text), each.text
        assert each.again == each.error, f"rank {rank} can continue after {each}"
        if fault.is_prompt:
            assert each.seconds < PROMPT_S + 0.3, each
        else:
            assert TIMEOUT_S - 0.3 < each.seconds < TIMEOUT_S + LATE_S, each
        if fault.phase in ("first", "before", "idle", "announce"):
            assert each.is_untouched, each
