"""One step of a bucketer: the buckets that it launched, and how long they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyringar.comm.work import Work

# What a gradient holds: see Held in csrc/bucket/step.h.
SUM, PART, COUNTED = 1, 2, 3


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
    """One bucket of one step."""

    lists: list[list[Tensor]]  # the tensors to reduce, by rank of this process
    params: list[int] = field(default_factory=list)  # indices of their parameters
    used: list[bool] = field(default_factory=list)  # has a rank of this process added to them?
    # Tensors that are no gradients: index in `params`, parameter, tensor.
    copies: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)  # of `lists` at a launch in backward
    flags: Tensor | None = None  # between processes: `used`, reduced over the ranks
    work: Work | None = None  # None: nothing to reduce

    def finish(self) -> list[int]:
        """Write results that are in copies to ``grad``; return the reduced parameters."""
        if not self.copies:
            return self.params  # reading flags would wait for a GPU
        flags = self.used if self.flags is None else self.flags.tolist()
        for at, param, copy in self.copies:
            if not flags[at] > 0:
                continue
            if param.grad is None:
                param.grad = copy
            else:
                param.grad.detach().copy_(copy)
        return [i for i, flag in zip(self.params, flags, strict=True) if flag > 0]


def measure(
    native: Any,
    buckets: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    works: Sequence[Work | None],
    began_ns: int,
) -> StepStats:
    """Return the statistics of a reduced step. ``began_ns``: when ``wait()`` was called."""
    ended_ns = time.perf_counter_ns()
    first_ns: int = native.begin_ns()

    def since(time_ns: int) -> float | None:
        return (time_ns - first_ns) * 1e-9 if time_ns else None

    rows = []
    times = zip(native.ready_ns(), native.launched_ns(), strict=True)
    for bucket, (ready_ns, launched_ns) in enumerate(times):
        work = works[bucket]
        row = BucketStats(
            params=tuple(buckets[bucket]),
            nbytes=nbytes[bucket],
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
