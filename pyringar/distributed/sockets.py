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
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
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
_LOOK_S = 1.0  # between looks at whether this one was aborted, or stopped
_ASK_S = 0.01  # between questions to the store
_MOST_S = 1e6  # a socket takes no more than some weeks


class _Patience:
    """Count the seconds that a wait may still last: not those in which this process is stopped.

    Whoever waits sleeps in naps, since of a longer time no more than a nap counts.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._longest_s = min(_LOOK_S, seconds / 4)
        self._looked_at = time.monotonic()

    def nap_s(self) -> float:
        """Return for how long to sleep now; less than 0: the time is up."""
        return min(self.left_s(self._longest_s), self._longest_s)

    def left_s(self, slept_s: float) -> float:
        """Return what is left; ``slept_s``: how long this process meant to sleep since the last."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, slept_s + 0.1)
        self._looked_at = now
        return self._left_s


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
            self._connect(store, rank, peers, timeout_s)
        except BaseException:
            self.close()
            raise
        # A child's copies would keep connections open when this process is gone.
        close_at_exit(self, SocketInter.close, in_child=SocketInter.close)

    def _connect(self, store: Any, rank: int, peers: Sequence[int], timeout_s: float) -> None:
        """Those of lower ranks listen, and those of higher ones call."""
        patience = _Patience(timeout_s)
        word = secrets.token_bytes(_WORD_BYTES)
        callers = {peer for peer in peers if peer > rank}
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("", 0), backlog=len(peers) + 8))
            where = {"hosts": _own_hosts(), "port": listener.getsockname()[1], "word": word.hex()}
            asked = PatientStore(store, "machines", rank, time.monotonic() + timeout_s)
            stack.callback(asked.close)
            asked.set(f"wire/{rank}", json.dumps(where))
            for peer in sorted(set(peers) - callers):
                self._streams[peer] = _Stream(peer, _call(asked, rank, peer, patience))
            for connection, peer in _answers(listener, word, callers, rank, patience):
                self._streams[peer] = _Stream(peer, connection)

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
            left_bytes, patience = -1, _Patience(self._timeout_s)
            while left := [transfer for transfer in transfers if transfer.rest]:
                before, left_bytes = left_bytes, sum(len(transfer.rest) for transfer in left)
                if left_bytes != before:
                    patience = _Patience(self._timeout_s)
                if (nap_s := patience.nap_s()) < 0:
                    why = f"timed out: nothing came or went in {self._timeout_s:g} s"
                    raise MessageError(left[0].peer, why)
                if not self._move_soon():
                    self._move_later(nap_s)

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

    def _move_later(self, most_s: float) -> None:
        """Wait until something can move, for so long at most, and move it."""
        poll = select.poll()
        at: dict[int, _Stream] = {}
        for stream in self._streams.values():
            if wanted := stream.wanted():
                if self._is_over:
                    raise MessageError(stream.peer, "this rank has closed its connections")
                at[stream.connection.fileno()] = stream
                poll.register(stream.connection, wanted)
        for fd, _ in poll.poll(1000 * most_s):
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


def _call(store: PatientStore, rank: int, peer: int, patience: _Patience) -> socket.socket:
    """Connect to a rank, and say who calls."""
    where = json.loads(_read(store, f"wire/{peer}", rank, peer, patience))
    hello = _HELLO.pack(bytes.fromhex(where["word"]), rank)
    errors = []
    limit_s = 0.0
    for num_left, host in zip(range(len(where["hosts"]), 0, -1), where["hosts"], strict=True):
        limit_s = max(0.1, min(patience.left_s(limit_s) / num_left, _MOST_S))
        try:
            with contextlib.ExitStack() as unless_taken:
                connection = socket.create_connection((host, where["port"]), timeout=limit_s)
                unless_taken.enter_context(connection)
                connection.sendall(hello)
                _wait_for(connection, limit_s)
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


def _wait_for(connection: socket.socket, seconds: float) -> None:
    """Return when something has come, or raise TimeoutError."""
    patience = _Patience(seconds)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000 * max(0.0, nap_s := patience.nap_s())):
        if nap_s < 0:
            raise TimeoutError("timed out")


class _Guest:
    """Hold a connection until it is known whether a rank that is waited for has made it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._said = b""
        self._is_welcome = False

    def hear(self, word: bytes, callers: Set[int]) -> int | None:
        """Take what has come, and return which rank it is once that is sure.

        Raises OSError where it is none of ``callers``, or has left.
        """
        part = self.connection.recv(_HELLO.size + len(_TAKEN) - len(self._said))
        if not part:
            raise ConnectionResetError("has left")
        self._said += part
        if len(self._said) < _HELLO.size:
            return None
        said, peer = _HELLO.unpack_from(self._said)
        if not secrets.compare_digest(said, word) or peer not in callers:
            raise PermissionError("is a stranger")
        if not self._is_welcome:
            self.connection.sendall(_WELCOME)
            self._is_welcome = True
        # Who has not waited for the welcome has gone, to another address of this machine.
        return int(peer) if self._said[_HELLO.size :] == _TAKEN else None


def _answers(
    listener: socket.socket, word: bytes, callers: Set[int], rank: int, patience: _Patience
) -> Iterator[tuple[socket.socket, int]]:
    """Yield a connection of each of these ranks as they come, and whose it is; let others go.

    All are heard at once: who says nothing, or takes its time, keeps nobody waiting.
    """
    missing = set(callers)
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_last:
        selector.register(listener, selectors.EVENT_READ)
        at_last.callback(_turn_out, selector)
        while missing:
            if (nap_s := patience.nap_s()) < 0:
                raise CollectiveTimeout(
                    f"rank {rank} waited for ranks {sorted(missing)} of the other machines to "
                    "connect"
                )
            for key, _ in selector.select(nap_s):
                guest: _Guest | None = key.data
                if guest is None:
                    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                        guest = _Guest(listener.accept()[0])
                        selector.register(guest.connection, selectors.EVENT_READ, guest)
                    continue
                try:
                    peer = guest.hear(word, missing)
                except BlockingIOError:
                    continue
                except OSError:
                    selector.unregister(guest.connection)
                    guest.connection.close()
                    continue
                if peer is not None:
                    selector.unregister(guest.connection)
                    missing.discard(peer)
                    yield guest.connection, peer


def _turn_out(selector: selectors.BaseSelector) -> None:
    """Close the connections of all guests."""
    for key in selector.get_map().values():
        if key.data is not None:
            key.data.connection.close()


def _read(store: PatientStore, key: str, rank: int, peer: int, patience: _Patience) -> bytes:
    while True:
        found: bytes | None = store.look_up([key])[0]
        if found is not None:
            return found
        if patience.nap_s() < 0:
            raise CollectiveTimeout(
                f"rank {rank} waited for rank {peer} of another machine to say where it is"
            )
        time.sleep(_ASK_S)


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
