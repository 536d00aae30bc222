"""Watch calls handed to gloo, which waits 30 s for a rank that is gone and names none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pyringar.distributed.convert import (
    NATIVE,
    Copy,
    as_bytes,
    check_no_overlap,
    copy_all,
    count_changes,
    has_plain_memory,
)
from pyringar.distributed.fallback import Fallback
from pyringar.distributed.messages import Message, Waiters
from pyringar.distributed.work import Completer, Part, PendingWork, StepPart
from pyringar.errors import CollectiveTimeout, PeerLostError, UnsupportedError

__all__ = ["Delegated", "WatchedPart", "by_any_name", "given_or_default"]

_LOOK_S = 0.2
# What a rank sent before it went is on its way for less than this.
_GRACE_S = 1.0
# In what gloo says of a connection, and of one that it closed by itself.
_CONNECTION = ("/transport/", "pair closure")


class WatchedPart:
    """A call of gloo's that runs, as a `pyringar.distributed.work.Part`.

    Args:
        comm: The group's communicator: knows which ranks are there.
        fallback: Where the call runs.
        operation: For error messages.
        peers: The ranks without which the call cannot end.
        begin: Begins it; returns gloo's work.
        waiters: Wait for it if it is a send or receive, which nobody else can.
        copies: What follows a receive.

    Raises PeerLostError if one of ``peers`` is gone, RingarError if the group failed or is closed.
    """

    def __init__(
        self,
        comm: Any,
        fallback: Fallback,
        operation: str,
        peers: Sequence[int],
        begin: Callable[[], Any],
        *,
        waiters: Waiters | None = None,
        copies: Sequence[Copy] = (),
    ) -> None:
        self._comm = comm
        self._fallback = fallback
        self._operation = f"{operation} over {comm.world_size} ranks"
        self._peers = [rank for rank in peers if rank != comm.rank]
        self._gone_since = 0.0
        self._error: RuntimeError | None = None
        self._message: Message | None = None
        self._check(self._peers)
        try:
            self.work = begin()
        except RuntimeError as error:  # a message that could not connect, or an argument
            self._check(self._peers)
            self._raise_named(error)
        if waiters is not None:
            self._message = Message(waiters, partial(_receive, self.work, copies))

    def wait(self, timeout: float | None = None) -> object:
        """Block until it is done.

        Args:
            timeout: Seconds; None: the group's own deadlines count.

        Raises:
            PeerLostError, CollectiveTimeout: A rank is gone, or late: names it.
            RingarError: The group was aborted.
        """
        ends = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not self._is_done_soon(max(0.001, min(_LOOK_S, ends - time.monotonic()))):
            if time.monotonic() > ends:
                raise CollectiveTimeout(f"{self._operation} is not done after {timeout:.3g} s")
            self._check_while_waiting()
        return True

    def _is_done_soon(self, seconds: float) -> bool:
        if self._message is not None:
            if self._message.wait(seconds) and self._message.error is not None:
                self._raise_named(self._message.error)
            return self._message.is_done
        try:
            self.work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if self.work.is_completed():  # its own error, else it is not done yet
                self._raise_named(error)
            return False
        return True

    def is_completed(self) -> bool:
        """Return whether it is done. Never blocks."""
        return bool(self.work.is_completed() if self._message is None else self._message.wait(0))

    def _raise_named(self, error: Exception) -> NoReturn:
        if not any(word in str(error) for word in _CONNECTION):
            raise error
        if self._error is None:
            waited = f"{self._operation}: rank {self._comm.rank} waited for ranks {self._peers}"
            self._error = _named(
                error, waited, lambda: self._check(self._peers), self._comm, self._fallback
            )
            self._comm._tell(self._error)
        raise self._error from error

    def _check(self, peers: Sequence[int]) -> None:
        _check(self._comm, self._operation, peers)

    def _check_while_waiting(self) -> None:
        """Raise PeerLostError after a grace period: a rank may exit after finishing its part."""
        self._check([])
        try:
            self._comm.check_peers(self._peers)
        except PeerLostError:
            now = time.monotonic()
            self._gone_since = self._gone_since or now
            is_alone = len(self._peers) == 1
            if now - self._gone_since > (_GRACE_S if is_alone else self._comm.timeout_s):
                self._check(self._peers)


class _DelegatedWork(PendingWork):
    """Stand for one call of gloo's, whose own work is the first part's."""

    def _source_rank(self) -> int:
        """Return the rank that a message received from any came from."""
        call: Any = self._parts[0]
        rank: int = call.work._source_rank()
        return rank


class Delegated:
    """Hand the calls that the engine does not know to gloo, which moves any dtype as bytes."""

    _comm: Any
    _fallback: Fallback
    _completer: Completer
    _timeout: timedelta
    _batch: list[Any] | None  # the works of what is coalesced now

    def reduce(self, tensors: Any, opts: Any, *more: Any) -> Any:
        """Reduce to the root; gloo does, or the backend for the tensors' device."""
        copies: list[Copy] = []
        moved = [_reduced(t, copies) for t in tensors]
        peers = self._met_over(tensors)
        return self._hand_over("reduce", tensors, (moved, opts, *more), copies, peers=peers)

    def gather(self, outputs: Any, inputs: Any, opts: Any, *more: Any) -> Any:
        """Gather at the root."""
        copies: list[Copy] = []
        rows = [[_written(t, copies) for t in row] for row in outputs]
        moved = [_read(t) for t in inputs]
        return self._hand_over(
            "gather",
            inputs,
            (rows, moved, opts, *more),
            copies,
            results=outputs[0] if outputs else [],  # as gloo's future has it
            peers=self._others(opts.rootRank),
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any, *more: Any) -> Any:
        """Scatter from the root."""
        copies: list[Copy] = []
        rows = [[_read(t) for t in row] for row in inputs]
        moved = [_written(t, copies) for t in outputs]
        peers = self._others(opts.rootRank)
        return self._hand_over("scatter", outputs, (moved, rows, opts, *more), copies, peers=peers)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> Any:
        """Give every rank what the others have for it."""
        opts = given_or_default(opts, "AllToAllOptions")
        copies: list[Copy] = []
        outs, ins = [_written(t, copies) for t in outputs], [_read(t) for t in inputs]
        arguments = (outs, ins, opts, *more)
        return self._hand_over("all_to_all", outputs, arguments, copies, names=("alltoall",))

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        """Give every rank what the others have for it, in one tensor."""
        opts = given_or_default(opts, "AllToAllOptions")
        copies: list[Copy] = []
        arguments = (_written(output, copies), _read(input), out_splits, in_splits, opts)
        names = ("all_to_all_single", "alltoall_base")
        return self._hand_over("all_to_all_single", [output], arguments, copies, names=names)

    all_to_all_single = alltoall_base

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Send to a rank."""
        arguments = ([_read(t) for t in tensors], rank, tag)
        waiters = self._fallback.waiters
        return self._hand_over("send", tensors, arguments, peers=[rank], waiters=waiters)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        return self._receive(tensors, "recv", (rank, tag), [rank])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from whichever rank sends."""
        return self._receive(tensors, "recv_anysource", (tag,), [])

    recvAnysource = recv_anysource  # noqa: N815  # torch's name in C++

    def _receive(self, tensors: Any, name: str, more: tuple[Any, ...], peers: Sequence[int]) -> Any:
        copies: list[Copy] = []
        moved = [_written(t, copies) for t in tensors]
        return self._hand_over(
            "recv",
            tensors,
            (moved, *more),
            copies,
            names=(name,),
            peers=peers,
            waiters=self._fallback.waiters,
        )

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; raise on rank 0 if some have not, naming them.

        Args:
            timeout: Overrides the group's; torch's own ProcessGroup gives ``BarrierOptions``.
            wait_all_ranks: Name all that are missing, and not only the first.

        Raises:
            PeerLostError, CollectiveTimeout: Some ranks, which it names, are gone, or have not
                called it in time.
        """
        gloo = self._fallback.for_device("cpu", "monitored_barrier")
        limit = getattr(timeout, "timeout", timeout)
        if limit is None or limit < timedelta(0):  # torch's sign for none
            limit = self._timeout
        what = f"monitored_barrier over {self._comm.world_size} ranks"
        check = partial(_check, self._comm, what, range(self._comm.world_size))
        check()  # gloo would wait for who is gone
        try:
            gloo.monitored_barrier(limit, wait_all_ranks)
        except RuntimeError as error:
            raise _named(error, what, check, self._comm, self._fallback) from error

    def _hand_over(
        self,
        operation: str,
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...],
        copies: Sequence[Copy] = (),
        *,
        names: tuple[str, ...] = (),
        results: Any = None,
        peers: Sequence[int] | None = None,
        waiters: Waiters | None = None,
    ) -> Any:
        """Return the work of a call of the backend for these tensors.

        Args:
            operation: What torch.distributed calls it.
            tensors: One of them says on which device they are.
            arguments: The call's.
            copies: Follow it.
            names: Of the backend's method, if not ``operation``; the first that it has.
            results: What the call writes, if not ``tensors``.
            peers: The ranks without which it cannot end, if not all.
            waiters: See `WatchedPart`.
        """
        backend = self._fallback.for_tensors(tensors, operation)
        begin = partial(by_any_name(backend, *(names or (operation,))), *arguments)
        if tensors and tensors[0].device.type != "cpu":
            return self._noted(begin())
        parts = self._watched(operation, begin, copies, peers, waiters)
        results = tensors if results is None else results
        return self._noted(_DelegatedWork(self._completer, parts, results))

    def _watched(
        self,
        operation: str,
        begin: Callable[[], Any],
        copies: Sequence[Copy],
        peers: Sequence[int] | None = None,
        waiters: Waiters | None = None,
    ) -> list[Part]:
        """Begin a call of gloo's; return it and the copies that follow it."""
        part = WatchedPart(
            self._comm,
            self._fallback,
            operation,
            self._others() if peers is None else peers,
            begin,
            waiters=waiters,
            copies=copies,
        )
        parts: list[Part] = [part]
        count_changes([into for into, _ in copies])
        if waiters is None:
            if copies:
                parts.append(StepPart(part.work.get_future(), lambda: copy_all(copies)))
            self._fallback.add(*parts)
        return parts

    def _noted(self, work: Any) -> Any:
        """Return a work, which belongs to what is coalesced now."""
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _met_over(self, tensors: Sequence[Tensor]) -> Sequence[int]:
        """Return the ranks that reduce these with this one: gloo meets nobody over no elements."""
        return range(self._comm.world_size) if any(t.numel() for t in tensors) else []

    def _others(self, root: int | None = None) -> Sequence[int]:
        """Return the ranks that this one needs: all at the root, elsewhere the root alone."""
        if root is None or root == self._comm.rank:
            return range(self._comm.world_size)
        return [root]


