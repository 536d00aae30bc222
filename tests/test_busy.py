"""Do benchmarks refuse a busy machine, mark what one disturbed, and end quietly in a pipeline?"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import bench, busy, compare, run_all, tables  # noqa: E402
from benchmarks.report import page, plots, summary  # noqa: E402
from benchmarks.rows import (  # noqa: E402
    InputError,
    Results,
    Row,
    limits,
    lines_of,
    read,
    read_sections,
    share_of_limit,
)
from benchmarks.script import exit_with  # noqa: E402
from benchmarks.sections import SECTIONS  # noqa: E402

MANY = busy.Others(0.43, 12.8, 9.1)
FEW = busy.Others(0.02, 0.3, 1.1)
RESULTS = ROOT / "benchmarks/results"


# -- counting --------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``counted(system_s, own_s)``: what others did in 10 seconds on 2 processors."""

    def call(system_s: float | None, own_s: float) -> busy.Others:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
        system, own, now = [5.0, system_s and 5.0 + system_s], [7.0, 7.0 + own_s], [1.0, 11.0]
        watch = busy.Watch(lambda: system.pop(0), lambda: own.pop(0), lambda: now.pop(0))
        return watch.others()

    return call


@pytest.mark.parametrize(
    ("system_s", "own_s", "share"),
    [
        (20.0, 20.0, 0.0),  # all of it ours
        (20.0, 10.0, 0.5),
        (12.0, 10.0, 0.1),
        (9.9, 10.0, 0.0),  # ticks are coarse
        (90.0, 10.0, 1.0),
        (None, 10.0, None),
    ],
)
def test_others_are_what_is_not_ours(
    counted: Any, system_s: float | None, own_s: float, share: float | None
) -> None:
    others = counted(system_s, own_s)
    assert others.share == pytest.approx(share)
    assert others.are_many is (share is not None and share > 0.1)


@pytest.mark.skipif(busy.processors_s() is None, reason="this system does not tell")
def test_a_program_that_computes_is_noticed() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as other:
        try:
            share = busy.others_now(0.4).share
        finally:
            other.kill()
    assert share is not None
    assert share * len(os.sched_getaffinity(0)) > 0.2


LEAVES_ITS_PARENT = """
import os, time
if os.fork():
    os._exit(0)
os.setsid()
while time.process_time() < 0.4:
    pass
"""

COUNTS_A_PROGRAM_THAT_LEFT = f"""
import subprocess, sys
from benchmarks import busy
busy.adopt_orphans()
before_s = busy.own_time_s()
subprocess.run([sys.executable, "-S", "-c", {LEAVES_ITS_PARENT!r}], check=True)
busy.wait_for_orphans()
print(busy.own_time_s() - before_s)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_a_program_of_ours_that_leaves_its_parent_is_ours() -> None:
    """As the daemons of Open MPI do, which start the ranks on other machines."""
    ran = subprocess.run(
        [sys.executable, "-c", COUNTS_A_PROGRAM_THAT_LEFT],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, "check": True},
    )
    assert float(ran.stdout) > 0.35  # of 0.4, in ticks of 10 ms


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_a_child_that_does_not_end_is_not_waited_for_for_ever() -> None:
    program = """
import subprocess
from benchmarks import busy
child = subprocess.Popen(["sleep", "60"])
try:
    busy.wait_for_orphans(0.1)
except TimeoutError as error:
    print(error)
child.kill()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, "check": True},
    )
    assert ran.stdout == "a child process has not ended after 0.1 s\n"


