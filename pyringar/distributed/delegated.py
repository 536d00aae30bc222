"""Run calls that the engine lacks on gloo, and detect lost ranks while they run.

gloo alone waits 30 s for a dead rank, and its error does not name the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.comm.plain_group import check_no_overlap
from pyringar.comm.threads import Latch
from pyringar.distributed.convert import (
    NATIVE,
    Copy,
    as_bytes,
    copy_all,
    count_changes,
    has_plain_memory,
)
from pyringar.distributed.fallback import Fallback, gloo_text
from pyringar.distributed.torch_works import BackgroundCall, Completer, PendingWork
from pyringar.errors import CollectiveTimeout, PeerLostError, UnsupportedError

_POLL_S = 0.2
# Seconds within which data arrives that a rank sent before it exited.
_GRACE_S = 1.0
# Gloo's errors about a broken connection contain one of these texts.
_CONNECTION = ("/transport/", "pair closure")


class WatchedCall:
    """A running call of gloo, as a `pyringar.distributed.torch_works.BackgroundCall`.

    ``begin`` starts the call and returns gloo's work. ``peers`` are the ranks that the call needs.
    ``copies`` are made after success, even if the program never waits. Gloo completes messages only
    in wait(), which a thread calls. PeerLostError: a peer is lost; RingarError: the group failed.
    """

    def __init__(
        self,
        group: Delegated,
        operation: str,
        peers: Sequence[int],
        begin: Callable[[], Any],
        copies: Sequence[Copy] = (),
        *,
        is_message: bool = False,
    ) -> None:
        self._comm = comm = group._comm
        self._fallback = group._fallback
        self._operation = f"{operation} over {comm.world_size} ranks"
        self._peers = [rank for rank in peers if rank != comm.rank]
        self._copies = copies
        self._gone_since = 0.0
        self._error: RuntimeError | None = None  # the raised error, which names a lost rank
        self._failure: Exception | None = None  # gloo's error
        self._end = Latch()
        self._check(self._peers)
        try:
            self.work = begin()
        except RuntimeError as error:  # a connection broke or an argument is wrong
            self._check(self._peers)
            self._raise_named(error)
        # The first waiting thread pops wait(): a second wait() would wait for the next message.
        self._waits = [self.work.wait]
        self._needs_wait = is_message or bool(copies)
        if copies:
            self._has_ended(0)

    def wait(self, timeout: float | None = None) -> object:
        """Block until the call is done, or raise after ``timeout`` seconds or a failed group.

        PeerLostError or CollectiveTimeout names the rank; RingarError: the group was aborted.
        """
        ends = time.monotonic() + (float("inf") if timeout is None else timeout)
        while not self._has_ended(max(0.001, min(_POLL_S, ends - time.monotonic()))):
            if time.monotonic() > ends:
                raise CollectiveTimeout(f"{self._operation} is not done after {timeout:.3g} s")
            self._check_while_waiting()
        if self._failure is not None:
            self._raise_named(self._failure)
        return True

    def is_completed(self) -> bool:
        return self._has_ended(0) if self._needs_wait else bool(self.work.is_completed())

    def _has_ended(self, seconds: float) -> bool:
        """Return True if the call ends within ``seconds``; if no thread waits for it, start one."""
        if self._waits:
            self._fallback.waiters.submit(self._wait_for_gloo)
        return self._end.wait(seconds)

    def _wait_for_gloo(self) -> None:
        try:
            wait = self._waits.pop()
        except IndexError:  # another thread already waits
            return
        try:
            wait()
            copy_all(self._copies)
        except Exception as error:
            self._failure = error.with_traceback(None)  # a traceback would reference this object
        self._end.open()

    def _raise_named(self, error: Exception) -> NoReturn:
        if not any(word in str(error) for word in _CONNECTION):
            raise error
        if self._error is None:
            self._error = self._named(error)
            self._comm._tell(self._error)
        raise self._error from error

    def _named(self, error: Exception) -> RuntimeError:
        """Return the PeerLostError of a lost rank; if no rank is lost, convert gloo's error."""
        text = str(error).lower()
        is_late = "timed out" in text or "timeout" in text
        ends = time.monotonic() + (0 if is_late else _GRACE_S)
        while True:  # poll: a dying process closes its connections before it ends
            try:
                self._check(self._peers)
            except RuntimeError as cause:
                return cause
            if time.monotonic() >= ends:
                break
            time.sleep(0.05)
        lost = [self._comm.members[rank].name for rank in self._fallback.closed_peers()]
        names = f"; {', '.join(lost)} is gone" if lost else ""
        own, *peers = map(self._comm._number, [self._comm.rank, *self._peers])
        waited = f"{self._operation}: rank {own} waited for ranks {peers}"
        return (CollectiveTimeout if is_late else PeerLostError)(
            f"{waited}: {gloo_text(error)}{names}"
        )

    def _check(self, peers: Sequence[int]) -> None:
        """Raise PeerLostError if a rank is lost, and tell the other ranks about the error."""
        try:
            self._comm.check_peers(peers)
        except PeerLostError as error:
            self._comm._tell(error)
            raise PeerLostError(f"{self._operation}: {error}") from None

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


def _read(_: list[Copy], tensor: Tensor) -> Tensor:
    """Return the tensor in a form that gloo can send: itself, a copy, or bytes."""
    return _movable(_whole(tensor))


