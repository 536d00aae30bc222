"""Does one command measure everything, say what is wrong, and write a page with pictures?"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import allreduce, run_all  # noqa: E402
from benchmarks.report import page, plots, sections, summary  # noqa: E402

CPU_SECTIONS = [section.name for section in sections.SECTIONS if not section.needs_cuda]


def png_size(path: Path) -> tuple[int, int]:
    """Width and height that the file's own header states."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def run_smoke(folder: Path, *only: str) -> tuple[int, dict[str, Any], str]:
    """A tiny run: its exit status, its JSON and its page."""
    names = ["--only", ",".join(only)] if only else []
    status = run_all.main(["--out", str(folder), "--smoke", *names])
    report = json.loads((folder / "report.json").read_text())
    return status, report, (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str, Path]:
    """All sections that run without a GPU."""
    folder = tmp_path_factory.mktemp("report")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return *run_smoke(folder, *CPU_SECTIONS), folder
    finally:
        torch.set_num_threads(threads)


def test_every_section_is_measured_and_right(smoke: Any) -> None:
    status, report, _, _ = smoke
    assert status == 0, report["failed"]
    assert report["version"] == 1
    assert list(report["sections"]) == CPU_SECTIONS
    assert not report["failed"]
    for name, section in report["sections"].items():
        assert section["rows"], name
        assert all(row["correct"] is True for row in section["rows"]), name
        for key in ("cpu", "cores", "date", "torch", "pyringar", "engine"):
            assert section["machine"][key], (name, key)
        assert section["seconds"] > 0
    for key in ("cpu", "cores", "date", "torch", "python", "system", "pyringar"):
        assert report["machine"][key], key


def test_rows_hold_their_spread_and_the_limit(smoke: Any) -> None:
    for row in smoke[1]["sections"]["allreduce"]["rows"]:
        assert row["min_us"] <= row["q1_us"] <= row["median_us"] <= row["q3_us"] <= row["max_us"]
        assert row["limit_us"] > 0
        assert row["limit_share"] == pytest.approx(row["limit_us"] / row["median_us"])


def test_peers_stand_beside_ours(smoke: Any) -> None:
    found = {
        name: {row.get("algorithm") or row["candidate"] for row in section["rows"]}
        for name, section in smoke[1]["sections"].items()
    }
    assert {"naive", "stack", "sharded", "fused", "direct", "ring", "auto"} <= found["allreduce"]
    assert {"gloo", "checked", "ring", "limit"} <= found["processes"]
    assert {"bare", "gloo", "ringar"} == found["ddp"]
    assert {"undivided", "book", "ringar"} <= found["training"]


def test_the_page_has_each_section_and_its_pictures(smoke: Any) -> None:
    _, _, text, folder = smoke
    for name in CPU_SECTIONS:
        assert f"## {page.TITLES[name]}" in text
    assert "## auto against the best algorithm" in text
    links = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(links) >= 6
    for link in links:
        width, height = png_size(folder / link)
        assert 500 <= width <= 3000, link
        assert 250 <= height <= 3000, link
        assert 4_000 < (folder / link).stat().st_size < 300_000, link
    assert "![" + "What two ranks compute" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_what_cannot_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    status, report, text = run_smoke(tmp_path, "allreduce_cuda", "training_cuda")
    assert status == 0
    assert report["not_run"] == [
        {"what": name, "why": "no CUDA device"} for name in ("allreduce_cuda", "training_cuda")
    ]
    assert "- training_cuda: no CUDA device" in text


def test_a_candidate_that_is_missing_says_why(smoke: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("nn.DataParallel can run on the CUDA device that is here")
    assert "nn.DataParallel, LeNet: nn.DataParallel knows no CPU ranks" in smoke[2]


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
    status, report, text = run_smoke(tmp_path, "allreduce")
    assert status == 1
    wrong = {r["algorithm"] for r in report["sections"]["allreduce"]["rows"] if not r["correct"]}
    assert wrong == {"direct"}
    assert "**Wrong results.** allreduce: 4 KiB fp32, 2 ranks, direct" in text


def failing(effort: str) -> sections.Plan:
    def measure(progress: sections.Progress) -> dict[str, Any]:
        raise RuntimeError("planted")

    return sections.Plan(1, 1.0, measure)


def test_a_section_that_fails_stops_no_other(tmp_path: Path) -> None:
    chosen = [
        sections.Section("training", failing),
        *(s for s in sections.SECTIONS if s.name == "allreduce"),
    ]
    assert run_all.run(chosen, "smoke", tmp_path, is_quiet=True) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["sections"]) == ["allreduce"]
    (failed,) = report["failed"]
    assert failed["section"] == "training"
    assert failed["error"] == "RuntimeError: planted"
    assert "in measure" in failed["traceback"]
    text = (tmp_path / "report.md").read_text()
    assert "**The section training failed:** `RuntimeError: planted`" in text


