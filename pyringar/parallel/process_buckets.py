"""A bucketer's other ranks, in other processes: one order of buckets, and who used which parameter.

Nobody sees the other ranks' gradients before they are reduced. So every bucket carries one small
tensor more, which says what this rank has; its sum says what all have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.arguments import OPS, op_name
from pyringar.comm.base import RankCommunicator
from pyringar.comm.work import Work
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)
from pyringar.parallel.bucket_step import Sent, Step
from pyringar.parallel.ranks import BucketState, Params, Ranks, gone

__all__ = ["CHANGED", "ProcessRanks"]

CHANGED = (
    "gradients were changed or cleared after they had left to be reduced, or a rank broke the step "
    "off: call wait() before zero_grad, clipping, unscaling or a step, and register hooks that "
    "change gradients before the bucketer is made; now clear the gradients of all ranks and run "
    "all backward passes of the step again"
)

# For flags that are 0 or 1 these reductions are > 0 if and only if some rank set the flag.
_OPS = ("sum", "mean", "max")


class ProcessRanks(Ranks):
    """This process's rank in a bucketer that spans processes.

    Args:
        comm: This rank of the group.
        op: How gradients are reduced: sum, mean or max.
        params: This rank's parameters.
        caps: What else the plan of buckets follows from, by name.

    Raises:
        ArgumentError: Ranks have different parameters, caps or reductions; on every rank.
        UnsupportedError: Another reduction: with it, nobody could tell that no rank used a
            parameter.

    Cost: two small collectives when it is made, one after the first step, and for every bucket one
    element per parameter.
    """

    in_turns = True
    unwaited = (
        "the step before was not waited for: ranks in other processes wait for it; call wait() "
        "once for every step, on all ranks"
    )

    def __init__(
        self, comm: RankCommunicator, op: Any, params: Sequence[Tensor], caps: dict[str, int]
    ) -> None:
        name = op_name(op)
        if name not in _OPS:
            raise UnsupportedError(
                f"op is {name!r}, but over processes a GradientBucketer knows {', '.join(_OPS)}: "
                "with others nobody could tell that no rank used a parameter"
            )
        self._comm = comm
        self._op = op
        self._failure = ""
        self._text = f"{len(params)} parameters"
        self._device = params[0].device if params else torch.device("cpu")
        self.can_tell = self._device.type == "cpu"  # on a GPU, to look at results is to wait
        self._check_alike(params, {**caps, "op": OPS.index(name)})
        self._order: Sent | None = None  # rank 0's, once it is on its way

    def __str__(self) -> str:
        return f"rank {self._comm.rank} of {self._comm.world_size}, {self._text}"

    def check(self) -> None:
        """Refuse to go on once this rank has left, or lost the others.

        Raises:
            RingarError: Says why.
        """
        if self._failure:
            raise RingarError(self._failure)

    def takes_part(self, *, has_marks: bool) -> bool:
        """Return True: all ranks take part in every step."""
        return True

    def pack(self, wanted: Sequence[int], params: Params, state: BucketState) -> Sent:
        """Put a bucket together; without a backward pass, of copies, so that nothing changes."""
        self.check()
        grads, used = [], []
        for i in wanted:
            grad = params[0][i].grad
            used.append(grad is not None)
            if grad is None:
                if state.is_complete:
                    raise gone(i)
                grad = torch.zeros_like(params[0][i])
            elif not state.has_marks:
                grad = grad.clone()
            grads.append(grad)
        kind = params[0][wanted[0]]
        entries = [*used, state.has_marks, state.is_changed]
        flags = torch.tensor(entries, dtype=kind.dtype, device=kind.device)
        return Sent(list(wanted), [grads], state.has_marks, flags, is_whole=all(used))

    @property
    def make_ready(self) -> Any:
        """Return what follows gradients on a GPU through its streams; None on the CPU."""
        inside = getattr(self._comm, "_intra", self._comm)  # of several machines, this one
        return getattr(getattr(inside, "_group", None), "make_ready", None)

    def sender(self, sent: Sent, after: Any) -> Callable[[], Work | None]:
        """Return what reduces a bucket and its flags, after the current stream."""
        (tensors,) = sent.tensors()

        def send() -> Work | None:
            if after is not None:
                ready, bucket = after
                ready.make_wait(bucket, 0)
            return self._comm.all_reduce_coalesced(tensors, self._op, async_op=True)

        return send

    def sees_change(self, step: Step) -> bool:
        """Return whether a rank changed gradients that had left, or broke the step off.

        All ranks see it.
        """
        flags = list(step.sent.values())[-1].flags if step.sent and self.can_tell else None
        return flags is not None and bool(flags[-1] > 0)

    def finish_step(self, step: Step, params: Params) -> bool:
        """Put what came for other tensors than ``grad`` into ``grad``."""
        buckets = [(sent, sent.flags) for sent in step.sent.values() if sent.flags is not None]
        # Reading what is on a GPU would wait for it: only where it tells something new.
        if buckets and not buckets[0][0].has_marks and not buckets[0][1][-2] > 0:
            return False
        for sent, flags in buckets:
            if sent.is_whole and sent.has_marks:
                continue
            for i, grad, used in zip(sent.params, sent.lists[0], flags.tolist(), strict=False):
                param = params[0][i]
                if param.grad is None:
                    param.grad = grad if used > 0 else None
                elif param.grad is not grad:
                    param.grad.detach().copy_(grad)
        return bool(buckets)

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return rank 0's, on all ranks. After an interrupt, call it again.

        Raises:
            RingarError: Nobody knows whether the interrupted call told the others; they are told
                that this rank has left.
        """
        if self._order is None:
            agreed = torch.tensor(order, dtype=torch.int64, device=self._device)
            self._order = Sent([], [[agreed]])
            self._order.work = self._comm.broadcast(agreed, 0, async_op=True)
            self._order.is_leaving = False
        elif self._order.is_leaving:
            self._leave("was interrupted while it told the others the order of buckets")
            self.check()
        if self._order.work is not None:
            self._order.work.wait()
        found: list[int] = self._order.lists[0][0].tolist()
        return found

    def lose(self, error: BaseException) -> bool:
        """Refuse to go on after an error that ends the communicator."""
        is_end = isinstance(error, (PeerLostError, CollectiveTimeout))
        if is_end and not self._failure:
            self._failure = (
                f"{error}; make a new communicator and a new GradientBucketer on all ranks"
            )
        return is_end

    def tell(self, step: Step, send_last: Callable[[], None]) -> bool:
        """Tell it with the last bucket, if all others have left and nothing is in doubt."""
        is_sure = not any(sent.is_leaving for sent in step.sent.values())
        if self.can_tell and is_sure and 0 < len(step.sent) == len(step.buckets) - 1:
            with suppress(RingarError):  # they are gone, and know
                send_last()
                return True
        return False

    def leave(self, step: Step) -> None:
        """Leave the group, and with that tell the others, who wait for the rest of the step.

        This rank's next step would meet the rest of the others' broken one.
        """
        if step.sent:
            self._leave(f"broke off a step after {len(step.sent)} of {len(step.buckets)} buckets")

    def _leave(self, what: str) -> None:
        if self._failure:
            return
        self._comm.close()
        self._failure = (
            f"rank {self._comm.rank} {what}, has left the group, and the other ranks have been "
            "told; make a new communicator and a new GradientBucketer on all ranks"
        )

    # -- before the first step ---------------------------------------------------------------------

    def _check_alike(self, params: Sequence[Tensor], settings: dict[str, int]) -> None:
        settings = {"number of parameters": len(params), **settings}
        self._compare(list(settings.values()), [f"its {name}" for name in settings])
        kinds = [f"{tuple(param.shape)} {param.dtype}" for param in params]
        self._compare(
            [_digest(kind) for kind in kinds],
            [f"the shape or dtype of parameter {i} ({kind})" for i, kind in enumerate(kinds)],
        )

    def _compare(self, own: list[int], names: list[str]) -> None:
        rows = torch.zeros(self._comm.world_size, len(own), dtype=torch.int64)
        rows[self._comm.rank] = torch.tensor(own, dtype=torch.int64)
        rows = rows.to(self._device)
        self._comm.all_reduce_coalesced([rows])
        for rank, row in enumerate(rows.tolist()):
            for ours, theirs, name in zip(own, row, names, strict=True):
                if ours != theirs:
                    raise ArgumentError(
                        f"rank {self._comm.rank} of the bucketer and rank {rank} differ in {name}"
                        + ("" if "dtype" in name else f": {ours} here, {theirs} there")
                    )


def _digest(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )
