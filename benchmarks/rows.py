"""Results files: one JSON line about the section and its machine, then one JSON line per case.

A case's line holds what its rows share, and the rows by candidate. A folder of results files, one
per section, is a report. ``benchmarks/results`` is such a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

VERSION = 3
NOISE = 0.02  # a row may be this much faster than its limit
SHARED = ("section", "case", "world_size", "size_bytes", "clock", "limit_s")
TIMES = ("median_s", "min_s", "q1_s", "q3_s")


class InputError(ValueError):
    """A file that cannot be used; the message names the file and the fault."""


@dataclass(frozen=True)
class Row:
    """One candidate in one case, checked and timed. Times are seconds per call.

    Attributes:
        case: What is reduced or trained, such as ``1 MiB fp32``.
        candidate: The implementation: an algorithm of ours, or a peer.
        correct: The result was checked in the run that timed it.
        limit_s: The physical limit of the case, measured in the same run.
        size_bytes: Bytes of one rank's tensors.
        clock: Set where a section times one call in several ways, see allreduce_cuda.py.
        parts_s: Seconds of known parts of the time, by name.
    """

    section: str
    case: str
    world_size: int
    candidate: str
    median_s: float
    min_s: float
    q1_s: float
    q3_s: float
    rounds: int
    correct: bool
    limit_s: float | None = None
    size_bytes: int | None = None
    clock: str | None = None
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, int, str | None]:
        """The fields that rows share when they may be compared with each other."""
        return self.case, self.world_size, self.clock

    @property
    def about(self) -> str:
        """Case, ranks, candidate and clock in words."""
        clock = f", {self.clock}" if self.clock else ""
        return f"{self.case}, {num_ranks(self.world_size)}, {self.candidate}{clock}"


@dataclass
class Results:
    """The rows of one section on one machine.

    Attributes:
        effort: ``full``, ``quick`` or ``trial``.
        not_run: ``{"what", "why"}`` of everything that could not be measured.
        failed: ``{"what", "why"}`` of everything that ended with an error.
        facts: What only this section knows.
    """

    section: str
    machine: dict[str, Any]
    effort: str = "full"
    rows: list[Row] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Row]:
        """The rows that did not pass their check."""
        return [row for row in self.rows if not row.correct]

    @property
    def digest(self) -> str:
        """A hash of all contents. A picture holds the hash of the results that it shows."""
        return hashlib.sha256(text_of(self).encode()).hexdigest()[:16]

    @property
    def filename(self) -> str:
        """The name in a folder of results."""
        return f"{self.section}.jsonl"


Sections = Mapping[str, Results]


def num_ranks(count: int) -> str:
    """Write a number of ranks."""
    return f"{count} rank{'s' if count > 1 else ''}"


def by_key(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Group items by a key, in the order in which keys come."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def limit_of(rows: Sequence[Row]) -> float | None:
    """Return the limit of the rows of one group, or None where no row has a true limit.

    The limit is measured with a call of its own, and the overhead of that call is in it. If a row
    is faster, the measured time is no limit. On the host's clocks most of a time is overhead.
    """
    limit_s = max((row.limit_s or 0.0 for row in rows), default=0.0)
    is_true = limit_s and min(row.median_s for row in rows) > limit_s * (1 - NOISE)
    return limit_s if is_true and rows[0].clock in (None, "device") else None


def text_of(results: Results) -> str:
    """Return the text of a results file."""
    head = {"version": VERSION, **{k: v for k, v in asdict(results).items() if k != "rows" and v}}
    lines = [head]
    for rows in by_key(results.rows, attrgetter(*SHARED)).values():
        line: dict[str, Any] = {"rows": {}}
        for row in rows:
            values = {k: v for k, v in asdict(row).items() if v is not None and v != {}}
            line |= {name: values.pop(name) for name in SHARED if name in values}
            line["rows"][values.pop("candidate")] = values
        lines.append(line)
    return "".join(json.dumps(line) + "\n" for line in lines)


def write(path: str | Path, results: Results) -> None:
    """Write a results file atomically: a killed process leaves the old file or the new one."""
    partial = Path(f"{path}.partial")
    partial.write_text(text_of(results), encoding="utf-8")
    os.replace(partial, path)


def read(path: str | Path) -> Results:
    """Read and check a results file.

    Raises:
        InputError: The file cannot be read, or is not a results file of this version.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        head, *cases = [json.loads(line) for line in lines]
        if head.pop("version") != VERSION or not head["machine"]["cpu"]:
            raise ValueError(f"line 1 is not the head of a results file of version {VERSION}")
        rows = [
            Row(candidate=name, **{k: case[k] for k in SHARED if k in case}, **values)
            for case in cases
            for name, values in case["rows"].items()
        ]
        results = Results(**head, rows=rows)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{path}: not a results file: {type(error).__name__}: {error}") from error
    for row in rows:
        for name in TIMES:
            if not getattr(row, name) > 0:
                value = getattr(row, name)
                raise InputError(f"{path}: {row.about}: {name} is {value!r}, expected > 0")
    return results


def read_folder(folder: str | Path) -> dict[str, Results]:
    """Read the results files of a folder, by section. The file of gpu_check.py has several.

    Raises:
        InputError: A file cannot be used, or there is none.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise InputError(f"{folder}: holds no results, expected *.jsonl")
    found: dict[str, Results] = {}
    for results in map(read, files):
        for section, rows in by_key(results.rows, lambda row: row.section).items():
            found[section] = replace(results, section=section, rows=rows)
    return found
