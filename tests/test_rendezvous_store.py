"""What if the store that ranks meet in is hostile: garbage, old keys, delays, deaths at every step?

Every rank ends with a group that works, or with an error of ours that names who wrote or died, in
time; what is left in the store keeps nobody from meeting there afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random as python_random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from cases import mostly_slow
from process_checks import mapped_memories, needs_linux, open_memories
from ranks import Crew, connect, new_name
from test_rendezvous import CountingStore, meet

import pyringar as pr
from pyringar.comm.member import Member
from pyringar.engine import load

pytestmark = needs_linux

ATTEMPT = "ab" * 16
LONG_S = 30.0


# -- garbage ---------------------------------------------------------------------------------------

GOOD_MEMBER = {
    "version": 3,
    "rank": 1,
    "node": "here",
    "host": "here",
    "pid": 1,
    "start_ticks": 1,
    "check": "",
    "kind": "cpu",
    "attempt": ATTEMPT,
}


def member(**changes: object) -> bytes:
    return json.dumps(GOOD_MEMBER | changes).encode()


GARBAGE = [b"", b"\0\xff\xfe", b"null", b"[]", b"3", b'"text"', b"{", b"{}", b"[" * 100_000]
GARBAGE += [b"[" * 3000, b'{"a":' * 700, b"9" * 4000, b"9" * 5000, b"{" + b" " * 1_000_000 + b"}"]
BAD_MEMBERS = [
    *GARBAGE,
    member(version=2),
    member(version="1"),
    member(version=10**400),
    member(version=[]),
    member(rank=0),
    member(rank=True),
    member(rank=-1),
    member(rank=10**40),
    member(pid=0),
    member(pid=-1),
    member(pid=2**31),
    member(pid=10**400),
    member(pid="1"),
    member(pid=1.5),
    member(start_ticks=-1),
    member(start_ticks=2**64),
    member(start_ticks=10**400),
    member(node=5),
    member(host=None),
    member(host="x" * 1000),
    member(check=["digest"]),
    member(kind={}),
    member(attempt=5),
    member(more=1),
    json.dumps({k: v for k, v in GOOD_MEMBER.items() if k != "pid"}).encode(),
    json.dumps({k: v for k, v in GOOD_MEMBER.items() if k != "version"}).encode(),
]


def wait_for(store, key: str) -> bytes:
    deadline = time.monotonic() + LONG_S
    while not store.check([key]):
        assert time.monotonic() < deadline, key
        time.sleep(0.001)
    return store.get(key)


@contextlib.contextmanager
def in_thread(function, *arguments):
    """What the other rank does meanwhile."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    yield
    thread.join()


def answer_as_rank_1(port: int, name: str, text: bytes) -> None:
    store = keys_of(port, name)
    caller = Member.parse(wait_for(store, "call"), 0)
    store.set(f"{caller.attempt}/member/1", text.decode("latin-1"))
    store.add(f"{caller.attempt}/came", 1)


def keys_of(port: int, name: str):
    """What the ranks of a group of this name see."""
    return dist.PrefixStore(f"pyringar/{name}", connect(port))


def join_as(rank: int, store_port: int, words: str, other, *arguments: object) -> str:
    """Join with another rank that a thread plays, ``other(port, name, ...)``; the error."""
    name = new_name()
    start = time.monotonic()
    with (
        in_thread(other, store_port, name, *arguments),
        pytest.raises(pr.RingarError, match=words) as caught,
    ):
        pr.ProcessCommunicator(connect(store_port), rank, 2, name=name, timeout=60)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - start < LONG_S
    return name


def call_as_rank_0(port: int, name: str, text: bytes) -> None:
    keys_of(port, name).set("call", text.decode("latin-1"))


