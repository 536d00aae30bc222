"""One rank per process: ranks that die, stop, differ, stay away or lie, at every moment.

The right error on every survivor, with the right names, in time; the group refuses from then on,
the same processes can make a new one, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random as python_random
import re
import resource
import signal
import sys
import time

import pytest
import torch
from oracle import assert_bits, inputs, reduced, same_bits
from ranks import Crew, Outcome, fork_server, join, new_name, value_of

import pyringar as pr
from pyringar.engine import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")

# Survivors hear of a death within this, and of a deadline not later than this after it.
DEATH_S = 1.0
LATE_S = 0.5
# What other programs on this machine may take of either, at worst; seldom.
BUSY_S = 1.0
LARGE = 200_000  # elements: two waits per piece, several pieces
SMALL = 100  # one wait


# -- what ranks do ---------------------------------------------------------------------------------


@functools.cache
def parts_of(numel: int, world_size: int) -> list[torch.Tensor]:
    return inputs(numel, torch.float32, world_size, seed=3)


def warm_up() -> None:
    """In the nursery, for all ranks."""
    for world_size in range(1, 5):
        for numel in (SMALL, LARGE):
            parts_of(numel, world_size)


def prepare(state, numel: int) -> None:
    """So that the next `reduce` calls at once."""
    parts_of(numel, state.world_size)


def reduce(state, numel: int = SMALL, algorithm: str | None = None, calls: int = 1) -> None:
    """All-reduces, compared with the oracle."""
    parts = parts_of(numel, state.world_size)
    for _ in range(calls):
        state.tensor = parts[state.rank].clone()
        state.before = state.tensor.clone()
        state.comm.all_reduce(state.tensor, algorithm=algorithm)
        if algorithm != "ring":
            assert_bits(state.tensor, reduced(parts, "sum"))


def register(state) -> None:
    state.shared = pr.shared_empty(LARGE)
    state.comm.register(state.shared)


def reduce_registered(state) -> None:
    state.shared.fill_(1.0)
    state.comm.all_reduce(state.shared)
    assert torch.equal(state.shared, torch.full((LARGE,), float(state.world_size)))


def forget_registered(state) -> None:
    del state.shared


def stop_in(state, phase: str, seconds: float = 50.0) -> None:
    """Stay in this phase of the next call, to be killed or stopped there."""
    state.comm._group.delay(phase, seconds)


def tensor_is_untouched(state) -> bool:
    return same_bits(state.tensor, state.before)


def pause(state, seconds: float) -> None:
    time.sleep(seconds)


def refuse(state, words: str, error: str = "RingarError") -> None:
    """Every call ends at once with the reason, and changes nothing."""
    tensor = torch.ones(4)
    comm = state.comm
    calls = (
        lambda: comm.all_reduce(tensor),
        lambda: comm.all_reduce(tensor, algorithm="ring"),
        lambda: comm.barrier(),
        lambda: comm.all_reduce(tensor, async_op=True).wait(),
        lambda: comm.broadcast(tensor),
    )
    start = time.monotonic()
    for call in calls:
        with pytest.raises(getattr(pr, error), match=re.escape(words)):
            call()
    assert time.monotonic() - start < 1
    assert torch.equal(tensor, torch.ones(4))


def holds_nothing(state) -> list[str]:
    """Close, and say what of the group is still open or mapped: descriptors, memory."""
    if hasattr(state, "comm"):
        state.comm.close()
        del state.comm
    gc.collect()
    return open_memories() + mapped_memories()


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
    """What has a name; other programs' files come and go, ours would say so."""
    return {name for name in os.listdir("/dev/shm") if "ringar" in name}


# -- what is said of it ----------------------------------------------------------------------------


def names_rank(text: str, rank: int, crew: Crew) -> bool:
    """Rank, process and host."""
    return f"rank {rank} (process {crew[rank].pid} on {os.uname().nodename})" in text


def assert_lost(outcome: Outcome, dead: int, crew: Crew, died_at: float) -> None:
    assert outcome.error == "PeerLostError", outcome
    assert names_rank(outcome.text, dead, crew), outcome.text
    assert outcome.at - died_at < DEATH_S + BUSY_S, f"{outcome.at - died_at:.2f} s"


