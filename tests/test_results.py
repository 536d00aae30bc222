"""Do figures in README and docs come from results files that name their machine and were right?"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import tables  # noqa: E402
from benchmarks.report import page  # noqa: E402
from benchmarks.report.document import load  # noqa: E402


def test_readme_tables_are_generated() -> None:
    text = tables.README.read_text()
    assert tables.filled(text) == text, "README.md is out of date: run python benchmarks/tables.py"


def test_an_edited_figure_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edited = tmp_path / "README.md"
    head, summary = tables.README.read_text().split(tables.BEGIN)
    edited.write_text(head + tables.BEGIN + summary.replace(" times as fast", "0 times as fast", 1))
    monkeypatch.setattr(tables, "README", edited)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert edited.read_text() == (ROOT / "README.md").read_text()
    assert tables.main(["--check"]) == 0


def test_the_page_and_its_pictures_are_generated() -> None:
    assert not tables.stale(), "run python benchmarks/tables.py"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """README, page, pictures and results that a test may change."""
    for name, place in (("README", "README.md"), ("PAGE", "docs/report.md")):
        copy = tmp_path / place
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / place, copy)
        monkeypatch.setattr(tables, name, copy)
    for name, place in (("FIGURES", "docs/figures"), ("RESULTS", "benchmarks/results")):
        shutil.copytree(ROOT / place, tmp_path / place)
        monkeypatch.setattr(tables, name, tmp_path / place)
    assert tables.main(["--check"]) == 0
    return tmp_path


def test_an_edited_page_is_noticed(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = copies / "docs/report.md"
    edited.write_text(edited.read_text().replace(" ms |", "1 ms |", 1))
    assert tables.main(["--check"]) == 1
    assert "docs/report.md: out of date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert edited.read_text() == (ROOT / "docs/report.md").read_text()


def test_pictures_of_other_results_are_noticed(copies: Path) -> None:
    path = copies / "benchmarks/results/ddp-cpu.json"
    section = json.loads(path.read_text())
    section["rows"][0]["rounds"] += 1  # a field that no text shows
    path.write_text(json.dumps(section))
    assert tables.stale() == ["docs/figures/ddp.png"]
    assert tables.main([]) == 0
    assert not tables.stale()
    (copies / "docs/figures/ddp.png").unlink()
    (copies / "docs/figures/left-over.png").write_bytes(b"")
    assert tables.stale() == [
        "docs/figures/ddp.png",
        "docs/figures/left-over.png (no results for it)",
    ]
    assert tables.main([]) == 0
    assert not tables.stale()


def as_report(**more: Any) -> dict[str, Any]:
    """The results here as `run_all.py` would write them, one of them changed."""
    sections = tables.results()
    for row in sections["ddp"]["rows"]:
        row["communication_ms"] = row["communication_ms"] and 2 * row["communication_ms"]
    machine = sections["ddp"]["machine"]
    return {"version": 1, "effort": "full", "machine": machine, "sections": sections, **more}


def test_a_report_is_taken_over_by_one_command(copies: Path) -> None:
    folder = copies / "measured"
    folder.mkdir()
    report = as_report()
    (folder / "report.json").write_text(json.dumps(report))
    assert tables.main(["--from", str(folder)]) == 0
    taken = json.loads((copies / "benchmarks/results/ddp-cpu.json").read_text())
    assert taken == report["sections"]["ddp"]
    assert (copies / "README.md").read_text() != (ROOT / "README.md").read_text()
    assert not tables.stale()


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"effort": "quick"}, "is a quick run, expected a full one"),
        ({"failed": [{"section": "ddp", "error": "planted"}]}, "the section ddp failed"),
        ({"version": 2}, "version is 2, expected 1"),
    ],
)
def test_half_a_report_is_not_taken_over(
    copies: Path, more: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copies / "report.json").write_text(json.dumps(as_report(**more)))
    assert tables.main(["--from", str(copies)]) == 2
    assert what in capsys.readouterr().err
    assert not tables.stale()


def test_there_are_results() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_name_their_machine_and_were_right(path: Path) -> None:
    report: dict[str, Any] = json.loads(path.read_text())
    machine = report["machine"]
    for key in ("date", "cpu", "cores", "torch", "python", "system", "pyringar"):
        assert machine[key], key
    assert report["rows"]
    assert path.stem.rpartition("-")[0] in page.TITLES
    load(path)  # as compare.py reads it: every row has a time and says what it is about
    wrong = [row for row in report["rows"] if row["correct"] is not True]
    assert not wrong


def test_a_wrong_result_would_be_noticed(tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks/results/allreduce-cpu.json").read_text())
    report["rows"][0]["correct"] = False
    path = tmp_path / "allreduce-cpu.json"
    path.write_text(json.dumps(report))
    with pytest.raises(AssertionError):
        test_results_name_their_machine_and_were_right(path)