@pytest.mark.parametrize("text", BAD_MEMBERS, ids=range(len(BAD_MEMBERS)))
def test_a_member_that_is_none(store_port, text):
    """Of rank 1, as rank 0 finds it; and of rank 0, as rank 1 does."""
    join_as(0, store_port, r"^rank 1 wrote .* into the store", answer_as_rank_1, text)
    text = text.replace(b'"rank": 1', b'"rank": 1.5').replace(b'"rank": 0', b'"rank": 1')
    join_as(1, store_port, r"^rank 0 wrote .* into the store", call_as_rank_0, text)
    assert open_memories() == []


def test_this_process_is_a_member_that_passes():
    text = Member.this_process(1).text().encode()
    assert Member.parse(text, 1) == Member.this_process(1)
    assert Member.parse(member(), 1).pid == 1


def be_rank_0(port: int, name: str, members: bytes | None, segment: bytes | None) -> None:
    """Call, and agree to rank 1's member, unless ``members`` says something else."""
    store = keys_of(port, name)
    own = Member.this_process(0, attempt=ATTEMPT).text()
    store.set("call", own)
    other = wait_for(store, f"{ATTEMPT}/member/1").decode()
    if members is None:
        members = json.dumps({"members": [own, other]}).encode()
    store.set(f"{ATTEMPT}/members", members.decode("latin-1"))
    if segment is not None:
        store.set(f"{ATTEMPT}/segment", segment.decode("latin-1"))


OWN_0 = member(rank=0).decode()
BAD_MEMBER_LISTS = [
    *GARBAGE,
    *(json.dumps({"members": x}).encode() for x in (None, 5, "ab", [5], [[]], [None], {"a": 1})),
    *(json.dumps({"members": [OWN_0, x]}).encode() for x in (OWN_0, "{", None, 10**400)),
    *(json.dumps({"error": "no", "attempts": x}).encode() for x in (5, None, 10**400)),
]


@pytest.mark.parametrize("text", BAD_MEMBER_LISTS, ids=range(len(BAD_MEMBER_LISTS)))
def test_a_list_of_members_that_is_none(store_port, text):
    join_as(1, store_port, r"^rank [01] wrote .* into the store", be_rank_0, text, None)


TOKEN = "ab" * 32


def segment(**changes: object) -> bytes:
    return json.dumps({"fd": 3, "token": TOKEN} | changes).encode()


BAD_SEGMENTS = [
    *GARBAGE,
    json.dumps({"fd": 3}).encode(),
    json.dumps({"token": TOKEN}).encode(),
    *(segment(fd=x) for x in ("3", 3.5, True, -1, 2**31, 10**400, float("inf"), None, [])),
    *(segment(token=x) for x in (TOKEN[:-2], TOKEN + "ab", "x" * 64, 5, None, ["ab"] * 32)),
]


@pytest.mark.parametrize("text", BAD_SEGMENTS, ids=range(len(BAD_SEGMENTS)))
def test_a_segment_that_is_none(store_port, text):
    join_as(1, store_port, "^rank 0 wrote .* into the store, no segment", be_rank_0, None, text)