def assert_survivors_go_on(crew: Crew, survivors: list[int], error: str = "PeerLostError") -> None:
    """The failed group refuses; a new one of the survivors works; the old one holds nothing."""
    crew.run(refuse, survivors, words="failed before and cannot be used", error=error)
    assert crew.run(holds_nothing, survivors) == [[]] * len(survivors)
    crew.join(survivors)
    crew.run(reduce, survivors, numel=LARGE)
    crew.run(reduce, survivors, algorithm="ring")
    assert crew.run(open_memories, survivors) == [[]] * len(survivors), "not sealed"
    assert crew.run(holds_nothing, survivors) == [[]] * len(survivors)
    assert not named_shared_memory()


# -- SIGKILL ---------------------------------------------------------------------------------------

PHASES = {
    "idle": SMALL,
    "announce": SMALL,
    "reduce": SMALL,
    "announce of many pieces": LARGE,
    "reduce of many pieces": LARGE,
    "gather of many pieces": LARGE,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "dead"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_killed(new_crew, world_size, dead, phase):
    crew = new_crew(world_size)
    crew.join()
    crew.run(reduce, calls=2)
    crew.run(prepare, numel=PHASES[phase])
    survivors = [rank for rank in range(world_size) if rank != dead]
    crew[dead].call(stop_in, phase=phase.split()[0])
    crew.start(reduce, numel=PHASES[phase])
    time.sleep(0.2)  # all are in the call, and where they wait
    died_at = crew[dead].kill()
    for outcome in crew.outcomes(survivors):
        if phase == "reduce":  # of one wait: the dead had announced, so that nothing is missing
            assert outcome.error is None, outcome
        else:
            assert_lost(outcome, dead, crew, died_at)
            assert "all_reduce (sum) of" in outcome.text
            assert f"{PHASES[phase]} float32 elements" in outcome.text
            last = 2 if phase == "idle" else 3
            assert f"its last was call {last}, all_reduce" in outcome.text, outcome.text
    if phase == "reduce":
        crew.start(reduce, survivors)
        for outcome in crew.outcomes(survivors):
            assert_lost(outcome, dead, crew, outcome.at - outcome.seconds)
    elif phase.split()[0] in ("idle", "announce"):
        assert all(crew.run(tensor_is_untouched, survivors))
    assert_survivors_go_on(crew, survivors)


@pytest.mark.parametrize("phase", ["announce", "reduce"])
@pytest.mark.parametrize("dead", [0, 2])
def test_killed_in_a_ring(new_crew, phase, dead):
    crew = new_crew(3)
    crew.join()
    crew.run(reduce, algorithm="ring", numel=LARGE)
    survivors = [rank for rank in range(3) if rank != dead]
    crew[dead].call(stop_in, phase=phase)
    crew.start(reduce, algorithm="ring", numel=LARGE)
    time.sleep(0.2)
    died_at = crew[dead].kill()
    for outcome in crew.outcomes(survivors):
        assert_lost(outcome, dead, crew, died_at)
    assert_survivors_go_on(crew, survivors)


@pytest.mark.parametrize("phase", ["idle", "announce", "reduce"])
def test_killed_while_tensors_are_registered(new_crew, phase):
    crew = new_crew(3)
    crew.join()
    crew.run(register)
    crew.run(reduce_registered)
    crew[1].call(stop_in, phase=phase)
    crew.start(reduce_registered)
    time.sleep(0.3)
    died_at = crew[1].kill()
    for outcome in crew.outcomes([0, 2]):
        assert_lost(outcome, 1, crew, died_at)
        assert "registered" in outcome.text
    crew.run(forget_registered, [0, 2])
    assert_survivors_go_on(crew, [0, 2])


def reduce_or_leave(state, **arguments) -> None:
    try:
        reduce(state, **arguments)
    finally:
        state.comm.close()


def test_those_who_leave_after_a_death_are_not_blamed(new_crew):
    """The first to hear of it leaves at once; others wait for that one, and hear of the dead."""
    crew = new_crew(4)
    crew.join()
    crew[1].call(stop_in, phase="reduce")
    crew.start(reduce_or_leave, numel=LARGE, algorithm="ring")
    time.sleep(0.2)
    died_at = crew[1].kill()
    for outcome in crew.outcomes([0, 2, 3]):
        assert_lost(outcome, 1, crew, died_at)


def test_a_zombie_is_gone(new_crew):
    """Nobody has waited for the dead process yet: the system still knows it."""
    crew = new_crew(2)
    crew.join()
    crew[0].start(reduce)
    time.sleep(0.2)
    died_at = crew[1].kill(reaped=False)
    assert_lost(crew[0].outcome(), 1, crew, died_at)
    crew[1].reap()


def test_dead_before_the_others_call(new_crew):
    crew = new_crew(3)
    crew.join()
    died_at = crew[2].kill()
    crew.start(reduce, [0, 1])
    for outcome in crew.outcomes([0, 1]):
        assert_lost(outcome, 2, crew, died_at)
        assert "it has called nothing yet" in outcome.text


def reduce_and_leave(state) -> None:
    reduce(state)
    state.comm.close()


def test_one_that_leaves_is_named_by_those_that_go_on(new_crew):
    crew = new_crew(2)
    crew.join()
    crew[1].start(reduce_and_leave)
    crew[0].start(reduce, calls=2)
    value_of(crew[1].outcome())
    outcome = crew[0].outcome()
    assert outcome.error == "PeerLostError"
    assert "which has left the group; its last was call 1" in outcome.text
    assert names_rank(outcome.text, 1, crew)


def submit_many(state, calls: int) -> list[str]:
    works = [state.comm.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(calls)]
    classes = []
    for work in works:
        with contextlib.suppress(pr.RingarError):
            work.wait()
        error = work.exception()
        classes.append(type(error).__name__ if error else "")
    return classes


def test_killed_while_others_have_work_in_the_background(new_crew):
    crew = new_crew(2)
    crew.join()
    crew[0].start(submit_many, calls=5)
    time.sleep(0.2)
    died_at = crew[1].kill()
    outcome = crew[0].outcome()
    assert value_of(outcome) == ["PeerLostError"] * 5
    assert outcome.at - died_at < DEATH_S + BUSY_S
    assert_survivors_go_on(crew, [0])


# -- SIGSTOP, and ranks that are late --------------------------------------------------------------


def assert_timed_out(outcomes: list[Outcome], late: int, crew: Crew, timeout_s: float) -> None:
    for outcome in outcomes:
        assert outcome.error == "CollectiveTimeout", outcome
        assert "TimeoutError" in outcome.classes
        assert names_rank(outcome.text, late, crew), outcome.text
        assert f"for {timeout_s:g} s" in outcome.text
        has_called = "it has called nothing yet" not in outcome.text
        assert has_called == ("last heard of" in outcome.text), outcome.text
        assert timeout_s - 0.3 < outcome.seconds < timeout_s + LATE_S + BUSY_S, outcome.seconds


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "reduce"])
@pytest.mark.parametrize(("world_size", "stopped"), [(2, 1), (3, 0)])
def test_stopped(new_crew, world_size, stopped, phase):
    timeout_s = 1.0
    crew = new_crew(world_size)
    crew.join(timeout=timeout_s)
    crew.run(reduce)
    crew.run(prepare, numel=PHASES[phase])
    others = [rank for rank in range(world_size) if rank != stopped]
    crew[stopped].call(stop_in, phase=phase.split()[0], seconds=0.3)
    crew[stopped].start(reduce, numel=PHASES[phase])
    time.sleep(0.1)
    crew[stopped].send(signal.SIGSTOP)
    crew.start(reduce, others, numel=PHASES[phase])
    assert_timed_out(crew.outcomes(others), stopped, crew, timeout_s)
    crew.run(refuse, others, words="failed before and cannot be used", error="CollectiveTimeout")
    # Awake again it hears of it, in this call or in the next.
    crew[stopped].send(signal.SIGCONT)
    outcome = crew[stopped].outcome()
    if outcome.error is None:
        crew[stopped].start(reduce)
        outcome = crew[stopped].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert names_rank(outcome.text, stopped, crew)
    # All can meet again.
    assert crew.run(holds_nothing) == [[]] * world_size
    crew.join()
    crew.run(reduce, numel=LARGE)


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_stopped_in_a_ring(new_crew, stopped):
    crew = new_crew(3)
    crew.join(timeout=1.0)
    crew.run(prepare, numel=LARGE)
    crew[stopped].call(stop_in, phase="reduce")
    crew.start(reduce, algorithm="ring", numel=LARGE)
    others = [rank for rank in range(3) if rank != stopped]
    assert_timed_out(crew.outcomes(others), stopped, crew, 1.0)


