"""The steps of a bucketer: what hooks and wait() do, and what becomes of a step that breaks off."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.parallel.broken_step import BrokenStep, settle
from pyringar.parallel.bucket_params import HookedParams
from pyringar.parallel.bucket_step import Step, StepStats, measure
from pyringar.parallel.own_memory import give_own_memory
from pyringar.parallel.process_buckets import CHANGED
from pyringar.parallel.ranks import BucketState, Ranks

__all__ = ["Reducer"]

FAILED = "a backward pass failed"


class Reducer:
    """Reduces the buckets of one step after the other.

    All that is known about a step is in its `Step`. Whoever works on one holds it, and sees
    that it was broken off meanwhile when it is not ``native.step`` any more.

    Args:
        params: Gets hooks.
        ranks: What reduces.
        overlap: False: reduce everything in `wait`.
        cap_bytes: A bucket's cap.
        first_cap_bytes: The first bucket's.

    Attributes:
        native: The engine's bucketer: counts gradients, and makes the steps.
        stats: Of the last step that was waited for.
    """

    def __init__(
        self,
        params: HookedParams,
        ranks: Ranks,
        *,
        overlap: bool,
        cap_bytes: int,
        first_cap_bytes: int,
    ) -> None:
        self._params, self._ranks = params, ranks
        self._process = os.getpid()
        self._overlap = overlap
        self._is_together = False
        self.stats = StepStats()
        engine = load.engine()
        self._marks = engine.Mark
        self._items = params.items()
        self._plan = partial(
            engine.plan_buckets,
            self._items,
            first_cap_bytes=first_cap_bytes,
            cap_bytes=cap_bytes,
        )
        this = weakref.ref(self)  # hooks must not keep the reducer alive
        self._broken = BrokenStep(
            _method(this, lambda self, rank, i: self._params.by_rank[rank][i].grad)
        )
        # Backward meets parameters last to first, more or less: good enough for the first step.
        order = list(reversed(range(len(self._items))))
        self.native = engine.Bucketer(
            world_size=len(params.by_rank),
            num_params=len(self._items),
            buckets=self._plan(order),
            in_turns=ranks.in_turns,
            on_complete=_method(this, Reducer._send) if overlap else None,
            on_trouble=_method(this, Reducer._trouble),
            on_failed=_method(this, Reducer._settle),
            on_new=give_own_memory,
            make_ready=ranks.make_ready,
        )
        params.add_hooks(self.native)
        # The order in which rank 0's gradients came in this step, if hooks see them in another.
        self._noted: list[int] = []

    def sections(self, num_params: int) -> list[list[int]]:
        """Return which gradients of a rank had better come together, last to first.

        Args:
            num_params: How many there are; if not these, all come together.
        """
        plan: list[list[int]] = self.native.step.buckets
        if not self._overlap or sum(map(len, plan)) != num_params:
            return [list(reversed(range(num_params)))]
        return plan

    @property
    def wants_order(self) -> bool:
        """Whether the buckets of later steps depend on the order in which gradients now come."""
        return bool(self.native.is_first_step and self.native.is_counting)

    def note_order(self, params: Sequence[int]) -> None:
        """Note in which order a pass has found rank 0's gradients, before hooks see any of them."""
        came = set(params)
        self._noted = [*(i for i in self._noted if i not in came), *params]

    def state(self) -> str:
        """Say in a word or two where the step is."""
        step = self.native.step
        if self._broken:
            return "the step failed"
        if step.sent:
            return f"{len(step.sent)} of {len(step.buckets)} buckets sent"
        return "backward has begun" if step.has_marks() else "waits for backward"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let backward passes of several ranks run at the same time in here.

        What one breaks off is seen to at the end: before that the others write to gradients. Where
        one has failed that nobody has counted, as in forward, what the others have left goes, too.
        """
        self._is_together = True
        try:
            yield
        except BaseException:
            if self.native.step.has_marks() or self.native.step.sent:
                self._break_off(FAILED)
            raise
        finally:
            self._is_together = False
            self._settle()

    def wait(self) -> None:
        """Do what `GradientBucketer.wait` says."""
        began_ns = time.perf_counter_ns()
        native = self.native
        if native.has_unfinished_pass():
            raise RingarError(
                "a backward pass still runs: call wait() once all have ended, not inside of one"
            )
        if not native.is_reported:  # the call for this step was interrupted at its very end
            self._broken.forget()
            return
        self._settle()
        step = native.step
        try:
            if not self._launch_rest(step):
                self._broken.forget()
                return
            for sent in list(step.sent.values()):
                if sent.work is not None:
                    sent.work.wait()
            next_plan = self._finish(step)
        except BaseException as error:
            self._fail(step, error)
            raise
        if step.has_marks():
            nbytes = [nbytes for nbytes, _ in self._items]
            self.stats = measure(step, nbytes, began_ns, time.perf_counter_ns())
        if not native.finish(step, next_plan):
            raise RingarError(
                "the step was broken off while wait() waited for it: clear the gradients of all "
                "ranks, and run all backward passes of the step again"
            )
        self._broken.forget()

    def close(self) -> None:
        """Remove the hooks, and break off what is under way. May be called again."""
        self.native.retire_hooks()
        self._params.remove_hooks()
        step = self.native.step
        if step.has_marks() or step.sent:
            self._break_off("the bucketer was closed in the middle of a step")
        self._settle()
        self._ranks.close()

    def __del__(self) -> None:  # not the bucketer's: a hook that runs holds this
        if hasattr(self, "native"):
            self.close()
            self._broken.forget()

    # -- called by hooks ---------------------------------------------------------------------------

    def _send(self, step: Step, bucket: int) -> None:
        try:
            self._launch(step, bucket, BucketState(is_complete=True))
            if step is not self.native.step:  # broken off meanwhile, and settled without this
                self.native.unsettled.append((FAILED, step, False, False))
                self._settle()
        except BaseException as error:
            self._fail(step, error, in_backward=True)
            raise

    def _trouble(self, mark: Any, rank: int, param: int, number: int) -> None:
        """Start over if a gradient that was counted before is new, else say what is wrong."""
        if mark == self._marks.STILL_RUNS:
            self._break_off(FAILED)
            raise RingarError(
                f"parameter {param} of rank {rank} got gradients from two backward passes that ran "
                "at the same time: run the passes of one replica one after the other"
            )
        grad = self._params.by_rank[rank][param].grad
        reduced = [old for sent in self.native.step.sent.values() for old in sent.lists[rank]]
        is_new = mark == self._marks.AFTER_LAUNCH and all(grad is not old for old in reduced)
        if is_new and not self._ranks.unwaited:
            self._break_off("nobody called wait() after the step before", spared_pass=number)
            return
        if is_new:
            self._break_off("the step before was not waited for")
            raise RingarError(self._ranks.unwaited)
        self._break_off(FAILED)
        shape = tuple(self._params.by_rank[rank][param].shape)
        raise RingarError(
            f"parameter {param} of rank {rank}, of shape {shape}, got a gradient after its bucket "
            "was reduced: call wait() between two backward passes, also after a step that was "
            "given up and before its gradients are cleared, or put all but the last into "
            "no_sync(); where one pass adds to a parameter twice (a shared parameter under a "
            "reentrant checkpoint), take overlap=False"
        )

    # -- one step ----------------------------------------------------------------------------------

    def _launch_rest(self, step: Step) -> bool:
        """Launch what has not left; return False if there is nothing to wait for."""
        changed = self._find_changed(step)
        # The last bucket tells ranks in other processes.
        if changed and not (self._ranks.can_tell and len(step.sent) < len(step.buckets)):
            reason = f"{CHANGED} (among parameters {changed})"
            self._break_off(f"a reduction failed ({reason})")
            raise RingarError(reason)
        self._params.adopt_new(self.native, step)
        has_marks = step.has_new_params or step.has_marks()
        has_marks = has_marks or any(sent.has_marks for sent in step.sent.values())
        self._check_cleared(self._broken.places())
        if not self._ranks.takes_part(has_marks=has_marks):
            return False
        state = BucketState(has_marks=has_marks, is_changed=bool(changed))
        for bucket in range(len(step.buckets)):
            if bucket not in step.sent:
                self._launch(step, bucket, state)
        return True

    def _launch(self, step: Step, bucket: int, state: BucketState) -> None:
        wanted = step.buckets[bucket]
        if self._broken:
            ranks = range(len(self._params.by_rank))
            self._check_cleared([(rank, i) for rank in ranks for i in wanted])
        sent = self._ranks.pack(wanted, self._params.by_rank, state)
        # Before it is noted: an interrupt in here breaks nothing off.
        send = self._ranks.sender(sent, step.after(bucket) if state.is_complete else None)
        step.launch(bucket, sent)
        try:
            sent.work = send()
        except (ArgumentError, UnsupportedError):
            del step.sent[bucket]
            raise
        if state.is_complete:
            sent.note_versions()
        sent.is_leaving = False

    def _find_changed(self, step: Step) -> list[int]:
        """Return parameters some of whose gradients are not what backward has left; or none."""
        by_rank = self._params.by_rank
        for bucket, wanted in enumerate(step.buckets):
            sent = step.sent.get(bucket)
            if sent is not None and sent.is_changed(by_rank):
                return sent.params
            if sent is None:
                for rank, params in enumerate(by_rank):
                    for i in wanted:
                        if params[i].grad is None and step.is_marked(rank, i):
                            return [i]
        return []

    def _check_cleared(self, places: Sequence[tuple[int, int]]) -> None:
        if self._broken:
            self._ranks.check()
            self._broken.check(places)

    def _finish(self, step: Step) -> list[list[int]] | None:
        """Put results where they belong; return the next step's buckets, if they are others."""
        if self._ranks.sees_change(step):
            self._break_off(f"a reduction failed ({CHANGED})", is_known=True)
            raise RingarError(CHANGED)
        has_gradients = self._ranks.finish_step(step, self._params.by_rank)
        if not (self.native.is_first_step and has_gradients):
            return None
        order = step.ready()
        places = {i: place for place, i in enumerate(self._noted)}
        order.sort(key=lambda i: places.get(i, len(places)))
        came = set(order)
        order += [i for i in reversed(range(len(self._items))) if i not in came]
        plan: list[list[int]] = self._plan(self._ranks.agree_on_order(order))
        return plan

    # -- a step that breaks off --------------------------------------------------------------------

    def _fail(self, step: Step, error: BaseException, *, in_backward: bool = False) -> None:
        """Break the step off, unless it can go on: interrupted, works are as good as before."""
        if step is not self.native.step:
            return  # it was broken off
        buckets = list(step.sent.values())
        is_complete = len(buckets) == len(step.buckets)
        has_failed = any(b.work is not None and b.work.exception() is not None for b in buckets)
        has_failed |= self._ranks.lose(error)
        is_leaving = any(bucket.is_leaving for bucket in buckets)
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
        self.native.break_off(reason, spared_pass, is_known)
        self._settle()

    def _settle(self) -> None:
        """See to steps that were broken off. If this is interrupted, the next call does."""
        if self._is_together:
            return
        broken = self.native.unsettled
        while broken:
            reason, step, is_spared, is_known = entry = broken[0]
            self._noted.clear()
            works = [sent.work for sent in step.sent.values() if sent.work is not None]
            is_told = is_known or self._ranks.tell(step, partial(self._send_failure, step))
            interrupt: BaseException | None = None
            try:
                if self._process == os.getpid():  # else nothing runs here
                    devices = {param.device for mine in self._params.by_rank for param in mine}
                    interrupt = settle(works, devices, is_patient=is_told)
                    if any(sent.is_leaving for sent in step.sent.values()):
                        self._ranks.flush()
            finally:
                if not is_told:
                    self._ranks.leave(step)
            # Not before: what another thread clears meanwhile is written to once more.
            self._broken.note(reason, self._places_left(step, is_spared))
            with suppress(ValueError):  # another thread was here
                broken.remove(entry)
            if interrupt is not None:
                raise interrupt

    def _send_failure(self, step: Step) -> None:
        state = BucketState(has_marks=False, is_changed=True)
        self._launch(step, len(step.buckets) - 1, state)

    def _places_left(self, step: Step, is_spared: bool) -> dict[tuple[int, int], Tensor]:
        """Return parameters whose gradients a step has left, by rank and index."""
        by_rank = self._params.by_rank
        if not is_spared:
            return {(r, i): param for r, mine in enumerate(by_rank) for i, param in enumerate(mine)}
        # Else new gradients may be there already.
        return {
            (rank, i): by_rank[rank][i]
            for sent in step.sent.values()
            for rank, mine in enumerate(sent.lists)
            for i, grad in zip(sent.params, mine, strict=True)
            if by_rank[rank][i].grad is grad
        }


def _method(this: weakref.ref[Reducer], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        reducer = this()
        return None if reducer is None else method(reducer, *arguments)

    return call