def _receive(work: Any, copies: Sequence[Copy]) -> None:
    """Wait for a message, and copy what came."""
    work.wait()
    copy_all(copies)


def _check(comm: Any, operation: str, peers: Sequence[int]) -> None:
    """Raise PeerLostError if a rank is gone, and tell the others: this one may leave because of it.

    RingarError if the group failed or is closed.
    """
    try:
        comm.check_peers(peers)
    except PeerLostError as error:
        comm._tell(error)
        raise PeerLostError(f"{operation}: {error}") from None


def _named(
    error: Exception, what: str, check: Callable[[], object], comm: Any, fallback: Fallback
) -> RuntimeError:
    """Return the error that ``check`` raises for a lost rank, or else gloo's error as one of ours.

    ``what`` says which call it was.
    """
    text = str(error).lower()
    is_broken = any(word in text for word in _CONNECTION)
    is_late = "timed out" in text or "timeout" in text or not is_broken
    ends = time.monotonic() + (0 if is_late else _GRACE_S)
    while True:  # a process closes its connections before it is gone
        try:
            check()
        except RuntimeError as cause:
            return cause
        if time.monotonic() >= ends:
            break
        time.sleep(0.05)
    lost = [comm.members[rank].name for rank in fallback.closed_peers()]
    names = f"; {', '.join(lost)} is gone" if lost else ""
    return (CollectiveTimeout if is_late else PeerLostError)(f"{what}: {error}{names}")


