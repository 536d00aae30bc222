"""Results files: a line of JSON about the section and its machine, then a line for every row.

A folder of such files, one a section, is a report: benchmarks/results is one, and so is what
`benchmarks/run_all.py` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.busy import Others

VERSION = 2
NOISE = 0.02  # by which a row may lie below its limit
TIMES = ("median_s", "min_s", "q1_s", "q3_s", "max_s")


class InputError(ValueError):
    """A file that cannot be used; the message names it and says what is wrong."""


@dataclass(frozen=True)
class Row:
    """One candidate in one case, checked and timed. Times are seconds of one call.

    Attributes:
        limit_s: The physical limit of the case, measured in the same run.
        baseline_s: Median of the candidate that the section compares with.
        size_bytes: Of one rank's tensors.
        clock: Where a section has several; allreduce_cuda.py says which.
        takes: The algorithm that ran, where the candidate names none.
        parts_s: What is known about parts of the time, by name.
    """

    section: str
    case: str
    world_size: int
    candidate: str
    median_s: float
    min_s: float
    q1_s: float
    q3_s: float
    max_s: float
    rounds: int
    correct: bool
    limit_s: float | None = None
    baseline_s: float | None = None
    size_bytes: int | None = None
    dtype: str | None = None
    clock: str | None = None
    takes: str | None = None
    parts_s: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that make it the same row in two files."""
        return self.section, self.case, self.world_size, self.candidate, self.clock

    @property
    def about(self) -> str:
        """Case, ranks, candidate and clock in words."""
        clock = f", {self.clock}" if self.clock else ""
        return f"{self.case}, {self.world_size} ranks, {self.candidate}{clock}"

    @property
    def is_ours(self) -> bool:
        """True where it says how good this version is, rather than how fast the machine was."""
        from benchmarks.candidates import (
            candidate_of,
        )  # imports torch, which a reader can do without

        return candidate_of(self.candidate).is_ours

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, over the median."""
        return (self.q3_s - self.q1_s) / 2 / self.median_s

    @property
    def limit_share(self) -> float | None:
        """The share of the physical limit that was reached."""
        return self.limit_s / self.median_s if self.limit_s else None

    @property
    def speedup(self) -> float | None:
        """The time of the baseline over its own."""
        return self.baseline_s / self.median_s if self.baseline_s else None

    @property
    def algbw_gbps(self) -> float | None:
        """One rank's bytes over time, GB/s."""
        return self.size_bytes / self.median_s / 1e9 if self.size_bytes else None

    @property
    def busbw_gbps(self) -> float | None:
        """The bandwidth that a link needs: algbw * 2 (k - 1) / k."""
        algbw, k = self.algbw_gbps, self.world_size
        return None if algbw is None else algbw * 2 * (k - 1) / k


@dataclass
class Results:
    """The measurements of one section on one machine.

    Attributes:
        effort: ``full``, ``quick`` or ``smoke``.
        not_run: ``{"what", "why"}`` of everything that could not be measured.
        failed: The error that ended the section, if one did.
        others: What other programs did meanwhile: the fields of `busy.Others`.
        facts: What only this section knows.
    """

    section: str
    machine: dict[str, Any]
    effort: str = "full"
    rows: list[Row] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    failed: str | None = None
    others: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Row]:
        """The rows that did not pass their check."""
        return [row for row in self.rows if not row.correct]

    @property
    def disturbed_by(self) -> Others | None:
        """Return what other programs did meanwhile, if that was too much."""
        others = Others(**self.others) if self.others else None
        return others if others and others.are_many else None

    @property
    def digest(self) -> str:
        """A hash, by which a picture says what it was drawn from."""
        return hashlib.sha256(lines_of(self).encode()).hexdigest()[:16]

    @property
    def filename(self) -> str:
        """The name in a folder of results: ``allreduce-cpu.jsonl``."""
        return f"{self.section}-{'gpu' if self.machine.get('gpu') else 'cpu'}.jsonl"


Sections = Mapping[str, Results]


