"""Results as files: what they hold, how they are checked when read, and which rows are the same.

A results file is what one benchmark measured: ``{"version", "benchmark", "machine", "rows", ...}``.
A report is what `benchmarks/run_all.py` measured: ``{"version", "machine", "sections", ...}``; each
section is a results file. Times in rows are in the unit that their names end with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PEERS",
    "VERSION",
    "InputError",
    "Times",
    "digest",
    "identities",
    "is_peer",
    "load",
    "name_of",
    "results_of",
    "times_of",
    "write_atomically",
    "write_results",
    "wrong_rows",
]

VERSION = 1

# What makes a row the same in two files. A field that a benchmark has not got does not count.
IDENTITY = (
    *("case", "world_size", "dtype", "algorithm", "candidate", "clock", "bucket_cap_mb"),
    *("batch_size", "device"),
)
MEDIANS = ("median_us", "median_ms", "median_s", "step_ms", "bucketed_s")
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

# Candidates that are not ours: they say how fast the machine was, not how good the version is.
PEERS = ("naive", "naive per tensor", "stack", "gloo", "limit", "bare", "book", "undivided")
PEERS_BEGIN = ("gloo", "nccl", "cupy", "torch ", "nn.DataParallel")


class InputError(ValueError):
    """A file that is not what it should be; the message names it and says what is wrong."""


@dataclass(frozen=True)
class Times:
    """A row's time and spread, seconds. Quartiles are None in files from before they were kept."""

    median_s: float
    min_s: float
    q1_s: float | None
    q3_s: float | None

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, or else of median and minimum, over the median."""
        if self.q1_s is not None and self.q3_s is not None:
            return (self.q3_s - self.q1_s) / 2 / self.median_s
        return (self.median_s - self.min_s) / self.median_s


# -- rows ------------------------------------------------------------------------------------------


def name_of(row: Mapping[str, Any]) -> str:
    """The algorithm or candidate; what the whole row is about where there is none."""
    return str(row.get("algorithm") or row.get("candidate") or "trainer")


def is_peer(row: Mapping[str, Any]) -> bool:
    """Whether a row is about something that is not ours."""
    name = name_of(row)
    return name in PEERS or name.startswith(PEERS_BEGIN)


def identities(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Rows by what they are about; one that is there twice is numbered."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        about = tuple(row.get(field) for field in IDENTITY)
        number = 1
        while (*about, number) in found:
            number += 1
        found[(*about, number)] = row
    return found


def times_of(row: Mapping[str, Any]) -> Times:
    """A row's time and spread in seconds."""
    field = next(field for field in MEDIANS if field in row)
    name, _, unit = field.rpartition("_")
    scale = SECONDS[unit]
    median_s = row[field] * scale
    least = row.get("min_step_ms" if name == "step" else f"min_{unit}", row[field])
    low, high = (row.get(f"{quartile}_{unit}") for quartile in ("q1", "q3"))
    if low is None or high is None:
        return Times(median_s, least * scale, None, None)
    return Times(median_s, least * scale, low * scale, high * scale)


def wrong_rows(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every row that did not pass its check, in words."""
    return [
        f"{section}: {row['case']}, {row['world_size']} ranks, {name_of(row)}"
        for section, results in sections.items()
        for row in results["rows"]
        if row["correct"] is not True
    ]


# -- files -----------------------------------------------------------------------------------------


def results_of(
    benchmark: str, machine: Mapping[str, Any], rows: Sequence[Any], **more: Any
) -> dict[str, Any]:
    """What a results file holds; rows are dataclasses or mappings."""
    plain = [asdict(row) if is_dataclass(row) else dict(row) for row in rows]  # type: ignore[arg-type]
    return {
        "version": VERSION,
        "benchmark": benchmark,
        "machine": dict(machine),
        **more,
        "rows": plain,
    }


def write_results(path: str | Path, results: Mapping[str, Any]) -> None:
    """Write JSON that a person can read, and diff: a row a line."""
    write_atomically(path, _lines_of(results) + "\n")


def _lines_of(value: Any, indent: str = "") -> str:
    """JSON in which what holds no list or object is one line."""
    is_object = isinstance(value, Mapping)
    items = list(value.items()) if is_object else [(None, item) for item in value]
    if not any(isinstance(item, (Mapping, list)) for _, item in items):
        return json.dumps(value)
    inner = indent + " "
    lines = [
        f"{inner}{json.dumps(key) + ': ' if is_object else ''}"
        + (_lines_of(item, inner) if isinstance(item, (Mapping, list)) else json.dumps(item))
        for key, item in items
    ]
    opening, closing = "{}" if is_object else "[]"
    return opening + "\n" + ",\n".join(lines) + f"\n{indent}{closing}"


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file that is there in whole or not at all, whenever this process is ended."""
    partial = Path(f"{path}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def load(path: str | Path) -> dict[str, Any]:
    """Read a report, or a results file as a report of one section.

    Raises:
        InputError: It is not there, no JSON, of another version, or not such a file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}, expected an object")
    version = content.get("version", VERSION if "rows" in content else None)
    if version != VERSION:
        raise InputError(f"{path}: version is {version!r}, expected {VERSION}")
    if "sections" not in content:
        if "rows" not in content:
            raise InputError(f"{path}: has neither sections nor rows: no results of a benchmark")
        content = {
            "version": VERSION,
            "machine": content.get("machine"),
            "sections": {content.get("benchmark", ""): content},
        }
    _check_report(path, content)
    return content


def _check_report(path: str | Path, report: Mapping[str, Any]) -> None:
    if not isinstance(report.get("machine"), dict) or not report["machine"].get("cpu"):
        raise InputError(f"{path}: does not name its machine")
    if not isinstance(report["sections"], dict):
        raise InputError(f"{path}: sections is no object")
    for name, section in report["sections"].items():
        rows = section.get("rows") if isinstance(section, dict) else None
        if not isinstance(rows, list):
            raise InputError(f"{path}: section {name or 'rows'!r} has no list of rows")
        for number, row in enumerate(rows):
            fault = _fault_of(row)
            if fault:
                raise InputError(f"{path}: section {name or 'rows'!r}, row {number}: {fault}")


def _fault_of(row: Any) -> str | None:
    """What is wrong with a row, if anything is."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, expected an object"
    for field in ("case", "world_size", "correct"):
        if field not in row:
            return f"has no {field}"
    field = next((field for field in MEDIANS if field in row), None)
    if field is None:
        return f"has no time: none of {', '.join(MEDIANS)}"
    if isinstance(row[field], bool) or not isinstance(row[field], (int, float)):
        return f"{field} is {row[field]!r}, expected a number"
    if not row[field] > 0:
        return f"{field} is {row[field]!r}, expected more than 0"
    return None


def digest(sections: Mapping[str, Any], names: Iterable[str]) -> str:
    """A hash of these sections, by which a picture says what it was drawn from."""
    chosen = {name: sections[name] for name in sorted(names) if name in sections}
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
