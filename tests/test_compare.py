"""Does the comparison of two reports see what is slower, and nothing in what is noise?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import compare  # noqa: E402
from benchmarks.rows import Results, Row, lines_of  # noqa: E402

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "memory_gib": 8.0,
    "torch": "2.11",
    "date": "2026-01-01",
}


def row(name: str, median_us: float, spread: float = 0.02, **more: Any) -> Row:
    """A row whose quartiles lie so far from its median, as a share of it."""
    median_s = median_us * 1e-6
    values: dict[str, Any] = {
        "min_s": median_s * (1 - 2 * spread),
        "q1_s": median_s * (1 - spread),
        "q3_s": median_s * (1 + spread),
        "max_s": median_s * 2,
        "rounds": 5,
        "correct": True,
    }
    about = ("allreduce", "1 MiB fp32", 2, name)
    return Row(*about, median_s, **values | more)


def report(*rows: Row, **machine: Any) -> Results:
    return Results("allreduce", MACHINE | machine, rows=list(rows))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compare two contents: the exit status, what was printed, and the errors."""

    def call(old: Any, new: Any, *options: str) -> tuple[int, str, str]:
        paths = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
        for path, content in zip(paths, (old, new), strict=True):
            path.write_text(content if isinstance(content, str) else lines_of(content))
        status = compare.main([*map(str, paths), *options])
        return status, *capsys.readouterr()

    return call


OLD = report(row("naive", 90.0), row("fused", 50.0), row("ring", 70.0))


def changed(name: str, factor: float, base: Results = OLD, **machine: Any) -> Results:
    """The same report with one candidate that many times as slow."""

    def slower(found: Row) -> Row:
        times = ("median_s", "min_s", "q1_s", "q3_s", "max_s")
        changes = {time: getattr(found, time) * factor for time in times}
        return replace(found, **changes) if found.candidate == name else found

    return report(*map(slower, base.rows), **machine)


def wild(spread: float) -> Results:
    return report(row("fused", 50.0, spread), row("naive", 90.0))


@pytest.mark.parametrize(
    ("old", "new", "status", "printed"),
    [
        (OLD, OLD, 0, "ours: 2 same"),
        (OLD, changed("fused", 1.08), 0, "ours: 2 same"),  # within the threshold
        (OLD, changed("fused", 1.25), 1, "1 slower"),
        (wild(0.2), changed("fused", 1.3, wild(0.2)), 0, "1 same"),  # within the spread of both
        (wild(0.2), changed("fused", 1.5, wild(0.2)), 1, "1 slower"),
        (wild(0.4), changed("fused", 1.6, wild(0.4)), 0, "1 too noisy"),
        (OLD, changed("ring", 0.5), 0, "1 faster"),
        (OLD, changed("naive", 2.0), 0, "peers took 2.00 times as long"),
        (OLD, changed("naive", 2.0), 0, "the machine was not in the same state"),
        (OLD, report(row("fused", 50.0, correct=False)), 1, "1 wrong"),
        # Rows that occur twice are matched in turn.
        (
            report(row("ring", 5), row("ring", 8)),
            report(row("ring", 5), row("ring", 8)),
            0,
            "2 same",
        ),
        (
            report(row("ring", 5), row("ring", 8)),
            report(row("ring", 5), row("ring", 12)),
            1,
            "1 slower",
        ),
    ],
)
def test_verdicts(run: Any, old: Results, new: Results, status: int, printed: str) -> None:
    found, text, _ = run(old, new, "--all")
    assert found == status
    assert printed in text


def test_a_planted_regression_is_shown_with_its_times(run: Any) -> None:
    _, printed, _ = run(OLD, changed("fused", 1.25))
    (line,) = (line for line in printed.splitlines() if "slower" in line and "fused" in line)
    assert all(figure in line for figure in ("50 us", "62.5 us", "1.25"))


def test_a_section_that_failed_is_told_and_fails(run: Any) -> None:
    status, printed, _ = run(OLD, replace(OLD, failed="RuntimeError: rank 1 died"))
    assert status == 1
    assert "FAILED: allreduce: RuntimeError: rank 1 died" in printed


def test_the_threshold_is_a_choice(run: Any) -> None:
    assert run(OLD, changed("fused", 1.25), "--threshold", "0.3")[0] == 0
    assert run(OLD, changed("fused", 1.08), "--threshold", "0.02")[0] == 1
    with pytest.raises(SystemExit, match="2"):
        run(OLD, OLD, "--threshold", "-1")


def test_missing_rows_are_named(run: Any) -> None:
    new = report(row("naive", 90.0), row("fused", 50.0), row("direct", 40.0))
    status, printed, _ = run(OLD, new)
    assert status == 0
    ends = [line.split()[-1] for line in printed.splitlines() if "only in" in line]
    assert ends[:2] == ["old", "new"]


@pytest.mark.parametrize(("field", "value"), [("cores", 64), ("cpu", "another"), ("gpu", "one")])
def test_unequal_machines_are_said_and_judge_no_version(run: Any, field: str, value: Any) -> None:
    status, printed, _ = run(OLD, changed("fused", 2.0, **{field: value}))
    assert status == 0
    # Slower rows are shown all the same.
    assert all(
        text in printed for text in ("UNEQUAL MACHINES", f"{field}: ", "not versions", "slower")
    )


def test_another_torch_is_another_version_not_another_machine(run: Any) -> None:
    status, printed, _ = run(OLD, changed("fused", 2.0, torch="2.15"))
    assert status == 1
    assert "differs: torch: 2.11 and 2.15" in printed


def head(**changes: Any) -> str:
    return json.dumps({"version": 2, "section": "allreduce", "machine": MACHINE, **changes}) + "\n"


def with_row(**changes: Any) -> str:
    """A file with one row, some of whose fields are other ones; None leaves a field out."""
    fields = json.loads(lines_of(report(row("fused", 50.0))).splitlines()[1]) | changes
    return head() + json.dumps({k: v for k, v in fields.items() if v is not None})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "is not JSON lines"),
        ("", "line 1 holds a NoneType"),
        ("[1]", "line 1 holds a list"),
        (head(version=7), "is not of version 2"),
        (json.dumps({"machine": MACHINE}), "is not of version 2"),
        (head(machine={}), "does not name its machine"),
        (head(rows=[]), "is not the head of a section: ['rows']"),
        (head() + "[]", "line 2: is a list"),
        (with_row(correct=None), "line 2: is not a row: "),
        (with_row(median_s=0), "line 2: median_s is 0, expected more than 0"),
        (with_row(case="another"), "nothing to compare"),
        (head(), "nothing to compare"),
    ],
)
def test_files_that_cannot_be_used_are_named(run: Any, content: str, what: str) -> None:
    status, printed, error = run(OLD, content)
    assert status == 2
    assert not printed
    assert "new.jsonl" in error
    assert what in error


def test_a_file_or_folder_without_results_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(tmp_path / "none.jsonl")] * 2) == 2
    assert "none.jsonl: cannot be read: No such file" in capsys.readouterr().err
    assert compare.main([str(tmp_path)] * 2) == 2
    assert "holds no results" in capsys.readouterr().err


def test_results_here_are_the_same_as_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(ROOT / "benchmarks/results")
    assert compare.main([folder, folder, "--all"]) == 0
    printed = capsys.readouterr().out
    assert "slower" not in printed
    assert all(f"{name}: " in printed for name in ("allreduce", "processes", "ddp", "training"))
