"""What ranks read from the store: malformed values raise, and a rank may die at any step."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

import pytest
import torch.distributed as dist
from cases import mostly_slow
from process_checks import mapped_memories, needs_linux, open_memories
from ranks import Crew, connect, new_name
from test_rendezvous import LONG_S, CountingStore, meet

import pyringar as pr
from pyringar.comm.member import Member
from pyringar.engine import load

pytestmark = needs_linux

# -- malformed values ------------------------------------------------------------------------------

ATTEMPT = "ab" * 16
GARBAGE = [b"", b"\0\xff\xfe", b"null", b"[]", b"3", b"{", b"{}", b"[" * 4000, b"9" * 4000]
GARBAGE += [b"{" + b" " * 1_000_000 + b"}"]


WELL = {"node": "here", "host": "here", "pid": 1, "start_ticks": 1, "kind": "cpu", "version": 5}


def member(rank: int) -> str:
    return Member.this_process(rank, attempt=ATTEMPT).text()


def bad_members(rank: int) -> list[bytes]:
    well = WELL | {"rank": rank, "attempt": ATTEMPT}
    changes = [{"version": 4}, {"rank": 5}, {"rank": True}, {"pid": "1"}, {"node": 5}, {"more": 1}]
    return [json.dumps(well | change).encode() for change in changes]


def wait_for(store, key: str) -> bytes:
    deadline = time.monotonic() + LONG_S
    while not store.check([key]):
        assert time.monotonic() < deadline, key
        time.sleep(0.001)
    return store.get(key)


def write_member_of_1(store, text: bytes) -> None:
    caller = Member.parse(wait_for(store, "call"), 0)
    store.set(f"{caller.attempt}/member/1", text.decode("latin-1"))


def write_call(store, text: bytes) -> None:
    store.set("call", text.decode("latin-1"))


def write_members(store, text: bytes) -> None:
    store.set("call", member(0))
    wait_for(store, f"{ATTEMPT}/member/1")
    store.set(f"{ATTEMPT}/members", text.decode("latin-1"))


def write_failed(store, text: bytes) -> None:
    store.set("call", member(0))
    wait_for(store, f"{ATTEMPT}/member/1")
    store.set(f"{ATTEMPT}/failed", text.decode("latin-1"))


def write_segment(store, text: bytes) -> None:
    store.set("call", member(0))
    other = wait_for(store, f"{ATTEMPT}/member/1").decode()
    store.set(f"{ATTEMPT}/members", json.dumps({"members": [member(0), other]}))
    store.set(f"{ATTEMPT}/segment", text.decode("latin-1"))


BAD_LISTS = [b'{"members": 5}', b'{"members": [5]}', b'{"members": ["{", null]}']
BAD_SEGMENTS = [b'{"fd": "3"}', b'{"fd": true}', b'{"fd": 3, "more": 1}']


@contextlib.contextmanager
def written(port: int, name: str, write, text: bytes):
    """What the other rank writes meanwhile, in a thread."""
    store = dist.PrefixStore(f"pyringar/{name}", connect(port))
    thread = threading.Thread(target=write, args=(store, text))
    thread.start()
    yield store
    thread.join()


@pytest.mark.parametrize(
    ("rank", "writer", "write", "bad"),
    [
        (0, 1, write_member_of_1, bad_members(1)),
        (1, 0, write_call, bad_members(0)),
        (1, 0, write_members, BAD_LISTS),
        (1, 0, write_failed, []),
        (1, 0, write_segment, BAD_SEGMENTS),
    ],
    ids=["member", "call", "members", "failed", "segment"],
)
def test_malformed_value_raises(store_port, rank, writer, write, bad):
    """An error, at once, that names the rank that wrote it; nothing is left open."""
    for text in [*GARBAGE, *bad]:
        name = new_name()
        start = time.monotonic()
        with (
            written(store_port, name, write, text),
            pytest.raises(
                pr.RingarError, match=rf"^rank {writer} wrote .* into the store"
            ) as caught,
        ):
            pr.ProcessCommunicator(connect(store_port), rank, 2, name=name, timeout=60)
        assert len(str(caught.value)) < 2000
        assert time.monotonic() - start < LONG_S
    assert open_memories() + mapped_memories() == []


@contextlib.contextmanager
def descriptor(kind: str):
    """A descriptor that is not the group's memory."""
    memory = load.engine().create_segment(2, b"t" * 32)
    fd = os.memfd_create("another") if kind == "empty" else os.dup(memory.fd)
    try:
        yield 1_000_000 if kind == "closed" else fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("closed", "cannot open"),
        ("empty", "is not the shared memory"),
        ("other token", "another group's"),
    ],
)
def test_wrong_memory_raises(store_port, kind, words):
    name = new_name()
    with (
        descriptor(kind) as fd,
        written(store_port, name, write_segment, b'{"fd": %d}' % fd) as store,
    ):
        with pytest.raises(pr.RingarError, match=words):
            pr.ProcessCommunicator(connect(store_port), 1, 2, name=name, timeout=60)
        told = json.loads(wait_for(store, f"{ATTEMPT}/failed"))
        assert told["error"].startswith("rank 1 (process ")


# -- deaths between steps --------------------------------------------------------------------------


class LastStore(CountingStore):
    """The process dies at its n-th question, before or after it was asked."""

    def __init__(self, inner, last_call: int, is_asked: bool) -> None:
        super().__init__(inner)
        self.last_call = last_call
        self.is_asked = is_asked

    def ask(self, question, *arguments):
        self.num_calls += 1
        is_last = self.num_calls == self.last_call
        if is_last and not self.is_asked:
            os.kill(os.getpid(), 9)
        answer = question(*arguments)
        if is_last:
            os.kill(os.getpid(), 9)
        return answer


def die_while_meeting(
    state, port: int, rank: int, name: str, world_size: int, step: int, is_asked: bool
) -> None:
    store = LastStore(connect(port), step, is_asked)
    pr.ProcessCommunicator(store, rank, world_size, name=name, timeout=LONG_S)
    os.kill(os.getpid(), 9)  # it took fewer questions


STEPS = [
    # Rank 1 has looked for the call; has answered it; waits for the members.
    pytest.param(step, marks=[] if step in (1, 5, 8) else pytest.mark.thorough)
    for step in range(1, 25)
]


@pytest.mark.parametrize("is_asked", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dead", mostly_slow([0, 1, 2], 1))
@pytest.mark.parametrize("step", STEPS)
def test_death_at_step(dead, step, is_asked):
    """The others hear of it, or wait for one that comes; then all meet, on the same keys."""
    survivors = [rank for rank in range(3) if rank != dead]
    options = {"world_size": 3, "name": new_name()}
    with Crew(4) as crew:
        crew.start_group(survivors, meet, timeout=1.0, **options)
        crew.start_group([dead], die_while_meeting, step=step, is_asked=is_asked, **options)
        for outcome in crew.outcomes(survivors):
            assert outcome.error in ("PeerLostError", "CollectiveTimeout"), outcome
            told = (f"rank {dead} (process", f"ranks [{dead}]", "ranks [0]")  # 0 alone knows all
            assert any(words in outcome.text for words in told), outcome.text
        crew[dead].reap()
        again = [*survivors, 3]
        ranks = dict(zip(again, [*survivors, dead], strict=True))
        crew.start_group(ranks, meet, timeout=LONG_S, **options)
        crew.values(again)
