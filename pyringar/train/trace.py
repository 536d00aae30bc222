"""Record where a training step's time goes: spans by rank, as a file, a picture and a table.

A trace is a list of spans. It is written in the Chrome format, which https://ui.perfetto.dev and
chrome://tracing show, one row for each rank's computation and one for its buckets.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.engine.files import read_json
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.bucketer import StepStats

__all__ = ["CATEGORIES", "Span", "Trace"]

_COLORS = {
    "forward": "#8fb8de",
    "backward": "#3b6ea5",
    "bucket": "#d98c3f",
    "wait": "#b3423a",
    "optimizer": "#6a9f58",
}
CATEGORIES = tuple(_COLORS)
"""A span's kind: a phase of a step, or a bucket on its way."""
_MOST_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Span:
    """Something that took a while.

    Attributes:
        name: For people: "backward", "bucket 2".
        category: One of ``forward``, ``backward``, ``bucket``, ``wait``, ``optimizer``.
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
        """How long it took."""
        return self.end_s - self.begin_s


class Trace:
    """Collects spans; one per training run.

    Cost: two readings of a clock for every span. On GPUs spans are the host's: what it enqueued,
    not what ran.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self._begin_ns = time.perf_counter_ns()

    @contextmanager
    def span(self, category: str, *ranks: int) -> Iterator[None]:
        """Record what happens in here.

        Args:
            category: One of :data:`CATEGORIES`; the span's name, too.
            *ranks: In whose rows: of each, what the host does for all in one go.
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

        Args:
            name: What is shown.
            category: One of :data:`CATEGORIES`.
            rank: In whose row.
            begin_ns: When it began, as ``time.perf_counter_ns`` counts.
            end_ns: When it ended.
            nbytes: What was moved, if anything was.

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
        """Record the buckets of a step, from launch to done, in the row of every rank.

        Args:
            stats: Of a :class:`GradientBucketer`.
            world_size: Number of ranks.
        """
        for index, bucket in enumerate(stats.buckets):
            if bucket.launched_s is None or bucket.done_s is None:
                continue
            begin_ns = stats.begin_ns + round(bucket.launched_s * 1e9)
            end_ns = stats.begin_ns + round(bucket.done_s * 1e9)
            for rank in range(world_size):
                self.add(f"bucket {index}", "bucket", rank, begin_ns, end_ns, bucket.nbytes)

    # -- files -------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the Chrome format.

        Args:
            path: A file, replaced if it is there.
        """
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
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            ArgumentError: The file is not there, or not such a file.
        """
        trace = cls()
        try:
            events = read_json(Path(path), _MOST_FILE_BYTES)["traceEvents"]
            trace.spans += [_span_of(event) for event in events if event["ph"] == "X"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{path} is no trace of pyringar's: {error!r}") from error
        return trace

    # -- for people --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Numbers of the steps that it holds."""
        return sorted({span.step for span in self.spans})

    def of_step(self, step: int) -> list[Span]:
        """Return the spans of one step.

        Args:
            step: Its number.
        """
        return [span for span in self.spans if span.step == step]

    def __str__(self) -> str:
        """Write a line per step: milliseconds of each kind, and the share of buckets hidden."""
        header = f"{'step':>5}  {'ms':>8}" + "".join(f"  {name:>9}" for name in CATEGORIES)
        lines = [f"{header}  {'hidden':>6}"]
        for step in self.steps():
            spans = self.of_step(step)
            rank = [span for span in spans if span.rank == spans[0].rank]
            total_s = max(s.end_s for s in spans) - min(s.begin_s for s in spans)
            by_kind = [sum(s.seconds for s in rank if s.category == kind) for kind in CATEGORIES]
            cells = "".join(f"  {seconds * 1e3:9.2f}" for seconds in by_kind)
            share = _hidden(rank)
            hidden = "-" if share is None else f"{share:.0%}"
            lines.append(f"{step:>5}  {total_s * 1e3:8.2f}{cells}  {hidden:>6}")
        return "\n".join(lines)

    def plot(self, path: str | Path, step: int | None = None) -> None:
        """Draw one step, the last one if not named, as a PNG: what overlapped, what stuck out.

        Args:
            path: The picture.
            step: Which step.

        Raises:
            ArgumentError: There is no such step.
            UnsupportedError: matplotlib cannot be imported.
        """
        steps = self.steps()
        chosen = step if step is not None else (steps[-1] if steps else None)
        if chosen not in steps:
            raise ArgumentError(f"step is {step!r}, expected one of {steps}")
        try:
            from matplotlib.figure import Figure  # not pyplot: a notebook's goes on as it was
        except ImportError as error:
            raise UnsupportedError(f"a picture needs matplotlib ({error})") from error
        spans = [span for span in self.spans if span.step == chosen]
        ranks = sorted({span.rank for span in spans})
        figure = Figure(figsize=(11, 1.6 + 0.9 * len(ranks)), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, spans, ranks)
        axes.set_title(f"step {chosen}", fontsize=10)
        figure.legend(loc="outside lower center", ncols=len(_COLORS), frameon=False, fontsize=8)
        figure.savefig(path, dpi=130)


