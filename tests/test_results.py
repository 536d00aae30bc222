"""Do figures in README and docs come from results files that name their machine and were right?"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import rows, tables  # noqa: E402
from benchmarks.sections import SECTIONS  # noqa: E402


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


def change_head(path: Path, **changes: Any) -> None:
    """Change the first line of a results file."""
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(head) | changes), *rows]) + "\n")


def test_readme_the_page_and_its_pictures_are_generated() -> None:
    assert not tables.stale(), "run python benchmarks/tables.py"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("README.md", " times as fast", "0 times as fast"), ("docs/report.md", " ms ", "1 ms ")],
)
def test_an_edited_figure_is_noticed(
    copies: Path, name: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head, summary = (
        (copies / name)
        .read_text()
        .split("<!-- benchmark:summary -->" if "README" in name else "##", 1)
    )
    (copies / name).write_text(
        (copies / name).read_text().replace(summary, summary.replace(old, new, 1))
    )
    assert head
    assert tables.main(["--check"]) == 1
    assert f"{name}: out of date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert (copies / name).read_text() == (ROOT / name).read_text()


@pytest.mark.slow
def test_pictures_of_other_results_are_noticed(copies: Path) -> None:
    change_head(copies / "benchmarks/results/ddp-cpu.jsonl", facts={"seconds": 1.0})
    pictures = ["docs/figures/ddp-time.png", "docs/figures/ddp-parts.png"]
    assert tables.stale() == pictures
    assert tables.main([]) == 0
    assert not tables.stale()
    (copies / pictures[0]).unlink()
    (copies / "docs/figures/left-over.png").write_bytes(b"")
    left_over = "docs/figures/left-over.png (no results for it)"
    assert tables.stale() == [pictures[0], left_over]
    assert tables.main([]) == 0
    assert not tables.stale()


def test_a_report_is_taken_over_by_one_command(copies: Path) -> None:
    measured = copies / "measured"
    shutil.copytree(ROOT / "benchmarks/results", measured)
    path = measured / "ddp-cpu.jsonl"
    path.write_text(path.read_text().replace('"communication": ', '"communication": 1'))
    assert tables.main(["--from", str(measured)]) == 0
    assert rows.read(copies / "benchmarks/results/ddp-cpu.jsonl") == rows.read(path)
    assert (copies / "README.md").read_text() != (ROOT / "README.md").read_text()
    assert not tables.stale()


def test_gpu_report_is_taken_over(copies: Path) -> None:
    kept, new = copies / "benchmarks/results/gpu_check-gpu.jsonl", copies / "new.jsonl"
    shutil.copy(kept, new)
    step = {"name": "build", "state": "ok", "note": "planted", "tail": "/a/path"}
    change_head(new, facts={"steps": [step]})
    assert tables.main(["--from", str(new)]) == 0
    assert not tables.stale()
    text = (copies / "docs/report.md").read_text()
    assert "| build | ok | planted |" in text
    assert "Kernels alone" not in text  # the notes were about the replaced report
    assert "/a/path" not in kept.read_text()
    change_head(new, machine=rows.read(new).machine | {"gpu": ""})
    assert tables.main(["--from", str(new)]) == 2  # a trial on a CPU


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"effort": "quick"}, "ddp is a quick run, expected a full one"),
        ({"failed": "planted"}, "the section ddp failed: planted"),
        ({"version": 1}, "is not of version 2"),
    ],
)
def test_half_a_report_is_not_taken_over(
    copies: Path, changes: dict[str, Any], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = copies / "measured"
    shutil.copytree(ROOT / "benchmarks/results", measured)
    change_head(measured / "ddp-cpu.jsonl", **changes)
    assert tables.main(["--from", str(measured)]) == 2
    assert what in capsys.readouterr().err
    assert not tables.stale()


def test_there_are_results() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_name_their_machine_and_were_right(path: Path) -> None:
    for name, section in rows.read_sections(path).items():
        for key in ("date", "cpu", "cores", "torch", "python", "system", "pyringar"):
            assert section.machine[key], key
        assert section.rows
        assert name in SECTIONS
        assert not section.wrong


def test_a_wrong_result_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "allreduce-cpu.jsonl"
    text = (ROOT / "benchmarks/results/allreduce-cpu.jsonl").read_text()
    path.write_text(text.replace('"correct": true', '"correct": false', 1))
    with pytest.raises(AssertionError):
        test_results_name_their_machine_and_were_right(path)


def test_a_row_survives_its_file(tmp_path: Path) -> None:
    (measured,) = rows.read_sections(FILES[0]).values()
    rows.write(tmp_path / "copy.jsonl", measured)
    assert (tmp_path / "copy.jsonl").read_text() == FILES[0].read_text()