def test_the_one_who_is_late_is_named_not_those_who_wait_for_it(new_crew):
    """All wait for each other; only rank 2 has done less than they."""
    crew = new_crew(4)
    crew.join(timeout=1.0)
    crew.run(reduce, numel=LARGE)
    crew.run(prepare, numel=10 * LARGE)
    crew[2].call(stop_in, phase="gather", seconds=4.0)
    crew.start(reduce, numel=10 * LARGE)
    assert_timed_out(crew.outcomes([0, 1, 3]), 2, crew, 1.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_late_but_in_time(new_crew, world_size):
    crew = new_crew(world_size)
    crew.join(timeout=20.0)
    for phase in ("idle", "announce", "reduce", "gather"):
        crew[world_size - 1].call(stop_in, phase=phase, seconds=0.3)
        crew.run(reduce, numel=LARGE)
        # A delay is for one call.
        crew.start(reduce, numel=LARGE)
        assert all(outcome.seconds < 0.3 + BUSY_S for outcome in crew.outcomes())


def test_an_exception_in_one_rank(new_crew):
    """A rank whose own program fails makes no call: the others wait until the deadline."""
    crew = new_crew(2)
    crew.join(timeout=1.0)
    crew[1].start(reduce, numel="many")
    assert crew[1].outcome().error == "TypeError"
    crew[0].start(reduce)
    assert_timed_out([crew[0].outcome()], 1, crew, 1.0)
    crew[1].start(reduce)
    outcome = crew[1].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert names_rank(outcome.text, 1, crew)


# -- ranks that call different things --------------------------------------------------------------


def call_something(state, what: str) -> None:
    comm, k, rank = state.comm, state.world_size, state.rank
    # What holds the results, before and after.
    state.tensor = torch.arange(600.0).view(20, 30) + rank
    state.before = state.tensor.clone()
    tensor = state.tensor
    calls = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "fewer elements": lambda: comm.all_reduce(tensor[:10]),
        "other sizes": lambda: comm.all_reduce(tensor.view(30, 20)),
        "many more": lambda: comm.all_reduce(torch.ones(LARGE)),
        "two tensors": lambda: comm.all_reduce([tensor[:10], tensor[10:]]),
        "an empty one more": lambda: comm.all_reduce([tensor, torch.empty(0)]),
        "other dtype": lambda: comm.all_reduce(tensor.view(torch.int32)),
        "mixed dtypes": lambda: comm.all_reduce([tensor[:19], tensor[19:].view(torch.int32)]),
        "mixed otherwise": lambda: comm.all_reduce([tensor[:19].view(torch.int32), tensor[19:]]),
        "other op": lambda: comm.all_reduce(tensor, "max"),
        "mean": lambda: comm.all_reduce(tensor, "mean"),
        "ring": lambda: comm.all_reduce(tensor, algorithm="ring"),
        "barrier": comm.barrier,
        "broadcast": lambda: comm.broadcast(tensor),
        "other root": lambda: comm.broadcast(tensor, 1),
        "all_gather": lambda: comm.all_gather(tensor[:k], tensor[5]),
        "reduce_scatter": lambda: comm.reduce_scatter(tensor[5], tensor[10 : 10 + k]),
        "in the background": lambda: comm.all_reduce(tensor[:5], async_op=True).wait(),
    }
    calls[what]()


DIFFERENT = [
    ("all_reduce", "fewer elements", "of 600 float32 elements", "of 300 float32 elements"),
    ("all_reduce", "many more", "600", "200000"),
    ("all_reduce", "other sizes", "600", "different sizes"),
    ("all_reduce", "two tensors", "600", "in 2 tensors"),
    ("all_reduce", "an empty one more", "600", "in 2 tensors"),
    ("all_reduce", "other dtype", "float32", "int32"),
    ("mixed dtypes", "mixed otherwise", "float32", "int32"),
    ("all_reduce", "other op", "(sum)", "(max)"),
    ("all_reduce", "mean", "(sum)", "(mean)"),
    ("all_reduce", "ring", "600", "different algorithms"),
    ("all_reduce", "barrier", "all_reduce", "barrier"),
    ("broadcast", "other root", "from rank 0", "from rank 1"),
    ("all_gather", "reduce_scatter", "all_gather", "reduce_scatter"),
    ("all_reduce", "broadcast", "all_reduce", "broadcast"),
    ("all_reduce", "in the background", "600", "150"),
]


@pytest.mark.parametrize(("usual", "odd", "word", "odd_word"), DIFFERENT)
def test_ranks_that_call_different_things(new_crew, usual, odd, word, odd_word):
    """An error on every rank, naming two; nothing written; the group refuses, a new one works."""
    crew = new_crew(3)
    crew.join()
    crew.run(reduce)
    for rank in range(3):
        crew[rank].start(call_something, what=odd if rank == 1 else usual)
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert outcome.text.startswith("ranks call different things: ")
        assert names_rank(outcome.text, 1, crew), outcome.text
        assert word in outcome.text
        assert odd_word in outcome.text, outcome.text
        assert "call 2" in outcome.text
        assert outcome.seconds < BUSY_S + DEATH_S, "they waited for a deadline"
    assert all(crew.run(tensor_is_untouched))
    assert_survivors_go_on(crew, [0, 1, 2], "ArgumentError")


