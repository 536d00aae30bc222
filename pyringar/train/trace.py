"""Record where the time of a training step goes: spans by rank, as a file and as tables.

The file has the Chrome format, which https://ui.perfetto.dev and chrome://tracing show: one row for
each rank's computation and one for its buckets.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.errors import ArgumentError
from pyringar.parallel.bucketer import StepStats

__all__ = ["CATEGORIES", "Span", "Trace"]

CATEGORIES = ("forward", "backward", "bucket", "wait", "optimizer", "run")
"""A span's kind: a phase of a step, a bucket from launch to done, or any code of a program."""
_MOST_REASON = 120  # characters
_NOTES = """\
ms of a step in which a rank was in a phase; what ranks do at once counts once
bucket: gradients that are summed over all ranks together when backward has them
hidden: share of the buckets' time in which ranks still computed and none waited"""


@dataclass(frozen=True)
class Span:
    """A span of time of one rank.

    Attributes:
        name: For people: "backward", "bucket 2".
        category: One of `CATEGORIES`; ``run`` is any code of a program, as in `pyringar.launch`.
        begin_s: Seconds since the trace began.
        nbytes: Bytes of one rank's gradients in a bucket; 0 for other categories.
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
        """Its length."""
        return self.end_s - self.begin_s


class Trace:
    """Collects the spans of a training run.

    Attributes:
        spans: The recorded spans.
        title: The run, in a line for people.
        step: Number of the step that is recorded now.

    Cost: two readings of a clock for every span. On GPUs spans are the host's: the time to enqueue
    kernels, not to run them.
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
            category: One of `CATEGORIES`, which is also the name of the span.
            *ranks: Ranks that get a span.
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
        """Record a span.

        The times are readings of ``time.perf_counter_ns``.

        Raises:
            ArgumentError: Unknown ``category``.
        """
        if category not in CATEGORIES:
            raise ArgumentError(
                f"category is {category!r}, expected one of {', '.join(CATEGORIES)}"
            )
        begin_s, end_s = ((t - self._begin_ns) * 1e-9 for t in (begin_ns, end_ns))
        self.spans.append(Span(name, category, rank, self.step, begin_s, end_s, nbytes))

    def add_buckets(self, stats: StepStats, world_size: int) -> None:
        """Record the buckets of a step, from launch to done, for every rank."""
        for index, bucket in enumerate(stats.buckets):
            if bucket.launched_s is None or bucket.done_s is None:
                continue
            begin_ns = stats.begin_ns + round(bucket.launched_s * 1e9)
            end_ns = stats.begin_ns + round(bucket.done_s * 1e9)
            for rank in range(world_size):
                self.add(f"bucket {index}", "bucket", rank, begin_ns, end_ns, bucket.nbytes)

    def save(self, path: str | Path) -> None:
        """Write the Chrome format. An existing file is replaced."""
        events: list[dict[str, Any]] = [
            {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
            for rank in sorted({span.rank for span in self.spans})
            for what, row, name in (
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
        about = {"title": self.title}
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that `save` wrote.

        Raises:
            ArgumentError: The file cannot be read, or `save` did not write it.
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
        """Return the tables of ``str()`` as values for JSON; times in milliseconds."""
        steps = {step: _step_times(self.of_step(step)) for step in self.steps()}
        return {
            "title": self.title,
            "steps": [{"step": step, **times} for step, times in steps.items()],
            "mean": _mean(list(steps.values())) if steps else None,
            "buckets": [{"name": name, **row} for name, row in self._buckets().items()],
        }

    def __str__(self) -> str:
        """Return a table of steps and a table of buckets; times in milliseconds."""
        kinds = _kinds_of(self.spans)
        facts = self.as_json()
        lines = [self.title] if self.title else []
        lines += [f"{'step':>5}  {'ms':>8}{''.join(f'  {k:>9}' for k in kinds)}  {'hidden':>6}"]
        rows = {str(row["step"]): row for row in facts["steps"]}
        if rows:
            rows["mean"] = facts["mean"]
        for name, row in rows.items():
            cells = "".join(f"  {row[f'{kind}_ms']:9.2f}" for kind in kinds)
            lines.append(f"{name:>5}  {row['total_ms']:8.2f}{cells}  {_percent(row['hidden']):>6}")
        if facts["buckets"]:
            lines += ["", f"{'':<12}  {'bytes':>12}  {'begins, ms':>10}  {'ms':>9}  {'hidden':>6}"]
        for row in facts["buckets"]:
            lines.append(
                f"{row['name']:<12}  {row['nbytes']:>12,}  {row['launched_ms']:10.2f}  "
                f"{row['took_ms']:9.3f}  {_percent(row['hidden']):>6}"
            )
        return "\n".join([*lines, "", _NOTES])

    def _buckets(self) -> dict[str, dict[str, Any]]:
        """Return, by the name of each bucket, its means over the steps."""
        found: dict[str, list[tuple[Span, float, float]]] = {}
        for step in self.steps():
            spans = self.of_step(step)
            begin_s = min(span.begin_s for span in spans)
            waits = [span for span in spans if span.category == "wait"]
            buckets = [span for span in spans if span.category == "bucket"]
            for span in {span.name: span for span in reversed(buckets)}.values():
                exposed_s = _overlap_s([span], waits)
                found.setdefault(span.name, []).append((span, span.begin_s - begin_s, exposed_s))
        return {
            name: {
                "nbytes": rows[-1][0].nbytes,
                "steps": len(rows),
                "launched_ms": sum(launched_s for _, launched_s, _ in rows) / len(rows) * 1e3,
                "took_ms": sum(span.seconds for span, _, _ in rows) / len(rows) * 1e3,
                "hidden": _hidden(sum(s.seconds for s, _, _ in rows), sum(e for _, _, e in rows)),
            }
            for name, rows in sorted(found.items(), key=lambda item: item[1][0][0].begin_s)
        }


def _kinds_of(spans: Sequence[Span]) -> list[str]:
    """Return the categories of a training step, or those that a program has."""
    there = {span.category for span in spans}
    return [kind for kind in CATEGORIES if (kind in there if "run" in there else kind != "run")]


def _step_times(spans: Sequence[Span]) -> dict[str, Any]:
    """Return milliseconds of a step in all, by category, and the hidden share of its buckets."""
    of = {kind: [span for span in spans if span.category == kind] for kind in CATEGORIES}
    total_s = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    return {
        "total_ms": total_s * 1e3,
        **{f"{kind}_ms": covered_s(of[kind]) * 1e3 for kind in CATEGORIES},
        "hidden": _hidden(covered_s(of["bucket"]), _overlap_s(of["bucket"], of["wait"])),
    }


def _mean(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name in steps[0] if name != "hidden"]
    bucket_ms = sum(step["bucket_ms"] for step in steps)
    exposed_ms = sum(step["bucket_ms"] * (1 - (step["hidden"] or 0.0)) for step in steps)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in names}
    return {**means, "hidden": _hidden(bucket_ms, exposed_ms)}


def covered_s(spans: Iterable[Span]) -> float:
    """Return how many seconds lie in at least one of the spans."""
    total_s, last_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, last_s))
        last_s = max(last_s, span.end_s)
    return total_s


def _overlap_s(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Return how many seconds lie both in one of ``spans`` and in one of ``others``."""
    return covered_s(spans) + covered_s(others) - covered_s([*spans, *others])


def _hidden(total_s: float, exposed_s: float) -> float | None:
    return 1 - exposed_s / total_s if total_s > 0 else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _span_of(event: Any) -> Span:
    name, kind, args = str(event["name"]), event["cat"], event["args"]
    if kind not in list(CATEGORIES):
        raise ValueError(f"category {kind!r}, expected one of {', '.join(CATEGORIES)}")
    rank, step, nbytes = (int(number) for number in (event["pid"], args["step"], args["bytes"]))
    begin_s, seconds = float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6
    if not (math.isfinite(begin_s) and 0 <= seconds < math.inf):
        raise ValueError(f"{name} has {event['dur']!r} microseconds")
    return Span(name, kind, rank, step, begin_s, begin_s + seconds, nbytes)
