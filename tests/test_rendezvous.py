"""Ranks in processes find each other, and each other only, on stores that outlive attempts.

Restarts on one store, survivors on a new one, ranks that give up and come again, ranks that die.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import process_checks
import pytest
import torch
import torch.distributed as dist
from cases import mostly_slow
from process_checks import needs_linux, settled
from ranks import Died, connect, join, new_name, value_of

import pyringar as pr
from pyringar.comm.member import Member, node_id
from pyringar.comm.rendezvous import Rendezvous
from pyringar.engine import load

pytestmark = needs_linux

# A death is heard of within this, whatever else runs here; deadlines are far behind it.
PROMPT_S = 5.0
LONG_S = 30.0


# -- what ranks do ---------------------------------------------------------------------------------


def reduce(state) -> None:
    """The sum of what only this rank knows."""
    k = state.comm.world_size
    tensor = torch.arange(1000, dtype=torch.int64) % 17 + state.comm.rank
    state.comm.all_reduce(tensor)
    wanted = k * (torch.arange(1000, dtype=torch.int64) % 17) + k * (k - 1) // 2
    assert torch.equal(tensor, wanted)


def meet(state, **arguments) -> None:
    """Join, reduce and leave; ``arguments`` as `ranks.join` has them."""
    join(state, **arguments)
    reduce(state)
    state.comm.close()


def meet_on_file(state, path: str, rank: int, world_size: int) -> None:
    store = dist.FileStore(path, world_size)
    state.comm = pr.ProcessCommunicator(store, rank, world_size, timeout=LONG_S)
    reduce(state)
    state.comm.close()


def meet_only(state, port: int, name: str, rank: int, world_size: int) -> None:
    """As far as the others know it has come; it never maps the memory."""
    with Rendezvous(connect(port), rank, world_size, name, LONG_S) as meeting:
        meeting.exchange_members()


def call_only(state, port: int, name: str) -> None:
    """Rank 0 at its first step."""
    caller = Member.this_process(0, attempt="ca11" * 8)
    connect(port).set(f"pyringar/{name}/call", caller.text())


# -- stores that were used before ------------------------------------------------------------------


@pytest.mark.parametrize("late", mostly_slow([0, 1], 0))
@pytest.mark.parametrize("killed", mostly_slow([False, True], True))
def test_restart_on_old_store(new_crew, late, killed):
    """As after a restart by torchrun, whose agent keeps the store; more than once."""
    before = new_crew(2)
    name = before.join(timeout=LONG_S)
    before.run(reduce)
    for _ in range(2):
        for rank in before.ranks:
            rank.kill() if killed else rank.close()
        crew = before = new_crew(2)
        for rank in (1 - late, late):
            crew.start_group([rank], meet, world_size=2, name=name, timeout=LONG_S)
            time.sleep(0.3)
        crew.values()


def test_dead_call_is_ignored(new_crew):
    """Nobody comes instead: the deadline passes, and names who left it."""
    name = new_name()
    crew = new_crew(2)
    crew[0].call(call_only, port=crew.port, name=name)
    crew[0].kill()
    crew.start_group([1], meet, world_size=2, name=name, timeout=1.0)
    outcome = crew[1].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert "waited 1 s for ranks [0] to join" in outcome.text
    assert outcome.seconds >= 1.0


@pytest.mark.parametrize("newcomer", [0, 1])
def test_survivor_meets_newcomer(new_crew, tmp_path, newcomer):
    """A process that has made groups meets one that has made none, on a new store and the old."""
    crew = new_crew(2)
    crew[1 - newcomer].call(meet_on_file, path=str(tmp_path / "a"), rank=0, world_size=1)
    for path in ("b", "b", "a"):
        for rank in range(2):
            crew[rank].start(meet_on_file, path=str(tmp_path / path), rank=rank, world_size=2)
        crew.values()


def test_deadline_begins_after_compiling(monkeypatch):
    """Where the first one is compiled, that takes longer than the others are waited for."""
    loaded = []
    engine = load.engine()

    def slow_first():
        loaded.append(time.monotonic())
        time.sleep(0.3 if len(loaded) == 1 else 0.0)
        return engine

    monkeypatch.setattr(load, "engine", slow_first)
    monkeypatch.setattr(load, "cuda_engine", lambda: engine)
    for kind in ("cpu", "cuda"):
        loaded.clear()
        meeting = Rendezvous(dist.HashStore(), 0, 2, f"slow {kind}", 10.0, kind)
        assert meeting._deadline - loaded[0] >= 10.3


def gloo_on(state, port: int, prefix: str, rank: int) -> None:
    """A call that goes to gloo, on a store that another job has used."""
    import pyringar.distributed  # noqa: F401

    store = dist.PrefixStore(prefix, connect(port))
    wait = timedelta(seconds=LONG_S)
    dist.init_process_group("ringar", store=store, rank=rank, world_size=2, timeout=wait)
    if rank == 0:
        dist.send(torch.arange(4), 1)
    else:
        got = torch.zeros(4, dtype=torch.int64)
        dist.recv(got, 0)
        assert torch.equal(got, torch.arange(4))
    dist.barrier()
    os._exit(0)  # nothing is taken back


def test_gloo_ignores_dead_addresses(new_crew):
    prefix = new_name()
    for _ in range(2):
        crew = new_crew(2)
        for rank in (1, 0):  # rank 1 sees the store before rank 0 has written anything
            crew[rank].start(gloo_on, port=crew.port, prefix=prefix, rank=rank)
            time.sleep(0.3)
        assert [rank.result(LONG_S) for rank in crew.ranks] == [Died(0)] * 2


# -- ranks that give up, and come again ------------------------------------------------------------


def retry(state, tries: int, **options) -> int:
    """Come again whenever the time is up; how often it was."""
    for i in range(tries):
        try:
            meet(state, **options)
        except pr.CollectiveTimeout:
            continue
        return i
    raise AssertionError(f"never met in {tries} tries")


@pytest.mark.parametrize("late", mostly_slow([0, 1], 0))
def test_rank_gives_up_and_returns(new_crew, late):
    crew = new_crew(2)
    options = {"world_size": 2, "name": new_name(), "tries": 20, "timeout": 1.0}
    crew.start_group([1 - late], retry, **options)
    time.sleep(1.5)
    crew.start_group([late], retry, **options)
    assert crew.values()[1 - late] >= 1


def test_rank_0_gives_up_and_is_replaced(new_crew):
    """What it called is over before its process is: rank 1 waits for the newcomer."""
    crew = new_crew(3)
    name = crew.start_group([0], meet, world_size=2, timeout=0.5)
    assert crew[0].outcome().error == "CollectiveTimeout"
    crew.start_group([1], meet, world_size=2, name=name, timeout=LONG_S)
    time.sleep(0.3)
    crew[0].kill()
    time.sleep(0.3)
    crew.start_group({2: 0}, meet, world_size=2, name=name, timeout=LONG_S)
    crew.values([1, 2])


def test_last_answer_of_rank_counts(new_crew):
    """Rank 1 gives up and comes again while rank 0 still waits for rank 2."""
    crew = new_crew(3)
    options = {"function": meet, "world_size": 3, "name": new_name()}
    crew.start_group([0], timeout=LONG_S, **options)
    crew.start_group([1], timeout=0.5, **options)
    assert crew[1].outcome().error == "CollectiveTimeout"
    crew.start_group([1], timeout=LONG_S, **options)
    time.sleep(0.5)
    crew.start_group([2], timeout=LONG_S, **options)
    crew.values()


def exchange(state, port: int, rank: int, world_size: int, name: str, timeout: float) -> None:
    """Meet the other ranks, each on a machine of its own: a death cannot be seen from there."""
    with mock.patch.dict(os.environ, {"PYRINGAR_NODE_ID": f"machine {rank}"}):
        meeting = Rendezvous(connect(port), rank, world_size, name, timeout)
    with meeting:
        assert len(meeting.exchange_members()) == world_size


@pytest.mark.parametrize("is_killed", [False, True], ids=["gives up", "killed"])
def test_rank_answers_new_call(new_crew, is_killed):
    """Rank 1 has answered a rank 0 that gives up or dies, and waits for the next one."""
    crew = new_crew(4)
    options = {"function": exchange, "world_size": 3, "name": new_name()}
    crew.start_group([0], timeout=LONG_S if is_killed else 1.0, **options)
    crew.start_group([1], timeout=LONG_S, **options)
    time.sleep(0.5)
    if is_killed:
        crew[0].kill()
    else:
        assert crew[0].outcome().error == "CollectiveTimeout"
    crew.start_group({3: 0, 2: 2}, timeout=LONG_S, **options)
    crew.values([1, 2, 3])


# -- ranks that die --------------------------------------------------------------------------------

assert_all_lost = functools.partial(process_checks.assert_all_lost, within_s=PROMPT_S)


def test_rank_0_dies_after_call(new_crew):
    crew = new_crew(3)
    name = new_name()
    crew[0].call(call_only, port=crew.port, name=name)
    crew.start_group([1, 2], world_size=3, name=name, timeout=60.0)
    time.sleep(0.4)
    died_at = crew[0].kill()
    assert_all_lost(crew, [1, 2], 0, died_at)
    crew.join([1, 2], name=name)
    crew.run(reduce, [1, 2])


def test_rank_dies_after_answer(new_crew):
    """Rank 0 sees it, and tells rank 1, which knows only rank 0."""
    crew = new_crew(3)
    crew.start_group(world_size=4, timeout=60.0)
    time.sleep(0.7)
    died_at = crew[2].kill()
    assert_all_lost(crew, [0, 1], 2, died_at)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_rank_dies_after_all_came(new_crew, dead):
    """Rank 2 never maps the memory; 0 and 1 have."""
    crew = new_crew(3)
    name = crew.start_group([2], meet_only, world_size=3)
    crew.start_group([0, 1], world_size=3, name=name, timeout=60.0)
    value_of(crew[2].outcome())
    time.sleep(0.4)
    died_at = crew[dead].kill()
    assert_all_lost(crew, [rank for rank in (0, 1) if rank != dead], dead, died_at)


def test_rank_stops_after_all_came(new_crew):
    crew = new_crew(2)
    name = crew.start_group([1], meet_only, world_size=2)
    crew.start_group([0], world_size=2, name=name, timeout=1.0)
    value_of(crew[1].outcome())
    crew[1].send(signal.SIGSTOP)
    outcome = crew[0].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert f"for ranks [1] to map the group's memory in group {name} of 2 ranks" in outcome.text
    assert crew.name(1) in outcome.text


# -- why there is no group -------------------------------------------------------------------------


def join_undumpable(state, rank: int, **options) -> None:
    """As `nobody`, whom others may not look into; then join."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, int(rank != 0), 0, 0, 0)
    join(state, rank=rank, **options)