def swapped(state) -> None:
    sizes = (10, 20) if state.rank else (20, 10)
    for numel in sizes:
        state.comm.all_reduce(torch.ones(numel))


def skipping(state) -> None:
    for call in range(3):
        if not (state.rank == 1 and call == 1):
            state.comm.all_reduce(torch.ones(100 + call))


@pytest.mark.parametrize(("program", "words"), [(swapped, "call 1"), (skipping, "call 2")])
def test_calls_that_are_swapped_or_skipped(new_crew, program, words):
    crew = new_crew(3)
    crew.join()
    crew.start(program)
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert words in outcome.text


def skip_the_last(state) -> None:
    for _ in range(2 if state.rank == 1 else 3):
        state.comm.all_reduce(torch.ones(100))


def test_the_last_call_skipped(new_crew):
    crew = new_crew(2)
    crew.join(timeout=1.0)
    crew.start(skip_the_last)
    value_of(crew[1].outcome())
    outcome = crew[0].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert "call 3" in outcome.text
    assert "its last was call 2" in outcome.text


# -- joining ---------------------------------------------------------------------------------------


def try_join(crew: Crew, ranks: list[int], world_size: int, **options) -> str:
    name = options.pop("name", None) or new_name()
    for rank in ranks:
        crew[rank].start(
            join, port=crew.port, rank=rank, world_size=world_size, name=name, **options
        )
    return name


def test_a_rank_that_never_comes(new_crew):
    crew = new_crew(3)
    try_join(crew, [0, 2], 3, timeout=1.0)
    for outcome in crew.outcomes([0, 2]):
        assert outcome.error == "CollectiveTimeout", outcome
        assert "ranks [1] to join" in outcome.text
        assert "of 3 ranks" in outcome.text
        assert 0.9 < outcome.seconds < 1.0 + LATE_S + BUSY_S
    assert crew.run(open_memories, [0, 2]) == [[], []]
    crew.join([0, 2])
    crew.run(reduce, [0, 2])