def test_processors_that_are_not_ours_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under taskset on a large machine: neither their work nor their number."""
    line = "cpu{} 100 0 100 900 50 0 0 0 7 7\n"
    (tmp_path / "stat").write_text(line.format("") + "".join(map(line.format, range(64))))
    monkeypatch.setattr(busy, "_STAT", str(tmp_path / "stat"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 63})
    ticks_a_second = os.sysconf("SC_CLK_TCK")
    assert busy.processors_s() == pytest.approx(2 * 200 / ticks_a_second)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {64})
    assert busy.processors_s() is None


def test_our_own_work_is_counted() -> None:
    own_s = busy.own_time_s()
    end = time.monotonic() + 30
    while busy.own_time_s() - own_s < 0.1:
        assert time.monotonic() < end


@pytest.mark.parametrize("content", ["", "cpu a b\n", "cpu\n", None])
def test_without_proc_stat_the_share_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    stat = tmp_path / "stat"
    if content is not None:
        stat.write_text(content)
    monkeypatch.setattr(busy, "_STAT", str(stat))
    assert busy.others_now(0.0).share is None
    assert busy.refusal(busy.others_now(0.0)) is None


# -- refusing and marking --------------------------------------------------------------------------


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, run_all):
        monkeypatch.setattr(module, "others_now", lambda: MANY)
    monkeypatch.setattr(busy.Watch, "others", lambda watch: MANY)


def tiny(section: str = "allreduce") -> bench.Benchmark:
    """A benchmark whose quick run takes no time."""
    benchmark = SECTIONS[section]
    return replace(
        benchmark,
        efforts={**benchmark.efforts, "quick": benchmark.efforts["smoke"]},
        cases=lambda effort: benchmark.cases("smoke"),
    )


def test_a_busy_machine_is_refused(
    busy_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all.main(["--out", str(tmp_path / "new"), "--quick"]) == 3
    assert not (tmp_path / "new").exists()
    assert bench.main(tiny(), ["--quick", "--json", str(tmp_path / "rows.jsonl")]) == 3
    assert not (tmp_path / "rows.jsonl").exists()
    told = capsys.readouterr().err
    assert told.count("43% of the processors' time, load 12.8") == 2
    assert told.count("--allow-busy") == 2


def test_what_was_measured_nevertheless_is_marked_everywhere(
    busy_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all.run([tiny()], "quick", tmp_path, is_quiet=True, allows_busy=True) == 0
    assert "BUSY MACHINE: other programs used 43%" in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    head, _, rest = text.partition("\n## ")
    assert "not to be published: other programs used" in head.split("\n\n")[1]
    bullets = [line for line in head.splitlines() if line.startswith("- ")]
    assert bullets
    assert all(line.startswith("- On a busy machine: ") for line in bullets)
    assert "**Busy machine: other programs used 43%" in rest.split("| case")[0]
    (results,) = read_sections(tmp_path).values()
    assert results.disturbed_by == MANY


def test_a_machine_that_became_busy_is_a_failure(
    busy_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "others_now", lambda: FEW)
    assert run_all.run([tiny()], "quick", tmp_path, is_quiet=True) == 1
    assert bench.main(tiny(), ["--quick"]) == 1
    assert bench.main(tiny(), ["--quick", "--allow-busy"]) == 0


def test_a_trial_of_a_script_runs_on_any_machine(busy_machine: None, tmp_path: Path) -> None:
    assert run_all.main(["--out", str(tmp_path), "--smoke", "--only", "allreduce"]) == 0
    assert "busy" not in (tmp_path / "report.md").read_text().lower()
    assert bench.main(SECTIONS["allreduce"], ["--dry-run"]) == 0


def test_figures_of_a_busy_machine_are_not_taken_over(tmp_path: Path) -> None:
    (results,) = read_sections(RESULTS / "ddp-cpu.jsonl").values()
    (tmp_path / "ddp-cpu.jsonl").write_text(lines_of(replace(results, others=asdict(MANY))))
    with pytest.raises(InputError, match=r"ddp was measured on a busy machine: .* 43%"):
        tables.take_over(str(tmp_path))
    assert all(not found.disturbed_by for found in read_sections(RESULTS).values())


def test_slower_on_a_busy_machine_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (old,) = read_sections(RESULTS / "ddp-cpu.jsonl").values()
    times = ("median_s", "min_s", "q1_s", "q3_s", "max_s")
    slower = [replace(row, **{name: 9 * getattr(row, name) for name in times}) for row in old.rows]
    for name, others, status in (("idle", FEW, 1), ("busy", MANY, 0)):
        new = tmp_path / f"{name}.jsonl"
        new.write_text(lines_of(replace(old, rows=slower, others=asdict(others))))
        assert compare.main([str(RESULTS / "ddp-cpu.jsonl"), str(new)]) == status
        assert ("BUSY MACHINE: new: ddp" in capsys.readouterr().out) is (name == "busy")


@pytest.mark.parametrize(
    "others", [[], 3, {"share": 0.1}, {**asdict(MANY), "share": "x"}, {**asdict(MANY), "more": 1}]
)
def test_nonsense_about_others_is_refused(tmp_path: Path, others: Any) -> None:
    (results,) = read_sections(RESULTS / "ddp-cpu.jsonl").values()
    path = tmp_path / "ddp-cpu.jsonl"
    text = lines_of(replace(results, others={"x": 1})).replace('{"x": 1}', json.dumps(others), 1)
    path.write_text(text)
    with pytest.raises(InputError, match=r"others is|is not the head"):
        read(path)


def test_a_share_that_is_unknown_survives_its_file(tmp_path: Path) -> None:
    (results,) = read_sections(RESULTS / "ddp-cpu.jsonl").values()
    unknown = replace(results, others=asdict(busy.Others(None, 1.0, 2.0)))
    (tmp_path / "ddp-cpu.jsonl").write_text(lines_of(unknown))
    assert read(tmp_path / "ddp-cpu.jsonl").disturbed_by is None


# -- limits that are none --------------------------------------------------------------------------


def timed(limit_us: float, **times_us: float) -> list[Row]:
    return [
        Row(
            *("allreduce", "1 MiB fp32", 2, name, *[us * 1e-6] * 5, 5, True),
            limit_s=limit_us * 1e-6,
            size_bytes=2**20,
            dtype="fp32",
        )
        for name, us in times_us.items()
    ]


@pytest.mark.parametrize(
    ("limit_us", "is_limit"), [(10.0, True), (19.9, True), (20.3, True), (20.5, False)]
)
def test_a_limit_that_a_row_beats_is_none(limit_us: float, is_limit: bool) -> None:
    rows = timed(limit_us, naive=90.0, fused=20.0)
    found = limits(rows)
    assert bool(found) is is_limit
    shares = [share_of_limit(row, found) for row in rows]
    if is_limit:
        assert shares == pytest.approx([limit_us / 90, min(1, limit_us / 20)])
    else:
        assert shares == [None, None]
    text = page.table(Results("allreduce", {}, rows=rows))
    assert ("%" in text) is is_limit
    assert ("| limit |" in text) is is_limit


def test_no_published_share_is_above_one_and_no_drawn_limit_above_a_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sections = read_sections(RESULTS)
    drawn = []

    class Axes:
        def plot(self, sizes: list[int], heights: list[float], *_: Any, **__: Any) -> None:
            drawn.append(dict(zip(sizes, heights, strict=True)))

    for results in sections.values():
        for rows in plots.sizes_panels(results).values():
            drawn.clear()
            plots._draw_limit(Axes(), rows)
            for row in rows:
                for line in drawn:
                    limit_us = line[row.size_bytes or 0]
                    assert math.isnan(limit_us) or limit_us < row.median_s * 1e6 * 1.03, row.about


def test_equal_times_are_called_equal() -> None:
    text = summary._range([(0.98, "a"), (1.0, "b"), (1.014, "c")])
    assert text == "equally fast in the median of 3 cases, from 0.98 (a) to 1.01 (c)"
    assert summary._range([(1.2, "a"), (2.0, "b"), (5.14, "c")]).startswith("2.0 times as fast in")


def test_sixteen_ranks_have_auto_too() -> None:
    cases = [case for case in SECTIONS["allreduce"].cases("full") if case.world_size == 16]
    assert len(cases) >= 4
    assert all("auto" in case.candidates for case in cases)


# -- pipelines -------------------------------------------------------------------------------------


PRINTS = "from benchmarks.script import exit_with; exit_with(lambda: print('x' * 10**7) or 1)"


def test_a_reader_that_has_enough_ends_a_script_quietly() -> None:
    script = f"{shlex.quote(sys.executable)} -c {shlex.quote(PRINTS)}"
    command = f"({script}; echo $? >&2) | head -c 1"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("x", "141\n")


def test_another_broken_pipe_is_a_failure() -> None:
    def breaks() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_with(breaks)


def test_every_script_ends_so() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    del texts["nccl.py"], texts["gpu_runs.py"]  # which benchmarks start, and read
    ends = {n: t.split('if __name__ == "__main__":')[1] for n, t in texts.items() if "__main_" in t}
    assert len(ends) > 8
    for name, end in ends.items():
        assert end.strip() in ("exit_with(main)", "run_as_script(BENCHMARK)"), name
