"""Does one command measure everything, say what is wrong, and write a page with pictures?"""

from __future__ import annotations

import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import allreduce, bench, run_all  # noqa: E402
from benchmarks.candidates import CANDIDATES, candidate_of  # noqa: E402
from benchmarks.report import page, plots, summary  # noqa: E402
from benchmarks.rows import Results, Row, read_sections, write  # noqa: E402
from benchmarks.sections import SECTIONS  # noqa: E402

CPU_SECTIONS = [name for name, benchmark in SECTIONS.items() if benchmark.device != "cuda"]


class Report(NamedTuple):
    status: int
    sections: dict[str, Results]
    text: str
    folder: Path


def report_in(folder: Path, status: int) -> Report:
    return Report(status, read_sections(folder), (folder / "report.md").read_text(), folder)


def run_smoke(folder: Path, *only: str) -> Report:
    """A tiny run."""
    options = ["--smoke", "--peers", "none", "--only", ",".join(only)]
    status = run_all.main(["--out", str(folder), *options])
    return report_in(folder, status)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """All sections that run without a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_smoke(tmp_path_factory.mktemp("report"), *CPU_SECTIONS)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_section_is_measured_and_right(smoke: Report) -> None:
    assert smoke.status == 0, [results.failed for results in smoke.sections.values()]
    assert set(smoke.sections) == set(CPU_SECTIONS)
    for name, results in smoke.sections.items():
        assert results.rows, name
        assert results.failed is None, name
        assert not results.wrong, name
        for key in ("cpu", "cores", "date", "torch", "python", "system", "pyringar", "engine"):
            assert results.machine[key], (name, key)
        assert results.facts["seconds"] > 0


@pytest.mark.slow
def test_rows_hold_their_spread_and_the_limit(smoke: Report) -> None:
    for results in smoke.sections.values():
        for row in results.rows:
            assert row.min_s <= row.q1_s <= row.median_s <= row.q3_s <= row.max_s
            if results.section not in ("bucketing", "orders"):
                assert row.limit_s is not None
                assert row.limit_s > 0
                assert row.limit_share == pytest.approx(row.limit_s / row.median_s)


@pytest.mark.slow
def test_peers_stand_beside_ours(smoke: Report) -> None:
    found = {name: {row.candidate for row in r.rows} for name, r in smoke.sections.items()}
    assert {"naive", "stack", "sharded", "fused", "direct", "ring", "auto"} <= found["allreduce"]
    assert {"naive", "auto", "bound", "limit"} == found["lists"]
    assert {"gloo", "auto", "bound", "backend", "ring", "limit"} <= found["processes"]
    assert {"bare", "gloo", "ringar"} == found["ddp"]
    assert {"undivided", "book", "ringar"} <= found["training"]
    for name in set.union(*found.values()):
        assert candidate_of(name).name in CANDIDATES, name


@pytest.mark.slow
def test_the_page_has_each_section_and_its_pictures(smoke: Report) -> None:
    for name in CPU_SECTIONS:
        assert f"## {SECTIONS[name].title}" in smoke.text
    assert "## auto against the best algorithm" in smoke.text
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", smoke.text)
    assert len(links) >= 6
    for link in links:
        data = (smoke.folder / link).read_bytes()
        assert (data[:8], data[12:16]) == (b"\x89PNG\r\n\x1a\n", b"IHDR")
        width, height = struct.unpack(">II", data[16:24])
        assert 500 <= width <= 3000, link
        assert 250 <= height <= 3000, link
        assert 4_000 < len(data) < 300_000, link


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
@pytest.mark.slow
def test_what_cannot_run_is_listed_with_its_reason(smoke: Report, tmp_path: Path) -> None:
    report = run_smoke(tmp_path, "allreduce_cuda", "training_cuda")
    assert report.status == 0
    for name in ("allreduce_cuda", "training_cuda"):
        (missing,) = report.sections[name].not_run
        assert missing["why"] == "no CUDA device"
        assert f"- {name}: the section: no CUDA device" in report.text
    assert "nn.DataParallel, LeNet, batch 256: nn.DataParallel knows no CPU ranks" in smoke.text


def test_a_wrong_sum_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = allreduce.reducer

    def planted(name: str, comm: Any, lists: list[list[torch.Tensor]]) -> Callable[[], object]:
        call = right(name, comm, lists)
        if name != "direct":
            return call

        def wrong() -> None:  # the last rank misses one element
            last = lists[-1][0][-1].item()
            call()
            lists[-1][0][-1] = last

        return wrong

    monkeypatch.setattr(allreduce, "reducer", planted)
    report = run_smoke(tmp_path, "allreduce")
    assert report.status == 1
    assert {row.candidate for row in report.sections["allreduce"].wrong} == {"direct"}
    assert "**Wrong results.** allreduce: 4 KiB fp32, 2 ranks, direct" in report.text


def raising(section: str, error: BaseException) -> bench.Benchmark:
    def measure(run: bench.Run) -> None:
        raise error

    return replace(SECTIONS[section], measure=measure)


def test_a_section_that_fails_stops_no_other(tmp_path: Path) -> None:
    chosen = [raising("training", RuntimeError("planted")), SECTIONS["allreduce"]]
    status = run_all.run(chosen, "smoke", tmp_path, is_quiet=True)
    report = report_in(tmp_path, status)
    assert report.status == 1
    assert report.sections["allreduce"].rows
    failed = report.sections["training"]
    assert failed.failed == "RuntimeError: planted"
    assert "in measure" in failed.facts["traceback"]
    assert "**The section training failed:** `RuntimeError: planted`" in report.text


def test_an_aborted_run_leaves_what_was_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [SECTIONS["allreduce"], raising("ddp", KeyboardInterrupt()), SECTIONS["training"]]
    report = report_in(tmp_path, run_all.run(chosen, "smoke", tmp_path, is_quiet=True))
    assert report.status == 130
    assert [name for name, found in report.sections.items() if found.rows] == ["allreduce"]
    for name in ("ddp", "training"):
        assert report.sections[name].not_run == [
            {"what": "the section", "why": "the run was aborted"}
        ]
    assert "aborted" in capsys.readouterr().err


def test_a_section_of_another_machine_names_it() -> None:
    sections = read_sections(ROOT / "benchmarks" / "results")
    one = {
        name: replace(found, machine=sections["allreduce"].machine)
        for name, found in sections.items()
    }
    assert "On another machine" not in page.render(one, [], "figures")
    one["ddp"] = replace(one["ddp"], machine={**one["ddp"].machine, "cpu": "a slower one"})
    text = page.render(one, [], "figures")
    assert text.count("On another machine: a slower one, 2 cores") == 1


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_all.main(["--out", "nowhere", "--only", "allreduce,speed"])
    assert "'speed' is none of allreduce, lists, orders" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_one_command_line_chooses_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    chosen = ["--sizes", "1KiB,4KiB", "--ranks", "2", "--candidates", "fused"]
    quick = ["--dry-run", "--json", str(path), "--plot", str(tmp_path / "out.png")]
    assert bench.main(SECTIONS["allreduce"], [*chosen, *quick]) == 0
    (results,) = read_sections(path).values()
    assert [(row.size_bytes, row.candidate) for row in results.rows] == [
        (size, name) for size in (1024, 4096) for name in ("naive", "fused")
    ]
    assert capsys.readouterr().out.count("fused") == 2
    assert (tmp_path / "out.png").stat().st_size > 4_000


@pytest.mark.parametrize(
    ("option", "value"), [("--candidates", "fusd"), ("--sizes", "4KB"), ("--ranks", "two")]
)
def test_a_wrong_option_is_named(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(SECTIONS["allreduce"], ["--dry-run", option, value])
    assert f"argument {option}: '{value}' is" in capsys.readouterr().err


def test_to_measure_nothing_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(SECTIONS["allreduce"], ["--dry-run", "--only", "nonsense"]) == 2
    assert "no case has such a name" in capsys.readouterr().err


# -- auto, and pictures ----------------------------------------------------------------------------


def timed(takes: str | None = None, **times_us: float) -> dict[str, Results]:
    """One case of allreduce: a median per candidate, with quartiles 10 % around it."""
    about = ("allreduce", "1 MiB fp32", 2)
    rows = [
        Row(
            *(*about, name, us * 1e-6, us * 0.8e-6, us * 0.9e-6, us * 1.1e-6, us * 2e-6),
            rounds=5,
            correct=True,
            takes=takes if name == "auto" else None,
        )
        for name, us in times_us.items()
    ]
    return {"allreduce": Results("allreduce", {}, rows=rows)}


@pytest.mark.parametrize(
    ("auto_us", "mark"), [(55.0, None), (56.0, "1.12 in the noise |"), (62.0, "1.24 |")]
)
def test_auto_is_flagged_above_a_tenth(auto_us: float, mark: str | None) -> None:
    found = timed(naive=90.0, fused=50.0, ring=70.0, auto=auto_us)
    (row,) = summary.auto_rows(found)
    assert row.best.candidate == "fused"
    assert row.ratio == pytest.approx(auto_us / 50)
    assert row.is_far is (mark is not None)
    text = page.auto_table(found)
    assert "| allreduce |" not in text if mark is None else mark in text


@pytest.mark.parametrize(("takes", "others"), [("fused", 0), ("ring", 1), (None, 0)])
def test_the_report_says_when_auto_took_another_algorithm(takes: str | None, others: int) -> None:
    found = timed(takes, naive=90.0, fused=50.0, ring=70.0, auto=71.0)
    (row,) = summary.auto_rows(found)
    assert (row.auto.takes, row.took_another) == (takes, bool(others))
    text = page.auto_table(found)
    assert f"in {others} of these it had taken another" in text
    assert (f"| `{takes}` | `fused` |" in text) is (takes is not None)


@pytest.mark.slow
def test_a_picture_is_drawn_anew_when_its_data_changed(smoke: Report, tmp_path: Path) -> None:
    training = smoke.sections["training"]
    path = tmp_path / "training-time.png"
    plots.draw({"training": training}, tmp_path)
    first, source = path.stat().st_mtime_ns, plots.source_in(path)
    plots.draw({"training": training}, tmp_path)
    assert path.stat().st_mtime_ns == first
    rows = [replace(training.rows[0], max_s=1.0), *training.rows[1:]]
    plots.draw({"training": replace(training, rows=rows)}, tmp_path)
    assert path.stat().st_mtime_ns != first
    assert plots.source_in(path) != source


@pytest.mark.slow
def test_a_file_of_several_sections_is_read_by_section(smoke: Report, tmp_path: Path) -> None:
    rows = [row for name in ("ddp", "training") for row in smoke.sections[name].rows]
    path = tmp_path / "all.jsonl"
    write(path, Results("gpu_check", smoke.sections["ddp"].machine, rows=rows))
    found = read_sections(path)
    assert list(found) == ["ddp", "training"]
    assert [row for results in found.values() for row in results.rows] == rows
    shutil.copy(path, tmp_path / "again.jsonl")
    assert read_sections(tmp_path) == found
