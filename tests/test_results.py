"""Do figures in README and docs come from results files that name their machine and were right?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.rows import InputError, Results, Row, read, read_folder, text_of, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.fixture
def copies(monkeypatch, tmp_path):
    for name, place in (("README", "README.md"), ("PAGE", "docs/report.md")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / place, tmp_path / place)
        monkeypatch.setattr(tables, name, tmp_path / place)
    for name, place in (("FIGURES", "docs/figures"), ("RESULTS", "benchmarks/results")):
        shutil.copytree(ROOT / place, tmp_path / place)
        monkeypatch.setattr(tables, name, tmp_path / place)
    assert tables.main(["--check"]) == 0
    return tmp_path


def test_generated_files_are_up_to_date():
    assert not tables.stale(), "run python benchmarks/tables.py"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("README.md", " times as fast", "0 times as fast"), ("docs/report.md", " ms ", "1 ms ")],
)
def test_edited_figure_is_noticed(copies, name, old, new, capsys):
    text = (copies / name).read_text()
    summary = text[text.index("<!-- benchmark:summary -->" if "README" in name else "##") :]
    (copies / name).write_text(text.replace(summary, summary.replace(old, new, 1)))
    assert tables.main(["--check"]) == 1
    assert f"{name}: out of date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert (copies / name).read_text() == text


def test_new_results_change_all_pages(copies):
    path = copies / "benchmarks/results/ddp.jsonl"
    path.write_text(path.read_text().replace('_s": 0.', '_s": 1.'))
    (copies / "docs/figures/left-over.png").write_bytes(b"")
    left_over = "docs/figures/left-over.png (no results for it)"
    files = ["README.md", "docs/report.md", "docs/figures/ddp-time.png", left_over]
    assert tables.stale() == files
    assert tables.main([]) == 0
    assert not tables.stale()


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("ddp", {"effort": "quick"}, "ddp is a quick run, expected a full one"),
        ("ddp", {"failed": [{"what": "x", "why": "planted"}]}, "wrong or failed: planted"),
        ("allreduce", {}, "allreduce is wrong or failed: 4 KiB fp32, 2 ranks, naive"),
    ],
)
def test_half_a_report_is_not_published(copies, name, changes, text, capsys):
    path = copies / f"benchmarks/results/{name}.jsonl"
    head, rest = path.read_text().split("\n", 1)
    path.write_text(f"{json.dumps(json.loads(head) | changes)}\n{rest}")
    if not changes:
        path.write_text(path.read_text().replace('"correct": true', '"correct": false', 1))
    for arguments in ([], ["--check"]):
        assert tables.main(arguments) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_rows_survive_their_file(path, tmp_path):
    results = read(path)
    write(tmp_path / "copy", results)
    assert (tmp_path / "copy").read_text() == path.read_text()
    assert read(tmp_path / "copy") == results


def one_row(**changes):
    values: dict[str, Any] = {"candidate": "auto", "median_s": 1.0, "clock": "device"} | changes
    times = {"min_s": 1.0, "q1_s": 1.0, "q3_s": 1.0, "rounds": 5, "correct": True}
    row = Row("allreduce", "1 MiB", 2, **times | values)
    return Results("allreduce", {"cpu": "one"}, rows=[row])


GOOD = text_of(one_row())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "JSONDecodeError"),
        (GOOD.replace('"version": 3', '"version": 7'), "not the head of a results file"),
        (GOOD.replace('"cpu": "one"', '"cpu": ""'), "not the head of a results file"),
        (GOOD.replace('"rounds": 5, ', ""), "TypeError"),
        (GOOD.replace('"median_s": 1.0', '"median_s": 0'), "median_s is 0, expected > 0"),
    ],
)
def test_bad_file_is_named(tmp_path, text, error):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=f"bad.jsonl: .*{error}"):
        read(path)
    path.unlink()
    with pytest.raises(InputError, match=r"bad.jsonl: .*No such file"):
        read(path)
    with pytest.raises(InputError, match="holds no results"):
        read_folder(tmp_path)
