"""Rendezvous of ranks in processes: restarts, repeated attempts, deaths, malformed values."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import process_checks
import pytest
import torch
import torch.distributed as dist
from case_marks import mostly_slow
from process_checks import mapped_memories, needs_linux, open_memories, settled
from programs import ROOT
from rank_processes import connect, free_port, join, new_name, value_of

import pyringar as pr
from pyringar.comm.rank_info import RankInfo, read
from pyringar.comm.rendezvous import Rendezvous
from pyringar.engine import load

pytestmark = needs_linux

# Ranks must detect the death of a rank within these seconds. Most timeouts are far longer.
PROMPT_S = 5.0
LONG_S = 30.0


def reduce(state) -> None:
    k = state.comm.world_size
    tensor = torch.arange(1000, dtype=torch.int64) % 17 + state.comm.rank
    state.comm.all_reduce(tensor)
    wanted = k * (torch.arange(1000, dtype=torch.int64) % 17) + k * (k - 1) // 2
    assert torch.equal(tensor, wanted)


def meet(state, **arguments) -> None:
    join(state, **arguments)
    reduce(state)
    state.comm.close()


def meet_only(state, port: int, name: str, rank: int, world_size: int) -> None:
    """Exchange records with the other ranks, but do not map the shared memory."""
    with Rendezvous(connect(port), rank, world_size, name, LONG_S) as meeting:
        meeting.exchange_members()


def call_only(state, port: int, name: str) -> None:
    caller = RankInfo.this_process(0, attempt="ca11" * 8)
    connect(port).set(f"pyringar/{name}/call", caller.text())


class CountingStore(dist.Store):
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


# -- stores that were used before ------------------------------------------------------------------


@pytest.mark.parametrize("late", mostly_slow([0, 1], 0))
@pytest.mark.parametrize("killed", mostly_slow([False, True], True))
def test_restarted_ranks_join_on_old_store(new_rank_group, late, killed):
    before = new_rank_group(2)
    name = before.join(timeout=LONG_S)
    before.run(reduce)
    for _ in range(2):
        for rank in before.ranks:
            rank.kill() if killed else rank.close()
        group = before = new_rank_group(2)
        for rank in (1 - late, late):
            group.start_group([rank], meet, world_size=2, name=name, timeout=LONG_S)
            time.sleep(0.3)
        group.values()


def test_joining_dead_rank_0_times_out(new_rank_group):
    name = new_name()
    group = new_rank_group(2)
    group[0].call(call_only, port=group.port, name=name)
    group[0].kill()
    group.start_group([1], meet, world_size=2, name=name, timeout=1.0)
    outcome = group[1].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert "waited 1 s for ranks [0] to join" in outcome.text
    assert outcome.seconds >= 1.0


# -- ranks that give up, and come again ------------------------------------------------------------


def test_rank_joins_after_timed_out_attempt(new_rank_group):
    group = new_rank_group(3)
    options = {"function": meet, "world_size": 3, "name": new_name()}
    group.start_group([0], timeout=LONG_S, **options)
    group.start_group([1], timeout=0.5, **options)
    assert group[1].outcome().error == "CollectiveTimeout"
    group.start_group([1], timeout=LONG_S, **options)
    time.sleep(0.5)
    group.start_group([2], timeout=LONG_S, **options)
    group.values()


def exchange(state, port: int, rank: int, world_size: int, name: str, timeout: float) -> None:
    with mock.patch.dict(os.environ, {"PYRINGAR_NODE_ID": f"machine {rank}"}):
        meeting = Rendezvous(connect(port), rank, world_size, name, timeout)
    with meeting:
        assert len(meeting.exchange_members()) == world_size


def test_waiting_rank_joins_restarted_rank_0(new_rank_group):
    group = new_rank_group(4)
    options = {"function": exchange, "world_size": 3, "name": new_name(), "timeout": LONG_S}
    group.start_group([0, 1], **options)
    time.sleep(0.5)
    group[0].kill()
    group.start_group({3: 0, 2: 2}, **options)
    group.values([1, 2, 3])


# -- ranks that die --------------------------------------------------------------------------------

assert_all_lost = functools.partial(process_checks.assert_all_lost, within_s=PROMPT_S)


@pytest.mark.parametrize(
    ("phase", "dead"), [("called", 0), ("answered", 2), ("met", 0), ("met", 1), ("met", 2)]
)
def test_rank_death_during_rendezvous_raises(new_rank_group, phase, dead):
    group, name = new_rank_group(3), new_name()
    options = {"world_size": 4 if phase == "answered" else 3, "name": name, "timeout": 60.0}
    if phase == "called":
        group[0].call(call_only, port=group.port, name=name)
    if phase == "met":
        group.start_group([2], meet_only, world_size=3, name=name)
    starting = {"called": [1, 2], "answered": [0, 1, 2], "met": [0, 1]}[phase]
    group.start_group(starting, **options)
    if phase == "met":
        value_of(group[2].outcome())
    time.sleep(0.7)
    died_at = group[dead].kill()
    survivors = [rank for rank in starting if rank != dead]
    assert_all_lost(group, survivors, dead, died_at)
    if phase == "called":
        group.join(survivors, name=name)
        group.run(reduce, survivors)


def test_stopped_rank_makes_join_time_out(new_rank_group):
    group = new_rank_group(2)
    name = group.start_group([1], meet_only, world_size=2)
    group.start_group([0], world_size=2, name=name, timeout=1.0)
    value_of(group[1].outcome())
    group[1].send(signal.SIGSTOP)
    outcome = group[0].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert f"for ranks [1] to map the group's memory in group {name} of 2 ranks" in outcome.text
    assert group.name(1) in outcome.text


# -- why there is no group -------------------------------------------------------------------------


def fail_to_map(state, port: int, name: str, rank: int, world_size: int) -> None:
    with Rendezvous(connect(port), rank, world_size, name, LONG_S) as meeting:
        meeting.exchange_members()
        raise KeyboardInterrupt


def test_interrupted_join_raises_on_other_ranks(new_rank_group):
    group = new_rank_group(3)
    name = group.start_group([0, 2], world_size=3, timeout=60.0)
    group.start_group([1], fail_to_map, world_size=3, name=name)
    for outcome in group.outcomes([0, 2]):
        assert outcome.error == "RingarError", outcome
        assert group.name(1) in outcome.text
        assert "could not make the group: KeyboardInterrupt" in outcome.text
        assert outcome.seconds < PROMPT_S + 5


def fail_when_mapped(state, why: str, **options) -> None:
    def fail_late(meeting, absent_ranks) -> None:
        time.sleep(0.5)  # meanwhile ranks 0 and 2 join, and call all_reduce
        raise KeyboardInterrupt(why)

    with mock.patch.object(Rendezvous, "wait_until_mapped", fail_late):
        join(state, **options)


@pytest.mark.parametrize(
    "why", ["planted \udcff", "planted" + 1000 * "\U0001f600"], ids=["odd", "long"]
)
def test_late_join_failure_reaches_all_ranks(new_rank_group, why):
    group = new_rank_group(3)
    name = group.start_group([0, 2], meet, world_size=3, timeout=60.0)
    group.start_group([1], fail_when_mapped, world_size=3, name=name, why=why)
    for outcome in group.outcomes([0, 2]):
        assert outcome.error == "PeerLostError", outcome
        assert f"{group.name(1)} could not make the group: planted" in outcome.text


def test_different_world_sizes_raise(new_rank_group):
    group = new_rank_group(2)
    name = group.start_group([1], world_size=3, timeout=60.0)
    group.start_group([0], world_size=2, name=name, timeout=60.0)
    for outcome in group.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert "world_size is 3 for rank 1 and 2 for rank 0 (process" in outcome.text, outcome
        assert outcome.seconds < PROMPT_S + 5


def test_different_global_ranks_raise(new_rank_group):
    group = new_rank_group(2)
    name = group.start_group([1], world_size=2, global_ranks=[3, 5], timeout=60.0)
    group.start_group([0], world_size=2, name=name, timeout=60.0)
    words = r"global_ranks is \[(3, 5|0, 1)\] for rank [50] and has \[0, 5\] for these ranks"
    for outcome in group.outcomes():
        assert outcome.error == "ArgumentError", outcome
        assert re.search(words, outcome.text), outcome


# -- restarts by torchrun, whose agent keeps the store --------------------------------------------

WORKER = """
import os, signal, sys
import torch, torch.distributed as dist
import pyringar as pr
import pyringar.distributed

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if sys.argv[1] == "backend":
    dist.init_process_group("ringar")
    reduce = dist.all_reduce
    dist.all_gather_object([None] * 3, rank)  # partly gloo's
    dist.barrier()
