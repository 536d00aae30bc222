"""Do messages between machines come whole, in order, by a deadline, and from whom they should?"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import oracle
import pytest
import torch
from ranks import Crew, connect
from torch.distributed import HashStore

import pyringar as pr
from pyringar.distributed import sockets
from pyringar.distributed.sockets import SocketInter
from pyringar.distributed.wire import MessageError


def connected(num: int, timeout_s: float = 10.0, store=None) -> list[SocketInter]:
    """All meet all."""
    store = store or HashStore()
    with ThreadPoolExecutor(num) as ranks:
        made = [
            ranks.submit(SocketInter, store, r, [p for p in range(num) if p != r], timeout_s)
            for r in range(num)
        ]
        return [future.result() for future in made]


@pytest.fixture
def pair():
    made = connected(2)
    yield made
    for inter in made:
        inter.close()


def message(numel: int, seed: int) -> torch.Tensor:
    return oracle.random(numel, torch.float32, seed)


def test_messages_of_any_size_come_in_order_while_others_leave(pair):
    sizes = [1, 0, 7, 3_000_001, 64, 1_000_000]

    def run(rank: int) -> list[torch.Tensor]:
        got = [torch.empty(size) for size in sizes]
        waits = [
            pair[rank].exchange([(1 - rank, message(size, 10 * rank + at))], [(1 - rank, into)])
            for at, (size, into) in enumerate(zip(sizes, got, strict=True))
        ]
        for wait in waits:
            wait()
        return got

    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(run, range(2)))
    for rank, got in enumerate(answers):
        for at, (size, tensor) in enumerate(zip(sizes, got, strict=True)):
            assert oracle.same_bits(tensor, message(size, 10 * (1 - rank) + at))


def test_three_at_once():
    made = connected(3)
    got = {(r, p): torch.empty(1000) for r in range(3) for p in range(3) if p != r}

    def run(rank: int) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        made[rank].exchange(
            [(peer, message(1000, 3 * rank + peer)) for peer in peers],
            [(peer, got[rank, peer]) for peer in peers],
        )()

    with ThreadPoolExecutor(3) as all_three:
        list(all_three.map(run, range(3)))
    for (rank, peer), tensor in got.items():
        assert oracle.same_bits(tensor, message(1000, 3 * peer + rank))
    for inter in made:
        inter.close()


def test_a_deadline_counts_from_the_last_byte_and_names_who_is_late(pair):
    first, second = pair
    first.set_timeout(0.6)
    got = torch.empty(3)
    wait = first.exchange([], [(1, got)])

    def slowly() -> None:
        for at in range(3):
            time.sleep(0.4)
            second.exchange([(0, torch.tensor([float(at)]))], [])()

    thread = threading.Thread(target=slowly)
    thread.start()
    wait()
    thread.join()
    assert got.tolist() == [0.0, 1.0, 2.0]
    began = time.monotonic()
    with pytest.raises(MessageError, match="timed out") as error:
        first.exchange([], [(1, got)])()
    assert 0.5 < time.monotonic() - began < 2
    assert error.value.peer == 1


def waits_as_rank(state, port: int) -> float:
    inter = SocketInter(connect(port), 1, [0], 1.5)
    got = torch.empty(1)
    wait = inter.exchange([(0, torch.ones(1))], [(0, got)])
    wait()
    inter.close()
    return got.item()


@pytest.mark.slow
def test_time_in_which_who_waits_is_stopped_does_not_count():
    with Crew(1) as crew:
        crew.start(waits_as_rank, port=crew.port)
        inter = SocketInter(connect(crew.port), 0, [1], 20.0)
        got = torch.empty(1)
        inter.exchange([], [(1, got)])()
        time.sleep(0.2)
        crew[0].send(signal.SIGSTOP)
        time.sleep(2)
        crew[0].send(signal.SIGCONT)
        time.sleep(0.2)
        inter.exchange([(1, torch.full((1,), 7.0))], [])()
        assert crew.values() == [7.0]
        inter.close()


def test_progress_counts_bytes_either_way(pair):
    first, second = pair
    wait = first.exchange([], [(1, torch.empty(3))])
    assert first.progress() == second.progress() == 0
    second.exchange([(0, torch.ones(3))], [])()
    wait()
    assert first.progress() == second.progress() == 12


@pytest.mark.parametrize("how", ["close", "abort"])
def test_who_leaves_is_named_and_known_without_a_wait(pair, how):
    first, second = pair
    assert list(first.lost()) == []
    getattr(second, how)()
    deadline = time.monotonic() + 5
    while not first.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(first.lost()) == [1]
    for sent, received in (([], [(1, torch.empty(3))]), ([(1, torch.zeros(4_000_000))], [])):
        with pytest.raises(MessageError) as error:
            first.exchange(sent, received)()
        assert error.value.peer == 1


def test_abort_ends_a_wait_of_its_own(pair):
    first, _ = pair
    threading.Timer(0.3, first.abort).start()
    began = time.monotonic()
    with pytest.raises(MessageError):
        first.exchange([], [(1, torch.empty(3))])()
    assert time.monotonic() - began < 5


def test_a_stranger_without_the_word_is_let_go(monkeypatch):
    store, answers = HashStore(), []

    def strangers() -> None:
        where = json.loads(store.get("wire/0"))
        for said in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, b"\0" * 36, b""):
            with socket.create_connection((where["hosts"][0], where["port"]), 5) as connection:
                try:
                    connection.sendall(said)
                    connection.shutdown(socket.SHUT_WR)
                    answers.append(connection.recv(1))
                except OSError:  # reset, also while it speaks
                    answers.append(b"")
        store.set("strangers", "came")

    thread = threading.Thread(target=strangers)
    thread.start()
    with ThreadPoolExecutor(2) as both:
        listening = both.submit(SocketInter, store, 0, [1], 10.0)
        store.wait(["strangers"])
        calling = both.submit(SocketInter, store, 1, [0], 10.0)
        made = [listening.result(), calling.result()]
    thread.join()
    assert answers == [b"", b"", b""]
    got = torch.empty(2)
    wait = made[0].exchange([], [(1, got)])
    made[1].exchange([(0, torch.tensor([1.0, 2.0]))], [])()
    wait()
    assert got.tolist() == [1.0, 2.0]
    for inter in made:
        inter.close()


def said_by(store: HashStore, rank: int = 1) -> tuple[socket.socket, bytes]:
    """A connection to rank 0, and what a rank says there."""
    store.wait(["wire/0"])
    where = json.loads(store.get("wire/0"))
    connection = socket.create_connection((where["hosts"][0], where["port"]), 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection, sockets._HELLO.pack(bytes.fromhex(where["word"]), rank)


def test_a_hello_may_come_in_parts():
    store = HashStore()
    with ThreadPoolExecutor(1) as listening:
        made = listening.submit(SocketInter, store, 0, [1], 10.0)
        connection, hello = said_by(store)
        with connection:
            for part in (hello[:5], hello[5:]):
                connection.sendall(part)
                time.sleep(0.2)
            assert connection.recv(1) == sockets._WELCOME
            connection.sendall(sockets._TAKEN)
            made.result().close()


def test_who_is_silent_or_slow_keeps_nobody_waiting():
    store = HashStore()
    with ThreadPoolExecutor(2) as both:
        listening = both.submit(SocketInter, store, 0, [1, 2], 20.0)
        silent, hello = said_by(store)
        slow, _ = said_by(store)
        with silent, slow:
            both.submit(SocketInter, store, 2, [0], 20.0).result(3.0).close()
            slow.sendall(hello)
            assert slow.recv(1) == sockets._WELCOME
            slow.sendall(sockets._TAKEN)
            listening.result().close()
            assert silent.recv(1) == b""


def test_who_is_gone_before_it_was_welcome_is_not_taken_for_the_rank():
    """As one that had too little time at an address, and has called at another."""
    store = HashStore()
    with ThreadPoolExecutor(2) as both:
        listening = both.submit(SocketInter, store, 0, [1], 10.0)
        connection, hello = said_by(store)
        connection.sendall(hello)
        connection.close()
        made = [both.submit(SocketInter, store, 1, [0], 10.0).result(), listening.result()]
    got = torch.empty(2)
    wait = made[1].exchange([], [(1, got)])
    made[0].exchange([(0, torch.tensor([1.0, 2.0]))], [])()
    wait()
    assert got.tolist() == [1.0, 2.0]
    for inter in made:
        inter.close()


@pytest.mark.parametrize("timeout_s", [timedelta(days=30) / timedelta(seconds=1), math.inf])
def test_any_timeout_may_be_given(timeout_s):
    first, second = connected(2, timeout_s)
    got = torch.empty(1)
    second.exchange([(0, torch.ones(1))], [])()
    first.exchange([], [(1, got)])()
    assert got.item() == 1
    first.close()
    second.close()


class Stopped(HashStore):
    """A store whose process is stopped: it takes a question and does not answer."""

    def check(self, keys) -> bool:
        time.sleep(3)
        return False


class Dead(HashStore):
    def set(self, key, value) -> None:
        raise RuntimeError("Connection was closed by remote peer")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [(Stopped, pr.CollectiveTimeout, "not answer rank 1"), (Dead, pr.PeerLostError, "is gone")],
)
def test_a_store_that_does_not_answer_is_named_by_the_deadline(kind, error, text):
    began = time.monotonic()
    with pytest.raises(error, match=text):
        SocketInter(kind(), 1, [0], 0.3)
    assert time.monotonic() - began < 2


def test_who_does_not_come_is_named():
    with pytest.raises(pr.CollectiveTimeout, match=r"waited for ranks \[1\]"):
        SocketInter(HashStore(), 0, [1], 0.3)
    with pytest.raises(pr.CollectiveTimeout, match=r"rank 1 waited for rank 0 .* where it is"):
        SocketInter(HashStore(), 1, [0], 0.3)
    store = HashStore()
    with socket.create_server(("", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("wire/0", json.dumps({"hosts": ["127.0.0.1"], "port": port, "word": "00" * 32}))
    with pytest.raises(pr.PeerLostError, match=r"cannot connect to rank 0 .*127\.0\.0\.1.*refused"):
        SocketInter(store, 1, [0], 5.0)


def test_a_network_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(pr.ArgumentError, match="GLOO_SOCKET_IFNAME is 'nothing0'"):
        SocketInter(HashStore(), 0, [1], 5.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for inter in connected(2):
        inter.close()


def test_a_forked_child_does_not_keep_connections_open(pair):
    """As a worker of a DataLoader, which outlives its parent's SIGKILL."""
    first, second = pair
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    os.close(reading)
    second.close()
    deadline = time.monotonic() + 5
    while not first.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(first.lost()) == [1]
    os.close(writing)
    os.waitpid(child, 0)