def test_a_rank_that_comes_late(new_crew):
    crew = new_crew(3)
    name = try_join(crew, [0, 2], 3, timeout=20.0)
    time.sleep(0.7)
    try_join(crew, [1], 3, timeout=20.0, name=name)
    for outcome in crew.outcomes():
        value_of(outcome)
    crew.run(reduce)


def join_without_room(state, limit: int, **options) -> None:
    """No file of this process may be larger, memory that others map included."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        join(state, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_groups_memory(new_crew):
    crew = new_crew(3)
    name = new_name()
    options = {"port": crew.port, "world_size": 3, "name": name}
    crew[0].start(join_without_room, limit=100_000, rank=0, **options)
    for rank in (1, 2):
        crew[rank].start(join, rank=rank, **options)
    for rank, outcome in enumerate(crew.outcomes()):
        assert outcome.error == "RingarError", outcome
        assert "bytes of shared memory for a group of processes: File too large" in outcome.text
        assert rank == 0 or names_rank(outcome.text, 0, crew), outcome.text
        assert outcome.seconds < 5, "they waited for a deadline"
    assert crew.run(holds_nothing) == [[]] * 3
    crew.join()
    crew.run(reduce)


def register_without_room(state) -> str:
    """Rank 1 has no address space left for the others' memory."""
    shared = pr.shared_empty(64 << 20, torch.uint8)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if state.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), before[1]))
    try:
        with pytest.raises(pr.RingarError) as caught:
            state.comm.register(shared)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    reduce(state)
    return str(caught.value)


def test_no_room_for_registered_memory(new_crew):
    crew = new_crew(3)
    crew.join()
    texts = crew.run(register_without_room)
    assert "cannot map 67108864 bytes" in texts[1]
    for rank in (0, 2):
        assert names_rank(texts[rank], 1, crew)
        assert "could not map" in texts[rank]


# -- the store -------------------------------------------------------------------------------------


def serve(state) -> int:
    """A store in this process."""
    state.server = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    return state.server.port


def test_the_store_is_gone_while_joining(new_crew):
    crew = new_crew(3)
    crew.port = crew[0].call(serve)
    try_join(crew, [1, 2], 3)
    time.sleep(0.5)
    died_at = crew[0].kill()
    for outcome in crew.outcomes([1, 2]):
        assert outcome.error == "PeerLostError", outcome
        assert "the store of group" in outcome.text
        assert outcome.at - died_at < DEATH_S + BUSY_S


def test_the_store_is_gone_later(new_crew):
    """A group that has met needs no store; a new one says that it is gone."""
    crew = new_crew(3)
    crew.port = crew[0].call(serve)
    name = new_name()
    for rank in (1, 2):
        crew[rank].start(join, port=crew.port, rank=rank - 1, world_size=2, name=name)
    for outcome in crew.outcomes([1, 2]):
        value_of(outcome)
    crew[0].kill()
    crew.run(reduce, [1, 2], numel=LARGE)
    for rank in (1, 2):
        crew[rank].start(join, port=crew.port, rank=rank - 1, world_size=2, name=new_name())
    for outcome in crew.outcomes([1, 2]):
        assert outcome.error == "PeerLostError", outcome
    crew.run(reduce, [1, 2])


def test_the_store_is_stopped_while_joining(new_crew):
    """It neither answers nor breaks off; its own timeout is far away."""
    crew = new_crew(2)
    crew.port = crew[0].call(serve)
    try_join(crew, [1], 2, timeout=2.0)
    time.sleep(0.5)
    crew[0].send(signal.SIGSTOP)
    outcome = crew[1].outcome(20)
    assert outcome.error in ("CollectiveTimeout", "PeerLostError"), outcome
    assert "store" in outcome.text
    assert outcome.seconds < 2.0 + LATE_S + BUSY_S


# -- digests ---------------------------------------------------------------------------------------


