"""GradientBucketer: reduce gradients in buckets, during backward or after it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import Op
from pyringar.comm.arguments import op_name
from pyringar.comm.background_work import Work
from pyringar.comm.communicator import Communicator
from pyringar.comm.exits import empty_backward_at_exit
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.engine import load
from pyringar.errors import RingarError, UnsupportedError
from pyringar.parallel.bucket_params import (
    Comm,
    HookedParams,
    Replica,
    cap_bytes,
    check_agreed,
    check_replicas,
    first_rank,
    give_own_memory,
    grad_dtype,
    is_accumulating,
)

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]

_FIRST_CAP_BYTES = 10**6  # a small first bucket is launched early
# States of a gradient: see GradState in csrc/bucket/step.h.
_SUM, _PART, _COUNTED = 1, 2, 3


@dataclass(frozen=True)
class BucketStats:
    """Statistics of one bucket in one step; times in seconds since the step's first gradient.

    Attributes:
        params: Indices of the bucket's parameters in ``parameters()``.
        nbytes: Bytes of the gradients of one rank.
        ready_s: When the last gradient was computed; None if a parameter had no gradient.
        launched_s: When the bucket was launched; None if it had nothing to reduce.
        done_s: When the bucket was finished; None on GPUs, where the host does not wait.
    """

    params: tuple[int, ...]
    nbytes: int
    ready_s: float | None
    launched_s: float | None
    done_s: float | None


@dataclass(frozen=True)
class StepStats:
    """Statistics of the last step that ``wait()`` finished.

    Attributes:
        begin_ns: When the first gradient was computed, in ``time.perf_counter_ns``.
        buckets: One entry per bucket, in the order of ``GradientBucketer.buckets``.
        backward_s: From the first gradient to the call of ``wait()``.
        communication_s: Sum of ``done_s - launched_s`` over buckets that have both.
        exposed_s: Duration of ``wait()``: the part that backward did not hide.
    """

    begin_ns: int = 0
    buckets: tuple[BucketStats, ...] = ()
    backward_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(slots=True, eq=False)
class Launched:
    """A launched bucket."""

    lists: list[list[Tensor]]  # tensors to reduce: lists[local rank][i]
    params: list[int] = field(default_factory=list)  # indices of the parameters in lists[rank]
    used: list[bool] = field(default_factory=list)  # per parameter: a local rank added a gradient
    # Copies and zeros that replace gradients: index in `params`, parameter, tensor.
    copies: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)  # of the gradients in `lists` at launch
    flags: Tensor | None = None  # over processes: `used`, reduced over all ranks
    work: Work | None = None  # None: the bucket has nothing to reduce

    def finish(self) -> list[int]:
        """Move results from copies to ``grad``; return the indices of reduced parameters."""
        if not self.copies:
            return self.params  # reading flags would wait for a GPU
        flags = self.used if self.flags is None else self.flags.tolist()
        for i, param, copy in self.copies:
            if not flags[i] > 0:
                continue
            if param.grad is None:
                param.grad = copy
            else:
                param.grad.detach().copy_(copy)
        return [i for i, flag in zip(self.params, flags, strict=True) if flag > 0]


class GradientBucketer(AbstractContextManager["GradientBucketer"]):
    """Reduces the gradients of replicas over all ranks, bucket by bucket.

    A hook on every parameter counts gradients. When all ranks have all gradients of a bucket, the
    bucket is launched: an allreduce in place, in the background. The first step fills buckets in
    the reverse order of the parameters, later steps in the order of rank 0's first gradients.

    Args:
        replicas: One module or list of parameters per rank, with equal shapes and dtypes.
            Parameters that do not require grad are ignored.
        comm: Default: a communicator in rank order over the replicas' devices, closed with the
            bucketer. With a `ProcessCommunicator`, ``replicas`` holds this process's replica.
        bucket_cap_mb: A bucket is full at this many megabytes (10**6 bytes) of one rank's
            gradients; the first bucket is full at 1 MB. Parameters are never split.
        op: ``"sum"`` or ``"mean"`` over ranks, or the ReduceOp of torch.distributed.
        overlap: True launches buckets during backward, False in `wait`, with the same bits.
            Default: True on GPUs and over processes, False for CPU ranks of one process, where
            overlap gains nothing.

    Attributes:
        overlap: Whether buckets are launched during backward.

    Raises:
        ArgumentError: Replicas differ, also between processes; or the cap is not a positive number.
        UnsupportedError: ``op`` is another reduction.

    For example:

        bucketer = pr.GradientBucketer(replicas)
        for loss in losses:
            loss.backward()
        bucketer.wait()

    **Reduced gradients.** `wait` reduces each gradient to which any rank's backward pass has added
    since the last reduction; ranks that added nothing count as zeros. Then ``grad`` holds the
    reduced gradient S on all ranks, and keeps every change that you make on all ranks, such as
    clipping. If later passes add g, the next `wait` gives S + sum(g) for ``op="sum"``, S + mean(g)
    for ``op="mean"``. Until then, for ``op="sum"``, only rank 0's ``grad`` contains S.

    **Rules.** Put all backward passes of a step but the last into `no_sync`, or pass
    ``overlap=False``; then call `wait` once. Do not change a gradient between backward and `wait`:
    `wait` raises if a gradient was changed after its launch. If gradients are views of one buffer,
    `wait` notices only a replaced ``grad``. The hook copies a gradient whose memory other tensors
    use, except a view of your buffer.

    **Errors.** An exception or signal in `wait`, or in a backward pass with overlap, closes the
    bucketer after the launched buckets have finished. Every later use raises `RingarError` with the
    reason: clear the gradients, and make a new bucketer. Over processes the communicator is
    aborted, and the other ranks get a `PeerLostError`. A failed backward pass goes unnoticed
    without overlap, under `no_sync`, under compiled autograd and before its first gradient: clear
    the gradients.

    **Processes.** Every rank calls `wait` once a step, also a rank without samples. Gradients have
    the bits of one process with all replicas. All ranks launch buckets in the same order, and the
    last bucket in `wait`: so a step that fails on one rank fails on all ranks.

    **Cost.** A hook of about four microseconds per parameter and rank, and two more on ranks above
    0 for ``op="sum"``; one collective per bucket. With ``torch.compile`` there is no overlap.

    Source: Li et al. 2020, "PyTorch Distributed", for buckets and the small first bucket.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        comm: Comm | None = None,
        bucket_cap_mb: float = 10,
        op: Op = "sum",
        overlap: bool | None = None,
    ) -> None:
        self._params = HookedParams(check_replicas(replicas))
        self._by_rank = by_rank = self._params.by_rank
        self._cap_bytes = cap_bytes(bucket_cap_mb)
        self._op = op_name(op)
        if self._op not in ("sum", "mean"):
            raise UnsupportedError(f"op is {op!r}, expected 'sum' or 'mean' for gradients")
        self._owned: Communicator | None = None
        if comm is None:
            devices = [params[0].device if params else "cpu" for params in by_rank]
            comm = self._owned = Communicator(devices, order="rank")
        self._comm = comm
        self._first_rank = first_rank(comm, len(by_rank))
        self._is_remote = isinstance(comm, RankCommunicator)
        self._check_agreed()
        has_gpus = any(param.device.type != "cpu" for params in by_rank for param in params)
        self.overlap = self._is_remote or has_gpus if overlap is None else bool(overlap)
        self._closed = ""  # why the bucketer is closed; "" if it is open
        self._is_waiting = False
        self._stats = StepStats()
        self._launched: dict[int, Launched] = {}
        self._items = self._params.items()
        self._order = list(
            reversed(range(len(self._items)))
        )  # the usual order of gradients in backward
        self._is_planned = False
        self._ready: Any = None  # GPU events, recorded when gradients are computed
        self._plan()
        # For "sum", rank 0 adds to the last reduced gradient, all other ranks add to zeros.
        first_summed = int(self._first_rank == 0) if self._op == "sum" else len(by_rank)
        # Weak references: hooks must not keep the bucketer alive.
        self._native = load.engine().Bucketer(
            world_size=len(by_rank),
            num_params=len(self._items),
            first_rank=self._first_rank,
            first_summed=first_summed,
            in_order=self._is_remote,
            on_complete=weakref.WeakMethod(self._launch) if self.overlap else None,
            on_failed=weakref.WeakMethod(self._end),
            on_new=give_own_memory,
            is_accumulating=is_accumulating,
        )
        self._native.start_step(self._buckets, [], self._ready)
        self._params.add_hooks(self._native, first_summed)

    @property
    def buckets(self) -> list[list[int]]:
        """Parameter indices of each bucket; buckets are in the order in which they fill."""
        return [list(bucket) for bucket in self._buckets]

    def wait(self) -> None:
        """Launch the buckets that backward has not launched, and finish all buckets.

        On GPUs the current streams are ordered after the reductions, and the host does not wait.

        Raises:
            RingarError: A backward pass or another `wait` still runs (the bucketer stays open), the
                bucketer is closed, or a gradient was changed after its launch.
            ArgumentError: A parameter was replaced after the bucketer was made.
            UnsupportedError: The communicator cannot reduce a gradient.
            CollectiveTimeout: A rank made no progress for the communicator's ``timeout``.
            PeerLostError: A rank ended or aborted the group.
        """
        self._check_open()
        if self._is_waiting or self._native.is_running():
            raise RingarError(
                "wait() runs already, or a backward pass still runs: call wait() once, after all "
                "backward passes have ended"
            )
        try:
            self._is_waiting = True
            self._wait()
            self._is_waiting = False
        except BaseException as error:
            self._end(f"wait() failed ({error!r})")
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without launching buckets; the next `wait` reduces them."""
        self._check_open()
        before = self._native.is_counting
        try:
            self._native.is_counting = False
            yield
        finally:
            self._native.is_counting = before

    def stats(self) -> StepStats:
        """Return the statistics of the last finished step."""
        return self._stats

    def close(self) -> None:
        """Remove the hooks, and close the communicator if the bucketer made it. Idempotent.

        Launched buckets finish first. Over processes, launched buckets abort the communicator, and
        the other ranks get a `PeerLostError`.
        """
        self._end("close() was called", is_failure=bool(self._launched))

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._launched:
            state = f"{len(self._launched)} of {len(self._buckets)} buckets launched"
        else:
            state = "backward has begun" if self._native.begin_ns() else "waits for backward"
        rank = f"rank {self._first_rank} of " if self._is_remote else ""
        return (
            f"GradientBucketer({rank}world size {self._comm.world_size}, parameters: "
            f"{len(self._items)}, buckets: {len(self._buckets)}, {state})"
        )

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.close()

    def _check_agreed(self) -> None:
        params, cap_mb = self._by_rank[0], self._cap_bytes / 1e6
        settings = [f"{len(params)} parameters", f"bucket_cap_mb {cap_mb:g}", f"op {self._op}"]
        settings += [f"parameter {i} of {tuple(p.shape)} {p.dtype}" for i, p in enumerate(params)]
        device = params[0].device if params else torch.device("cpu")
        check_agreed(self._comm, settings, device)

    def _plan(self) -> None:
        self._buckets: list[list[int]] = load.engine().plan_buckets(
            self._items,
            self._order,
            first_cap_bytes=min(_FIRST_CAP_BYTES, self._cap_bytes),
            cap_bytes=self._cap_bytes,
        )
        inside = getattr(self._comm, "_intra", self._comm)  # this machine's communicator
        group: Any = getattr(inside, "_group", None)
        if self.overlap and hasattr(group, "make_ready"):
            self._ready = group.make_ready([len(bucket) for bucket in self._buckets])

    def _pack(self, bucket: int) -> Launched:
        """Collect a bucket's gradients; copies or zeros replace gradients that nothing added to."""
        wanted, by_rank = self._buckets[bucket], self._by_rank
        held = [self._native.held(rank, wanted) for rank in range(len(by_rank))]
        grads: list[Any] = [[params[i].grad for i in wanted] for params in by_rank]
        is_whole = all(min(row) >= _PART for row in held)
        if is_whole and not any(grad is None for row in grads for grad in row):
            return Launched(grads, wanted, [True] * len(wanted))
        packed = Launched([[] for _ in by_rank])
        rows = [zip(*row, strict=True) for row in zip(grads, held, strict=True)]
        for i, *column in zip(wanted, *rows, strict=True):
            for rank, (grad, state) in enumerate(column):
                if grad is None and state == _COUNTED:
                    raise self._changed(rank, i)
            is_used = any(grad is not None and state >= _PART for grad, state in column)
            if not (is_used or self._is_remote):
                continue
            packed.params.append(i)
            packed.used.append(is_used)
            for params, mine, (grad, state) in zip(by_rank, packed.lists, column, strict=True):
                if grad is None or state < _PART:
                    grad = _stand_in(params[i], state)
                    packed.copies.append((len(packed.params) - 1, params[i], grad))
                mine.append(grad)
        return packed

    def _launch(self, bucket: int, *, in_backward: bool = True) -> None:
        launched = self._pack(bucket)
        self._native.set_launched(bucket)
        self._launched[bucket] = launched
        launched.work = self._begin(launched, self._ready if in_backward else None, bucket)
        if in_backward:
            launched.versions = [[grad._version for grad in grads] for grads in launched.lists]
        if self._closed:  # another thread closed the bucketer during the launch
            self._abort()

    def _begin(self, launched: Launched, ready: Any, index: int) -> Work | None:
        """Start the allreduce of a bucket; return None if the bucket has nothing to reduce.

        ``ready``: GPU events of the gradients. None: the current streams compute the gradients.
        """
        lists = [[g.detach() if g.requires_grad else g for g in grads] for grads in launched.lists]
        comm, op = self._comm, self._op
        if isinstance(comm, Communicator):
            if not launched.params:
                return None
            if ready is not None:
                return comm._begin_bucket(lists, op, (ready, index))
            return comm.all_reduce_coalesced(lists, op, async_op=True)
        if ready is not None:
            ready.make_wait(index, 0)
        # A rank does not know which gradients other processes have. So the allreduce also reduces
        # one flag per parameter, which is > 0 if any rank has a gradient.
        first = lists[0][0]
        launched.flags = torch.tensor(launched.used, dtype=first.dtype, device=first.device)
        return comm.all_reduce_coalesced([*lists[0], launched.flags], op, async_op=True)

    def _wait(self) -> None:
        began_ns = time.perf_counter_ns()
        native, launched = self._native, self._launched
        self._params.check_same()
        self._check_unchanged()
        for bucket in range(len(self._buckets)):
            if bucket not in launched:
                self._launch(bucket, in_backward=False)
        works = [launched[bucket].work for bucket in range(len(self._buckets))]
        for work in filter(None, works):
            work.wait()
        self._check_open()  # a signal handler may have closed the bucketer
        reduced = [i for bucket in launched.values() for i in bucket.finish()]
        if native.begin_ns():
            self._stats = self._measure(works, began_ns)
        if reduced and not self._is_planned:
            self._order = list(dict.fromkeys([*native.order(), *self._order]))
            if self._is_remote:
                agreed = torch.tensor(self._order, device=self._by_rank[0][0].device)
                self._comm.broadcast(agreed, 0)
                self._order = agreed.tolist()
            self._plan()
            self._is_planned = True
        self._launched = {}
        native.start_step(self._buckets, reduced, self._ready)

    def _measure(self, works: Sequence[Work | None], began_ns: int) -> StepStats:
        """Return the statistics of the finished step. ``began_ns``: when ``wait()`` was called."""
        ended_ns, native = time.perf_counter_ns(), self._native
        first_ns = native.begin_ns()

        def since(time_ns: int) -> float | None:
            return (time_ns - first_ns) * 1e-9 if time_ns else None

        times = zip(self._buckets, native.ready_ns(), native.launched_ns(), works, strict=True)
        buckets = tuple(
            BucketStats(
                params=tuple(indices),
                nbytes=sum(self._items[i][0] for i in indices),
                ready_s=since(ready_ns),
                launched_s=since(launched_ns if work else 0),
                done_s=since(work.finished_ns() if work else 0),
            )
            for indices, ready_ns, launched_ns, work in times
        )
        spent = [b.done_s - b.launched_s for b in buckets if b.done_s and b.launched_s is not None]
        return StepStats(
            begin_ns=first_ns,
            buckets=buckets,
            backward_s=(began_ns - first_ns) * 1e-9,
            communication_s=sum(spent),
            exposed_s=(ended_ns - began_ns) * 1e-9,
        )

    def _check_unchanged(self) -> None:
        """Raise if a gradient was changed or replaced since its launch."""
        for launched in self._launched.values():
            for rank, params in enumerate(self._by_rank):
                grads, versions = launched.lists[rank], launched.versions[rank]
                for i, grad, version in zip(launched.params, grads, versions, strict=True):
                    is_same = params[i].grad is grad
                    if is_same and grad._version == version:
                        continue
                    # A view's version also counts writes to other views of its storage: ignore it.
                    is_view = grad.untyped_storage().nbytes() != grad.nbytes
                    if not (is_same and is_view):
                        raise self._changed(rank, i)

    def _changed(self, rank: int, i: int) -> RingarError:
        return RingarError(
            f"the gradient of parameter {i} of rank {self._first_rank + rank} was changed or "
            "cleared after backward and before its reduction: call wait() before clip_grad_norm_, "
            "scaler.unscale_, optimizer.step or zero_grad. (Register hooks that change gradients "
            "before making the bucketer; no hook may set a gradient to None)"
        )

    def _check_open(self) -> None:
        if self._closed:
            advice = ", with a new communicator, on all ranks" if self._is_remote else ""
            raise RingarError(
                f"this GradientBucketer is closed: {self._closed}. Clear the gradients and make a "
                f"new one{advice}"
            )

    def _end(self, reason: str, *, is_failure: bool = True) -> None:
        """Close the bucketer after all launched buckets have finished. Idempotent.

        ``is_failure``: buckets may be launched, or other processes may wait for this rank.
        """
        try:
            self._closed = self._closed or reason
            self._native.is_closed = True
            self._params.remove_hooks()
            if is_failure:
                empty_backward_at_exit()
                self._abort()
            if self._owned is not None:
                self._owned.close()
        except BaseException as error:
            if not isinstance(error, RuntimeError):  # a signal handler raised it: wait once more
                self._end(reason, is_failure=is_failure)
            raise

    def _abort(self) -> None:
        """Wait for launched buckets of local ranks; over processes, abort the group instead."""
        comm = self._comm
        if not isinstance(comm, Communicator):
            with suppress(RingarError):
                comm.abort()
            return
        for work in list(comm._in_flight):
            with suppress(RingarError):
                work.wait(math.inf)
        # Wait for whole devices: buckets may run on streams of another thread.
        for device in {device for device in comm.devices if device.type == "cuda"}:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)


def _stand_in(param: Tensor, state: int) -> Tensor:
    if param.grad is None:
        return torch.zeros_like(param, dtype=grad_dtype(param))
    return torch.zeros_like(param.grad) if state == _SUM else param.grad.detach().clone()