def _written(copies: list[Copy], tensor: Tensor) -> Tensor:
    """Return a tensor that gloo can write. Record in ``copies`` how to copy it to ``tensor``."""
    stand_in = _whole(tensor)
    count_changes([tensor])
    if stand_in is not tensor:
        check_no_overlap("tensor", tensor)
        copies.append((tensor.detach(), stand_in))
    return _movable(stand_in)


def _whole(tensor: Tensor) -> Tensor:
    is_strided_here = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not is_strided_here or (tensor.is_contiguous() and has_plain_memory(tensor)):
        return tensor
    return tensor.detach().resolve_neg().resolve_conj().contiguous()


def _movable(tensor: Tensor) -> Tensor:
    is_movable = tensor.dtype in NATIVE or tensor.layout is not torch.strided
    return tensor if is_movable or tensor.device.type != "cpu" else as_bytes(tensor)


def _handed(
    operation: str,
    *conversions: Callable[[list[Copy], Tensor], Tensor],
    names: tuple[str, ...] = (),
    peers: Callable[..., Sequence[int] | None] = lambda *_: None,
    is_message: bool = False,
) -> Callable[..., Any]:
    """Make a method that hands a call to the backend for the device of its tensors.

    ``conversions`` convert the first arguments, which are tensors or lists of tensors. ``peers``
    returns the ranks that the call needs to end; None: all ranks.
    """

    def hand_over(self: Delegated, *arguments: Any) -> Any:
        copies: list[Copy] = []
        given = arguments[: len(conversions)]
        pairs = zip(conversions, given, strict=True)
        moved = [_each(partial(convert, copies), argument) for convert, argument in pairs]
        return self._hand_over(
            operation,
            [tensor for argument in given for tensor in flat(argument)],
            (*moved, *arguments[len(conversions) :]),
            copies,
            names=names,
            results=flat(given[0]),
            peers=peers(self, *arguments),
            is_message=is_message,
        )

    return hand_over


def _each(convert: Callable[[Tensor], Tensor], given: Any) -> Any:
    if isinstance(given, Tensor):
        return convert(given)
    return [_each(convert, one) for one in given]


def flat(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [tensor for one in given for tensor in flat(one)]


def _to_or_from_root(group: Delegated, _outputs: Any, _inputs: Any, opts: Any) -> Sequence[int]:
    """Return the ranks that this rank needs: all ranks at the root, else the root."""
    is_root = opts.rootRank == group._comm.rank
    return range(group._comm.world_size) if is_root else [opts.rootRank]


class Delegated:
    """The calls of torch.distributed that gloo runs; unsupported dtypes are sent as bytes."""

    _comm: Any
    _fallback: Fallback
    _completer: Completer
    _timeout: timedelta
    _batch: list[Any] | None  # works since start_coalescing(), else None
    _own_devices: tuple[str, ...] = ("cpu",)

    gather = _handed("gather", _written, _read, peers=_to_or_from_root)
    scatter = _handed("scatter", _written, _read, peers=_to_or_from_root)
    alltoall = _handed("all_to_all", _written, _read, names=("alltoall",))
    all_to_all_single = _handed(
        "all_to_all_single", _written, _read, names=("all_to_all_single", "alltoall_base")
    )
    alltoall_base = all_to_all_single
    send = _handed("send", _read, peers=lambda _, tensors, rank, *tag: [rank], is_message=True)
    recv = _handed("recv", _written, peers=lambda _, tensors, rank, *tag: [rank], is_message=True)
    recv_anysource = _handed(
        "recv", _written, names=("recv_anysource",), peers=lambda *_: [], is_message=True
    )
    recvAnysource = recv_anysource  # noqa: N815  # torch's name in C++

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
        is_message: bool = False,
    ) -> Any:
        """Call the backend for the device of these tensors; return the work.

        ``copies`` are made after the call. ``names`` are possible names of the backend's method
        (default: ``operation``). ``results`` are the tensors that it writes (default: ``tensors``).
        ``peers`` are the ranks that the call needs to end (default: all).
        """
        device = tensors[0].device.type if tensors else "cpu"
        backend = self._fallback.for_device(device, operation)
        if arguments[-1] is None:  # without options the backend uses defaults
            arguments = arguments[:-1]
        begin = partial(_by_any_name(backend, *(names or (operation,))), *arguments)
        if device not in self._own_devices:
            return self._noted(begin())
        parts = self._watched(operation, begin, copies, peers, is_message=is_message)
        return self._pending(parts, tensors if results is None else results)

    def _watched(
        self,
        operation: str,
        begin: Callable[[], Any],
        copies: Sequence[Copy],
        peers: Sequence[int] | None = None,
        *,
        is_message: bool = False,
    ) -> list[BackgroundCall]:
        peers = range(self._comm.world_size) if peers is None else peers
        part = WatchedCall(self, operation, peers, begin, copies, is_message=is_message)
        if not is_message:
            self._fallback.add(part)
        return [part]

    def _are_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        return any(
            t.device.type not in self._own_devices or t.layout is not torch.strided for t in tensors
        )

    def _pending(self, parts: Sequence[BackgroundCall], results: Any) -> Any:
        return self._noted(PendingWork(self._completer, parts, results))

    def _noted(self, work: Any) -> Any:
        if self._batch is not None:
            self._batch.append(work)
        return work


def _by_any_name(backend: Any, *names: str) -> Any:
    for name in names:
        if hasattr(backend, name):
            return getattr(backend, name)
    raise UnsupportedError(f"this torch's {type(backend).__name__} has no {names[-1]}")
