"""Bases of communicators: the calls of one rank per process, and how an engine's group ends."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as num_modes
from torch.compiler import is_dynamo_compiling

from pyringar.comm import exits  # noqa: F401  its exit handler ends the engine's use of torch
from pyringar.comm.orders import Guarantee
from pyringar.comm.work import Work
from pyringar.errors import CollectiveTimeout, PeerLostError, RingarError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Closing",
    "EngineCommunicator",
    "RankCommunicator",
    "communicator_of",
    "handle_of",
    "is_traced",
]

# What a graph, which holds no objects of Python's, knows a communicator by.
_by_handle: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()


def handle_of(communicator: Any, what: str) -> str:
    """Return a new name by which `communicator_of` finds this one as long as it lives.

    Args:
        communicator: What is to be found.
        what: All on which its results depend. A graph that is loaded by another process, or taken
            from torch's cache, finds one that was made alike, as the same in number, or none.
    """
    handle = f"communicator {next(_numbers)} ({what})"
    _by_handle[handle] = communicator
    return handle


def communicator_of(handle: str) -> Any:
    """Return the communicator of this process with that handle.

    Raises:
        RingarError: It is gone.
    """
    found = _by_handle.get(handle)
    if found is None:
        raise RingarError(
            f"{handle} is not there: keep a communicator as long as the graphs and the results "
            "that were made with it"
        )
    return found


logger = logging.getLogger(__name__)
_MAKING_GRAPHS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or make_fx makes a graph of what is called."""
    return is_dynamo_compiling() or (
        num_modes() > 0
        and any(torch._C._get_dispatch_mode(key) is not None for key in _MAKING_GRAPHS)
    )


class Closing:
    """Close a communicator where its ``with`` block ends, and say what it promises until then."""

    _order: str

    @property
    def guarantee(self) -> Guarantee:
        """Return what may change without changing a bit of the calls that name no order."""
        return Guarantee.of(self._order)

    def close(self) -> None:
        """End it. May be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What ended the block is worth more than a call that was late because of it.
        with nullcontext() if error is None else suppress(*_TOLD_LATE):
            self.close()


class RankCommunicator(Closing):
    """One rank of a group whose other ranks are in other processes.

    All ranks make the same calls in the same order.
    """

    _rank: int
    _world_size: int
    _store: Any

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def store(self) -> Any:
        """The part of the torch.distributed store that belongs to this group and to no other."""
        return self._store

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce this rank's tensors over all ranks, in place."""
        raise NotImplementedError

    def _begin_as(self, what: object, call: str, *arguments: Any) -> Work | None:
        """Begin a call on stand-ins for tensors that the engine does not take.

        Args:
            what: The call of the original tensors, in words that all ranks must agree on. Messages
                show it.
            call: ``"all_reduce"``, ``"all_gather"`` or ``"broadcast"``.
            *arguments: Its positional arguments; ``all_reduce`` gets a list.
        """
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's."""
        raise NotImplementedError

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Any:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why."""
        raise NotImplementedError

    def abort(self) -> None:
        """Fail the calls that run, on all ranks, then `close`."""
        raise NotImplementedError


# What close() tells of calls that had returned, on GPUs.
_TOLD_LATE = (CollectiveTimeout, PeerLostError)

# Tensors of communicators whose last close() a signal ended: the engine may still write them.
_interrupted: list[dict[Any, object]] = []


class EngineCommunicator(Closing):
    """End an engine's group; the base of communicators that have one."""

    _group: Any
    # What the engine's works that may still run write and read, by the work: the engine adds it
    # before it returns. Without a lock: a signal handler may come in between, and a fork.
    _in_flight: dict[Any, object]

    _is_closed = False

    def _begun(self, native: Any, *call: str) -> Work:
        """Return the work for one of the engine's; let go of the tensors of those that are done.

        Args:
            native: That work.
            *call: The call's name, reduction and algorithm, as far as it has them.
        """
        # list() is one step of the interpreter's; tuple() may collect garbage in the middle of it,
        # and other threads take works out then.
        for other in list(self._in_flight):
            if other.is_completed():
                self._in_flight.pop(other, None)
        return Work(native, self._in_flight, *call)

    def close(self) -> None:
        """Wait for what runs in the background, then end all threads. May be called again.

        Everything else raises `RingarError` from then on, and other processes of the group
        that go on calling get a `PeerLostError`.

        Where ranks of one process wait for GPUs, signals are not looked at: there
        `Communicator.abort` ends what waits for a rank. Elsewhere an exception from a signal
        handler ends the wait within 0.2 s: calls that have not begun fail, and the other processes
        are told.

        Raises:
            CollectiveTimeout, PeerLostError: A rank was late in one of the last calls, or lost, on
                a GPU; or this process's GPU has not come to their end, and what they write is kept
                until it has. The next close() says nothing any more.
        """
        self._is_closed = True
        try:
            is_done = self._group.close()
        except _TOLD_LATE:  # once, of the last calls, which may still run
            if self._group.close():
                self._in_flight.clear()
            raise
        if is_done:
            self._in_flight.clear()

    def __del__(self) -> None:
        # Background work must end before the tensors that it writes are let go.
        if hasattr(self, "_in_flight"):
            try:
                self.close()
            except _TOLD_LATE as error:
                logger.error("a communicator was let go without close(), and %s", error)
            finally:
                if self._in_flight:  # the engine, or a GPU, is not done with them
                    _interrupted.append(self._in_flight)
