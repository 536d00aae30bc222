"""Benchmarks: their checks of results, results files, the report, and the README summary."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks import allreduce, machine, order_cost, report_page, run_all, sums, tables
from benchmarks.bench import BenchmarkCase
from benchmarks.peers import registry
from benchmarks.rows import InputError, Results, Row, limit_of, read, read_folder, text_of, write
from benchmarks.sections import SECTIONS
from benchmarks.timing import Effort, Timing, in_turns

ROOT = Path(__file__).resolve().parents[1]


class Trial(NamedTuple):
    status: int
    folder: Path
    printed: str
    warned: str

    @property
    def page(self):
        return (self.folder / "report.md").read_text()

    def results(self, section):
        return read(self.folder / f"{section}.jsonl")


@pytest.fixture(autouse=True)
def no_peers(monkeypatch, tmp_path):
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path / "none"))


@pytest.fixture
def trial(tmp_path, capsys):
    def run(*arguments):
        status = run_all.main(["--dry-run", "--out", str(tmp_path / "out"), *arguments])
        return Trial(status, tmp_path / "out", *capsys.readouterr())

    return run


def change_section(monkeypatch, section, **changes):
    monkeypatch.setitem(SECTIONS, section, replace(SECTIONS[section], **changes))


CANDIDATES = {
    "allreduce": {"naive", "fused", "direct", "ring", "sharded", "auto", "bound"},
    "orders": {"rank", "tree", "exact"},
    "processes": {"gloo", "auto", "bound", "direct", "backend", "limit"},
    "ddp": {"bare", "gloo", "ringar"},
    "bucketing": {"naive", "fused per tensor", "coalesced", "bucketed, 1 MB"},
    "training": {"undivided", "book", "ringar", "ringar, shards"},
    "allreduce_cuda": {"naive", "fused", "ring", "auto", "allreduce", "bound"},
    "peers_cuda": {"gloo", "auto", "limit"},
    "training_cuda": {"ringar", "nn.DataParallel", "bucketed", "coalesced", "without"},
}


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_dry_run_measures_all_candidates(trial, section):
    run = trial(section)
    results = run.results(section)
    assert (run.status, results.failed, results.wrong) == (0, [], [])
    assert {row.candidate for row in results.rows} == CANDIDATES[section]
    for row in results.rows:
        assert 0 < row.min_s <= row.q1_s <= row.median_s <= row.q3_s
        has_limit = section not in ("orders", "bucketing")
        is_call = row.clock in (None, "device") and section != "training_cuda"
        assert (row.limit_s is not None) == has_limit or not is_call, row.about
    assert report_page.table(results) in run.page
    (link,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", run.page)
    assert (run.folder / link).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("effort", ["full", "quick"])
def test_benchmark_cases_cover_all_candidates(effort):
    for benchmark in SECTIONS.values():
        cases = benchmark.cases(effort)
        assert len({(case.name, case.world_size, case.dtype) for case in cases}) == len(cases)
        names = {name for case in cases for name in case.candidates}
        assert set(benchmark.peers) | {benchmark.ours} <= names


def end_after_first_case(monkeypatch, end):
    measure = SECTIONS["allreduce"].measure

    def measure_and_end(run):
        run.cases = run.cases[:1]
        measure(run)
        end()

    change_section(monkeypatch, "allreduce", measure=measure_and_end)


def test_section_error_skips_no_other_section(trial, monkeypatch):
    def fail():
        raise RuntimeError("planted\nin two lines")

    end_after_first_case(monkeypatch, fail)
    run = trial("allreduce", "orders")
    assert run.status == 1
    assert {row.case for row in run.results("allreduce").rows} == {"4 KiB fp32"}
    assert run.results("orders").rows
    assert "FAILED: the section: RuntimeError: planted\n" in run.printed
    assert "**allreduce failed:** the section: `RuntimeError: planted`" in run.page
    assert "ended early" not in run.page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_run_writes_report(trial, monkeypatch, tmp_path, number):
    end_after_first_case(monkeypatch, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trial("allreduce", "orders")
    assert signal.getsignal(signal.SIGTERM) == before
    page = (tmp_path / "out/report.md").read_text()
    assert page.startswith("# Benchmark report\n\n**This run ended early.**")
    assert "| 4 KiB fp32 | 2 |" in page
    assert "- orders: no results" in page
    assert {row.case for row in read(tmp_path / "out/allreduce.jsonl").rows} == {"4 KiB fp32"}


def test_error_between_sections_writes_report(trial, monkeypatch, tmp_path):
    change_section(monkeypatch, "orders", threads="two")  # torch refuses this number of threads
    with pytest.raises(RuntimeError, match="set_num_threads"):
        trial("allreduce", "orders")
    page = (tmp_path / "out/report.md").read_text()
    assert "**This run ended early.**" in page
    assert "## All ranks in one process" in page


def test_failed_case_skips_no_other_case(trial, monkeypatch):
    right = allreduce.call_of

    def fail(name, comm, lists):
        return right(name, comm, lists) if lists[0][0].numel() != 1024 else 1 / 0

    monkeypatch.setattr(allreduce, "call_of", fail)
    run = trial("allreduce")
    assert run.status == 1
    assert {row.case for row in run.results("allreduce").rows} == {"16 KiB fp32"}
    assert "FAILED: 4 KiB fp32, 2 ranks: ZeroDivisionError: division by zero" in run.printed


@pytest.mark.parametrize(
    ("advance_s", "now_s", "left_min"), [(240.0, 300.0, 3), (240.0, 840.0, 2), (60.0, 60.0, 2)]
)
def test_progress_shows_time_and_case(advance_s, now_s, left_min):
    """Half of the plan of 4 minutes is done after ``advance_s``; case z takes as long as others."""
    w, x, z = (BenchmarkCase(name, 4, ()) for name in "wxz")
    progress = run_all.SectionProgress({"a": 60.0, "b": 60.0}, {"a": [w], "b": [x, z, w]})
    progress.begin("b")
    progress.advance("b", x)
    progress._begin_s, progress._advance_s = 0.0, advance_s
    expected = f"about {left_min} min left, section 2 of 2 (b): z, 4 ranks"
    assert progress.line(now_s) == f"[#####     ]  50%, {expected}"


def test_log_omits_repeated_lines(monkeypatch, capsys):
    progress = run_all.SectionProgress({}, {})
    stops = iter([*[False] * 6, True])
    monkeypatch.setattr(progress._stop, "wait", lambda period_s: next(stops))
    progress._show_regularly()
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_share_of_other_programs(monkeypatch, tmp_path):
    """In 5 s on processors 0 and 2, all programs use 3 s, and this process 1 s."""
    monkeypatch.setattr(machine, "PROC_STAT", tmp_path / "stat")
    assert machine.OtherPrograms().facts()["other_programs"] is None
    hz, seconds, own_s = os.sysconf("SC_CLK_TCK"), iter([10.0, 15.0]), iter([4.0, 5.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "times", lambda: (next(own_s), 0.0, 0.0, 0.0, 0.0))
    machine.PROC_STAT.write_text("cpu 9 9 9 9\ncpu0 0 0 0 9\ncpu1 0 0 0 9\ncpu2 0 0 0 9")
    others = machine.OtherPrograms()
    machine.PROC_STAT.write_text(f"cpu0 {hz} {hz} 0 77\ncpu1 {hz} 0 0 9\ncpu2 0 0 {hz} 9")
    assert others.facts() == {"cores": 2, "other_programs": 0.2}


def test_busy_machine_is_reported(trial, monkeypatch):
    monkeypatch.setattr(machine, "_foreign_s", lambda: 999 * time.monotonic())
    run = trial("allreduce")
    used = "used 100% of the processors"
    assert f"Other programs {used} during allreduce. Close them and measure again." in run.warned
    mark = f"**Measured while other programs {used}: times and ratios are not reliable.**"
    assert run.page.startswith(f"# Benchmark report\n\n{mark}")
    assert "](algorithms.md)" not in run.page


def test_report_without_sentences_has_no_summary(trial):
    assert "Summary" in trial("allreduce").page
    assert "Summary" not in trial("orders").page


def test_default_output_folder_is_new(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(run_all.parse_arguments(["--quick"]).out) == "bench"
    (tmp_path / "bench").mkdir()
    assert str(run_all.parse_arguments([]).out) == "bench-2"
    assert run_all.parse_arguments(["--dry-run"]).out is None


def test_benchmark_reports_wrong_sum(trial, monkeypatch):
    right = allreduce.call_of

    def planted(name, comm, lists):
        call = right(name, comm, lists)
        if name not in ("direct", "naive"):
            return call

        def wrong():
            last = lists[-1][0][-1].item()
            call()
            lists[-1][0][-1] = last

        return wrong

    monkeypatch.setattr(allreduce, "call_of", planted)
    run = trial("allreduce")
    assert run.status == 1
    wrong = run.results("allreduce").wrong
    assert {row.candidate for row in wrong} == {"direct", "naive"}
    assert "WRONG: 4 KiB fp32, 2 ranks, direct" in run.printed
    assert "**Wrong results.** allreduce: 4 KiB fp32, 2 ranks, naive" in run.page


def test_benchmark_reports_wrong_addition_order(trial, monkeypatch):
    """A different order of additions changes only the last bits of a sum."""
    monkeypatch.setattr(order_cost, "rank_order", lambda terms: sums.rank_order(terms[::-1]))
    assert {row.candidate for row in trial("orders").results("orders").wrong} == {"rank"}


def test_is_nearest_detects_one_ulp_error():
    terms = [torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    exact = sum(term.double() for term in terms).float()
    assert sums.is_nearest(exact, terms)
    exact[7] = torch.nextafter(exact[7], torch.tensor(math.inf))
    assert not sums.is_nearest(exact, terms)


def test_measurement_ends_at_time_budget():
    counts = {"a": 0, "b": 0}

    def sampler(name):
        def sample():
            counts[name] += 1
            return [float(counts[name])]

        return sample

    samplers = {name: sampler(name) for name in counts}
    timings = in_turns(samplers, Effort(7, 1e9))
    assert timings["a"] == Timing(4.0, 1.0, 2.5, 5.5, 7)
    assert in_turns(samplers, Effort(100, 0.0))["b"].rounds == 5
    assert in_turns(samplers, Effort(100, 0.0), least_rounds=1)["b"].rounds == 1
    assert counts["a"] == counts["b"] == 13


FACTORS = {"median_s": 1, "min_s": 0.8, "q1_s": 0.9, "q3_s": 1.1}


def timed(limit_us=None, section="allreduce", **times_us):
    about = {"case": "1 MiB fp32", "world_size": 2, "rounds": 5, "correct": True}
    about |= {"limit_s": limit_us and limit_us * 1e-6, "size_bytes": 2**20}
    rows = [
        Row(section, candidate=name, **{f: us * x * 1e-6 for f, x in FACTORS.items()}, **about)
        for name, us in times_us.items()
    ]
    return Results(section, {}, rows=rows)


@pytest.mark.parametrize(
    ("limit_us", "is_limit"), [(10.0, True), (19.9, True), (20.3, True), (20.5, False)]
)
def test_measurement_below_limit_hides_limit(limit_us, is_limit):
    results = timed(limit_us, naive=90.0, auto=20.0)
    assert limit_of(results.rows) == (limit_us * 1e-6 if is_limit else None)
    text = report_page.table(results)
    assert ("%" in text) is is_limit
    assert ("| limit |" in text) is is_limit


def test_speedup_compares_with_fastest_library():
    results = timed(section="processes", gloo=90.0, impi=60.0, limit=7.0, bound=29.0, auto=30.0)
    results.rows += [
        replace(row, case="4 KiB", median_s=row.median_s * (3 if row.candidate == "impi" else 1))
        for row in results.rows
    ]
    header, _, first, second = report_page.table(results).splitlines()
    columns = "`gloo` | `impi` | `limit` | `bound` | `auto` | speedup of `auto` |"
    assert header == f"| case | ranks | {columns}"
    assert first == "| 1 MiB fp32 | 2 | 90 us | 60 us | 7 us | **29 us** | 30 us | 2.00 |"
    assert second.endswith("| 3.00 |")
    alone, *_ = report_page.section_lines(results)
    assert "2.5 times as fast as" in alone
    assert "(median of 2 cases; from 2.00 for 1 MiB fp32, 2 ranks" in alone


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
def test_check_detects_edited_tables(copies, name, old, new, capsys):
    text = (copies / name).read_text()
    summary = text[text.index("<!-- benchmark:summary -->" if "README" in name else "##") :]
    (copies / name).write_text(text.replace(summary, summary.replace(old, new, 1)))
    assert tables.main(["--check"]) == 1
    assert f"{name}: out of date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert (copies / name).read_text() == text


def test_new_results_outdate_generated_files(copies):
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
def test_incomplete_results_are_refused(copies, name, changes, text, capsys):
    path = copies / f"benchmarks/results/{name}.jsonl"
    head, rest = path.read_text().split("\n", 1)
    path.write_text(f"{json.dumps(json.loads(head) | changes)}\n{rest}")
    if not changes:
        path.write_text(path.read_text().replace('"correct": true', '"correct": false', 1))
    for arguments in ([], ["--check"]):
        assert tables.main(arguments) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_file_round_trip(path, tmp_path):
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
def test_bad_results_file_raises(tmp_path, text, error):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=f"bad.jsonl: .*{error}"):
        read(path)
    path.unlink()
    with pytest.raises(InputError, match=r"bad.jsonl: .*No such file"):
        read(path)
    with pytest.raises(InputError, match="holds no results"):
        read_folder(tmp_path)