def given_or_default(opts: Any, kind: str) -> Any:
    """Return the options of a call; by default, those of this class of torch's."""
    return getattr(c10d, kind)() if opts is None else opts


def by_any_name(backend: Any, *names: str) -> Any:
    """Return a method that has another name in older versions of torch."""
    for name in names:
        if hasattr(backend, name):
            return getattr(backend, name)
    raise UnsupportedError(f"this torch's {type(backend).__name__} has no {names[-1]}")


def _read(tensor: Tensor) -> Tensor:
    """Return a tensor that gloo can send: as it is, its bytes, or those of a copy."""
    return _movable(_whole(tensor))


def _written(tensor: Tensor, copies: list[Copy]) -> Tensor:
    """Return a tensor that gloo can receive into: as it is, its bytes, or those of a copy."""
    return _movable(_reduced(tensor, copies))


def _reduced(tensor: Tensor, copies: list[Copy]) -> Tensor:
    """Return a tensor that gloo can reduce in place, or one that is copied into it after."""
    stand_in = _whole(tensor)
    if stand_in is not tensor:
        check_no_overlap("tensor", tensor)
        copies.append((tensor.detach(), stand_in))
    return stand_in


def _whole(tensor: Tensor) -> Tensor:
    """Return it as gloo takes for granted: its elements end to end, as its memory has them."""
    is_strided_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not is_strided_here or (tensor.is_contiguous() and has_plain_memory(tensor)):
        return tensor
    return tensor.detach().resolve_neg().resolve_conj().contiguous()


def _movable(tensor: Tensor) -> Tensor:
    """Return a tensor that gloo can move: as it is, or its bytes, same in the first dimension."""
    is_movable = tensor.dtype in NATIVE or tensor.layout is not torch.strided
    return tensor if is_movable or tensor.device.type != "cpu" else as_bytes(tensor)
