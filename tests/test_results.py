"""Do the figures in README come from results files that name their machine and were right?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import tables  # noqa: E402


def test_readme_tables_are_generated() -> None:
    text = tables.README.read_text()
    assert tables.filled(text) == text, "README.md is out of date: run python benchmarks/tables.py"


def test_an_edited_figure_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edited = tmp_path / "README.md"
    head, table = tables.README.read_text().split("<!-- benchmark:allreduce -->")
    edited.write_text(head + "<!-- benchmark:allreduce -->" + table.replace(" us |", "1 us |", 1))
    monkeypatch.setattr(tables, "README", edited)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert edited.read_text() == (ROOT / "README.md").read_text()
    assert tables.main(["--check"]) == 0


def test_there_are_results() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_name_their_machine_and_were_right(path: Path) -> None:
    report: dict[str, Any] = json.loads(path.read_text())
    machine = report["machine"]
    for key in ("date", "torch", "python", "system", "pyringar"):
        assert machine[key], key
    assert report["rows"]
    wrong = [row for row in report["rows"] if row["correct"] is not True]
    assert not wrong


def test_a_wrong_result_would_be_noticed(tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks/results/allreduce-cpu.json").read_text())
    report["rows"][0]["correct"] = False
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(report))
    with pytest.raises(AssertionError):
        test_results_name_their_machine_and_were_right(path)
