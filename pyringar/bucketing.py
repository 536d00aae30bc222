"""Gradients leave while backward still runs: buckets that are reduced as soon as they are full."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from pyringar import _native
from pyringar.broken_step import BrokenStep, PassEnd, are_changed, in_compiled_autograd, settle
from pyringar.bucket_params import (
    Replica,
    check_alike,
    check_caps,
    check_replicas,
    items_of,
    trainable,
)
from pyringar.call import RankCommunicator, Work
from pyringar.communicator import Communicator
from pyringar.errors import ArgumentError, RingarError
from pyringar.process_buckets import CHANGED, ProcessRanks

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]

FAILED = "a backward pass failed"

_grad, _version = attrgetter("grad"), attrgetter("_version")


@dataclass(frozen=True)
class BucketStats:
    """One bucket of one step; times in seconds since the step's first gradient.

    Attributes:
        params: Indices of its parameters, in the order of ``parameters()``.
        nbytes: Bytes of one rank's gradients.
        ready_s: When the last gradient came; None where some parameter had none.
        launched_s: When its reduction was asked for; None where there was nothing to reduce.
        done_s: When it was reduced; None where that is not known (GPUs: nobody waited for it).
    """

    params: tuple[int, ...]
    nbytes: int
    ready_s: float | None
    launched_s: float | None
    done_s: float | None


@dataclass(frozen=True)
class StepStats:
    """The last step that was waited for.

    Attributes:
        begin_ns: When the first gradient came, as ``time.perf_counter_ns`` counts.
        buckets: In the order in which they were planned.
        backward_s: From the first gradient to the call of ``wait()``.
        communication_s: Sum over buckets of the time from launch to done, where it is known.
        exposed_s: How long ``wait()`` took: what backward did not hide.
    """

    begin_ns: int = 0
    buckets: tuple[BucketStats, ...] = ()
    backward_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(slots=True)
class _Sent:
    """One bucket of one step.

    Attributes:
        params: Indices of its parameters; fewer than planned where no rank used some.
        lists: Their gradients by rank, as they are in ``grad``.
        work: Their reduction; None where there is nothing to reduce.
        versions: Torch's counts of changes in place of ``lists``, when it left; None if it left in
            ``wait()``.
    """

    params: list[int]
    lists: list[list[Tensor]]
    work: Work | None
    versions: list[list[int]] | None


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
            closed with the bucketer. A :class:`ProcessCommunicator`: one replica, this process's;
            see below.
        bucket_cap_mb: A bucket closes once it holds this many megabytes (10**6 bytes) of one rank's
            gradients. Parameters are never split.
        first_bucket_mb: The same for the first bucket: a small one leaves early.
        op: As in :meth:`Communicator.all_reduce`.
        overlap: False: reduce everything in :meth:`wait`. The bits are the same.

    Raises:
        ArgumentError: Replicas that differ, also in other processes; caps that are no positive
            numbers.
        UnsupportedError: Over processes, a reduction other than sum, mean and max.

    Gradients are what is reduced, as they are in ``param.grad`` when the last rank has them. After
    steps under :meth:`no_sync` they hold what was accumulated. A parameter that some ranks did not
    use counts as zeros there; one that no rank used is left alone.

    A gradient that has left must stay as it is until :meth:`wait` returns: one that ``zero_grad``,
    an optimizer or a later hook has changed makes :meth:`wait` raise, on all ranks (changes in
    place of views of one buffer are not told from what backward does to other views). When a pass
    fails, what it had sent is waited for before the exception comes out of ``backward()``, so
    nothing writes to gradients behind the user's back. Then clear the gradients of all ranks
    (``zero_grad``, with or without ``set_to_none``) and run all passes of the step again; until
    they are cleared, :meth:`wait` and reductions of the next step raise.

    For example:

        bucketer = pr.GradientBucketer(replicas)
        for loss in losses:
            loss.backward()
        bucketer.wait()

    With one rank per process, every rank makes a bucketer of its one replica, and calls
    :meth:`wait` once a step, with samples or without. Gradients get the bits that one process with
    all replicas would give them. All ranks reduce in one order, rank 0's of the first step, so a
    bucket waits for those before it, and the last one for :meth:`wait`. Where a rank breaks off a
    step that has begun to leave, it leaves the group: its communicator is closed, and the other
    ranks get a ``PeerLostError``.

    Cost: a call of a microsecond or less for every parameter and rank, one collective per bucket,
    over processes with one element more per parameter.
    With ``torch.compile`` all hooks run at the end of the compiled backward: right, not overlapped.
    Under compiled autograd everything is reduced in :meth:`wait`, and a pass that fails is not
    noticed; nor is one that got gradients only from a reentrant checkpoint, a pass of its own:
    call :meth:`wait` before you clear them. ``backward(create_graph=True)`` sums values; the graph
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
        self._replicas = check_replicas(replicas)
        caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        self._params = [trainable(replica) for replica in self._replicas]
        check_alike(self._params)
        self._op = op
        self._overlap = bool(overlap)
        self._is_first_step = True
        self._sent: dict[int, _Sent] = {}  # by bucket, in this step
        self._broken = BrokenStep()
        self._is_waiting = False
        self._process = os.getpid()
        self._stats = StepStats()
        self._owned: Communicator | None = None
        self._comm: Communicator | None = None
        self._elsewhere: ProcessRanks | None = None  # the ranks in other processes
        if isinstance(comm, RankCommunicator):
            if len(self._replicas) != 1:
                raise ArgumentError(
                    f"replicas has {len(self._replicas)} entries, but comm is one rank of "
                    f"{comm.world_size}, each in a process of its own: expected one replica"
                )
            self._elsewhere = ProcessRanks(comm, op, self._params[0], caps)
        else:
            self._comm = self._make_comm() if comm is None else comm
            if self._comm.world_size != len(self._replicas):
                raise ArgumentError(
                    f"comm has {self._comm.world_size} ranks for {len(self._replicas)} replicas"
                )
        this = weakref.ref(self)  # hooks must not keep the bucketer alive
        self._native = _native.engine().Bucketer(
            world_size=len(self._replicas),
            items=items_of(self._params),
            first_cap_bytes=caps["first_bucket_mb"],
            cap_bytes=caps["bucket_cap_mb"],
            on_pass=_method(this, GradientBucketer._begin_pass),
            on_complete=_method(this, GradientBucketer._complete),
            on_trouble=_method(this, GradientBucketer._trouble),
        )
        self._handles: list[Any] = []
        self._add_hooks()

    def _make_comm(self) -> Communicator:
        devices = [params[0].device if params else "cpu" for params in self._params]
        self._owned = Communicator(devices, order="rank")
        return self._owned

    @property
    def buckets(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in the order in which buckets are expected."""
        buckets: list[list[int]] = self._native.buckets()
        return buckets

    def wait(self) -> None:
        """Reduce what has not been, and return when all gradients are reduced.

        On GPUs the current streams are ordered after the reductions; the host does not wait. Over
        processes this is a collective: also a rank without a backward pass takes part. After a
        ``KeyboardInterrupt`` while it waits, call it again to go on.

        Raises:
            RingarError: A backward pass still runs, or this is a forked child. Or a pass failed, a
                reduction did, or a gradient was changed after it had left: nothing that is in
                ``grad`` can be relied on, and every call raises until the gradients of all ranks
                are cleared. Where ranks are in processes and more than the last bucket is missing,
                this rank has left the group; it says so.
            ArgumentError, UnsupportedError, CollectiveTimeout, PeerLostError: As
                ``all_reduce_coalesced`` of the communicator; where that does not refuse further
                calls, clear the gradients and run the step again.
        """
        began_ns = time.perf_counter_ns()
        if self._process != os.getpid():
            raise RingarError(
                "this bucketer was made before fork(), and what it reduces stayed in the parent "
                "process; make a new GradientBucketer in the child"
            )
        if self._native.has_unfinished_pass():
            raise RingarError(
                "a backward pass still runs: call wait() once all have ended, not inside of one"
            )
        try:
            if not self._launch_rest():
                return
            self._is_waiting = True
            for sent in self._sent.values():
                if sent.work is not None:
                    sent.work.wait()
            self._is_waiting = False
            order = self._settle_order()
        except BaseException as error:
            self._fail(error)
            raise
        self._finish_step(began_ns, order)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the next step outside reduces."""
        before = self._native.is_counting
        self._native.is_counting = False
        try:
            yield
        finally:
            self._native.is_counting = before

    def stats(self) -> StepStats:
        """What the last step did, and when."""
        return self._stats

    def close(self) -> None:
        """Remove the hooks; close the communicator if it is the bucketer's. May be called again.

        In the middle of a step its gradients are left as after a backward pass that failed.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._native.has_marks() or self._sent:
            self._break_off("the bucketer was closed in the middle of a step")
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> GradientBucketer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    # -- called by hooks ---------------------------------------------------------------------------

    def _begin_pass(self, number: int) -> None:
        """A new backward pass: have it tell when it ends, well or not."""
        if in_compiled_autograd():  # which never calls back: nothing may depend on its end
            self._native.end_pass(number)
            return
        end = PassEnd(weakref.WeakMethod(self._end_pass), number)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _complete(self, bucket: int) -> None:
        if not self._overlap or in_compiled_autograd():
            return
        try:
            turns: Iterable[int] = [bucket]
            if self._elsewhere is not None:
                turns = self._elsewhere.take(bucket, len(self._native.buckets()))
            for turn in turns:
                self._launch(turn, is_complete=True)
        except BaseException as error:
            self._fail(error)
            raise

    def _trouble(self, what: str, rank: int, param: int, number: int) -> None:
        """A gradient that was counted before: start over if it is new, else say what is wrong."""
        if what == "still runs":
            self._break_off(FAILED)
            raise RingarError(
                f"parameter {param} of rank {rank} got gradients from two backward passes that ran "
                "at the same time: run the passes of one replica one after the other"
            )
        grad = self._params[rank][param].grad
        reduced = [old for sent in self._sent.values() for old in sent.lists[rank]]
        is_new = what == "launched" and all(grad is not old for old in reduced)
        if is_new and self._elsewhere is None:
            self._break_off("nobody called wait() after the step before", spared_pass=number)
            return
        if is_new:
            self._break_off("the step before was not waited for")
            raise RingarError(
                "the step before was not waited for: ranks in other processes wait for it; call "
                "wait() once for every step, on all ranks"
            )
        self._break_off(FAILED)
        shape = tuple(self._params[rank][param].shape)
        raise RingarError(
            f"parameter {param} of rank {rank}, of shape {shape}, got a gradient after its bucket "
            "was reduced: call wait() between two backward passes, also after a step that was "
            "given up and before its gradients are cleared, or put all but the last into "
            "no_sync(); where one pass adds to a parameter twice (a shared parameter under a "
            "reentrant checkpoint), take overlap=False"
        )

    def _end_pass(self, number: int, is_failed: bool) -> None:
        """A backward pass is over; if it failed, what it raised is on its way to the user."""
        if self._native.end_pass(number) and is_failed:
            self._break_off(FAILED)

    # -- one step ----------------------------------------------------------------------------------

    def _launch_rest(self) -> bool:
        """What wait() begins with; False if there is nothing to wait for."""
        changed = self._find_changed()
        # Ranks in other processes are told with the last bucket, or by not getting it.
        if changed and (self._elsewhere is None or not self._elsewhere.can_tell):
            raise RingarError(f"{CHANGED} (among parameters {changed})")
        has_marks = self._adopt_new_parameters() or self._native.has_marks()
        self._check_cleared(self._broken.places())
        if not has_marks and self._elsewhere is None:
            self._broken.forget()
            return False
        for bucket in range(len(self._native.buckets())):
            if bucket not in self._sent:
                self._launch(bucket, has_marks=has_marks, is_changed=bool(changed))
        return True

    def _launch(
        self,
        bucket: int,
        *,
        is_complete: bool = False,
        has_marks: bool = True,
        is_changed: bool = False,
    ) -> None:
        wanted = self._native.buckets()[bucket]
        if self._broken:
            self._check_cleared([(r, i) for r in range(len(self._params)) for i in wanted])
        work: Work | None = None
        if self._elsewhere is None or is_complete:
            wanted, lists = self._gradients(wanted, is_complete)
        if self._elsewhere is not None:
            self._native.launched(bucket)
            work, grads = self._elsewhere.send(
                wanted, self._params[0], has_marks=has_marks, is_changed=is_changed
            )
            lists = [grads]
        elif wanted and self._comm is not None:
            self._native.launched(bucket)  # before: it may be done when the call returns
            # Without the graph that create_graph=True has made.
            values = [[g.detach() if g.requires_grad else g for g in grads] for grads in lists]
            work = self._comm.all_reduce_coalesced(values, self._op, async_op=True)
        versions = [list(map(_version, grads)) for grads in lists] if is_complete else None
        self._sent[bucket] = _Sent(wanted, lists, work, versions)

    def _gradients(
        self, wanted: list[int], is_complete: bool
    ) -> tuple[list[int], list[list[Tensor]]]:
        """Which parameters have gradients, and these by rank; zeros where other ranks have one."""
        if not is_complete:
            wanted = [
                i for i in wanted if any(params[i].grad is not None for params in self._params)
            ]
            for params in self._params:
                for i in wanted:
                    if params[i].grad is None:
                        params[i].grad = torch.zeros_like(params[i])
        lists: list[list[Tensor]] = [[] for _ in self._params]
        for mine, params in zip(lists, self._params, strict=True):
            for i in wanted:
                grad = params[i].grad
                if grad is None:
                    raise RingarError(
                        f"the gradient of parameter {i} was gone before it was reduced: another "
                        "hook, such as an optimizer inside backward, has set it to None, or it was "
                        "cleared without a call of wait() for the step before"
                    )
                mine.append(grad)
        return wanted, lists

    def _find_changed(self) -> list[int]:
        """Parameters among which some gradient is not what a backward pass has left; or none."""
        for bucket, wanted in enumerate(self._native.buckets()):
            sent = self._sent.get(bucket)
            if sent is not None and self._is_changed(sent):
                return sent.params
            if sent is None:
                for rank, params in enumerate(self._params):
                    for i in wanted:
                        if params[i].grad is None and self._native.is_marked(rank, i):
                            return [i]
        return []

    def _is_changed(self, sent: _Sent) -> bool:
        """Whether gradients were changed, or replaced, since they left in a backward pass."""
        if sent.versions is None:
            return False
        for params, grads, then in zip(self._params, sent.lists, sent.versions, strict=True):
            now = map(_grad, map(params.__getitem__, sent.params))
            if any(map(is_not, now, grads)):
                return True
            if list(map(_version, grads)) != then and are_changed(grads, then):
                return True
        return False

    def _check_cleared(self, places: Sequence[tuple[int, int]]) -> None:
        if not self._broken:
            return
        if self._elsewhere is not None:
            self._elsewhere.check()
        self._broken.check(
            places, lambda rank, i: self._params[rank][i].grad, self._native.is_marked
        )

    def _settle_order(self) -> list[int] | None:
        """After the first step: the order in which the gradients came, the same on all ranks."""
        has_gradients = self._native.has_marks()
        if self._elsewhere is not None:
            has_gradients = self._elsewhere.finish_step(self._params[0])
        if not (self._is_first_step and has_gradients):
            return None
        order: list[int] = self._native.ready_order()
        return order if self._elsewhere is None else self._elsewhere.agree_on_order(order)

    def _finish_step(self, began_ns: int, order: list[int] | None) -> None:
        if self._native.has_marks():
            self._stats = self._measure(began_ns, time.perf_counter_ns())
        self._sent.clear()
        self._broken.forget()
        if self._elsewhere is not None:
            self._elsewhere.begin_step()
        if order is not None:
            self._native.plan(order)
            self._is_first_step = False
        self._native.reset()

    def _measure(self, began_ns: int, ended_ns: int) -> StepStats:
        first_ns = self._native.begin_ns()

        def since(time_ns: int) -> float | None:
            return (time_ns - first_ns) * 1e-9 if time_ns else None

        rows = []
        for bucket, (params, (ready_ns, launched_ns)) in enumerate(
            zip(self._native.buckets(), self._native.times(), strict=True)
        ):
            sent = self._sent.get(bucket)
            done_ns = 0 if sent is None or sent.work is None else sent.work.finished_ns()
            nbytes = self._native.bytes_of(bucket)
            rows.append(
                BucketStats(
                    tuple(params), nbytes, since(ready_ns), since(launched_ns), since(done_ns)
                )
            )
        spent = [b.done_s - b.launched_s for b in rows if b.done_s and b.launched_s is not None]
        return StepStats(
            begin_ns=first_ns,
            buckets=tuple(rows),
            backward_s=(began_ns - first_ns) * 1e-9,
            communication_s=sum(spent),
            exposed_s=(ended_ns - began_ns) * 1e-9,
        )

    def _fail(self, error: BaseException) -> None:
        """Break the step off, unless it can go on: interrupted, works are as good as before."""
        is_waiting, self._is_waiting = self._is_waiting, False
        if is_waiting and not isinstance(error, Exception):
            return
        if self._elsewhere is not None:
            self._elsewhere.lose(error)
        self._break_off(f"a reduction failed ({error})")
        if self._comm is not None and isinstance(error, KeyboardInterrupt):
            # Interrupted while it left, a bucket may run though no work of it was noted.
            with suppress(RingarError):
                self._comm.all_reduce([torch.zeros(1, device=d) for d in self._comm.devices])

    def _break_off(self, reason: str, spared_pass: int = 0) -> None:
        """End the step: nothing runs afterwards, and what is in the gradients must be cleared.

        Args:
            reason: Why, for messages.
            spared_pass: A backward pass whose gradients belong to the next step.
        """
        self._tell_others()
        marked = self._native.break_off(spared_pass)
        params, sent = self._params, self._sent
        self._sent = {}
        grads: dict[tuple[int, int], Tensor | None] = {}
        if not spared_pass:  # else new gradients may be there already
            grads = {(rank, i): params[rank][i].grad for rank, i in marked}
        for bucket in sent.values():
            for rank, mine in enumerate(bucket.lists):
                grads |= {(rank, i): g for i, g in zip(bucket.params, mine, strict=True)}
        try:
            if self._process == os.getpid():  # else nothing runs here
                works = [bucket.work for bucket in sent.values() if bucket.work is not None]
                devices = {param.device for mine in params for param in mine}
                settle(works, devices, is_patient=self._elsewhere is None)
        finally:
            if self._elsewhere is not None:
                self._elsewhere.leave(len(sent), len(self._native.buckets()))
                self._elsewhere.begin_step()
            # Not before: what another thread clears meanwhile is written to once more.
            self._broken.note(reason, grads)

    def _tell_others(self) -> None:
        """Where ranks in other processes miss the last bucket only, they learn from it."""
        last = len(self._native.buckets()) - 1
        ranks = self._elsewhere
        if ranks is not None and ranks.can_tell and 0 < len(self._sent) == last:
            with suppress(RingarError):  # they are gone, and know
                self._launch(last, is_changed=True)

    # -- parameters --------------------------------------------------------------------------------

    def _add_hooks(self) -> None:
        for rank, params in enumerate(self._params):
            for i, param in enumerate(params):
                hook = self._native.hook(rank, i)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _adopt_new_parameters(self) -> bool:
        """Parameters that were replaced (``load_state_dict(assign=True)``) get hooks."""
        if not any(isinstance(replica, nn.Module) for replica in self._replicas):
            return False
        now = [trainable(replica) for replica in self._replicas]
        same = all(
            len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            for new, old in zip(now, self._params, strict=True)
        )
        if same:
            return False
        if items_of(now) != items_of(self._params):
            raise ArgumentError(
                "the replicas' parameters have changed in number, shape, dtype or requires_grad; "
                "make a new GradientBucketer"
            )
        check_alike(now)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._params = now
        self._add_hooks()
        return True


def _method(
    this: weakref.ref[GradientBucketer], method: Callable[..., None]
) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        bucketer = this()
        if bucketer is not None:
            method(bucketer, *arguments)

    return call
