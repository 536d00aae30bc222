"""Record where a training step's time goes: spans by rank, as a file, a picture and a table.

A trace is a list of spans. It is written in the Chrome format, which https://ui.perfetto.dev and
chrome://tracing show, one row for each rank's computation and one for its buckets.
"""

from __future__ import annotations

import itertools
import json
import reprlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyringar.engine.files import read_json
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.bucketer import StepStats
from pyringar.train import spans as sums
from pyringar.train.spans import Span, StepTimes, as_json, by_bucket, by_step, summed

__all__ = ["CATEGORIES", "Span", "Trace"]

CATEGORIES = sums.CATEGORIES
"""A span's kind: a phase of a step, or a bucket on its way."""
_COLORS = {
    "forward": "#8fb8de",
    "backward": "#3b6ea5",
    "bucket": "#d98c3f",
    "wait": "#b3423a",
    "optimizer": "#6a9f58",
    "run": "#3b6ea5",
}
_MOST_FILE_BYTES = 256 * 2**20  # 100 steps of 1,000 ranks are a third of it
_MOST_ROWS = 32  # of a picture
_MOST_TITLE = 200
_NOTES = """\
ms of a step in which a rank was in a phase; what ranks do at once counts once
bucket: gradients that are summed over all ranks together when backward has them
hidden: share of the buckets' time in which ranks still computed and none waited"""