def test_unreadable_memory_fails_all_ranks(new_crew):
    if os.geteuid() != 0:
        pytest.skip("must be root to become somebody else")
    crew = new_crew(3)
    crew.start_group(None, join_undumpable, timeout=60.0)
    outcomes = crew.outcomes()
    for outcome in outcomes:
        assert outcome.error == "RingarError", outcome
        assert outcome.seconds < PROMPT_S + 5
        assert "Permission denied" in outcome.text
        for cause in ("one user", "one user namespace", "PR_SET_DUMPABLE 0"):
            assert cause in outcome.text
        assert "  " not in outcome.text
    assert re.search(r"^rank [12] \(process \d+ .*could not make the group", outcomes[0].text)


def fail_to_map(state, port: int, name: str, rank: int, world_size: int) -> None:
    with Rendezvous(connect(port), rank, world_size, name, LONG_S) as meeting:
        meeting.exchange_members()
        raise KeyboardInterrupt


def test_interrupted_rank_tells_others(new_crew):
    crew = new_crew(3)
    name = crew.start_group([0, 2], world_size=3, timeout=60.0)
    crew.start_group([1], fail_to_map, world_size=3, name=name)
    for outcome in crew.outcomes([0, 2]):
        assert outcome.error == "RingarError", outcome
        assert crew.name(1) in outcome.text
        assert "could not make the group: KeyboardInterrupt" in outcome.text
        assert outcome.seconds < PROMPT_S + 5


def test_different_world_sizes_raise(new_crew):
    crew = new_crew(2)
    name = crew.start_group([1], world_size=3, timeout=60.0)
    crew.start_group([0], world_size=2, name=name, timeout=60.0)
    for outcome in crew.outcomes():
        assert "world_size is 3 for rank 1 and 2 for rank 0 (process" in outcome.text, outcome
        assert outcome.seconds < PROMPT_S + 5


def test_no_thread_left_raises(monkeypatch, store_port):
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    store = connect(store_port)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(pr.RingarError, match=r"cannot start .*rank 0 of group .*ulimit"):
        pr.ProcessCommunicator(store, 0, 2, name=new_name(), timeout=1)


# -- cost ------------------------------------------------------------------------------------------


class CountingStore(dist.Store):
    """Counts the calls of a store."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.num_calls = 0

    def ask(self, question, *arguments):
        self.num_calls += 1
        return question(*arguments)

    def set(self, key, value):
        self.ask(self.inner.set, key, value)

    def get(self, key):
        return self.ask(self.inner.get, key)

    def check(self, keys):
        return self.ask(self.inner.check, keys)


def test_store_calls_and_threads_are_bounded():
    """Of the calls most are polls, whose number grows with the logarithm of the wait."""
    world_size = 48
    store = CountingStore(dist.HashStore())
    name = new_name()
    before = threading.active_count()

    def meet_in_thread(rank: int) -> None:
        pr.ProcessCommunicator(store, rank, world_size, name=name, timeout=60.0).close()

    with ThreadPoolExecutor(world_size) as threads:
        list(threads.map(meet_in_thread, range(world_size)))
    assert store.num_calls < 120 * world_size, store.num_calls  # k^2: 3 * 48 * 48 and the polls
    assert settled(lambda: threading.active_count() > before, False) is False


def test_waiting_rank_polls_seldom():
    store = CountingStore(dist.HashStore())
    with pytest.raises(pr.CollectiveTimeout):
        pr.ProcessCommunicator(store, 0, 2, name=new_name(), timeout=1.0)
    assert store.num_calls < 100, store.num_calls  # every millisecond: 1000


# -- machines --------------------------------------------------------------------------------------


def test_node_id_names_clock(monkeypatch):
    monkeypatch.delenv("PYRINGAR_NODE_ID", raising=False)
    link = Path("/proc/self/ns/time")
    if not link.is_symlink():
        pytest.skip("this kernel has no time namespaces")
    assert os.readlink(link) in node_id()


@pytest.mark.parametrize("given", ["\udcff", "\N{SNOWMAN}" * 200, "a\nb"])
def test_node_id_may_be_any_text(monkeypatch, given):
    monkeypatch.setenv("PYRINGAR_NODE_ID", given)
    member = Member.this_process(0)
    assert Member.parse(member.text().encode(), 0) == member
    monkeypatch.setenv("PYRINGAR_NODE_ID", given + "!")
    assert Member.this_process(0).node != member.node
