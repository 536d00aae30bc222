"""Record the time of each phase of a training step and rank, for a file and a table.

The file has the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing display,
with a row for the computation of each rank and a row for its buckets.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError
from pyringar.parallel.bucketer import StepStats

CATEGORIES = ("forward", "backward", "bucket", "wait", "optimizer")
"""Categories of spans: the phases of a step, and "bucket", from launch to finish."""
_MOST_REASON = 120  # maximum characters of an error's reason
_NOTES = "Times in ms. A phase counts while any rank is in it."
_BUCKET_NOTES = """
bucket: a group of gradients is being summed over all ranks
exposed: the part of the bucket time in which a rank waited"""


@dataclass(frozen=True)
class Span:
    """A time span of a rank, in seconds since the trace began.

    ``name`` is a label such as "backward" or "bucket 2". ``nbytes`` is the size of a bucket on one
    rank, and 0 in other categories. ArgumentError for an unknown category.
    """

    name: str
    category: str
    rank: int
    step: int
    begin_s: float
    end_s: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        check_choice("category", self.category, CATEGORIES)

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end_s - self.begin_s


class Trace:
    """The recorded spans of a training run.

    Attributes:
        spans: The recorded spans.
        title: Description of the run in one line.
        step: Number of the current step.

    Cost: two clock readings per span. On GPUs a span is the time in which the host enqueues
    kernels, not the time in which they run.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.title = ""
        self.step = 0
        self._begin_ns = time.perf_counter_ns()

    @contextmanager
    def span(self, category: str, *ranks: int) -> Iterator[None]:
        """Record the time of a ``with`` block.

        Args:
            category: Name of the span, one of `CATEGORIES`.
            *ranks: Ranks for which the span is recorded.
        """
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            end_ns = time.perf_counter_ns()
            for rank in ranks:
                self.add(category, category, rank, begin_ns, end_ns)

    def add(
        self, name: str, category: str, rank: int, begin_ns: int, end_ns: int, nbytes: int = 0
    ) -> None:
        """Record a span, with times of ``time.perf_counter_ns``.

        ArgumentError for an unknown ``category``.
        """
        begin_s, end_s = ((t - self._begin_ns) * 1e-9 for t in (begin_ns, end_ns))
        self.spans.append(Span(name, category, rank, self.step, begin_s, end_s, nbytes))

    def add_buckets(self, stats: StepStats, world_size: int) -> None:
        """Record a span for each bucket of a step and each rank, from launch to finish."""
        for index, bucket in enumerate(stats.buckets):
            if bucket.launched_s is None or bucket.done_s is None:
                continue
            begin_ns = stats.begin_ns + round(bucket.launched_s * 1e9)
            end_ns = stats.begin_ns + round(bucket.done_s * 1e9)
            for rank in range(world_size):
                self.add(f"bucket {index}", "bucket", rank, begin_ns, end_ns, bucket.nbytes)

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace format; replaces an existing file."""
        events: list[dict[str, Any]] = []
        for rank in sorted({span.rank for span in self.spans}):
            events += [
                {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
                for kind, row, name in (
                    ("process_name", 0, f"rank {rank}"),
                    ("thread_name", 0, "computation"),
                    ("thread_name", 1, "buckets"),
                )
            ]
        events += [
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",
                "pid": span.rank,
                "tid": int(span.category == "bucket"),
                "ts": span.begin_s * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"step": span.step, "bytes": span.nbytes},
            }
            for span in self.spans
        ]
        facts = {"title": self.title}
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that `save` wrote.

        ArgumentError if the file cannot be read or is not a trace.
        """
        trace = cls()
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            trace.title = str(content["otherData"]["title"])
            trace.spans = [_span_of(e) for e in content["traceEvents"] if e["ph"] == "X"]
            if not trace.spans:
                raise ValueError("it holds no step")
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"[:_MOST_REASON]
            raise ArgumentError(f"{path} is not a trace of `pyringar train` ({reason})") from error
        return trace

    def steps(self) -> list[int]:
        """Return the numbers of the recorded steps."""
        return sorted({span.step for span in self.spans})

    def of_step(self, step: int) -> list[Span]:
        """Return the spans of one step."""
        return [span for span in self.spans if span.step == step]

    def as_json(self) -> dict[str, Any]:
        """Return the table of `__str__` as JSON values, with times in milliseconds."""
        rows = [_step_times(self.of_step(step)) for step in self.steps()]
        means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        steps = [{"step": step, **row} for step, row in zip(self.steps(), rows, strict=True)]
        return {"title": self.title, "steps": steps, "mean": means}

    def __str__(self) -> str:
        """Return a table with the milliseconds of each phase in each step."""
        has_buckets = any(span.category == "bucket" for span in self.spans)
        columns = ["total", *CATEGORIES, "exposed"]
        if not has_buckets:
            columns = [name for name in columns if name not in ("bucket", "exposed")]
        facts = self.as_json()
        lines = [self.title] if self.title else []
        lines.append(f"{'step':>5}{''.join(f' {name:>9}' for name in columns)}")
        for row in (*facts["steps"], {"step": "mean", **facts["mean"]}):
            cells = "".join(f" {row[f'{name}_ms']:9.2f}" for name in columns)
            lines.append(f"{row['step']:>5}{cells}")
        notes = _NOTES + _BUCKET_NOTES if has_buckets else _NOTES
        return "\n".join([*lines, "", notes])


def _step_times(spans: Sequence[Span]) -> dict[str, float]:
    """Return milliseconds of a step: in total, per category, and exposed bucket time."""
    of = {kind: [span for span in spans if span.category == kind] for kind in CATEGORIES}
    seconds = {"total": max(span.end_s for span in spans) - min(span.begin_s for span in spans)}
    seconds |= {kind: covered_s(found) for kind, found in of.items()}
    either_s = covered_s([*of["bucket"], *of["wait"]])
    seconds["exposed"] = seconds["bucket"] + seconds["wait"] - either_s
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()}


def covered_s(spans: Iterable[Span]) -> float:
    total_s, last_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, last_s))
        last_s = max(last_s, span.end_s)
    return total_s


def _span_of(event: Any) -> Span:
    name, kind, args = str(event["name"]), event["cat"], event["args"]
    rank, step, nbytes = (int(number) for number in (event["pid"], args["step"], args["bytes"]))
    begin_s, seconds = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
    if not (math.isfinite(begin_s) and 0 <= seconds < math.inf):
        raise ValueError(f"{name} has {event['dur']!r} microseconds")
    return Span(name, kind, rank, step, begin_s, begin_s + seconds, nbytes)
