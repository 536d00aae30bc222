"""Define work handles, and argument checks shared by all communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyringar.errors import ArgumentError, CollectiveTimeout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "OPS",
    "ORDERS",
    "Closing",
    "EngineCommunicator",
    "RankCommunicator",
    "Work",
    "check_choice",
    "check_plan",
    "check_ring_order",
    "check_timeout",
    "op_name",
]

OPS = ("sum", "mean", "max", "min", "prod")
ORDERS = ("any", "rank")


class Work:
    """A collective that runs in the background, returned by ``async_op=True``.

    Until it is done its tensors must be neither read nor written, nor their memory resized: after
    ``resize_`` or ``untyped_storage().resize_()`` the engine writes where memory was freed.
    Dropping it is fine, and so is dropping or changing the lists, or a new ``.data``: the
    communicator keeps the memory that the tensors had, and reduces that.
    """

    def __init__(self, native: Any, in_flight: dict[Any, object]) -> None:
        self._native = native
        self._in_flight = in_flight

    def is_completed(self) -> bool:
        """Return whether it is done, successfully or not. Never blocks."""
        if self._native is None:
            return True
        done = bool(self._native.is_completed())
        if done:
            self._in_flight.pop(self._native, None)
        return done

    def exception(self) -> BaseException | None:
        """The error it ended with; None while it runs and when all went well."""
        return None if self._native is None else self._native.exception()

    def finished_ns(self) -> int:
        """Return when it ended (``time.perf_counter_ns``); 0 while it runs and on GPUs."""
        finished: int = self._native.finished_ns() if self._native is not None else 0
        return finished

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is done; other Python threads run meanwhile.

        Args:
            timeout: Seconds; None waits until the collective ends, well or by the communicator's
                own timeout, which counts for each call. Ranks on GPUs in one process are not
                waited for on the host, and it has no meaning there.

        Returns:
            True.

        Raises:
            RingarError: The collective's own error, if it failed.
            ArgumentError: ``timeout`` is no number of seconds.
            CollectiveTimeout: It is not done after ``timeout``; it goes on nevertheless, and the
                message says what it waits for.
        """
        if self._native is None:
            return True
        seconds = math.inf if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ArgumentError(f"wait: timeout is {seconds!r}, expected seconds, 0 or more")
        if not self._native.wait(float(seconds)):
            raise CollectiveTimeout(
                f"wait: not done after {seconds:g} s, and goes on: {self._native.describe()}"
            )
        # On a GPU the streams are in order now, and the tensors still in use.
        self.is_completed()
        return True


@runtime_checkable
class RankCommunicator(Protocol):
    """One rank of a group whose other ranks are in other processes.

    All ranks make the same calls in the same order.
    """

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def store(self) -> Any:
        """The part of the torch.distributed store that belongs to this group and to no other."""

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

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's."""

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Any:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why."""

    def close(self) -> None:
        """Leave the group; others that go on calling are told."""


class Closing:
    """A communicator in a ``with`` block, whose end closes it."""

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
        self.close()


# Tensors of communicators whose last close() a signal handler broke off: the engine may write them.
_interrupted: list[dict[Any, object]] = []


class EngineCommunicator(Closing):
    """End an engine's group; the base of communicators that have one."""

    _group: Any
    # What the engine's works that may still run write and read, by the work: the engine adds it
    # before it returns. Without a lock: a signal handler may come in between, and a fork.
    _in_flight: dict[Any, object]

    def _begun(self, native: Any) -> Work:
        """The work for one of the engine's; lets go of the tensors of those that are done."""
        for other in tuple(self._in_flight):
            if other.is_completed():
                self._in_flight.pop(other, None)
        return Work(native, self._in_flight)

    def close(self) -> None:
        """Wait for what runs in the background, then end all threads. May be called again.

        Everything else raises :class:`RingarError` from then on, and other processes of the group
        that go on calling get a :class:`PeerLostError`.

        Signals are looked at meanwhile. What a handler raises, such as KeyboardInterrupt, ends the
        wait: calls that have not begun fail, the other processes are told, and the next close()
        waits for the rest. A handler may close a communicator for which this thread waits: the
        call then fails when the handler has returned, and the other processes are told at once.
        """
        if self._group.close():
            self._in_flight.clear()

    def __del__(self) -> None:
        # Background work must end before the tensors that it writes are let go.
        if hasattr(self, "_in_flight"):
            try:
                self.close()
            except BaseException:
                _interrupted.append(self._in_flight)
                raise


def op_name(op: Any) -> str:
    """The name of a reduction given as a string or as torch.distributed.ReduceOp."""
    if isinstance(op, str):
        if op in OPS:
            return op
    elif torch.distributed.is_available():
        c10d = torch.distributed.ReduceOp
        names = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
        # By type first: ReduceOp.SUM equals 0, and a tensor given by mistake equals elementwise.
        if isinstance(op, (c10d, c10d.RedOpType)):
            for theirs, ours in names.items():
                if op == getattr(c10d, theirs):
                    return ours
    raise ArgumentError(f"op is {op!r}, expected one of {', '.join(OPS)} or its ReduceOp")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """An argument that must be one of some strings."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return value


def check_timeout(timeout: Any) -> float:
    """Seconds that a wait may last without progress, positive."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout is {timeout!r}, expected a positive number of seconds")
    return float(timeout)


def check_plan(nbytes: Any, dtype: Any) -> None:
    """The arguments of every ``plan()``: a number of bytes and a dtype."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ArgumentError(f"nbytes is {nbytes!r}, expected a number of bytes, 0 or more")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}, expected a torch.dtype")


def check_ring_order(algorithm: str, order: str, others: str) -> None:
    """A ring adds in its own order; ``others`` keep that of the ranks."""
    if algorithm == "ring" and order == "rank":
        raise ArgumentError(
            "algorithm is 'ring' and order is 'rank': a ring adds in its own order; "
            f"take order='any', or {others} for rank order"
        )
