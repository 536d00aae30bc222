"""Buckets of ranks that are all in this process."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import op_name
from pyringar.comm.communicator import Communicator
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_step import PART, SUM, Launched

__all__ = ["LocalBuckets", "Params", "cleared", "run_to_the_end"]

Params = Sequence[Sequence[Tensor]]  # by rank of this process


class LocalBuckets:
    """Reduces buckets with a communicator that has all ranks.

    Args:
        params: Parameters of each rank.
        comm: The communicator; None: make one in rank order, and own it.
        op: How gradients are reduced.

    Attributes:
        first_rank: The rank of the first replica.
        first_summed: The first replica whose sums are set to zero before a pass adds to them.
        in_order: Whether buckets must be launched in the order of the plan.
        is_overlapped: Whether buckets are launched during backward by default.
        advice: What else to make anew after a failure.

    Raises:
        ArgumentError: The communicator has another number of ranks, or there is no such ``op``.
    """

    first_rank = 0
    in_order = False
    advice = ""

    def __init__(self, params: Params, comm: Communicator | None, op: Any) -> None:
        self._params = params
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
        self.first_summed = 1 if self._op == "sum" else len(params)
        self.is_overlapped = any(device.type != "cpu" for device in comm.devices)
        # By the first parameter of a bucket: its gradient, and the prepared reduction.
        self._firsts: dict[int, weakref.ref[Tensor]] = {}
        self._prepared: dict[int, Any] = {}

    def __str__(self) -> str:
        return f"{len(self._params)} replicas with {len(self._params[0])} parameters"

    @property
    def make_ready(self) -> Any:
        """Return the factory of GPU events that follow gradients; None without GPUs."""
        return getattr(self._comm._group, "make_ready", None)

    def pack(self, wanted: Sequence[int], native: Any, *, is_complete: bool) -> Launched:
        """Collect the gradients of a bucket.

        Args:
            wanted: Its parameters.
            native: The engine's bucketer.
            is_complete: Every rank has a new gradient for each of them.

        Raises:
            RingarError: A gradient is missing.
        """
        held: list[dict[int, int]] = []
        if not is_complete:
            ranks = range(len(self._params))
            held = [dict(zip(wanted, native.held(rank, wanted), strict=True)) for rank in ranks]
            wanted = [i for i in wanted if self._has_part(held, i)]
        lists: list[list[Tensor]] = [[] for _ in self._params]
        for rank, (mine, grads) in enumerate(zip(self._params, lists, strict=True)):
            for i in wanted:
                grad = mine[i].grad
                if grad is None and is_complete:
                    raise cleared(i, rank)
                if grad is None:
                    grad = mine[i].grad = torch.zeros_like(mine[i])
                elif held and rank >= self.first_summed and held[rank][i] == SUM:
                    grad.detach().zero_()
                grads.append(grad)
        return Launched(list(wanted), lists)

    def _has_part(self, held: Sequence[dict[int, int]], param: int) -> bool:
        return any(
            one[param] == PART and mine[param].grad is not None
            for one, mine in zip(held, self._params, strict=True)
        )

    def launch(self, bucket: Launched, after: Any) -> Work | None:
        """Begin the reduction of a bucket; return None if there is nothing to reduce.

        Args:
            bucket: From `pack`.
            after: The GPU events of its gradients; None: the current streams have them.
        """
        if not bucket.params:
            return None
        prepared = self._prepare(bucket)
        if prepared is not None:
            return self._comm._begin(prepared, bucket.lists, after)
        tensors = bucket.tensors()
        if after is None:
            return self._comm.all_reduce_coalesced(tensors, self._op, async_op=True)
        return self._comm._begin_bucket(tensors, self._op, after)

    def _prepare(self, bucket: Launched) -> Any:
        """Return the prepared reduction if the gradients are those of the step before.

        Under ``zero_grad(set_to_none=True)`` they never are. The prepared reduction keeps the
        memory of the gradients until the first of them is freed.
        """
        key, first, prepared = bucket.params[0], bucket.lists[0][0], self._prepared
        before = self._firsts.get(key)
        if before is None or before() is not first:
            self._firsts[key] = weakref.ref(first)
            prepared.pop(key, None)
            return None
        if key in prepared and (prepared[key] is None or prepared[key].holds(bucket.lists)):
            return prepared[key]
        reduction = prepared[key] = self._comm._remember(bucket.tensors(), self._op)
        self._firsts[key] = weakref.ref(first, lambda _: prepared.pop(key, None))
        return reduction

    def finish(self, bucket: Launched) -> list[int]:
        """Return which parameters hold the sum, once the work is done."""
        return bucket.params

    def agree_on_order(self, order: list[int]) -> list[int]:
        """Return the order of gradients on rank 0."""
        return order

    def abort(self) -> None:
        """Wait until no reduction of the communicator writes to a gradient."""
        works = list(self._comm._in_flight)
        run_to_the_end(*(lambda work=work: work.wait(math.inf) for work in works))
        # The current streams are those of another thread.
        for device in {device for device in self._comm.devices if device.type == "cuda"}:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Close the communicator if it is owned."""
        self._prepared.clear()
        if self._owned is not None:
            self._owned.close()


def run_to_the_end(*calls: Callable[[], object]) -> None:
    """Repeat each call until it returns or fails, and raise the last signal at the end.

    A call that a signal handler ends with an exception is repeated. A `RingarError` is the failure
    of the call itself.
    """
    interrupt: BaseException | None = None
    for call in calls:
        is_done = False
        while not is_done:
            is_done = True
            try:
                call()
            except RingarError:
                pass
            except BaseException as error:
                interrupt, is_done = error, False
    if interrupt is not None:
        raise interrupt


def cleared(param: int, rank: int) -> RingarError:
    """Return the error of a gradient that is gone before it was reduced."""
    return RingarError(
        f"the gradient of parameter {param} of rank {rank} was cleared after its backward pass and "
        "before it was reduced: call wait() before zero_grad, and let no hook set a gradient to "
        "None"
    )