else:
    reduce = pr.ProcessCommunicator(timeout=120).all_reduce
for step in range(4):
    tensor = torch.arange(5.0) + rank
    reduce(tensor)
    assert torch.equal(tensor, 3 * torch.arange(5.0) + 3), tensor
    if attempt == 0 and rank == int(sys.argv[2]) and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"attempt {attempt} rank {rank} is done\\n", end="", flush=True)
if sys.argv[1] == "backend":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["backend", "communicator"])
@pytest.mark.parametrize("form", ["static", "standalone", "c10d"])
def test_torchrun_restarts_once_after_death(tmp_path, form, kind):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    options = {
        "static": ["--master-port", str(free_port())],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"],
    }[form]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--nproc-per-node", "3", "--max-restarts", "1", str(script), kind, "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(3):
        assert f"attempt 1 rank {rank} is done" in ended.stdout, ended.stdout


# -- malformed values ------------------------------------------------------------------------------

ATTEMPT = "ab" * 16
GARBAGE = [b"", b"\0\xff\xfe", b"null", b"[]", b"3", b"{", b"{}", b"[" * 4000, b'{"more": 1}']


def member(rank: int) -> str:
    return RankInfo.this_process(rank, attempt=ATTEMPT).text()


def wait_for(store, key: str) -> bytes:
    deadline = time.monotonic() + LONG_S
    while not store.check([key]):
        assert time.monotonic() < deadline, key
        time.sleep(0.001)
    return store.get(key)