def everything_passes(state) -> int:
    comm, k = state.comm, state.world_size
    for numel in (0, SMALL, LARGE):
        reduce(state, numel)
        reduce(state, numel, "ring")
    wide = torch.ones(100, 2)
    comm.all_reduce(wide[:, 0])
    comm.all_reduce([torch.ones(3), torch.ones(5).half(), torch.ones(100_001).int()])
    comm.broadcast(torch.full((SMALL,), float(state.rank)), 1)
    comm.all_gather(torch.empty(2 * k), torch.full((2,), float(state.rank)))
    part = torch.empty(2)
    comm.reduce_scatter(part, torch.arange(2.0 * k))  # results differ, as they should
    assert part.tolist() == [2.0 * state.rank * k, (2.0 * state.rank + 1) * k]
    comm.barrier()
    nan = torch.tensor([float("nan"), float("inf"), -0.0])
    comm.all_reduce(nan)
    comm.all_reduce(nan, async_op=True).wait()
    register(state)
    reduce_registered(state)
    forget_registered(state)
    return comm.stats()["exchange"]["calls"]


def flip_and_reduce(state, flips: bool, numel: int, algorithm: str) -> None:
    if flips:
        state.comm._group.flip_bit_of_next()
    reduce(state, numel, algorithm)


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_digests(new_crew, numel, algorithm):
    crew = new_crew(3)
    crew.join(env={"PYRINGAR_CHECK": "digest"})
    crew.run(everything_passes)
    for rank in range(3):
        crew[rank].start(flip_and_reduce, flips=rank == 1, numel=numel, algorithm=algorithm)
    for outcome in crew.outcomes():
        assert outcome.error == "RingarError", outcome
        assert outcome.text.startswith("results differ: after call ")
        assert names_rank(outcome.text, 1, crew), outcome.text
        assert f"of {numel} float32 elements" in outcome.text
    assert_survivors_go_on(crew, [0, 1, 2], "RingarError")


def test_without_digests_nobody_notices(new_crew):
    """That the flip is what the test above finds."""
    crew = new_crew(2)
    crew.join()
    for rank in range(2):
        crew[rank].start(flip_and_reduce, flips=rank == 1, numel=SMALL, algorithm="ring")
    assert [outcome.error for outcome in crew.outcomes()] == [None, None]


def test_digests_on_some_ranks_only(new_crew):
    crew = new_crew(3)
    name = new_name()
    try_join(crew, [0, 2], 3, name=name)
    try_join(crew, [1], 3, name=name, env={"PYRINGAR_CHECK": "digest"})
    for outcome in crew.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert "PYRINGAR_CHECK is ''" in outcome.text
        assert "'digest' for rank 1 (process" in outcome.text


# -- Ctrl-C ----------------------------------------------------------------------------------------


def wait_in_the_background(state) -> None:
    state.comm.all_reduce(torch.ones(3), async_op=True).wait()


def wait_behind_the_background(state) -> None:
    state.comm.all_reduce(torch.ones(3), async_op=True)
    state.comm.barrier()


@pytest.mark.parametrize("waits", [reduce, wait_in_the_background, wait_behind_the_background])
def test_interrupted_while_waiting(new_crew, waits):
    crew = new_crew(2)
    crew.join(timeout=20)
    crew[0].start(waits)
    time.sleep(0.4)
    sent_at = time.monotonic()
    crew[0].send(signal.SIGINT)
    outcome = crew[0].outcome()
    assert outcome.error == "KeyboardInterrupt", outcome
    assert outcome.at - sent_at < DEATH_S + BUSY_S
    if waits is reduce:
        # It had called, and will not come: the others hear of that at once.
        crew.run(refuse, [0], words="was interrupted while it waited for rank 1")
        crew[1].start(reduce)
        other = crew[1].outcome()
        assert other.error == "RingarError"
        assert names_rank(other.text, 0, crew)
        assert other.seconds < DEATH_S + BUSY_S
    else:
        # What was submitted goes on.
        crew[1].start(wait_in_the_background)
        value_of(crew[1].outcome())
        crew.run(reduce)