@contextlib.contextmanager
def descriptor(kind: str):
    """Something that is no segment."""
    size = load.engine().create_segment(2, b"t" * 32).nbytes
    if kind == "fifo":
        other_end, fd = os.pipe()
        os.close(other_end)
    elif kind == "zero":
        fd = os.open("/dev/zero", os.O_RDWR)
    elif kind == "socket":
        pair = socket.socketpair()
        fd = os.dup(pair[0].fileno())
    elif kind == "folder":
        fd = os.open("/tmp", os.O_RDONLY)
    elif kind == "file":
        fd = os.memfd_create("file")
        os.ftruncate(fd, size)
    elif kind == "unsealed":
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
    else:
        fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size - 4096 if kind == "small" else size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        seals |= fcntl.F_SEAL_WRITE if kind == "read-only" else 0
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unsealed", "is not the shared memory"),
        ("small", "is not the shared memory"),
        ("closed", "cannot open"),
        pytest.param("empty", "another group's, or none of ours", marks=pytest.mark.slow),
        pytest.param("fifo", "is not the shared memory", marks=pytest.mark.slow),
        pytest.param("zero", "is not the shared memory", marks=pytest.mark.slow),
        pytest.param("socket", "cannot open", marks=pytest.mark.slow),
        pytest.param("folder", "cannot open", marks=pytest.mark.slow),
        pytest.param("file", "is not the shared memory", marks=pytest.mark.slow),
        pytest.param("read-only", "cannot", marks=pytest.mark.slow),
    ],
)
def test_a_descriptor_that_is_no_segment(store_port, kind, words):
    with descriptor(kind) as fd:
        offer = segment(fd=1_000_000 if kind == "closed" else fd)
        name = join_as(1, store_port, words, be_rank_0, None, offer)
        failed = wait_for(keys_of(store_port, name), f"{ATTEMPT}/failed")
        assert json.loads(failed)["rank"] == 1  # the others are told
    gc.collect()
    assert mapped_memories() == []


def test_another_groups_memory(store_port):
    """The right kind of memory, another token."""
    memory = load.engine().create_segment(2, b"t" * 32)
    offer = segment(fd=memory.fd)
    join_as(1, store_port, "another group's, or none of ours", be_rank_0, None, offer)


# -- mutations, delays -----------------------------------------------------------------------------


class MutatingStore(CountingStore):
    """What is read may come late, or changed in a byte, cut off, or be what stood there before."""

    def __init__(self, choice: python_random.Random) -> None:
        super().__init__()
        self.choice = choice
        self.lock = threading.Lock()  # of `choice`
        self.old: list[bytes] = [b"", b"{}", b"[" * 900, b"9" * 999]

    def set(self, key, value):
        super().set(key, value)
        with self.lock:
            self.old.append(bytes(value))

    def get(self, key):
        text = super().get(key)
        with self.lock:
            kind = self.choice.randrange(60)
            at = self.choice.randrange(len(text) + 1)
            other = self.choice.choice(self.old)
            byte = bytes([self.choice.randrange(256)])
            delay_s = self.choice.random() * 0.02
        if kind == 0:
            return text[:at] + byte + text[at + 1 :]
        if kind == 1:
            return text[:at]
        if kind == 2:
            return other
        if kind < 20:
            time.sleep(delay_s)
        return text


def meet_among_mutations(seed: int, timeout_s: float) -> int:
    """How many of three ranks, in threads, met."""
    store = MutatingStore(python_random.Random(seed))

    def meets(rank: int) -> bool:
        start, told = time.monotonic(), ""
        try:
            pr.ProcessCommunicator(store, rank, 3, name="x", timeout=timeout_s).close()
        except pr.RingarError as error:
            told = str(error)
        assert len(told) <= 2000, f"seed {seed}"
        assert not told or time.monotonic() - start < timeout_s + LONG_S, f"seed {seed}"
        return not told

    with ThreadPoolExecutor(3) as threads:
        return sum(threads.map(meets, range(3)))


LONG_RUN = [pytest.mark.thorough, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("count", [16, pytest.param(1000, marks=LONG_RUN)])
def test_mutated_payloads(count):
    met = [meet_among_mutations(seed, 0.3) for seed in range(count)]
    # Neither all nor none: else the mutations did nothing, or let nobody through.
    assert {0, 3} <= set(met), met


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


def die_at_step(dead: int, step: int, is_asked: bool) -> None:
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


@pytest.mark.parametrize("dead", mostly_slow([0, 1], 1))
@pytest.mark.parametrize("step", [1, 4, 7])
def test_death_at_a_step(dead, step):
    die_at_step(dead, step, is_asked=True)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_death_at_every_step():
    for step in range(1, 25):
        for dead in range(3):
            for is_asked in (False, True):
                die_at_step(dead, step, is_asked)