def _draw(axes: Any, spans: Sequence[Span], ranks: Sequence[int]) -> None:
    """Draw a step: two rows for each rank, what it computes and its buckets."""
    start = min(span.begin_s for span in spans)
    for kind, color in _COLORS.items():
        for row, rank in enumerate(ranks):
            drawn = [s for s in spans if (s.category, s.rank) == (kind, rank)]
            axes.broken_barh(
                [((s.begin_s - start) * 1e3, s.seconds * 1e3) for s in drawn],
                (2 * row + (kind == "bucket") - 0.375, 0.75),
                color=color,  # of edges, too, or what is short would not be seen
                linewidth=0.8,
                label=kind if drawn and row == 0 else None,
            )
    labels = [f"rank {rank} {what}" for rank in ranks for what in ("computes", "buckets")]
    axes.set_yticks(range(2 * len(ranks)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")


def _span_of(event: Any) -> Span:
    """Return the span of an event in a file, checked.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    name, kind, rank = event["name"], event["cat"], event["pid"]
    step, nbytes = event["args"]["step"], event["args"]["bytes"]
    begin_us, duration_us = event["ts"], event["dur"]
    if kind not in list(CATEGORIES):
        raise ValueError(f"cat is {reprlib.repr(kind)}, expected one of {', '.join(CATEGORIES)}")
    if not (isinstance(name, str) and name.isprintable()):
        raise ValueError(f"name is {reprlib.repr(name)}, expected printable text")
    for key, number in (("pid", rank), ("step", step), ("bytes", nbytes)):
        if not (type(number) is int and 0 <= number < 2**63):
            raise ValueError(f"{key} is {reprlib.repr(number)}, expected a whole number from 0 on")
    for key, number in (("ts", begin_us), ("dur", duration_us)):
        if not (type(number) in (int, float) and abs(number) < 2**63):
            raise ValueError(f"{key} is {reprlib.repr(number)}, expected microseconds")
    begin_s = begin_us * 1e-6
    return Span(name, kind, rank, step, begin_s, begin_s + duration_us * 1e-6, nbytes)


def _hidden(spans: Sequence[Span]) -> float | None:
    """Share of the buckets' time that lies outside every wait; None without buckets."""
    buckets = [(s.begin_s, s.end_s) for s in spans if s.category == "bucket"]
    waits = [(s.begin_s, s.end_s) for s in spans if s.category == "wait"]
    total = sum(end - begin for begin, end in buckets)
    if total <= 0:
        return None
    exposed = sum(
        max(0.0, min(end, w_end) - max(begin, w_begin))
        for begin, end in buckets
        for w_begin, w_end in waits
    )
    return 1 - exposed / total
