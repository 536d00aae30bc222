"""Define the interface between machines, and implement it with torch.distributed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.topology import check_device
from pyringar.distributed.fallback import break_off
from pyringar.errors import ArgumentError, PeerLostError, RingarError

__all__ = [
    "Inter",
    "Message",
    "MessageError",
    "PinnedInter",
    "TorchInter",
    "check_place",
    "compare",
    "told",
    "words_told",
]

Wait = Callable[[], object]
Message = tuple[int, Tensor]
"""The other rank, and what goes there or comes from there: contiguous, flat."""

# What crosses at once: each has a deadline of its own.
_CHUNK_BYTES = 16 * 2**20
# What machines tell each other of a call: a digest, and words for messages.
_DIGEST_BYTES = 8
_TOLD_BYTES = 256


class MessageError(RuntimeError):
    """A message did not cross; ``peer`` is the other rank."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Inter(Protocol):
    """Connect this rank with some on other machines."""

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """Begin to send and receive; what is returned waits for all of it.

        Two ranks' messages to each other come in the order in which they were sent, with the sizes
        and dtypes that they were sent with.

        Args:
            sent: On a GPU each is read after what is on the current stream. They are left alone
                until the wait is over.
            received: They are written. On a GPU what comes on the current stream after the wait
                sees them.
        """

    def lost(self) -> Sequence[int]:
        """Return the ranks that are known to be gone. Never waits."""

    def progress(self) -> int:
        """Return a number that grows as data moves. Never waits."""

    def set_timeout(self, seconds: float) -> None:
        """Let waits that begin from now on last as long as this without a message."""

    def abort(self) -> None:
        """Break connections off, so that the others need not wait for this rank."""

    def close(self) -> None:
        """Let go of connections."""


def told(words: str) -> bytearray:
    """Return what ranks tell each other of a call: a digest of its words, and these, cut."""
    text = words.encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return bytearray((digest + text)[:_TOLD_BYTES].ljust(_TOLD_BYTES))


def words_told(heard: bytes | bytearray) -> str:
    """Return the words that another rank has `told`."""
    return heard[_DIGEST_BYTES:].decode(errors="replace").rstrip()


def compare(
    what: str, peers: Sequence[int], exchange: Callable[..., Wait], names: Callable[[int], str]
) -> Wait:
    """Begin to ask the other machines whether they call the same; what is returned raises if not.

    Args:
        what: The call in words, which are the same for equal calls alone.
        peers: Who is asked.
        exchange: See `Inter`.
        names: Of ranks, for messages.
    """
    own = torch.frombuffer(told(what), dtype=torch.uint8)
    heard = {peer: torch.empty_like(own) for peer in peers}
    waits = [exchange([(peer, own) for peer in peers], list(heard.items()))]

    def check() -> None:
        if not waits:
            return
        waits.pop()()
        for peer, theirs in heard.items():
            if not torch.equal(theirs[:_DIGEST_BYTES], own[:_DIGEST_BYTES]):
                said = words_told(bytes(theirs.tolist()))
                raise ArgumentError(
                    f"machines call different things: this rank calls {what}, and {names(peer)} "
                    f"{said}"
                )

    return check


class TorchInter:
    """A process group of torch.distributed, which must be initialised.

    Every rank of the job makes one, with equal arguments, at the same point of its program.

    Args:
        columns: Ranks that meet each other, in lists without a rank in common.
        rank: This process's rank.
        backend: Of torch.distributed, for tensors on the CPU; ``"nccl"`` is for those on GPUs, and
            gloo, beside it, for the CPU's.
        timeout_s: How long a wait lasts without a message.

    Raises:
        ArgumentError: torch.distributed is not initialised, or it has other ranks; NCCL in a torch
            without it.
        PeerLostError: Other machines cannot be reached.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[int]],
        rank: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        self._under_way: list[list[tuple[int, Any]]] = []
        self._num_crossed = 0
        self.set_timeout(timeout_s)
        column = next(i for i, ranks in enumerate(columns) if rank in ranks)
        if backend == "nccl":
            _check_nccl()
        try:
            with default_float_mode():  # of this thread, and of those that gloo adds in
                group = _new_groups(columns, rank, backend, self._timeout)[column]
        except RingarError:
            raise
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {rank} cannot connect to ranks {list(columns[column])} of the other "
                f"machines: {error}; GLOO_SOCKET_IFNAME names the network to take"
            ) from error
        self._group = group
        self._at = {other: dist.get_group_rank(group, other) for other in columns[column]}

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """See `Inter`."""
        if any(tensor.device.type != "cpu" for _, tensor in (*sent, *received)):
            return self._exchange_on_gpu(sent, received)
        group = self._group
        works = [
            (peer, begin([chunk], self._at[peer], 0))
            for begin, messages in ((group.recv, received), (group.send, sent))
            for peer, tensor in messages
            if tensor.numel()
            for chunk in torch.split(tensor, _CHUNK_BYTES // tensor.itemsize)
        ]
        return self._waiter(works)

    def _exchange_on_gpu(self, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """Let the backend begin all at once: one that sends first might wait for one that does."""
        group: Any = self._group
        calls = [
            dist.P2POp(call, tensor, group=group, group_peer=self._at[peer])
            for call, messages in ((dist.irecv, received), (dist.isend, sent))
            for peer, tensor in messages
            if tensor.numel()
        ]
        peers = sorted({peer for peer, _ in (*sent, *received)})
        works = dist.batch_isend_irecv(calls) if calls else []
        return self._waiter([(peers[0], work) for work in works])

    def _waiter(self, works: list[tuple[int, Any]]) -> Wait:
        """Return a function that waits, and lets go: a work that is held keeps connections open."""
        held = list(works)
        self._under_way.append(held)

        def wait() -> None:
            try:
                for peer, work in list(held):
                    try:
                        work.wait(self._timeout)
                    except RuntimeError as error:
                        raise MessageError(peer, str(error)) from error
                    self._num_crossed += 1
            finally:
                held.clear()
                self._under_way.remove(held)

        return wait

    def lost(self) -> Sequence[int]:
        """See `Inter`; torch.distributed cannot tell."""
        return ()

    def progress(self) -> int:
        """See `Inter`: how many messages, or parts of them, have been waited for."""
        return self._num_crossed

    def set_timeout(self, seconds: float) -> None:
        """See `Inter`."""
        self._timeout = timedelta(
            seconds=min(seconds, 1e9)
        )  # it holds no more than a thousand such

    def abort(self) -> None:
        """See `Inter`; not every backend can."""
        group = self._group
        with suppress(RuntimeError, AttributeError):
            group.abort()  # what is under way fails, and is not waited for
            if hasattr(group, "_get_backend"):
                group = group._get_backend(torch.device("cpu"))
            if group.name() == "gloo":  # whose abort() does nothing
                break_off(group)
        for held in list(self._under_way):
            held.clear()
        self.close()

    def close(self) -> None:
        """See `Inter`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError, AssertionError):  # it is none of its groups
                dist.destroy_process_group(group)


