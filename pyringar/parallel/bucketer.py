"""Gradients leave while backward still runs: buckets that are reduced as soon as they are full."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.comm.shown import never_fails
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.bucket_params import HookedParams, Replica, check_caps, check_replicas
from pyringar.parallel.bucket_step import BucketStats, StepStats
from pyringar.parallel.process_buckets import ProcessRanks
from pyringar.parallel.ranks import LocalRanks, Ranks
from pyringar.parallel.reducer import Reducer

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]


class GradientBucketer:
    """Reduces the gradients of replicas, bucket by bucket, while backward goes on.

    Every parameter gets a hook that counts its gradient. When all gradients of a bucket are there
    on all ranks, it is reduced in the background, where the gradients lie; nothing is packed.
    Buckets follow the order in which gradients became ready in the first step; until then, the
    reverse order of the parameters.

    Args:
        replicas: One module per rank, or one list of parameters per rank, alike in shapes and
            dtypes. Parameters that do not require grad when it is made are left alone.
        comm: What reduces; if not given, a communicator in rank order over the replicas' devices,
            closed with the bucketer. A `ProcessCommunicator`: one replica, this process's;
            see below.
        bucket_cap_mb: A bucket closes once it holds this many megabytes (10**6 bytes) of one rank's
            gradients. Parameters are never split.
        first_bucket_mb: The same for the first bucket: a small one leaves early. At most
            ``bucket_cap_mb``.
        op: How ranks are reduced: see `Communicator.all_reduce`.
        overlap: False: reduce everything in `wait`. The bits are the same.

    Raises:
        ArgumentError: Replicas that differ, also in other processes; caps that are no positive
            numbers.
        UnsupportedError: Over processes, a reduction other than sum, mean and max.

    Gradients are what is reduced, as they are in ``param.grad`` when the last rank has them. After
    steps under `no_sync` they hold what was accumulated. A parameter that some ranks did not
    use counts as zeros there; one that no rank used is left alone.

    Where backward leaves a gradient in memory that other tensors use, too, as it may for
    ``param.view(...)``, the hook puts a copy into ``param.grad``. Parts of a buffer of yours stay
    where they are if they are views, as torch has it (not of ``.detach()`` or ``.data``), or were
    in ``param.grad`` when the bucketer was made.

    A gradient that has left must stay as it is until `wait` returns: one that ``zero_grad``,
    an optimizer or a later hook has changed makes `wait` raise, on all ranks (changes in
    place of views of one buffer are not told from what backward does to other views). When a pass
    fails, what it had sent is waited for before the exception comes out of ``backward()``, so
    nothing writes to gradients behind the user's back. Then clear the gradients of all ranks
    (``zero_grad``, with or without ``set_to_none``) and run all passes of the step again; until
    each is None, all zeros or another tensor of yours, `wait` and reductions of the next
    step raise. To scale them, or to add to them in further passes, clears nothing.

    For example:

        bucketer = pr.GradientBucketer(replicas)
        for loss in losses:
            loss.backward()
        bucketer.wait()

    With one rank per process, every rank makes a bucketer of its one replica, and calls
    `wait` once a step, with samples or without. Gradients get the bits that one process with
    all replicas would give them. All ranks reduce in one order, rank 0's of the first step, so a
    bucket waits for those before it, and the last one for `wait`. Where a rank breaks off a
    step that has begun to leave, it leaves the group: its communicator is closed, and the other
    ranks get a ``PeerLostError``.

    Cost: a call of two microseconds or less for every parameter and rank, one collective per
    bucket, over processes with one element more per parameter. In one process, gradients that stay
    from step to step (``zero_grad(set_to_none=False)``) are checked once; their memory is kept
    until the first gradient of their bucket goes.
    With ``torch.compile`` all hooks run at the end of the compiled backward: right, not overlapped.
    Under compiled autograd everything is reduced in `wait`, and a pass that fails is not
    noticed; nor is one that got gradients only from a reentrant checkpoint, a pass of its own, or
    that fails before the hook of its first parameter, as when the loss raises: clear the gradients
    and run the step again before you call `wait`, which would count what is there.
    ``backward(create_graph=True)`` sums values; the graph
    stays that of a rank's own part.
    Source: Li et al. 2020, "PyTorch Distributed"; the first bucket's own cap is theirs too.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        comm: Communicator | RankCommunicator | None = None,
        bucket_cap_mb: float = 10,
        first_bucket_mb: float = 1,
        op: Any = "sum",
        overlap: bool = True,
    ) -> None:
        checked = check_replicas(replicas)
        caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        params = HookedParams(checked)
        ranks: Ranks
        if isinstance(comm, RankCommunicator):
            if len(checked) != 1:
                raise ArgumentError(
                    f"replicas has {len(checked)} entries, but comm is one rank of "
                    f"{comm.world_size}, each in a process of its own: expected one replica"
                )
            ranks = ProcessRanks(comm, op, params.by_rank[0], caps)
        else:
            ranks = LocalRanks(params.by_rank, comm, op)
        self._process = os.getpid()
        self._is_closed = False
        self._ranks = ranks
        self._reducer = Reducer(
            params,
            ranks,
            overlap=bool(overlap),
            cap_bytes=caps["bucket_cap_mb"],
            first_cap_bytes=min(caps.values()),
        )

    @property
    def buckets(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in the order in which buckets are expected."""
        return [list(bucket) for bucket in self._reducer.native.step.buckets]

    def wait(self) -> None:
        """Reduce what has not been, and return when all gradients are reduced.

        On GPUs the current streams are ordered after the reductions; the host does not wait. Over
        processes this is a collective: also a rank without a backward pass takes part.

        After a ``KeyboardInterrupt``, or whatever else a signal's handler has raised in it, call it
        again, before all else: it ends the same step, also where the interrupted call had done so
        already, or it raises, where nobody knows whether a bucket has left.

        Raises:
            RingarError: A backward pass still runs, or another call of this does (a handler, a
                callback or a thread has come in between; that call goes on), or this is a forked
                child. Or a pass failed, a reduction did, a gradient was changed after it had left,
                or a bucket was interrupted while it left: nothing that is in ``grad`` can be relied
                on, and every call raises until the gradients of all ranks are cleared. Where ranks
                are in processes and the others cannot be told in time, this rank has left the
                group; it says so.
            ArgumentError, UnsupportedError, CollectiveTimeout, PeerLostError: As
                ``all_reduce_coalesced`` of the communicator; where that does not refuse further
                calls, clear the gradients and run the step again.
        """
        if self._process != os.getpid():
            raise RingarError(
                "this bucketer was made before fork(), and what it reduces stayed in the parent "
                "process; make a new GradientBucketer in the child"
            )
        if not self._reducer.native.wait_alone(self._reducer.wait):
            raise RingarError(
                "wait() runs already, and a signal's handler, a callback or another thread has "
                "called it again: call it once the first call has returned"
            )
        self._reducer.native.is_reported = True  # nothing can come between this and the return

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the next step outside reduces."""
        native = self._reducer.native
        before = native.is_counting
        try:
            native.is_counting = False
            yield
        finally:
            native.is_counting = before

    def together(self) -> AbstractContextManager[None]:
        """Let backward passes of several ranks run at the same time in here, each in a thread.

        Leave it once all have ended. Buckets leave from whichever thread is last. A pass that fails
        is seen to at the end, when no other one writes to gradients any more.
        """
        return self._reducer.together()

    def stats(self) -> StepStats:
        """Return the statistics of the last step."""
        return self._reducer.stats

    def close(self) -> None:
        """Remove the hooks; close the communicator if it is the bucketer's. May be called again.

        In the middle of a step its gradients are left as after a backward pass that failed.
        """
        self._is_closed = True
        self._reducer.close()

    @never_fails
    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self._reducer.state()
        count = f"{len(self.buckets)} bucket{'' if len(self.buckets) == 1 else 's'}"
        return f"GradientBucketer({self._ranks}, {count}, {state})"

    def __enter__(self) -> GradientBucketer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
