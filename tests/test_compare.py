"""Does the comparison of two reports see what is slower, and nothing in what is noise?"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import compare  # noqa: E402

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "memory_gib": 8.0,
    "torch": "2.11",
    "date": "2026-01-01",
}


def row(name: str, median_us: float, spread: float = 0.02, **more: Any) -> dict[str, Any]:
    """A row whose quartiles lie so far from its median, as a share of it."""
    return {
        "case": "1 MiB fp32",
        "world_size": 2,
        "dtype": "fp32",
        "algorithm": name,
        "median_us": median_us,
        "min_us": median_us * (1 - 2 * spread),
        "q1_us": median_us * (1 - spread),
        "q3_us": median_us * (1 + spread),
        "correct": True,
        **more,
    }


def report(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    section = {"version": 1, "benchmark": "allreduce", "machine": MACHINE, "rows": list(rows)}
    return {"version": 1, "machine": MACHINE, "sections": {"allreduce": section}, **more}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compare two contents: the exit status, what was printed, and the errors."""

    def call(old: Any, new: Any, *options: str) -> tuple[int, str, str]:
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, content in zip(paths, (old, new), strict=True):
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        status = compare.main([*map(str, paths), *options])
        return status, *capsys.readouterr()

    return call


OLD = report(row("naive", 90.0), row("fused", 50.0), row("ring", 70.0))


def changed(name: str, factor: float, base: dict[str, Any] = OLD) -> dict[str, Any]:
    """The same report with one candidate that many times as slow."""
    new = copy.deepcopy(base)
    for found in new["sections"]["allreduce"]["rows"]:
        if found["algorithm"] == name:
            for field in ("median_us", "min_us", "q1_us", "q3_us"):
                found[field] *= factor
    return new


def test_a_report_is_the_same_as_itself(run: Any) -> None:
    status, printed, _ = run(OLD, OLD, "--all")
    assert status == 0
    assert "ours: 2 same" in printed
    assert "slower" not in printed


def test_a_planted_regression_is_caught(run: Any) -> None:
    status, printed, _ = run(OLD, changed("fused", 1.25))
    assert status == 1
    (line,) = (line for line in printed.splitlines() if "slower" in line and "fused" in line)
    assert "50 us" in line
    assert "62.5 us" in line
    assert "1.25" in line


def test_noise_is_none(run: Any) -> None:
    assert run(OLD, changed("fused", 1.08))[0] == 0  # within the threshold
    noisy = report(row("fused", 50.0, spread=0.2), row("naive", 90.0))
    assert run(noisy, changed("fused", 1.3, noisy))[0] == 0  # within the spread of both
    assert run(noisy, changed("fused", 1.5, noisy))[0] == 1
    # Where a file has no quartiles, the minimum says how far it swings.
    plain = report({k: v for k, v in row("fused", 50.0, 0.1).items() if k[0] != "q"})
    assert run(plain, changed_plain(plain, 1.3))[0] == 0
    assert run(plain, changed_plain(plain, 1.5))[0] == 1


def changed_plain(base: dict[str, Any], factor: float) -> dict[str, Any]:
    new = copy.deepcopy(base)
    for found in new["sections"]["allreduce"]["rows"]:
        found["median_us"] *= factor
        found["min_us"] *= factor
    return new


def test_what_swings_beyond_measure_is_called_so(run: Any) -> None:
    wild = report(row("fused", 50.0, spread=0.4))
    status, printed, _ = run(wild, changed("fused", 1.6, wild))
    assert status == 0
    assert "too noisy" in printed


def test_the_threshold_is_a_choice(run: Any) -> None:
    assert run(OLD, changed("fused", 1.25), "--threshold", "0.3")[0] == 0
    assert run(OLD, changed("fused", 1.08), "--threshold", "0.02")[0] == 1
    with pytest.raises(SystemExit, match="2"):
        run(OLD, OLD, "--threshold", "-1")


def test_faster_is_said_and_is_no_failure(run: Any) -> None:
    status, printed, _ = run(OLD, changed("ring", 0.5))
    assert status == 0
    assert "1 faster" in printed


def test_peers_judge_nobody(run: Any) -> None:
    status, printed, _ = run(OLD, changed("naive", 2.0))
    assert status == 0
    assert "peers took 2.00 times as long" in printed
    assert "the machine was not in the same state" in printed


def test_missing_rows_are_named(run: Any) -> None:
    new = report(row("naive", 90.0), row("fused", 50.0), row("direct", 40.0))
    status, printed, _ = run(OLD, new)
    assert status == 0
    assert [line.split()[-1] for line in printed.splitlines() if "only in" in line][:2] == [
        *("old", "new")
    ]


def test_rows_that_occur_twice_are_matched_in_turn(run: Any) -> None:
    old = report(row("fused", 50.0), row("fused", 80.0))
    assert run(old, old)[0] == 0
    assert run(old, report(row("fused", 50.0), row("fused", 120.0)))[0] == 1


def test_a_wrong_result_fails_whatever_its_time(run: Any) -> None:
    new = copy.deepcopy(OLD)
    new["sections"]["allreduce"]["rows"][1]["correct"] = False
    status, printed, _ = run(OLD, new)
    assert status == 1
    assert "1 wrong" in printed


@pytest.mark.parametrize(("field", "value"), [("cores", 64), ("cpu", "another"), ("gpu", "one")])
def test_unequal_machines_are_said_and_judge_no_version(run: Any, field: str, value: Any) -> None:
    new = changed("fused", 2.0)
    new["machine"] = {**MACHINE, field: value}
    status, printed, _ = run(OLD, new)
    assert status == 0
    assert "UNEQUAL MACHINES" in printed
    assert f"{field}: " in printed
    assert "not versions" in printed
    assert "slower" in printed  # shown all the same


def test_another_torch_is_another_version_not_another_machine(run: Any) -> None:
    new = changed("fused", 2.0)
    new["machine"] = {**MACHINE, "torch": "2.15"}
    status, printed, _ = run(OLD, new)
    assert status == 1
    assert "differs: torch: 2.11 and 2.15" in printed


def test_results_files_are_taken_like_reports(run: Any) -> None:
    section = OLD["sections"]["allreduce"]
    unnamed = {"machine": MACHINE, "rows": changed("ring", 2.0)["sections"]["allreduce"]["rows"]}
    assert run(section, section)[0] == 0
    assert run(section, unnamed)[0] == 1
    assert run(OLD, unnamed)[0] == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds a list"),
        ({**OLD, "version": 7}, "version is 7, expected 1"),
        ({"machine": MACHINE}, "version is None, expected 1"),
        ({"version": 1, "machine": MACHINE}, "neither sections nor rows"),
        ({"version": 1, "sections": {}}, "does not name its machine"),
        ({"version": 1, "machine": MACHINE, "sections": {"ddp": {}}}, "'ddp' has no list of rows"),
        (report({"case": "x", "world_size": 2}), "row 0: has no correct"),
        (
            report(row("fused", 50.0), row("fused", 0)),
            "row 1: median_us is 0, expected more than 0",
        ),
        (report(row("fused", 50.0, case="another")), "nothing to compare"),
    ],
)
def test_what_cannot_be_used_is_named(run: Any, content: Any, what: str) -> None:
    status, printed, error = run(OLD, content)
    assert status == 2
    assert not printed
    assert "new.json" in error
    assert what in error


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(tmp_path / "none.json"), str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.name
)
def test_results_here_are_the_same_as_themselves(path: Path) -> None:
    assert compare.main([str(path), str(path)]) == 0