class PinnedInter:
    """An inter for tensors on GPUs, by way of pinned host memory and one for tensors on the CPU.

    Messages of the CPU alone are handed on as they are.

    Args:
        inner: What crosses the wire.

    Cost: a copy of each tensor that is sent to the host, for which the host waits, and one back of
    each that came, for which it does not; a buffer for each tensor on its way, kept and grown by
    doubling.
    """

    def __init__(self, inner: Inter) -> None:
        self._inner = inner
        self._idle: list[Tensor] = []  # buffers

    def exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """See `Inter`."""
        if all(tensor.device.type == "cpu" for _, tensor in (*sent, *received)):
            return self._inner.exchange(sent, received)
        taken: list[Tensor] = []
        leaving = [(peer, self._on_host(tensor, taken)) for peer, tensor in sent]
        for (_, host), (_, tensor) in zip(leaving, sent, strict=True):
            host.copy_(tensor)  # the host waits for it: the inner inter reads at once
        coming = [(peer, self._on_host(tensor, taken)) for peer, tensor in received]
        arrived = self._inner.exchange(leaving, coming)

        def wait() -> None:
            arrived()  # what fails keeps its buffers: somebody may still write there
            for (_, host), (_, tensor) in zip(coming, received, strict=True):
                tensor.copy_(host, non_blocking=True)
            self._idle.extend(taken)  # the next copy into one comes after these on the stream

        return wait

    def _on_host(self, tensor: Tensor, taken: list[Tensor]) -> Tensor:
        """Return a buffer of a tensor's size, noted in ``taken``."""
        nbytes = tensor.numel() * tensor.itemsize
        buffer = self._idle.pop() if self._idle else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            size = max(nbytes, 2 * buffer.numel())
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        taken.append(buffer)
        return buffer[:nbytes].view(tensor.dtype)

    def lost(self) -> Sequence[int]:
        """See `Inter`."""
        return self._inner.lost()

    def progress(self) -> int:
        """See `Inter`."""
        return self._inner.progress()

    def set_timeout(self, seconds: float) -> None:
        """See `Inter`."""
        self._inner.set_timeout(seconds)

    def abort(self) -> None:
        """See `Inter`."""
        self._inner.abort()

    def close(self) -> None:
        """See `Inter`."""
        self._idle.clear()
        self._inner.close()


def check_place(device: str | torch.device | int | None, backend: str) -> torch.device:
    """Return the device of a rank's tensors; None is the CPU.

    Raises:
        ArgumentError: It is not there, or not for this backend.
    """
    if not isinstance(backend, str) or not backend or backend != backend.lower():
        raise ArgumentError(
            f"backend is {backend!r}, expected 'tcp', or 'nccl' or another's name, in small letters"
        )
    place = check_device("cpu" if device is None else device, "device")
    if backend == "nccl" and place.type == "cpu":
        raise ArgumentError(
            "backend is 'nccl' and device the CPU, expected a GPU: name it, or take 'tcp'"
        )
    return torch.device("cpu") if place.type == "cpu" else place


def _check_nccl() -> None:
    if not (dist.is_nccl_available() and torch.version.cuda):
        raise ArgumentError(
            "backend is 'nccl', which this torch was built without; take another torch, or 'tcp'"
        )


def _new_groups(
    columns: Sequence[Sequence[int]], rank: int, backend: str, timeout: timedelta
) -> list[Any]:
    """Make the group of every column: torch wants every rank to, whether it is in it or not."""
    if not dist.is_initialized():
        raise ArgumentError(
            f"backend is {backend!r} and torch.distributed is not initialised, which would connect "
            "the machines with it: call torch.distributed.init_process_group first, or take 'tcp'"
        )
    world_size = sum(map(len, columns))
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ArgumentError(
            f"rank is {rank} of {world_size}, in torch.distributed it is {dist.get_rank()} of "
            f"{dist.get_world_size()}: expected the same ranks"
        )
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    return [dist.new_group(list(c), timeout=timeout, backend=backend) for c in columns]
