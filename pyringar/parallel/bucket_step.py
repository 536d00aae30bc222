"""One step of a bucketer: what has left to be reduced, and how long that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import Any, Protocol

from torch import Tensor

from pyringar.comm.work import Work

__all__ = ["BucketStats", "Sent", "Step", "StepStats", "measure"]

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


@dataclass(slots=True, eq=False)
class Sent:
    """One bucket of one step, noted before it leaves.

    Attributes:
        params: Indices of its parameters; fewer than planned where no rank used some.
        lists: Their gradients by rank, as they are in ``grad``; over processes this rank's, or what
            was handed over instead: a copy, or zeros.
        has_marks: A rank of this process had a backward pass.
        flags: Over processes, sent with them: 1 or 0 for each parameter that has a gradient; then
            ``has_marks``, and whether gradients that had left were changed; then reduced.
        is_whole: Every parameter had a gradient.
        is_leaving: It is being handed over: what an interrupt now leaves is not known.
        work: Their reduction; None where there is nothing to reduce.
        versions: Torch's counts of changes in place of ``lists``, when it left; None if it left in
            ``wait()``.
    """

    params: list[int]
    lists: list[list[Tensor]]
    has_marks: bool = True
    flags: Tensor | None = None
    is_whole: bool = True
    is_leaving: bool = True
    work: Work | None = None
    versions: list[list[int]] | None = None

    def tensors(self) -> list[list[Tensor]]:
        """Return what is reduced: gradients without ``create_graph=True``'s graph, and flags."""
        found = [[g.detach() if g.requires_grad else g for g in grads] for grads in self.lists]
        if self.flags is not None:
            found[0].append(self.flags)
        return found

    def note_versions(self) -> None:
        """From now on, `is_changed` notices changes."""
        self.versions = [list(map(_version, grads)) for grads in self.lists]

    def is_changed(self, params: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether gradients were changed or replaced since they left in a backward pass.

        All parts of one storage have one count, which backward advances when it adds to any of
        them, such as a flat buffer of the user's. Of these it says nothing, and they count as
        unchanged.

        Args:
            params: All parameters, by rank.
        """
        if self.versions is None:
            return False
        for mine, grads, then in zip(params, self.lists, self.versions, strict=True):
            now = map(_grad, map(mine.__getitem__, self.params))
            if any(map(is_not, now, grads)):
                return True
            if list(map(_version, grads)) != then and any(
                grad._version != version and grad.untyped_storage().nbytes() == grad.nbytes
                for grad, version in zip(grads, then, strict=True)
            ):
                return True
        return False


class Step(Protocol):
    """The whole state of one step, which the engine makes afresh for each.

    Attributes:
        buckets: Indices of the parameters of each bucket.
        sent: What has left, by bucket.
        has_new_params: Parameters were replaced, whose gradients nobody has counted.
    """

    buckets: list[list[int]]
    sent: dict[int, Sent]
    has_new_params: bool

    def launch(self, bucket: int, sent: Sent) -> None:
        """Note that a bucket leaves, and when."""

    def after(self, bucket: int) -> Any:
        """Return what says when a complete bucket's gradients are there; None: they are."""

    def has_marks(self) -> bool:
        """Return whether any gradient was counted."""

    def is_marked(self, rank: int, param: int) -> bool:
        """Return whether this gradient was counted."""

    def ready(self) -> list[int]:
        """Return the parameters of rank 0 in the order in which they came."""

    def begin_ns(self) -> int:
        """Return when the first gradient came; 0 if none did."""

    def times(self) -> list[tuple[int, int]]:
        """Return for each bucket when it was complete and when it left, in ns; 0 if it was not."""


def measure(step: Step, bytes_of: Sequence[int], began_ns: int, ended_ns: int) -> StepStats:
    """Return what a step did, and when.

    Args:
        step: All that has left is reduced.
        bytes_of: Bytes of each parameter.
        began_ns: When ``wait()`` was called, as ``time.perf_counter_ns`` counts.
        ended_ns: When all was reduced.
    """
    first_ns = step.begin_ns()

    def since(time_ns: int) -> float | None:
        return (time_ns - first_ns) * 1e-9 if time_ns else None

    rows = []
    for bucket, (params, (ready_ns, launched_ns)) in enumerate(
        zip(step.buckets, step.times(), strict=True)
    ):
        work = step.sent[bucket].work if bucket in step.sent else None
        rows.append(
            BucketStats(
                params=tuple(params),
                nbytes=sum(bytes_of[i] for i in params),
                ready_s=since(ready_ns),
                launched_s=since(launched_ns if work else 0),
                done_s=since(work.finished_ns() if work else 0),
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
