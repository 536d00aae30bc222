"""Gradients leave while backward still runs: buckets that are reduced as soon as they are full."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.comm.call import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.parallel.broken_step import BrokenStep, are_changed, settle
from pyringar.parallel.bucket_params import (
    Replica,
    check_alike,
    check_caps,
    check_replicas,
    items_of,
    trainable,
)
from pyringar.parallel.bucket_step import BucketStats, Sent, StepStats, measure
from pyringar.parallel.process_buckets import CHANGED, ProcessRanks

__all__ = ["BucketStats", "GradientBucketer", "StepStats"]

FAILED = "a backward pass failed"

_grad, _version = attrgetter("grad"), attrgetter("_version")


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
    each is None, all zeros or another tensor of yours, :meth:`wait` and reductions of the next
    step raise. To scale them, or to add to them in further passes, clears nothing.

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
    noticed; nor is one that got gradients only from a reentrant checkpoint, a pass of its own, or
    that fails before the hook of its first parameter, as when the loss raises: clear the gradients
    and run the step again before you call :meth:`wait`, which would count what is there.
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
        self._replicas = check_replicas(replicas)
        caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        self._params = [trainable(replica) for replica in self._replicas]
        check_alike(self._params)
        self._op = op
        self._overlap = bool(overlap)
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
        self._native = load.engine().Bucketer(
            world_size=len(self._replicas),
            items=items_of(self._params),
            first_cap_bytes=caps["first_bucket_mb"],
            cap_bytes=caps["bucket_cap_mb"],
            on_complete=_method(this, GradientBucketer._complete),
            on_trouble=_method(this, GradientBucketer._trouble),
            on_failed=_method(this, GradientBucketer._settle),
        )
        # The step in which parameters were replaced, whose passes nobody has counted.
        self._adopted_in: dict[int, Sent] | None = None
        self._broken = BrokenStep(_method(this, lambda self, rank, i: self._params[rank][i].grad))
        self._handles: list[Any] = []
        self._add_hooks(self._params)

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
        if not self._native.wait_alone(self._wait):
            raise RingarError(
                "wait() runs already, and a signal's handler, a callback or another thread has "
                "called it again: call it once the first call has returned"
            )
        self._native.is_reported = True  # nothing can come between this and the return

    def _wait(self) -> None:
        began_ns = time.perf_counter_ns()
        if self._native.has_unfinished_pass():
            raise RingarError(
                "a backward pass still runs: call wait() once all have ended, not inside of one"
            )
        if not self._native.is_reported:  # the call for this step was interrupted at its very end
            self._broken.forget()
            return
        self._settle()
        sent = self._native.sent
        try:
            if not self._launch_rest(sent):
                return
            for bucket in list(sent.values()):
                if bucket.work is not None:
                    bucket.work.wait()
            order = self._settle_order(sent)
        except BaseException as error:
            self._fail(sent, error)
            raise
        if self._native.has_marks():
            self._stats = measure(self._native, sent, began_ns, time.perf_counter_ns())
        if not self._native.finish(sent, order):
            raise RingarError(
                "the step was broken off while wait() waited for it: clear the gradients of all "
                "ranks, and run all backward passes of the step again"
            )
        self._adopted_in = None
        self._broken.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the next step outside reduces."""
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
        """Remove the hooks; close the communicator if it is the bucketer's. May be called again.

        In the middle of a step its gradients are left as after a backward pass that failed.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._native.has_marks() or self._native.sent:
            self._break_off("the bucketer was closed in the middle of a step")
        self._settle()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> GradientBucketer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()
            self._broken.forget()

    # -- called by hooks ---------------------------------------------------------------------------

    def _complete(self, bucket: int, sent: dict[int, Sent]) -> None:
        if not self._overlap:
            return
        try:
            if self._elsewhere is None:
                self._launch(sent, bucket, is_complete=True)
            else:
                # All ranks keep one order. The last one is for wait(): with it ranks tell each
                # other what became of the others.
                turn = self._native.take_turn(has_sent=False)
                while turn >= 0:
                    self._launch(sent, turn, is_complete=True)
                    turn = self._native.take_turn(has_sent=True)
            if sent is not self._native.sent:  # broken off meanwhile, and settled without this
                self._native.unsettled.append((FAILED, sent, False, False))
                self._settle()
        except BaseException as error:
            self._fail(sent, error, in_backward=True)
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
        reduced = [old for sent in self._native.sent.values() for old in sent.lists[rank]]
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

    # -- one step ----------------------------------------------------------------------------------

    def _launch_rest(self, sent: dict[int, Sent]) -> bool:
        """Begin wait(); return False if there is nothing to wait for."""
        changed = self._find_changed(sent)
        num_buckets = len(self._native.buckets())
        # Ranks in other processes are told with the last bucket, or by not getting it.
        can_tell = self._elsewhere is not None and self._elsewhere.can_tell
        if changed and not (can_tell and len(sent) < num_buckets):
            reason = f"{CHANGED} (among parameters {changed})"
            self._break_off(f"a reduction failed ({reason})")
            raise RingarError(reason)
        self._adopt_new_parameters(sent)
        has_marks = self._adopted_in is sent or self._native.has_marks()
        has_marks = has_marks or any(bucket.has_marks for bucket in sent.values())
        self._check_cleared(self._broken.places())
        if not has_marks and self._elsewhere is None:
            self._broken.forget()
            return False
        for bucket in range(num_buckets):
            if bucket not in sent:
                self._launch(sent, bucket, has_marks=has_marks, is_changed=bool(changed))
        return True

    def _launch(
        self,
        sent: dict[int, Sent],
        bucket: int,
        *,
        is_complete: bool = False,
        has_marks: bool = True,
        is_changed: bool = False,
    ) -> None:
        wanted = self._native.buckets()[bucket]
        if self._broken:
            self._check_cleared([(r, i) for r in range(len(self._params)) for i in wanted])
        if self._elsewhere is None or is_complete:
            wanted, lists = self._gradients(wanted, is_complete)
        if self._elsewhere is None:
            one = Sent(wanted, lists)
        else:
            one = self._elsewhere.pack(
                wanted, self._params[0], has_marks=has_marks, is_changed=is_changed
            )
        # Without the graph that create_graph=True has made.
        values = [[g.detach() if g.requires_grad else g for g in grads] for grads in one.lists]
        has_work = self._elsewhere is not None or (bool(wanted) and self._comm is not None)
        if has_work:
            self._native.launched(bucket, sent)  # before: it may be done when the call returns
        sent[bucket] = one
        try:
            if one.flags is not None and self._elsewhere is not None:
                one.work = self._elsewhere.send(values, one.flags)
            elif wanted and self._comm is not None:
                one.work = self._comm.all_reduce_coalesced(values, self._op, async_op=True)
        except (ArgumentError, UnsupportedError):
            del sent[bucket]
            raise
        if is_complete:
            one.versions = [list(map(_version, grads)) for grads in one.lists]
        one.is_leaving = False

    def _gradients(
        self, wanted: list[int], is_complete: bool
    ) -> tuple[list[int], list[list[Tensor]]]:
        """Return which parameters have gradients, and these by rank; zeros where only others do."""
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

    def _find_changed(self, all_sent: Mapping[int, Sent]) -> list[int]:
        """Parameters among which some gradient is not what a backward pass has left; or none."""
        for bucket, wanted in enumerate(self._native.buckets()):
            sent = all_sent.get(bucket)
            if sent is not None and self._is_changed(sent):
                return sent.params
            if sent is None:
                for rank, params in enumerate(self._params):
                    for i in wanted:
                        if params[i].grad is None and self._native.is_marked(rank, i):
                            return [i]
        return []

    def _is_changed(self, sent: Sent) -> bool:
        """Return whether gradients were changed or replaced since they left in a backward pass."""
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
        self._broken.check(places)

    def _settle_order(self, sent: Mapping[int, Sent]) -> list[int] | None:
        """After the first step: the order in which the gradients came, the same on all ranks."""
        has_gradients = self._native.has_marks()
        if self._elsewhere is not None:
            if self._elsewhere.sees_change(sent):
                self._break_off(f"a reduction failed ({CHANGED})", is_known=True)
                raise RingarError(CHANGED)
            has_gradients = self._elsewhere.finish_step(sent, self._params[0])
        if not (self._native.is_first_step and has_gradients):
            return None
        order: list[int] = self._native.ready_order()
        return order if self._elsewhere is None else self._elsewhere.agree_on_order(order)

    def _fail(
        self, sent: Mapping[int, Sent], error: BaseException, *, in_backward: bool = False
    ) -> None:
        """Break the step off, unless it can go on: interrupted, works are as good as before."""
        if sent is not self._native.sent:
            return  # it was broken off
        buckets = list(sent.values())
        is_complete = len(buckets) == len(self._native.buckets())
        has_failed = any(b.work is not None and b.work.exception() is not None for b in buckets)
        if self._elsewhere is not None:
            has_failed |= self._elsewhere.lose(error)
        is_leaving = any(b.is_leaving for b in buckets)
        is_refused = isinstance(error, RingarError) and not is_complete
        if in_backward or is_leaving or is_refused or has_failed:
            what = "a reduction failed" if isinstance(error, RingarError) else "the step broke off"
            self._break_off(
                f"{what} ({str(error) or type(error).__name__})",
                is_known=is_complete and not is_leaving and not in_backward,
            )

    def _break_off(self, reason: str, *, spared_pass: int = 0, is_known: bool = False) -> None:
        """End the step: nothing runs afterwards, and what is in the gradients must be cleared.

        Args:
            reason: Why, for messages.
            spared_pass: A backward pass whose gradients belong to the next step.
            is_known: All ranks break this step off.
        """
        self._native.break_off(reason, spared_pass, is_known)
        self._settle()

    def _settle(self) -> None:
        """See to steps that were broken off. If this is interrupted, the next call does."""
        broken = self._native.unsettled
        while broken:
            reason, sent, is_spared, is_known = step = broken[0]
            works = [bucket.work for bucket in sent.values() if bucket.work is not None]
            leaves = self._elsewhere is not None and not is_known and not self._tell_others(sent)
            interrupt: BaseException | None = None
            try:
                if self._process == os.getpid():  # else nothing runs here
                    devices = {param.device for mine in self._params for param in mine}
                    interrupt = settle(works, devices, is_patient=not leaves)
                    self._flush(sent)
            finally:
                if self._elsewhere is not None and leaves:
                    self._elsewhere.leave(len(sent), len(self._native.buckets()))
            # Not before: what another thread clears meanwhile is written to once more.
            self._broken.note(reason, self._places_left(sent, is_spared))
            with suppress(ValueError):  # another thread was here
                broken.remove(step)
            if interrupt is not None:
                raise interrupt

    def _tell_others(self, sent: dict[int, Sent]) -> bool:
        """Send the last bucket, from which ranks in other processes learn of the failure."""
        last = len(self._native.buckets()) - 1
        is_sure = not any(bucket.is_leaving for bucket in sent.values())
        can_tell = self._elsewhere is not None and self._elsewhere.can_tell
        if can_tell and is_sure and 0 < len(sent) == last:
            with suppress(RingarError):  # they are gone, and know
                self._launch(sent, last, has_marks=False, is_changed=True)
                return True
        return False

    def _flush(self, sent: Mapping[int, Sent]) -> None:
        """Interrupted while it left, a bucket may run though no work of it was noted."""
        if self._comm is not None and any(bucket.is_leaving for bucket in sent.values()):
            with suppress(RingarError):
                self._comm.all_reduce([torch.zeros(1, device=d) for d in self._comm.devices])

    def _places_left(
        self, sent: Mapping[int, Sent], is_spared: bool
    ) -> dict[tuple[int, int], Tensor]:
        """Parameters whose gradients a step has left, by rank and index."""
        if not is_spared:
            return {(r, i): p for r, mine in enumerate(self._params) for i, p in enumerate(mine)}
        # Else new gradients may be there already.
        return {
            (rank, i): self._params[rank][i]
            for bucket in sent.values()
            for rank, mine in enumerate(bucket.lists)
            for i, grad in zip(bucket.params, mine, strict=True)
            if self._params[rank][i].grad is grad
        }

    # -- parameters --------------------------------------------------------------------------------

    def _add_hooks(self, all_params: Sequence[Sequence[Tensor]]) -> None:
        for rank, params in enumerate(all_params):
            for i, param in enumerate(params):
                hook = self._native.hook(rank, i)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _adopt_new_parameters(self, sent: dict[int, Sent]) -> None:
        """Parameters that were replaced (``load_state_dict(assign=True)``) get hooks."""
        if not any(isinstance(replica, nn.Module) for replica in self._replicas):
            return
        now = [trainable(replica) for replica in self._replicas]
        same = all(
            len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            for new, old in zip(now, self._params, strict=True)
        )
        if same:
            return
        if items_of(now) != items_of(self._params):
            raise ArgumentError(
                "the replicas' parameters have changed in number, shape, dtype or requires_grad; "
                "make a new GradientBucketer"
            )
        check_alike(now)
        self._native.retire_hooks()  # also one whose handle an interrupt has kept from us
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._add_hooks(now)
        self._adopted_in = sent
        self._params = now  # last: interrupted, this is done again


def _method(this: weakref.ref[GradientBucketer], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        bucketer = this()
        return None if bucketer is None else method(bucketer, *arguments)

    return call
