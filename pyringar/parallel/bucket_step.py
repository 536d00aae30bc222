"""One step of a bucketer: what has left to be reduced, and how long that took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyringar.comm.call import Work

__all__ = ["BucketStats", "Sent", "StepStats", "measure"]


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


def measure(native: Any, sent: Mapping[int, Sent], began_ns: int, ended_ns: int) -> StepStats:
    """Return what a step did, and when.

    Args:
        native: The engine's bucketer.
        sent: What has left, by bucket.
        began_ns: When ``wait()`` was called, as ``time.perf_counter_ns`` counts.
        ended_ns: When all was reduced.
    """
    first_ns = native.begin_ns()

    def since(time_ns: int) -> float | None:
        return (time_ns - first_ns) * 1e-9 if time_ns else None

    rows = []
    for bucket, (params, (ready_ns, launched_ns)) in enumerate(
        zip(native.buckets(), native.times(), strict=True)
    ):
        work = sent[bucket].work if bucket in sent else None
        done_ns = 0 if work is None else work.finished_ns()
        nbytes = native.bytes_of(bucket)
        rows.append(
            BucketStats(tuple(params), nbytes, since(ready_ns), since(launched_ns), since(done_ns))
        )
    spent = [b.done_s - b.launched_s for b in rows if b.done_s and b.launched_s is not None]
    return StepStats(
        begin_ns=first_ns,
        buckets=tuple(rows),
        backward_s=(began_ns - first_ns) * 1e-9,
        communication_s=sum(spent),
        exposed_s=(ended_ns - began_ns) * 1e-9,
    )
