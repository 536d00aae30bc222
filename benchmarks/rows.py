"""Results files: a JSON line about the section and its machine, then a JSON line per case.

The line of a case holds the fields that all its rows share, and the rows by candidate. A report is
made from a folder of results files, one per section, such as ``benchmarks/results``.
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
NOISE = 0.02  # a row may be faster than its limit by this fraction
SHARED = ("section", "case", "world_size", "size_bytes", "clock", "limit_s")
TIMES = ("median_s", "min_s", "q1_s", "q3_s")


class InputError(ValueError):
    """An unusable results file; the message names the file and the fault."""


@dataclass(frozen=True)
class Row:
    """Times and check of one candidate in one case. Times are seconds per call.

    Attributes:
        case: Name of the tensors or the model, such as ``1 MiB fp32``.
        candidate: The implementation: an algorithm of pyringar, or a peer.
        correct: Whether the result was right, checked in the run that timed it.
        limit_s: The physical limit of the case, measured in the same run.
        size_bytes: Bytes of one rank's tensors.
        clock: How the call was timed, see allreduce_cuda.py; None if the section has one clock.
        parts_s: Seconds of parts of the time, by name.
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
        """The case, world size and clock, which comparable rows share."""
        return self.case, self.world_size, self.clock

    @property
    def about(self) -> str:
        """Case, world size, candidate and clock in words."""
        clock = f", {self.clock}" if self.clock else ""
        return f"{self.case}, {num_ranks(self.world_size)}, {self.candidate}{clock}"


@dataclass
class Results:
    """The rows of one section on one machine.

    Attributes:
        effort: ``full``, ``quick`` or ``trial``.
        not_run: ``{"what", "why"}`` of each item that cannot be measured on this machine.
        failed: ``{"what", "why"}`` of each item that raised an error.
        facts: Values that only this section has, such as library versions.
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
        """The rows with a wrong result."""
        return [row for row in self.rows if not row.correct]

    @property
    def digest(self) -> str:
        """A hash of all contents, which the picture of these results stores."""
        return hashlib.sha256(text_of(self).encode()).hexdigest()[:16]

    @property
    def filename(self) -> str:
        """The file name of this section."""
        return f"{self.section}.jsonl"


Sections = Mapping[str, Results]


def num_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def by_key(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Group items by a key, in order of first occurrence."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def limit_of(rows: Sequence[Row]) -> float | None:
    """Return the limit of the rows of one group, or None if the limit is invalid.

    The limit is the time of a torch call, with its overhead. A candidate that is faster than the
    limit disproves it. Host clocks measure mostly overhead, so their rows have no limit.
    """
    limit_s = max((row.limit_s or 0.0 for row in rows), default=0.0)
    is_true = limit_s and min(row.median_s for row in rows) > limit_s * (1 - NOISE)
    return limit_s if is_true and rows[0].clock in (None, "device") else None


def text_of(results: Results) -> str:
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
    """Replace a results file atomically, so that a killed process leaves a complete file."""
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
    """Read the results files of a folder, by section. The file of gpu_check.py has 3 sections.

    Raises:
        InputError: A file is unusable, or the folder has no results file.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise InputError(f"{folder}: holds no results, expected *.jsonl")
    found: dict[str, Results] = {}
    for results in map(read, files):
        for section, rows in by_key(results.rows, lambda row: row.section).items():
            found[section] = replace(results, section=section, rows=rows)
    return found