def play_peer(store, key: str, text: str) -> None:
    if key == "member/1":
        store.set(f"{json.loads(wait_for(store, 'call'))['attempt']}/{key}", text)
        return
    store.set("call", text if key == "call" else member(0))
    if key != "call":
        other = json.loads(wait_for(store, f"{ATTEMPT}/member/1"))
        if key == "segment":
            members = [json.loads(member(0)), other]
            store.set(f"{ATTEMPT}/members", json.dumps({"members": members}))
        store.set(f"{ATTEMPT}/{key}", text)


@contextlib.contextmanager
def written(port: int, name: str, key: str, text: bytes):
    store = dist.PrefixStore(f"pyringar/{name}", connect(port))
    thread = threading.Thread(target=play_peer, args=(store, key, text.decode("latin-1")))
    thread.start()
    yield store
    thread.join()


@pytest.mark.parametrize("key", ["member/1", "call", "members", "failed", "segment"])
def test_malformed_store_value_raises(store_port, key):
    writer = 1 if key == "member/1" else 0
    for text in GARBAGE:
        name = new_name()
        start = time.monotonic()
        with (
            written(store_port, name, key, text),
            pytest.raises(pr.RingarError, match=rf"^rank {writer} wrote .* into the") as caught,
        ):
            pr.ProcessCommunicator(connect(store_port), 1 - writer, 2, name=name, timeout=60)
        assert len(str(caught.value)) < 2000
        assert time.monotonic() - start < LONG_S
    assert open_memories() + mapped_memories() == []


@pytest.mark.parametrize("words", ["cannot open", "another group's"])
def test_wrong_shared_memory_segment_raises(store_port, words):
    name, memory = new_name(), load.engine().create_segment([0, 1], b"t" * 32)
    fd = 1_000_000 if words == "cannot open" else memory.fd
    with written(store_port, name, "segment", b'{"fd": %d}' % fd) as store:
        with pytest.raises(pr.RingarError, match=words):
            pr.ProcessCommunicator(connect(store_port), 1, 2, name=name, timeout=60)
        told = json.loads(wait_for(store, f"{ATTEMPT}/failed"))
        assert told["error"].startswith("rank 1 (process ")


# -- cost ------------------------------------------------------------------------------------------


def test_store_calls_and_threads_are_bounded():
    world_size = 48
    store = CountingStore(dist.HashStore())
    name = new_name()
    before = threading.active_count()

    def meet_in_thread(rank: int) -> None:
        pr.ProcessCommunicator(store, rank, world_size, name=name, timeout=60.0).close()

    with ThreadPoolExecutor(world_size) as threads:
        list(threads.map(meet_in_thread, range(world_size)))
    assert store.num_calls < 120 * world_size, store.num_calls  # if calls grew as k^2: 3 * 48 * 48
    assert settled(lambda: threading.active_count() > before, False) is False


def test_unresponsive_store_raises_timeout():
    gate = threading.Event()

    class SilentStore(CountingStore):
        def ask(self, question, *arguments):
            gate.wait(LONG_S)

    with pytest.raises(pr.CollectiveTimeout, match="did not answer rank 0 in time"):
        pr.ProcessCommunicator(SilentStore(dist.HashStore()), 0, 2, name=new_name(), timeout=0.3)
    gate.set()


def test_pause_between_polls_grows(monkeypatch):
    pauses = []
    began_s = time.monotonic()

    def sleep(seconds, own=time.sleep):
        pauses.append((seconds, time.monotonic() - began_s))
        own(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(pr.CollectiveTimeout):
        pr.ProcessCommunicator(dist.HashStore(), 0, 2, name=new_name(), timeout=0.3)
    assert 20 < len(pauses) < 100, len(pauses)  # a poll every ms: 300 pauses
    assert all(pause_s <= max(0.001, waited_s / 8) for pause_s, waited_s in pauses)


@pytest.mark.parametrize("given", ["\udcff", "\N{SNOWMAN}" * 200, "a\nb"])
def test_node_id_may_be_any_text(monkeypatch, given):
    monkeypatch.setenv("PYRINGAR_NODE_ID", given)
    member = RankInfo.this_process(0)
    assert read(member.text().encode(), 0, RankInfo) == member
    monkeypatch.setenv("PYRINGAR_NODE_ID", given + "!")
    assert RankInfo.this_process(0).node != member.node