def by_key(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Group items, in the order in which keys come."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def limits(rows: Iterable[Row]) -> dict[tuple[object, ...], float]:
    """Return the limits that are one, by case, ranks and clock: those that no row is faster than.

    What stands for a limit is a call of its own, with a call's overhead: of small tensors another
    call may be faster.
    """
    found = {}
    for key, same in by_key(rows, lambda row: (row.case, row.world_size, row.clock)).items():
        if key[2] not in (None, "device"):
            continue  # most of such a time is a call's
        limit_s = max((row.limit_s or 0 for row in same), default=0)
        if limit_s and min(row.median_s for row in same) > limit_s * (1 - NOISE):
            found[key] = limit_s
    return found


def share_of_limit(row: Row, found: Mapping[tuple[object, ...], float]) -> float | None:
    """Return the share of the limit that a row reached, where `limits` found one; at most 1."""
    limit_s = found.get((row.case, row.world_size, row.clock))
    return min(1.0, limit_s / row.median_s) if limit_s and row.limit_s else None


# -- writing ---------------------------------------------------------------------------------------


def lines_of(results: Results) -> str:
    """Return the text of a results file."""
    head = {"version": VERSION, **{k: v for k, v in asdict(results).items() if k != "rows" and v}}
    rows = (
        {k: v for k, v in asdict(row).items() if v is not None and v != {}} for row in results.rows
    )
    return "".join(json.dumps(line) + "\n" for line in (head, *rows))


def write(path: str | Path, results: Results) -> None:
    """Write a results file."""
    write_atomically(path, lines_of(results))


def write_atomically(path: str | Path, text: str) -> None:
    """Write a file that is there in whole or not at all, whenever this process is ended."""
    partial = Path(f"{path}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


# -- reading ---------------------------------------------------------------------------------------


def read(path: str | Path) -> Results:
    """Read and check a results file.

    Raises:
        InputError: It is not there, no JSON, of another version, or not such a file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        head, *rows = [json.loads(line) for line in lines] or [None]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON lines: {error}") from error
    if not isinstance(head, dict):
        raise InputError(f"{path}: line 1 holds a {type(head).__name__}, expected an object")
    if head.pop("version", None) != VERSION:
        raise InputError(f"{path}: is not of version {VERSION}")
    if not isinstance(head.get("machine"), dict) or not head["machine"].get("cpu"):
        raise InputError(f"{path}: does not name its machine")
    others = head.get("others")
    if others is not None and not _is_others(others):
        raise InputError(f"{path}: line 1: others is {others!r}, expected a share and two loads")
    unknown = set(head) - {field.name for field in fields(Results) if field.name != "rows"}
    if unknown or "section" not in head:
        raise InputError(f"{path}: line 1 is not the head of a section: {sorted(unknown)}")
    return Results(**head, rows=[_row_of(path, n, row) for n, row in enumerate(rows, start=2)])


def _is_others(found: Any) -> bool:
    names = {field.name for field in fields(Others)}
    return (
        isinstance(found, dict)
        and set(found) == names
        and all(
            isinstance(n, (int, float)) or (n is None and k == "share") for k, n in found.items()
        )
    )


def _row_of(path: str | Path, line: int, values: Any) -> Row:
    """Check a row; InputError says which line is wrong, and why."""
    if not isinstance(values, dict):
        raise InputError(f"{path}: line {line}: is a {type(values).__name__}, expected an object")
    for name in TIMES:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise InputError(f"{path}: line {line}: {name} is {value!r}, expected more than 0")
    try:
        return Row(**values)
    except TypeError as error:
        raise InputError(f"{path}: line {line}: is not a row: {error}") from error


def read_files(path: str | Path) -> list[Results]:
    """Read a results file, or all of a folder.

    Raises:
        InputError: As `read`; or the folder holds no results.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: holds no results, expected *.jsonl")
    return [read(file) for file in files]


def read_sections(path: str | Path) -> dict[str, Results]:
    """Do as `read_files`, by section; a later file's section replaces another."""
    found: dict[str, Results] = {}
    for results in read_files(path):
        sections = by_key(results.rows, lambda row: row.section) or {results.section: []}
        for section, rows in sections.items():
            head = {f.name: getattr(results, f.name) for f in fields(Results)}
            found[section] = Results(**{**head, "section": section, "rows": rows})
    return found
