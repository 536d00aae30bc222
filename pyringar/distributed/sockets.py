"""Carry messages between machines over TCP: a connection for each two ranks that meet.

There is one stream of bytes each way, and nothing in it but data: both sides know what comes next,
since they make the same calls (`pyringar.distributed.wire.compare` finds out if not, before data is
sent). Bytes move in the thread that waits for them: no other is woken, and nobody asks whether it
may send.

Who may connect knows a random word from the store. Nothing is encrypted, as with gloo and NCCL: it
is for networks whose machines trust each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyringar.comm.exits import close_at_exit
from pyringar.comm.stores import PatientStore
from pyringar.distributed.wire import Message, MessageError, Wait
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError

__all__ = ["SocketInter"]

_WORD_BYTES = 32
_WELCOME, _TAKEN = b"!", b"+"
_HELLO = struct.Struct(f"!{_WORD_BYTES}sI")
# How long to look before sleeping: to be woken takes longer than many a message.
_SPIN_S = 200e-6
_LOOK_S = 1.0  # between looks at whether this one was aborted
_ASK_S = 0.01  # between questions to the store
_HELLO_S = 5.0  # for who has connected, to say who it is
_MOST_S = 1e6  # a socket takes no more than some weeks


class _Stream:
    """One connection, and what is on its way: each way in order."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.peer = peer
        self.connection = connection
        self.moved_bytes = 0  # either way
        self.leaving: deque[_Transfer] = deque()
        self.coming: deque[_Transfer] = deque()

    def move(self) -> bool:
        """Move what can be moved now; return whether anything was."""
        return self._send() | self._receive()

    def wanted(self) -> int:
        """Return what to wait for, as `select.poll` has it."""
        return (select.POLLOUT if self.leaving else 0) | (select.POLLIN if self.coming else 0)

    def _send(self) -> bool:
        has_moved = False
        while self.leaving:
            transfer = self.leaving[0]
            try:
                num = self.connection.send(transfer.rest)
            except (BlockingIOError, InterruptedError):
                break
            has_moved = True
            self.moved_bytes += num
            transfer.rest = transfer.rest[num:]
            if not transfer.rest:
                self.leaving.popleft()
        return has_moved

    def _receive(self) -> bool:
        has_moved = False
        while self.coming:
            transfer = self.coming[0]
            try:
                num = self.connection.recv_into(transfer.rest)
            except (BlockingIOError, InterruptedError):
                break
            if num == 0:
                raise ConnectionResetError("the connection was closed by the other side")
            has_moved = True
            self.moved_bytes += num
            transfer.rest = transfer.rest[num:]
            if not transfer.rest:
                self.coming.popleft()
        return has_moved


class _Transfer:
    """Bytes of a tensor that have not moved yet."""

    def __init__(self, peer: int, tensor: Tensor) -> None:
        self.peer = peer
        nbytes = tensor.numel() * tensor.itemsize
        memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        self.rest = memoryview(memory).cast("B")
        self._tensor = tensor  # keeps it


