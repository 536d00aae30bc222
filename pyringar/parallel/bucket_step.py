"""One step of a bucketer: the buckets that it launched, and how long they took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyringar.comm.work import Work

__all__ = ["PART", "SUM", "BucketStats", "Launched", "StepStats", "measure"]

# What a gradient holds, from `held` of the engine's bucketer: see csrc/bindings/bucketer.h.
PART, SUM = 1, 2


@dataclass(frozen=True)
class BucketStats:
    """One bucket of one step; times in seconds since the first gradient of the step.

    Attributes:
        params: Indices of its parameters, in the order of ``parameters()``.
        nbytes: Bytes of the gradients of one rank.
        ready_s: When its last gradient existed; None if a parameter had no gradient.
        launched_s: When its reduction was launched; None if there was nothing to reduce.
        done_s: When it was reduced; None on GPUs, where the host does not wait.
    """

    params: tuple[int, ...]
    nbytes: int
    ready_s: float | None
    launched_s: float | None
    done_s: float | None


@dataclass(frozen=True)
class StepStats:
    """The last step for which ``wait()`` returned.

    Attributes:
        begin_ns: When the first gradient existed, on the clock of ``time.perf_counter_ns``.
        buckets: In the order of the plan.
        backward_s: From the first gradient to the call of ``wait()``.
        communication_s: Sum over buckets of the time from launch to done, where it is known.
        exposed_s: Duration of ``wait()``: the part that backward did not hide.
    """

    begin_ns: int = 0
    buckets: tuple[BucketStats, ...] = ()
    backward_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(slots=True, eq=False)
class Launched:
    """One bucket of one step.

    Attributes:
        params: Indices of the parameters to reduce.
        lists: Their gradients by rank of this process, or the tensors reduced in their place.
        flags: Between processes: for each parameter 1 if this rank has a gradient, else 0.
        is_whole: This rank has a gradient for every parameter.
        work: The reduction; None if there is nothing to reduce.
        versions: Version counters of ``lists`` at launch; None if `wait` launched the bucket.
    """

    params: list[int]
    lists: list[list[Tensor]]
    flags: Tensor | None = None
    is_whole: bool = True
    work: Work | None = None
    versions: list[list[int]] | None = None

    def tensors(self) -> list[list[Tensor]]:
        """Return the tensors to reduce, without the graph of ``create_graph=True``."""
        found = [[g.detach() if g.requires_grad else g for g in grads] for grads in self.lists]
        if self.flags is not None:
            found[0].append(self.flags)
        return found

    def find_changed(self, params: Sequence[Sequence[Tensor]]) -> tuple[int, int] | None:
        """Return rank and parameter of a gradient that was changed or replaced since its launch.

        Views of one storage share a version counter, which backward advances when it adds to one
        of them. So the counter of a view is ignored.
        """
        for rank, versions in enumerate(self.versions or ()):
            for i, grad, version in zip(self.params, self.lists[rank], versions, strict=True):
                if params[rank][i].grad is not grad or (
                    grad._version != version and grad.untyped_storage().nbytes() == grad.nbytes
                ):
                    return rank, i
        return None


def measure(
    native: Any,
    buckets: Sequence[Sequence[int]],
    launched: Mapping[int, Launched],
    bytes_of: Sequence[int],
    began_ns: int,
) -> StepStats:
    """Return the statistics of a step whose buckets are all reduced.

    ``native`` has not ended the step. ``began_ns`` is when ``wait()`` was called.
    """
    ended_ns = time.perf_counter_ns()
    first_ns: int = native.begin_ns()

    def since(time_ns: int) -> float | None:
        return (time_ns - first_ns) * 1e-9 if time_ns else None

    rows = []
    for bucket, (ready_ns, launched_ns) in enumerate(native.times()):
        work = launched[bucket].work
        row = BucketStats(
            params=tuple(buckets[bucket]),
            nbytes=sum(bytes_of[i] for i in buckets[bucket]),
            ready_s=since(ready_ns),
            launched_s=since(launched_ns if work else 0),
            done_s=since(work.finished_ns() if work else 0),
        )
        rows.append(row)
    spent = [b.done_s - b.launched_s for b in rows if b.done_s and b.launched_s is not None]
    return StepStats(
        begin_ns=first_ns,
        buckets=tuple(rows),
        backward_s=(began_ns - first_ns) * 1e-9,
        communication_s=sum(spent),
        exposed_s=(ended_ns - began_ns) * 1e-9,
    )
