"""A training step: gradients come one by one, buckets leave as they fill, and take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pyringar.engine import load
from pyringar.parallel.bucket_params import check_caps
from pyringar.predict.algorithms import ITEM_BYTES

__all__ = ["Backward", "BucketForecast", "StepForecast", "plan_buckets", "predict_step"]


@dataclass(frozen=True)
class Backward:
    """Say when the gradients of one rank are ready.

    Attributes:
        compute_s: Forward and backward, without any communication.
        ready_s: When each parameter's gradient is ready, since forward began.
        order: Parameters in the order in which their gradients come.
        source: How this is known.
    """

    compute_s: float
    ready_s: tuple[float, ...]
    order: tuple[int, ...]
    source: str

    @classmethod
    def at_the_end(cls, num_tensors: int, compute_s: float) -> Backward:
        """Assume that all gradients come at once: nothing is known about the model.

        Args:
            num_tensors: Number of parameters.
            compute_s: Seconds of forward and backward together.
        """
        source = "given; all gradients come at its end, so that nothing overlaps"
        return cls(compute_s, (compute_s,) * num_tensors, tuple(range(num_tensors)), source)

    @classmethod
    def by_flops(
        cls, params: Sequence[Tensor], loss: Callable[[], Tensor], compute_s: float
    ) -> Backward:
        """Spread a given time over the step as its floating-point operations are.

        Args:
            params: The model's, on torch's meta device: nothing is computed.
            loss: Runs forward and returns what to differentiate.
            compute_s: Seconds of forward and backward together.
        """
        with FlopCounterMode(display=False) as counter:
            order, flops = _watch(params, loss, counter.get_total_flops)
        total = counter.get_total_flops()
        ready_s = tuple(compute_s * count / total for count in flops)
        source = "given; gradients come as the floating-point operations of the model are spread"
        return cls(compute_s, ready_s, tuple(order), source)

    @classmethod
    def measured(
        cls, params: Sequence[Tensor], loss: Callable[[], Tensor], rounds: int = 3
    ) -> Backward:
        """Measure on this machine: the median of some steps, after one to warm up.

        Args:
            params: The model's, on the CPU.
            loss: Runs forward and returns what to differentiate.
            rounds: Number of steps that count.
        """
        steps = []
        for _ in range(1 + rounds):
            for param in params:
                param.grad = None
            begin_s = time.perf_counter()
            order, ready_s = _watch(params, loss, time.perf_counter)
            ends_s = (*ready_s, time.perf_counter())
            steps.append([end_s - begin_s for end_s in ends_s])
        columns = zip(*steps[1:], strict=True)
        *medians_s, compute_s = (statistics.median(column) for column in columns)
        source = "measured on this machine, one rank by itself"
        return cls(compute_s, tuple(medians_s), tuple(order), source)


def _watch(
    params: Sequence[Tensor], loss: Callable[[], Tensor], read: Callable[[], float]
) -> tuple[list[int], list[float]]:
    """Run a step; return the order of the gradients, and a reading as each one came."""
    order: list[int] = []
    readings = [0.0] * len(params)

    def note(index: int) -> None:
        order.append(index)
        readings[index] = read()

    handles = [
        param.register_post_accumulate_grad_hook(lambda _, index=index: note(index))  # type: ignore[no-untyped-call]
        for index, param in enumerate(params)
    ]
    try:
        loss().backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return order, readings


@dataclass(frozen=True)
class BucketForecast:
    """One bucket of a step; times since forward began.

    Attributes:
        params: Indices of its parameters.
        nbytes: Of one rank's gradients.
        ready_s: When its last gradient is ready.
        begin_s: When its reduction begins: after that of the bucket before.
        end_s: When it is reduced.
    """

    params: tuple[int, ...]
    nbytes: int
    ready_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepForecast:
    """A step without the optimiser.

    Attributes:
        step_s: Until the last gradient is reduced.
        exposed_s: The part of it after backward.
        communication_s: Sum of the reductions.
        buckets: In the order in which they leave.
    """

    step_s: float
    exposed_s: float
    communication_s: float
    buckets: tuple[BucketForecast, ...]


def plan_buckets(
    tensors: Sequence[int], order: Sequence[int], *, bucket_cap_mb: float, first_bucket_mb: float
) -> list[list[int]]:
    """Return the bucketer's own plan for float32 tensors of these numbers of elements.

    Raises:
        ArgumentError: A cap is not a positive number of megabytes.
    """
    items = [(numel * ITEM_BYTES, 0) for numel in tensors]
    caps = check_caps(bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb)
    buckets: list[list[int]] = load.engine().plan_buckets(
        items, list(order), min(caps.values()), caps["bucket_cap_mb"]
    )
    return buckets


def predict_step(
    tensors: Sequence[int],
    backward: Backward,
    buckets: Sequence[Sequence[int]],
    reduction_s: Callable[[Sequence[int]], float],
) -> StepForecast:
    """Launch every bucket when its last gradient is ready; a communicator runs one at a time.

    Computation is taken to lose nothing to the reductions that run beside it.

    Args:
        tensors: Numbers of elements of the parameters.
        backward: When their gradients are ready.
        buckets: Parameters that travel together, by index.
        reduction_s: Returns the seconds to reduce tensors of these numbers of elements.
    """
    done: list[BucketForecast] = []
    free_s = 0.0
    readiness = [(max(backward.ready_s[i] for i in bucket), bucket) for bucket in buckets]
    for ready_s, bucket in sorted(readiness, key=lambda pair: pair[0]):
        numels = [tensors[i] for i in bucket]
        begin_s = max(ready_s, free_s)
        free_s = begin_s + reduction_s(numels)
        nbytes = sum(numels) * ITEM_BYTES
        done.append(BucketForecast(tuple(bucket), nbytes, ready_s, begin_s, free_s))
    step_s = max(backward.compute_s, free_s)
    return StepForecast(
        step_s=step_s,
        exposed_s=step_s - backward.compute_s,
        communication_s=sum(b.end_s - b.begin_s for b in done),
        buckets=tuple(done),
    )