def test_interrupted_while_joining(new_crew):
    crew = new_crew(2)
    try_join(crew, [0], 2)
    time.sleep(0.4)
    sent_at = time.monotonic()
    crew[0].send(signal.SIGINT)
    outcome = crew[0].outcome()
    assert outcome.error == "KeyboardInterrupt"
    assert outcome.at - sent_at < DEATH_S + BUSY_S
    assert crew.run(holds_nothing, [0]) == [[]]


# -- memory ----------------------------------------------------------------------------------------


def test_a_rank_joins_once():
    engine = load.engine()
    memory = engine.create_segment(2, b"t" * 32)
    again = engine.open_segment(os.getpid(), memory.fd, 2)
    options = {"world_size": 2, "token": b"t" * 32, "timeout_s": 5.0, "checks_digests": False}
    group = engine.ProcessGroup(memory=memory, rank=0, **options)
    with pytest.raises(pr.RingarError, match=f"rank 0 has joined .* as process {os.getpid()}"):
        engine.ProcessGroup(memory=again, rank=0, **options)
    group.close()


def test_another_user_cannot_open_it():
    if os.geteuid() != 0:
        pytest.skip("must be root to become somebody else")
    memory = load.engine().create_segment(2, b"t" * 32)
    parent, path = os.getpid(), f"/proc/{os.getpid()}/fd/{memory.fd}"
    with open(path, "rb"):
        pass  # we may
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(memory.fd)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(path, os.O_RDWR)
            except PermissionError:
                try:
                    load.engine().open_segment(parent, memory.fd, 2)
                except pr.RingarError as error:
                    status = 0 if "Permission denied" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- 200 kills -------------------------------------------------------------------------------------


def reduce_for_ever(state, seed: int) -> None:
    choice = python_random.Random(seed)  # the same on all ranks
    shared = pr.shared_empty(LARGE)
    state.comm.register(shared)
    while True:
        kind = choice.randrange(6)
        numel = choice.choice([SMALL, 20_000, LARGE])
        if kind < 2:
            state.comm.all_reduce(torch.ones(numel))
        elif kind == 2:
            state.comm.all_reduce(torch.ones(numel), algorithm="ring")
        elif kind == 3:
            state.comm.all_reduce(torch.ones(numel), async_op=True).wait()
        elif kind == 4:
            state.comm.all_reduce(shared)
        else:
            state.comm.broadcast(torch.ones(numel))


def kill_one(choice: python_random.Random) -> None:
    world_size = choice.randint(2, 4)
    dead = choice.randrange(world_size)
    survivors = [rank for rank in range(world_size) if rank != dead]
    crew = Crew(world_size)
    try:
        if choice.random() < 0.15:  # while they meet
            try_join(crew, list(range(world_size)), world_size, timeout=2.0)
            time.sleep(choice.random() * 0.02)
            crew[dead].kill()
            for outcome in crew.outcomes(survivors):
                if outcome.error == "CollectiveTimeout":  # it never came, as far as one can know
                    assert f"for ranks [{dead}] to join" in outcome.text, outcome
                else:
                    assert outcome.error in (None, "PeerLostError"), outcome
        else:
            crew.join()
            if choice.random() < 0.5:
                phase = choice.choice(["idle", "announce", "reduce", "gather"])
                crew[dead].call(stop_in, phase=phase)
            crew.start(reduce_for_ever, seed=choice.randrange(1000))
            time.sleep(choice.random() * 0.1)
            died_at = crew[dead].kill()
            for outcome in crew.outcomes(survivors):
                assert_lost(outcome, dead, crew, died_at)
        assert crew.run(holds_nothing, survivors) == [[]] * len(survivors)
        crew.join(survivors)
        crew.run(reduce, survivors, numel=LARGE)
        assert crew.run(holds_nothing, survivors) == [[]] * len(survivors)
    finally:
        crew.close()


def kill_many(count: int) -> None:
    before = fork_server().children()
    choice = python_random.Random(count)
    for _ in range(count):
        kill_one(choice)
    assert fork_server().children() == before, "a process is left"
    assert not named_shared_memory()


def test_ten_kills():
    kill_many(10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills():
    kill_many(200)
