"""The ranks of a bucketer: all in this process here, or in others (process_buckets)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import op_name
from pyringar.comm.communicator import Communicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_step import Sent, Step

__all__ = ["BucketState", "LocalRanks", "Params", "Ranks", "gone"]

Params = Sequence[Sequence[Tensor]]  # by rank of this process


@dataclass(frozen=True)
class BucketState:
    """A bucket that is about to leave.

    Attributes:
        is_complete: Backward has left all its gradients.
        has_marks: This process had a backward pass. If no rank had one nothing shall change.
        is_changed: Gradients that had left were changed here, or the step broke off: no rank can
            rely on them.
    """

    is_complete: bool = False
    has_marks: bool = True
    is_changed: bool = False


class Ranks:
    """Reduces the buckets of a step; what is not overridden is for ranks in one process.

    Attributes:
        in_turns: Buckets leave in the order of the plan, the last one in ``wait()``.
        make_ready: Makes what follows gradients through streams; None where hooks find them there.
        can_tell: The last bucket can tell all ranks that the step failed.
        unwaited: Why a step that nobody waited for cannot be forgotten; "" if it can.
    """

    in_turns: bool = False
    make_ready: Any = None
    can_tell: bool = False
    unwaited: str = ""

    def check(self) -> None:
        """Raise `RingarError` if these ranks can reduce nothing any more."""

    def takes_part(self, *, has_marks: bool) -> bool:
        """Return whether ``wait()`` reduces, where this process had a backward pass or not."""
        return has_marks

    def pack(self, wanted: Sequence[int], params: Params, state: BucketState) -> Sent:
        """Put a bucket together.

        Args:
            wanted: Its parameters.
            params: All parameters.
            state: What is known about it.

        Raises:
            RingarError: A gradient is gone, or `check` raises.
        """
        raise NotImplementedError

    def sender(self, sent: Sent, after: Any) -> Callable[[], Work | None]:
        """Return what begins a bucket's reduction; it returns None where nothing is to be reduced.

        Nothing has left before that is called.

        Args:
            sent: The bucket.
            after: What says when its gradients are there, if backward has left them all; or None.
        """
        raise NotImplementedError

    def sees_change(self, step: Step) -> bool:
        """Return whether another process changed what had left; all works are done."""
        return False

    def finish_step(self, step: Step, params: Params) -> bool:
        """Put results where they belong, once all works are done. May be called again.

        Returns:
            Whether any rank had a backward pass.
        """
        return step.has_marks()

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return rank 0's, on all ranks. After an interrupt, call it again."""
        return order

    def lose(self, error: BaseException) -> bool:
        """Return whether an error is the end of these ranks; then refuse to go on."""
        return False

    def tell(self, step: Step, send_last: Callable[[], None]) -> bool:
        """Tell all ranks that a step broke off, and return whether they know.

        Args:
            step: What broke off.
            send_last: Sends its last bucket, and with it that it broke off.
        """
        return True

    def leave(self, step: Step) -> None:
        """Leave the group where a step was broken off that the others would finish."""

    def flush(self) -> None:
        """Wait for a bucket that may run though no work of it was noted."""

    def close(self) -> None:
        """Let go of what these ranks own. May be called again."""


class LocalRanks(Ranks):
    """All ranks are in this process.

    Args:
        params: Their parameters.
        comm: What reduces; if None, a communicator of its own in rank order.
        op: How gradients are reduced.

    Raises:
        ArgumentError: The communicator has another number of ranks, or there is no such ``op``.
    """

    def __init__(self, params: Params, comm: Communicator | None, op: Any) -> None:
        self._op = op_name(op)
        self._owned: Communicator | None = None
        if comm is None:
            devices = [mine[0].device if mine else "cpu" for mine in params]
            comm = self._owned = Communicator(devices, order="rank")
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
            )
        if comm.world_size != len(params):
            raise ArgumentError(f"comm has {comm.world_size} ranks for {len(params)} replicas")
        self._comm = comm
        # By a bucket's first parameter: its gradient, and what reduces the bucket's if they stay.
        self._firsts: dict[int, weakref.ref[Tensor]] = {}
        self._kept: dict[int, Any] = {}
        self._text = f"{len(params)} replicas with {len(params[0])} parameters"

    def __str__(self) -> str:
        return self._text

    def pack(self, wanted: Sequence[int], params: Params, state: BucketState) -> Sent:
        """Take the gradients as they are; zeros where only other ranks have one."""
        if not state.is_complete:
            wanted = [i for i in wanted if any(mine[i].grad is not None for mine in params)]
            for mine in params:
                for i in wanted:
                    if mine[i].grad is None:
                        mine[i].grad = torch.zeros_like(mine[i])
        lists: list[list[Tensor]] = [[] for _ in params]
        for grads, mine in zip(lists, params, strict=True):
            for i in wanted:
                grad = mine[i].grad
                if grad is None:
                    raise gone(i)
                grads.append(grad)
        return Sent(list(wanted), lists)

    @property
    def make_ready(self) -> Any:
        """Return what follows gradients on GPUs through their streams; None without GPUs."""
        return getattr(self._comm._group, "make_ready", None)

    def sender(self, sent: Sent, after: Any) -> Callable[[], Work | None]:
        """Return what reduces where the gradients lie."""
        if not sent.params:
            return lambda: None
        remembered = self._remembered(sent)
        if remembered is not None:
            return partial(self._comm._begin, remembered, sent.lists, after)
        tensors = sent.tensors()
        if after is None:
            return partial(self._comm.all_reduce_coalesced, tensors, self._op, async_op=True)
        return partial(self._comm._begin_bucket, tensors, self._op, after)

    def _remembered(self, sent: Sent) -> Any:
        """Return the reduction of these gradients if they are those of the step before.

        Under ``zero_grad(set_to_none=True)`` they never are. Its memory is kept until the first of
        them goes, as all do that are cleared so.
        """
        key, first, kept = sent.params[0], sent.lists[0][0], self._kept
        before = self._firsts.get(key)
        if before is None or before() is not first:
            self._firsts[key] = weakref.ref(first)
            kept.pop(key, None)
            return None
        if key in kept and (kept[key] is None or kept[key].holds(sent.lists)):
            return kept[key]
        reduction = kept[key] = self._comm._remember(sent.tensors(), self._op)
        self._firsts[key] = weakref.ref(first, lambda _: kept.pop(key, None))
        return reduction

    def flush(self) -> None:
        """Wait for all buckets, by a reduction after them."""
        with suppress(RingarError):
            self._comm.all_reduce([torch.zeros(1, device=d) for d in self._comm.devices])

    def close(self) -> None:
        """Close the communicator, if it is their own."""
        self._kept.clear()
        if self._owned is not None:
            self._owned.close()


def gone(param: int) -> RingarError:
    """Return the error of a parameter whose gradient vanished between its hook and its bucket."""
    return RingarError(
        f"the gradient of parameter {param} was gone before it was reduced: another hook, such as "
        "an optimizer inside backward, has set it to None, or it was cleared without a call of "
        "wait() for the step before"
    )