class Trace:
    """Collects spans; one per training run.

    Attributes:
        spans: What was recorded.
        title: What ran where, in a line for people.
        step: Number of the step that is recorded now.

    Cost: two readings of a clock for every span. On GPUs spans are the host's: what it enqueued,
    not what ran.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.title = ""
        self.step = 0
        self._begin_ns = time.perf_counter_ns()

    @contextmanager
    def span(self, category: str, *ranks: int) -> Iterator[None]:
        """Record what happens in here.

        Args:
            category: One of `CATEGORIES`; the span's name, too.
            *ranks: In whose rows: of each, what the host does for all in one go.
        """
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            end_ns = time.perf_counter_ns()
            for rank in ranks:
                self.add(category, category, rank, begin_ns, end_ns)

    @contextmanager
    def turns(self, category: str, lanes: Sequence[Hashable]) -> Iterator[Callable[[int], None]]:
        """Record a phase in which ranks take turns, each in its own row.

        Gives a function to call with a rank, whenever that rank has got on. What passed since the
        last such call belongs to it, the end of the phase to the last one. If it is never called,
        the phase is recorded for all ranks at once.

        Args:
            category: One of `CATEGORIES`; the spans' name, too.
            lanes: One value per rank, such as its device: ranks with equal ones take turns, others
                run side by side.
        """
        marks: list[tuple[int, int]] = []
        begin_ns = time.perf_counter_ns()
        yield lambda rank: marks.append((rank, time.perf_counter_ns()))
        end_ns = time.perf_counter_ns()
        for lane in dict.fromkeys(lanes):
            own = [(rank, at_ns) for rank, at_ns in marks if lanes[rank] == lane]
            last_ns = begin_ns
            turns = [(r, list(found)) for r, found in itertools.groupby(own, lambda mark: mark[0])]
            for number, (rank, found) in enumerate(turns, start=1):
                until_ns = end_ns if number == len(turns) else found[-1][1]
                self.add(category, category, rank, last_ns, until_ns)
                last_ns = until_ns
        if not marks:
            for rank in range(len(lanes)):
                self.add(category, category, rank, begin_ns, end_ns)

    def add(
        self, name: str, category: str, rank: int, begin_ns: int, end_ns: int, nbytes: int = 0
    ) -> None:
        """Record a span.

        Args:
            name: What is shown.
            category: One of `CATEGORIES`.
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
            stats: Of a `GradientBucketer`.
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
        about = {"title": self.title}
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote.

        Args:
            path: The file.

        Raises:
            ArgumentError: It cannot be read, or is not such a file; says why, in one line.
        """
        trace = cls()
        try:
            trace.title, trace.spans = _read(Path(path))
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {_why(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{path} is not a trace of `pyringar train`: {error}") from error
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
        """Write a table of steps with their mean and total, a table of buckets, and what it means.

        Times are milliseconds.
        """
        steps = by_step(self.spans)
        lines = [self.title] if self.title else []
        kinds = _kinds_of(self.spans)
        names = "".join(f"  {name:>9}" for name in kinds)
        lines += [f"{'step':>5}  {'ms':>8}{names}  {'hidden':>6}"]
        lines += [_step_line(str(step), times, kinds) for step, times in steps.items()]
        found = list(steps.values())
        if found:
            lines += [_step_line("mean", summed(found, 1 / len(found)), kinds)]
            lines += [_step_line("total", summed(found), kinds)]
        buckets = by_bucket(self.spans)
        if buckets:
            lines += ["", f"{'':<12}  {'bytes':>12}  {'begins, ms':>10}  {'ms':>9}  {'hidden':>6}"]
        lines += [
            f"{name:<12}  {b.nbytes:>12,}  {b.launched_ms:10.2f}  {b.took_ms:9.3f}  "
            f"{_percent(b.hidden):>6}"
            for name, b in buckets.items()
        ]
        return "\n".join([*lines, "", _NOTES])

    def as_json(self) -> dict[str, Any]:
        """Return what ``str()`` shows as values for JSON; times in milliseconds, bytes in bytes."""
        steps = by_step(self.spans)
        found = list(steps.values())
        return {
            "title": self.title,
            "steps": [{"step": step, **as_json(times)} for step, times in steps.items()],
            "mean": as_json(summed(found, 1 / len(found))) if found else None,
            "total": as_json(summed(found)) if found else None,
            "buckets": [{"name": n, **as_json(b)} for n, b in by_bucket(self.spans).items()],
        }

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
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(f"a picture needs matplotlib ({error})") from error
        _draw(self.title, self.of_step(chosen), path)


def _draw(title: str, spans: Sequence[Span], path: str | Path) -> None:
    """Draw a step: a row for what each rank does, and one for the buckets of all."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's goes on as it was

    ranks = sorted({span.rank for span in spans})
    rows = {rank: row for row, rank in enumerate(ranks[:_MOST_ROWS])}
    start_s = min(span.begin_s for span in spans)
    has_buckets = "bucket" in _kinds_of(spans)
    figure = Figure(figsize=(11, 1.9 + 0.42 * (len(rows) + has_buckets)), layout="constrained")
    axes = figure.add_subplot()
    named: set[str] = set()
    for kind in _kinds_of(spans):
        color = _COLORS[kind]
        if kind == "bucket":  # a call for all ranks: drawn once
            _draw_buckets(axes, [s for s in spans if s.rank == ranks[0]], start_s, len(rows))
            continue
        for rank, row in rows.items():
            drawn = [s for s in spans if (s.category, s.rank) == (kind, rank)]
            axes.broken_barh(
                [((s.begin_s - start_s) * 1e3, s.seconds * 1e3) for s in drawn],
                (row - 0.375, 0.75),
                color=color,  # of edges, too, or what is short would not be seen
                linewidth=0.8,
                label=kind if drawn and kind not in named else None,
            )
            named |= {span.category for span in drawn}
    labels = [*(f"rank {rank}" for rank in rows), *["buckets,\nall ranks"] * has_buckets]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    more = f", the first {len(rows)} of {len(ranks)} ranks" if len(ranks) > len(rows) else ""
    total_ms = (max(span.end_s for span in spans) - start_s) * 1e3
    step = f"step {spans[0].step}: " if has_buckets else ""  # a program that just ran has none
    lines = [title, f"{step}{total_ms:.1f} ms{more}"]
    text = "\n".join(line for line in lines if line).replace("$", r"\$")  # $ begins a formula
    axes.set_title(text, fontsize=9, loc="left")
    figure.legend(loc="outside lower center", ncols=len(CATEGORIES), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _draw_buckets(axes: Any, spans: Sequence[Span], start_s: float, row: int) -> None:
    """Draw buckets from launch to done, each with its number; those that overlap, in lanes."""
    buckets = sorted((s for s in spans if s.category == "bucket"), key=lambda span: span.begin_s)
    ends: list[float] = []  # of the last bucket in each lane
    placed = []
    for span in buckets:
        lane = next((n for n, end in enumerate(ends) if end <= span.begin_s), len(ends))
        ends[lane : lane + 1] = [span.end_s]
        placed.append((lane, span))
    height = 0.75 / max(1, len(ends))
    for index, (lane, span) in enumerate(placed):
        begin_ms, took_ms = (span.begin_s - start_s) * 1e3, span.seconds * 1e3
        top = row - 0.375 + lane * height
        axes.broken_barh(
            *([(begin_ms, took_ms)], (top, height)),
            facecolor=_COLORS["bucket"],
            edgecolor="#8a5417",
            linewidth=0.8,
            label="bucket" if span is buckets[0] else None,
        )
        if len(buckets) <= 2 * _MOST_ROWS:
            number = span.name.removeprefix("bucket ")
            axes.annotate(
                *(number, (begin_ms + took_ms, top + height * (0.2 + 0.3 * (index % 3)))),
                xytext=(2, 0),  # and three heights, for neighbours
                textcoords="offset points",
                fontsize=7,
                va="center",
            )


def _kinds_of(spans: Sequence[Span]) -> Sequence[str]:
    """Return the kinds of a training step; where programs just ran, those that there are."""
    there = {span.category for span in spans}
    return [kind for kind in CATEGORIES if (kind in there if "run" in there else kind != "run")]


def _step_line(name: str, times: StepTimes, kinds: Sequence[str]) -> str:
    cells = "".join(f"  {getattr(times, f'{kind}_ms'):9.2f}" for kind in kinds)
    return f"{name:>5}  {times.total_ms:8.2f}{cells}  {_percent(times.hidden):>6}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# -- reading ---------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[str, list[Span]]:
    """Return title and spans of a file.

    Raises:
        OSError: It cannot be read.
        ValueError, KeyError, TypeError: It is not a trace; the words say why, in one line.
    """
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    try:
        content = read_json(path, _MOST_FILE_BYTES)
    except json.JSONDecodeError as error:
        raise ValueError(_what_json_lacks(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError("it is JSON without a list 'traceEvents'")
    about = content.get("otherData")
    title = about.get("title") if isinstance(about, dict) else None
    if not (isinstance(title, str) and title.isprintable() and len(title) <= _MOST_TITLE):
        title = ""  # another program's, or an older file
    spans = []
    for number, event in enumerate(content["traceEvents"]):
        if not isinstance(event, dict):
            raise ValueError(f"traceEvents[{number}] is a {type(event).__name__}, not an object")
        try:
            if event["ph"] == "X":
                spans.append(_span_of(event))
        except KeyError as error:
            raise ValueError(f"traceEvents[{number}] has no {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"traceEvents[{number}]: {error}") from None
    if not spans:
        raise ValueError("it holds no step")
    return title, spans


def _what_json_lacks(error: json.JSONDecodeError) -> str:
    text = error.doc.strip()
    if not text:
        return "it is empty"
    if not text.startswith("{"):
        return "it is not JSON"
    # What is open at the end of the text is reported where it begins, or at the end.
    if error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip()):
        return f"its JSON is cut off after {len(error.doc.encode()):,} bytes"
    return f"it is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return (error.strerror or str(error)).lower()


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
    if not (isinstance(name, str) and name.isascii() and name.isprintable() and len(name) < 64):
        raise ValueError(f"name is {reprlib.repr(name)}, expected a few printable characters")
    for key, number in (("pid", rank), ("step", step), ("bytes", nbytes)):
        if not (type(number) is int and 0 <= number < 2**63):
            raise ValueError(f"{key} is {reprlib.repr(number)}, expected a whole number from 0 on")
    for key, number in (("ts", begin_us), ("dur", duration_us)):
        if not (type(number) in (int, float) and abs(number) < 2**63):
            raise ValueError(f"{key} is {reprlib.repr(number)}, expected microseconds")
    if duration_us < 0:
        raise ValueError(f"dur is {reprlib.repr(duration_us)}, expected 0 or more")
    begin_s = begin_us * 1e-6
    return Span(name, kind, rank, step, begin_s, begin_s + duration_us * 1e-6, nbytes)
