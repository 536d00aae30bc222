"""Reduces gradients in buckets, while backward still runs."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.comm.exits import empty_backward_at_exit
from pyringar.comm.shown import never_fails
from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_params import HookedParams, Replica, check_caps, check_replicas
from pyringar.parallel.bucket_step import BucketStats, Launched, StepStats, measure
from pyringar.parallel.local_buckets import LocalBuckets, cleared
from pyringar.parallel.own_memory import give_own_memory
from pyringar.parallel.process_buckets import ProcessBuckets

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]

FAILED_PASS = "a backward pass failed"


class GradientBucketer:
    """Reduces the gradients of replicas over all ranks, bucket by bucket.

    A hook on every parameter counts gradients. When all ranks have all gradients of a bucket, the
    bucket is launched: it is reduced in the background, in place. Buckets follow the order of
    rank 0's gradients in the first step, and the reverse order of the parameters before.

    Args:
        replicas: One module or list of parameters per rank, with equal shapes and dtypes.
            Parameters that do not require grad are left alone.
        comm: None: make one in rank order over the devices of the replicas, and close it with the
            bucketer. Over a `ProcessCommunicator`, ``replicas`` has the replica of this process.
        bucket_cap_mb: A bucket is full when it holds this many megabytes (10**6 bytes) of the
            gradients of one rank. Parameters are never split.
        first_bucket_mb: The cap of the first bucket, at most ``bucket_cap_mb``. A small first
            bucket is launched early.
        op: See `Communicator.all_reduce`. Over processes sum, mean or max.
        overlap: Launch buckets during backward, else in `wait`, with the same bits. None: True on
            GPUs and over processes. False for ranks on the CPU in one process, where overlap gains
            nothing.

    Attributes:
        overlap: Whether buckets are launched during backward.

    Raises:
        ArgumentError: Replicas that differ, also in other processes; caps that are no positive
            numbers.
        UnsupportedError: Over processes, another ``op``.

    For example:

        bucketer = pr.GradientBucketer(replicas)
        for loss in losses:
            loss.backward()
        bucketer.wait()

    **What is reduced.** `wait` reduces each gradient to which a backward pass of any rank has added
    since its last reduction; ranks without such a pass count as zeros. Then ``grad`` holds the
    reduced gradient S on all ranks, and keeps every change that you make on all ranks, such as
    clipping. If later passes add g, the next `wait` gives S + sum(g) for ``op="sum"``, S + mean(g)
    for ``op="mean"``. Until then, for ``op="sum"``, only rank 0's ``grad`` contains S.

    **Rules.** Put all backward passes of a step but the last into `no_sync`, or pass
    ``overlap=False``; then call `wait` once. Do not change a gradient in between. A change after
    the launch makes `wait` raise; of views of one buffer, only a replaced ``grad`` is noticed.
    ``overlap=False`` is also needed if one backward gives a parameter gradients from several
    passes, such as a shared parameter under a reentrant checkpoint.

    **Memory.** If backward leaves a gradient in memory that other tensors use, as it may for
    ``param.view(...)``, the hook puts a copy into ``param.grad``. A gradient stays where it is if
    it is a view of your buffer, or was in ``param.grad`` when the bucketer was made.

    **Errors.** An exception or signal in `wait`, or in a backward pass with overlap, closes the
    bucketer: launched reductions end first, so nothing writes to gradients afterwards. Every later
    use raises `RingarError` with the reason. Clear the gradients, and make a new bucketer. Over
    processes the communicator is aborted, and the other ranks get a `PeerLostError`. A backward
    pass that fails without overlap, under `no_sync`, under compiled autograd or before its first
    gradient is not noticed: the next `wait` reduces what is in ``grad``, so clear the gradients.

    **Processes.** Every rank calls `wait` once a step, also a rank without samples. Gradients have
    the bits that one process with all replicas would compute. All ranks launch buckets in the same
    order, the last one in `wait`, so no rank ends a step that fails on another rank.

    **Cost.** A hook of about four microseconds per parameter and rank, and two more on ranks above
    0 for ``op="sum"``; one collective per bucket. With ``torch.compile`` hooks run at the end of
    backward, without overlap. ``backward(create_graph=True)`` reduces values, and keeps the rank's
    own graph.

    Source: Li et al. 2020, "PyTorch Distributed": buckets, and the cap of the first.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        comm: Communicator | RankCommunicator | None = None,
        bucket_cap_mb: float = 10,
        first_bucket_mb: float = 1,
        op: Any = "sum",
        overlap: bool | None = None,
    ) -> None:
        checked = check_replicas(replicas)
        caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        params = HookedParams(checked)
        ranks: LocalBuckets | ProcessBuckets
        if isinstance(comm, RankCommunicator):
            if len(checked) != 1:
                raise ArgumentError(
                    f"replicas has {len(checked)} entries, but comm is one rank of "
                    f"{comm.world_size}, each in a process of its own: expected one replica"
                )
            ranks = ProcessBuckets(comm, op, params.by_rank[0], caps)
        else:
            ranks = LocalBuckets(params.by_rank, comm, op)
        engine = load.engine()
        self._params, self._ranks = params, ranks
        self._process = os.getpid()
        self._closed = ""  # the reason
        self._is_ended = self._is_waiting = False
        self._is_first_step = True
        self._launched: dict[int, Launched] = {}
        self._stats = StepStats()
        items = params.items()
        self._bytes_of = [nbytes for nbytes, _ in items]
        self._plan = partial(
            engine.plan_buckets,
            items,
            first_cap_bytes=min(caps.values()),
            cap_bytes=caps["bucket_cap_mb"],
        )
        # Backward usually meets parameters from last to first.
        self._last_to_first = list(reversed(range(len(items))))
        self._buckets: list[list[int]] = self._plan(self._last_to_first)
        self.overlap = ranks.is_overlapped if overlap is None else bool(overlap)
        this = weakref.ref(self)  # hooks must not keep the bucketer alive
        launch = _method(this, GradientBucketer._launch_in_backward)
        self._native = engine.Bucketer(
            world_size=len(params.by_rank),
            num_params=len(items),
            first_rank=ranks.first_rank,
            plan=self._buckets,
            in_order=ranks.in_order,
            on_complete=launch if self.overlap else None,
            on_failed=_method(this, partial(GradientBucketer._end, reason=FAILED_PASS)),
            on_new=give_own_memory,
            make_ready=ranks.make_ready if self.overlap else None,
        )
        params.add_hooks(self._native, ranks.first_summed)

    @property
    def buckets(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in the order of the plan."""
        return [list(bucket) for bucket in self._buckets]

    def wait(self) -> None:
        """Launch the buckets that backward has not launched, and wait for all reductions.

        On GPUs the current streams are ordered after the reductions, and the host does not wait.

        Raises:
            RingarError: A backward pass or another `wait` still runs, or this is a forked child.
                These errors do not close the bucketer. Or it is closed, or a gradient was changed
                after its launch.
            ArgumentError, UnsupportedError, CollectiveTimeout, PeerLostError: See
                ``all_reduce_coalesced`` of the communicator. Also parameters that were replaced.
        """
        self._check_open()
        if self._native.is_running():
            raise RingarError("a backward pass still runs: call wait() after all passes have ended")
        if self._is_waiting:
            raise RingarError(
                "wait() runs already: a signal handler, a callback or another thread called it too"
            )
        began_ns = time.perf_counter_ns()
        try:
            self._is_waiting = True
            self._wait(began_ns)
            self._is_waiting = False
        except BaseException as error:
            self._end(f"wait() failed ({error!r})")
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in the backward passes inside; a later `wait` reduces."""
        self._check_open()
        before = self._native.is_counting
        try:
            self._native.is_counting = False
            yield
        finally:
            self._native.is_counting = before

    def stats(self) -> StepStats:
        """Return the statistics of the last step."""
        return self._stats

    def close(self) -> None:
        """Remove the hooks; close the communicator if the bucketer made it. May be called again.

        Launched reductions end first. Over processes, if buckets are launched, the communicator is
        aborted, and the other ranks get a `PeerLostError`.
        """
        self._end("close() was called", is_failure=bool(self._launched))

    @never_fails
    def __repr__(self) -> str:
        count = len(self._buckets)
        state = "backward has begun" if self._native.begin_ns() else "waits for backward"
        if self._closed:
            state = "closed"
        elif self._launched:
            state = f"{len(self._launched)} of {count} buckets launched"
        plural = "" if count == 1 else "s"
        return f"GradientBucketer({self._ranks}, {count} bucket{plural}, {state})"

    def __enter__(self) -> GradientBucketer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            self.close()

    # -- one step ----------------------------------------------------------------------------------

    def _launch_in_backward(self, bucket: int) -> None:
        try:
            self._launch(bucket, is_complete=True)
        except BaseException as error:
            self._end(f"{FAILED_PASS} ({error!r})")
            raise

    def _launch(self, bucket: int, *, is_complete: bool) -> None:
        native = self._native
        launched = self._ranks.pack(self._buckets[bucket], native, is_complete=is_complete)
        native.set_launched(bucket)
        self._launched[bucket] = launched
        has_events = is_complete and native.ready is not None
        launched.work = self._ranks.launch(launched, (native.ready, bucket) if has_events else None)
        if is_complete:
            launched.versions = [[grad._version for grad in grads] for grads in launched.lists]
        if self._closed:  # by another thread, meanwhile
            self._ranks.abort()

    def _wait(self, began_ns: int) -> None:
        native, ranks = self._native, self._ranks
        self._params.check_same()
        self._check_unchanged()
        for bucket in range(len(self._buckets)):
            if bucket not in self._launched:
                self._launch(bucket, is_complete=False)
        for launched in self._launched.values():
            if launched.work is not None:
                launched.work.wait()
        self._check_open()  # a signal handler may have closed it
        reduced = [i for launched in self._launched.values() for i in ranks.finish(launched)]
        plan = None
        if self._is_first_step and reduced:
            order = list(dict.fromkeys([*native.order(), *self._last_to_first]))
            plan = self._plan(ranks.agree_on_order(order))
            self._is_first_step = False
        if native.begin_ns():
            self._stats = measure(native, self._buckets, self._launched, self._bytes_of, began_ns)
        self._launched = {}
        self._buckets = plan or self._buckets
        native.finish_step(reduced, plan)

    def _check_unchanged(self) -> None:
        first_rank, by_rank = self._ranks.first_rank, self._params.by_rank
        for launched in self._launched.values():
            found = launched.find_changed(by_rank)
            if found is not None:
                raise RingarError(
                    f"the gradient of parameter {found[1]} of rank {first_rank + found[0]} was "
                    "changed or cleared after its launch: call wait() before zero_grad, clipping, "
                    "unscaling or an optimizer step, and register hooks that change gradients "
                    "before the bucketer is made"
                )
        for rank, params in enumerate(by_rank):
            for i, param in enumerate(params):
                if param.grad is None and self._native.is_marked(rank, i):
                    raise cleared(i, first_rank + rank)

    # -- the end -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise RingarError(
                "this bucketer was made before fork(), and its reductions run in the parent "
                "process; make a new GradientBucketer in the child"
            )
        if self._closed:
            raise RingarError(
                f"this GradientBucketer is closed: {self._closed}. Clear the gradients and make a "
                f"new one{self._ranks.advice}"
            )

    def _end(self, reason: str, *, is_failure: bool = True) -> None:
        """Close, once no launched reduction writes to a gradient.

        May be called again, also to repeat a call that a signal ended. ``is_failure``: reductions
        may run, or other processes may wait for this rank.
        """
        if self._is_ended:
            return
        try:
            self._closed = self._closed or reason
            self._native.is_closed = True
            self._params.remove_hooks()
        finally:
            if is_failure and self._process == os.getpid():
                empty_backward_at_exit()
                self._ranks.abort()
            self._ranks.close()
        self._is_ended = True


def _method(this: weakref.ref[GradientBucketer], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        bucketer = this()
        return None if bucketer is None else method(bucketer, *arguments)

    return call