class SocketInter:
    """TCP connections to ranks on other machines; see `pyringar.distributed.wire.Inter`.

    Args:
        store: Shared by all ranks of the job; this use of it has a name of its own.
        rank: This process's rank.
        peers: The ranks that it meets; each of them meets it.
        timeout_s: How long to wait for connections, and for bytes.

    Raises:
        ArgumentError: There is no such network as ``GLOO_SOCKET_IFNAME`` says.
        CollectiveTimeout, PeerLostError: Other machines cannot be reached.
    """

    def __init__(self, store: Any, rank: int, peers: Sequence[int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_over = False
        self._streams: dict[int, _Stream] = {}
        try:
            self._connect(store, rank, peers, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        # A child's copies would keep connections open when this process is gone.
        close_at_exit(self, SocketInter.close, in_child=SocketInter.close)

    def _connect(self, store: Any, rank: int, peers: Sequence[int], deadline: float) -> None:
        """Those of lower ranks listen, and those of higher ones call."""
        word = secrets.token_bytes(_WORD_BYTES)
        callers = {peer for peer in peers if peer > rank}
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("", 0), backlog=len(peers) + 8))
            where = {"hosts": _own_hosts(), "port": listener.getsockname()[1], "word": word.hex()}
            asked = PatientStore(store, "machines", rank, deadline)
            stack.callback(asked.close)
            asked.set(f"wire/{rank}", json.dumps(where))
            for peer in sorted(set(peers) - callers):
                self._streams[peer] = _Stream(peer, _call(asked, rank, peer, deadline))
            while callers:
                connection, peer = _answer(listener, word, callers, rank, deadline)
                self._streams[peer] = _Stream(peer, connection)
                callers.discard(peer)

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """See `Inter`."""
        transfers = []
        for messages, name in ((received, "coming"), (sent, "leaving")):
            for peer, tensor in messages:
                if tensor.numel():
                    transfers.append(transfer := _Transfer(peer, tensor))
                    getattr(self._streams[peer], name).append(transfer)
        for peer, _ in sent:
            self._move(self._streams[peer])

        def wait() -> None:
            left_bytes, ends = -1, 0.0
            while left := [transfer for transfer in transfers if transfer.rest]:
                before, left_bytes = left_bytes, sum(len(transfer.rest) for transfer in left)
                if left_bytes != before:
                    ends = time.monotonic() + self._timeout_s
                elif time.monotonic() > ends:
                    why = f"timed out: nothing came or went in {self._timeout_s:g} s"
                    raise MessageError(left[0].peer, why)
                if not self._move_soon():
                    self._move_later(ends)

        return wait

    def _move_soon(self) -> bool:
        """Look again and again for a moment, in which others may have the processor."""
        busy = [stream for stream in self._streams.values() if stream.wanted()]
        ends = time.perf_counter() + _SPIN_S
        while True:
            moved = [self._move(stream) for stream in busy]
            if any(moved) or time.perf_counter() > ends:
                return any(moved)
            os.sched_yield()

    def _move_later(self, ends: float) -> None:
        """Wait until something can move, and move it."""
        poll = select.poll()
        at: dict[int, _Stream] = {}
        for stream in self._streams.values():
            if wanted := stream.wanted():
                if self._is_over:
                    raise MessageError(stream.peer, "this rank has closed its connections")
                at[stream.connection.fileno()] = stream
                poll.register(stream.connection, wanted)
        left_s = max(0.0, min(ends - time.monotonic(), _LOOK_S))
        for fd, _ in poll.poll(1000 * left_s):
            self._move(at[fd])

    def _move(self, stream: _Stream) -> bool:
        try:
            return stream.move()
        except OSError as error:
            raise MessageError(stream.peer, str(error)) from error

    def lost(self) -> list[int]:
        """See `Inter`."""
        if self._is_over:  # it is this rank that has left
            return []
        return [peer for peer, stream in self._streams.items() if _is_closed(stream.connection)]

    def progress(self) -> int:
        """See `Inter`: the bytes that have moved."""
        return sum(stream.moved_bytes for stream in list(self._streams.values()))

    def set_timeout(self, seconds: float) -> None:
        """See `Inter`."""
        self._timeout_s = seconds

    def abort(self) -> None:
        """See `Inter`."""
        self._is_over = True
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                stream.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Inter`."""
        self._is_over = True
        for stream in self._streams.values():
            stream.connection.close()


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def _call(store: PatientStore, rank: int, peer: int, deadline: float) -> socket.socket:
    """Connect to a rank, and say who calls."""
    where = json.loads(_read(store, f"wire/{peer}", rank, peer, deadline))
    hello = _HELLO.pack(bytes.fromhex(where["word"]), rank)
    errors = []
    for num_left, host in zip(range(len(where["hosts"]), 0, -1), where["hosts"], strict=True):
        limit_s = max(0.1, _left_s(deadline) / num_left)
        try:
            with contextlib.ExitStack() as unless_taken:
                connection = socket.create_connection((host, where["port"]), timeout=limit_s)
                unless_taken.enter_context(connection)
                connection.sendall(hello)
                if connection.recv(1) == _WELCOME:
                    connection.sendall(_TAKEN)  # or the other side would not count it
                    unless_taken.pop_all()
                    return connection
            errors.append(f"{host}: somebody else is there")
        except OSError as error:
            errors.append(f"{host}: {error}")
    raise PeerLostError(
        f"rank {rank} cannot connect to rank {peer} of another machine at port {where['port']}: "
        f"{'; '.join(errors)}. Connections are made over IPv4; GLOO_SOCKET_IFNAME names the "
        "network to take"
    )


def _answer(
    listener: socket.socket, word: bytes, callers: set[int], rank: int, deadline: float
) -> tuple[socket.socket, int]:
    """Return a connection of one of these ranks, and whose it is; others are let go."""
    while True:
        listener.settimeout(_left_s(deadline))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise CollectiveTimeout(
                f"rank {rank} waited for ranks {sorted(callers)} of the other machines to connect"
            ) from None
        with contextlib.suppress(OSError, struct.error):
            ends = min(deadline, time.monotonic() + _HELLO_S)
            said, peer = _HELLO.unpack(_receive(connection, _HELLO.size, ends))
            if secrets.compare_digest(said, word) and peer in callers:
                connection.sendall(_WELCOME)
                # Who has not waited for the welcome has gone, to another address of this machine.
                if _receive(connection, len(_TAKEN), ends) == _TAKEN:
                    return connection, peer
        connection.close()


def _read(store: PatientStore, key: str, rank: int, peer: int, deadline: float) -> bytes:
    while True:
        found: bytes | None = store.look_up([key])[0]
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise CollectiveTimeout(
                f"rank {rank} waited for rank {peer} of another machine to say where it is"
            )
        time.sleep(_ASK_S)


def _receive(connection: socket.socket, nbytes: int, ends: float) -> bytes:
    """Return so many bytes, in however many parts they come; fewer where the other side ends."""
    got = b""
    while len(got) < nbytes:
        connection.settimeout(_left_s(ends))
        part = connection.recv(nbytes - len(got))
        if not part:
            break
        got += part
    return got


def _left_s(deadline: float) -> float:
    """Return the seconds until then, as a socket takes them: some, and not too many."""
    return max(0.01, min(deadline - time.monotonic(), _MOST_S))


def _own_hosts() -> list[str]:
    """Return where this machine may be reached, the likeliest first.

    On the networks asked for; else on the way to the host of torchrun's store, and under its name.
    """
    networks = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if networks:
        return [_address_on(name) for name in networks]
    hosts: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        if master := os.environ.get("MASTER_ADDR"):
            way.connect((master, 9))  # sends nothing
            hosts.append(way.getsockname()[0])
    with contextlib.suppress(OSError):
        hosts += [str(f[4][0]) for f in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)]
    return [*dict.fromkeys(hosts)] or ["127.0.0.1"]


def _address_on(network: str) -> str:
    """Return this machine's address on a network, by the name of its device."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            entry = fcntl.ioctl(
                asked.fileno(),
                0x8915,
                struct.pack("256s", network.encode()[:15]),  # SIOCGIFADDR
            )
        except OSError as error:
            raise ArgumentError(
                f"GLOO_SOCKET_IFNAME is {network!r}, expected a network device with an IPv4 "
                f"address: {error}"
            ) from error
    return socket.inet_ntoa(entry[20:24])