def test_a_run_that_is_broken_off_leaves_what_was_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(effort: str) -> sections.Plan:
        def measure(progress: sections.Progress) -> dict[str, Any]:
            raise KeyboardInterrupt

        return sections.Plan(1, 1.0, measure)

    chosen = [
        *(s for s in sections.SECTIONS if s.name == "allreduce"),
        sections.Section("ddp", broken),
        sections.Section("training", failing),
    ]
    assert run_all.run(chosen, "smoke", tmp_path, is_quiet=True) == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["sections"]) == ["allreduce"]
    assert [missing["what"] for missing in report["not_run"]] == ["ddp", "training"]
    assert (tmp_path / "report.md").exists()
    assert "broken off" in capsys.readouterr().err


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_all.main(["--out", "nowhere", "--only", "allreduce,speed"])
    assert "'speed' is none of allreduce, processes" in capsys.readouterr().err
    assert not Path("nowhere").exists()


# -- auto, and pictures ----------------------------------------------------------------------------


def timed(names: Sequence[str], times: Sequence[float]) -> dict[str, Any]:
    rows = [
        {"case": "1 MiB fp32", "world_size": 2, "algorithm": name, "median_us": t, "min_us": t}
        for name, t in zip(names, times, strict=True)
    ]
    return {"allreduce": {"rows": rows}}


@pytest.mark.parametrize(("auto_us", "is_far"), [(55.0, False), (56.0, True)])
def test_auto_is_flagged_above_a_tenth(auto_us: float, is_far: bool) -> None:
    found = timed(("naive", "fused", "ring", "auto"), (90.0, 50.0, 70.0, auto_us))
    (row,) = summary.auto_rows(found)
    assert row.best == "fused"
    assert row.ratio == pytest.approx(auto_us / 50)
    assert row.is_far is is_far
    assert not row.took_another
    assert ("**!** |" in summary.auto_table(found)) is is_far


@pytest.mark.parametrize(("takes", "others"), [("fused", 0), ("ring", 1), (None, 0)])
def test_the_report_says_when_auto_took_another_algorithm(takes: str | None, others: int) -> None:
    found = timed(("naive", "fused", "ring", "auto"), (90.0, 50.0, 70.0, 71.0))
    found["allreduce"]["rows"][-1]["takes"] = takes
    (row,) = summary.auto_rows(found)
    assert (row.takes, row.took_another) == (takes, bool(others))
    text = summary.auto_table(found)
    assert f"in {others} of these it had taken another" in text
    assert (f"| `{takes}` | `fused` |" in text) is (takes is not None)


def test_what_lies_in_the_noise_of_both_is_called_so() -> None:
    found = timed(("naive", "fused", "auto"), (90.0, 50.0, 60.0))
    for row, low, high in zip(found["allreduce"]["rows"], (80, 40, 54), (99, 55, 70), strict=True):
        row |= {"q1_us": low, "q3_us": high}
    assert "1.20 **!** in the noise |" in summary.auto_table(found)
    found["allreduce"]["rows"][2]["q1_us"] = 56
    assert "1.20 **!** |" in summary.auto_table(found)


def test_a_picture_is_drawn_anew_when_its_data_changed(smoke: Any, tmp_path: Path) -> None:
    training = {"training": smoke[1]["sections"]["training"]}
    plots.draw(training, tmp_path)
    path = tmp_path / "training.png"
    first, source = path.stat().st_mtime_ns, plots.source_in(path)
    plots.draw(training, tmp_path)
    assert path.stat().st_mtime_ns == first
    changed = json.loads(json.dumps(training))
    changed["training"]["rows"][0]["max_ms"] *= 2
    plots.draw(changed, tmp_path)
    assert path.stat().st_mtime_ns != first
    assert plots.source_in(path) != source
