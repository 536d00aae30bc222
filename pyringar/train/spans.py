"""Spans of time that ranks spent, and what they add up to: by step and by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["CATEGORIES", "BucketTimes", "Span", "StepTimes", "by_bucket", "by_step", "covered_s"]

CATEGORIES = ("forward", "backward", "bucket", "wait", "optimizer", "run")


@dataclass(frozen=True)
class Span:
    """Something that took a while.

    Attributes:
        name: For people: "backward", "bucket 2".
        category: One of ``forward``, ``backward``, ``bucket``, ``wait``, ``optimizer``; ``run``
            where nobody knows what a rank's program did, as in `pyringar.launch`.
        rank: Whose row it is in.
        step: Number of the training step.
        begin_s: Seconds since the trace began.
        end_s: When it ended.
        nbytes: Of a bucket: one rank's gradients.
    """

    name: str
    category: str
    rank: int
    step: int
    begin_s: float
    end_s: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class StepTimes:
    """Hold what a step spent its time on, or several in the mean or in total, in milliseconds.

    Attributes:
        total_ms: From its first span's begin to its last one's end.
        forward_ms: How long some rank was in this phase; what ranks did at once counts once.
        backward_ms: Likewise.
        bucket_ms: How long some bucket was on its way.
        wait_ms: How long ranks waited for buckets, or for calls of other ranks.
        optimizer_ms: How long some rank updated parameters.
        run_ms: How long some rank ran, doing nobody knows what.
        hidden: Share of ``bucket_ms`` in which nobody waited, 0 to 1; None without buckets.
    """

    total_ms: float
    forward_ms: float
    backward_ms: float
    bucket_ms: float
    wait_ms: float
    optimizer_ms: float
    run_ms: float
    hidden: float | None


@dataclass(frozen=True)
class BucketTimes:
    """Hold what one bucket took, in the mean over the steps that had it.

    Attributes:
        nbytes: One rank's gradients.
        steps: Number of steps.
        launched_ms: Milliseconds from the step's begin until it left.
        took_ms: From there until it was summed.
        hidden: Share of ``took_ms`` in which nobody waited, 0 to 1; None if it took no time.
    """

    nbytes: int
    steps: int
    launched_ms: float
    took_ms: float
    hidden: float | None


def covered_s(spans: Iterable[Span]) -> float:
    """Return how many seconds lie in at least one of these spans."""
    return sum(end - begin for begin, end in _merged(spans))


def by_step(spans: Iterable[Span]) -> dict[int, StepTimes]:
    """Return what every step spent its time on, by its number."""
    return {step: _step_times(own) for step, own in sorted(_grouped(spans, _step_of).items())}


def summed(steps: Sequence[StepTimes], share: float = 1.0) -> StepTimes:
    """Return the total of steps, times ``share``: 1 / their number gives the mean."""
    values: dict[str, Any] = {
        field.name: share * sum(getattr(step, field.name) for step in steps)
        for field in fields(StepTimes)
        if field.name != "hidden"
    }
    bucket_ms = sum(step.bucket_ms for step in steps)
    hidden_ms = sum(step.bucket_ms * (step.hidden or 0.0) for step in steps)
    return StepTimes(**values, hidden=hidden_ms / bucket_ms if bucket_ms > 0 else None)


def by_bucket(spans: Iterable[Span]) -> dict[str, BucketTimes]:
    """Return what every bucket took, by its name, in the order in which they first left."""
    by_name: dict[str, list[tuple[Span, float, float]]] = {}
    for own in _grouped(spans, _step_of).values():
        begin_s = min(span.begin_s for span in own)
        waits = [span for span in own if span.category == "wait"]
        buckets = [span for span in own if span.category == "bucket"]
        for name, same in _grouped(buckets, lambda span: span.name).items():
            first = same[0]  # all ranks have the same ones
            exposed_s = _overlap_s([first], waits)
            by_name.setdefault(name, []).append((first, first.begin_s - begin_s, exposed_s))
    return {name: _bucket_times(found) for name, found in by_name.items()}


def as_json(times: StepTimes | BucketTimes) -> dict[str, Any]:
    """Return the fields, milliseconds with four digits after the point."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(times).items()
    }


def _step_of(span: Span) -> int:
    return span.step


def _grouped(spans: Iterable[Span], key: Callable[[Span], Any]) -> Mapping[Any, list[Span]]:
    found: dict[Any, list[Span]] = {}
    for span in spans:
        found.setdefault(key(span), []).append(span)
    return found


def _step_times(spans: Sequence[Span]) -> StepTimes:
    kinds = {kind: [span for span in spans if span.category == kind] for kind in CATEGORIES}
    total_s = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    bucket_s = covered_s(kinds["bucket"])
    values: dict[str, Any] = {f"{kind}_ms": covered_s(kinds[kind]) * 1e3 for kind in CATEGORIES}
    hidden = _hidden(bucket_s, _overlap_s(kinds["bucket"], kinds["wait"]))
    return StepTimes(total_ms=total_s * 1e3, **values, hidden=hidden)


def _bucket_times(found: Sequence[tuple[Span, float, float]]) -> BucketTimes:
    count = len(found)
    took_s = sum(span.seconds for span, _, _ in found)
    return BucketTimes(
        nbytes=found[-1][0].nbytes,
        steps=count,
        launched_ms=sum(launched_s for _, launched_s, _ in found) / count * 1e3,
        took_ms=took_s / count * 1e3,
        hidden=_hidden(took_s, sum(exposed_s for _, _, exposed_s in found)),
    )


def _hidden(total_s: float, exposed_s: float) -> float | None:
    return 1 - exposed_s / total_s if total_s > 0 else None


def _overlap_s(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Return how many seconds lie both in a span of the first kind and in one of the second."""
    return sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in _merged(spans)
        for other_begin, other_end in _merged(others)
    )


def _merged(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield disjoint intervals in order, which together cover what the spans do."""
    begin = end = None
    for span in sorted(spans, key=lambda span: span.begin_s):
        if begin is not None and end is not None and span.begin_s <= end:
            end = max(end, span.end_s)
            continue
        if begin is not None and end is not None:
            yield begin, end
        begin, end = span.begin_s, span.end_s
    if begin is not None and end is not None:
        yield begin, end
