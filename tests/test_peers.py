"""Are libraries beside ours measured in turns, checked, named if they fail or lack, and ended?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FAKE = (sys.executable, str(ROOT / "tests" / "fake_peer.py"))

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import bench, processes, run_all  # noqa: E402
from benchmarks.peers import install, registry  # noqa: E402
from benchmarks.peers.group import Answer, Group, GroupError, descendants  # noqa: E402
from benchmarks.peers.rank import ROW, Sum  # noqa: E402
from benchmarks.peers.registry import PEERS, STAMP, Peer, start_ranks  # noqa: E402
from benchmarks.report import page, summary  # noqa: E402
from benchmarks.rows import Results, Row  # noqa: E402
from benchmarks.sections import SECTIONS  # noqa: E402
from benchmarks.timing import Timing  # noqa: E402


@pytest.fixture(autouse=True)
def all_ended() -> Iterator[None]:
    """Nothing that a test starts outlives it."""
    before = set(descendants([os.getpid()]))
    yield
    left = set(descendants([os.getpid()])) - before
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def fake(fault: str = "", k: int = 2, **options: Any) -> Group:
    each = [{"RANK": str(r), "WORLD_SIZE": str(k), "FAULT": fault} for r in range(k)]
    return Group("Fake", [(*FAKE, "{address}")] * k, k, each=each, **options)


# -- one library -----------------------------------------------------------------------------------


@pytest.mark.parametrize("numels", [[1], [17], [ROW], [3 * ROW + 5], [ROW + 1, 2, ROW]])
def test_right_sums_are_right(numels: list[int]) -> None:
    with fake(k=3) as group:
        answer = group.measure("any", numels, 10, 3)
    assert answer.wrong == 0
    assert len(answer.seconds) == 10
    assert all(0 < s < 1 for s in answer.seconds)


@pytest.mark.parametrize("fault", ["one element", "two swapped", "the call before"])
@pytest.mark.parametrize("numels", [[64], [2 * ROW + 9]])
def test_wrong_sums_are_caught(fault: str, numels: list[int]) -> None:
    with fake(fault) as group:
        wrong = group.measure("any", numels, 8, 2).wrong
    assert wrong == (9 if fault == "the call before" else 10)  # warm-up and all


@pytest.mark.parametrize("place", [0, ROW - 1, ROW, 2 * ROW, 2 * ROW + 3])
def test_each_element_counts(place: int) -> None:
    array = np.zeros(2 * ROW + 4, np.float32)
    timed = Sum([array], 1, 2, lambda: None, lambda: None)
    timed.fill(3)
    own = array.copy()
    array[...] = 2 * (own - 1) + 1
    assert timed.is_right(3)
    assert not timed.is_right(4)
    array[place] += 1
    assert not timed.is_right(3)


def test_the_slowest_rank_counts() -> None:
    with fake("is slow") as group:
        assert min(group.measure("any", [4], 3, 0).seconds) >= 0.02


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "any, 4 elements: rank 1: ended"),
        ("hangs", "any, 4 elements: no answer of rank 1 within its deadline"),
        ("raises", "any, 4 elements: rank 1: ValueError: planted in two lines"),
    ],
)
def test_a_rank_that_fails_is_named_in_time(fault: str, said: str) -> None:
    begin_s = time.monotonic()
    group = fake(fault, answer_s=0.5)
    with pytest.raises(GroupError, match=f"^Fake, 2 ranks: {said}"):
        group.measure("any", [4], 3, 0)
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("does not start", "ended with 1: planted: no such fabric"),
        ("leaves", "ended with 1: planted: left"),
        ("never comes", "not all ranks came in time"),
    ],
)
def test_a_library_that_does_not_start_is_named_in_time(fault: str, said: str) -> None:
    begin_s = time.monotonic()
    with pytest.raises(GroupError, match=f"^Fake, 2 ranks: did not start: {said}"):
        fake(fault, start_s=1.5)
    assert time.monotonic() - begin_s < 10


def test_a_launcher_that_is_missing_is_named() -> None:
    with pytest.raises(GroupError, match=r"^Gone, 2 ranks: did not start: .*/no/mpiexec"):
        start_ranks("Gone", ["/no/mpiexec"], 2, has_launcher=True)


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("fault", ["hangs", "dies", ""])
def test_ranks_below_a_launcher_are_ended(fault: str) -> None:
    ranks = " & ".join(f"RANK={r} setsid {' '.join(FAKE)} $0" for r in range(2))
    shell = ["sh", "-c", f"{ranks} & wait", "{address}"]
    variables = {"WORLD_SIZE": "2", "FAULT": fault}
    group = Group("Fake", [shell], 2, environment=variables, answer_s=0.5)
    pids = [rank.pid for rank in group._ranks.values()]
    if fault:
        with pytest.raises(GroupError, match=r"rank 1"):
            group.measure("any", [4], 1, 0)
    group.close()
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_ranks_end_when_the_benchmark_is_killed() -> None:
    program = (
        "import sys, time; sys.path.append(sys.argv[1]); from tests import test_peers as t; "
        "g = t.fake(); print(*[r.pid for r in g._ranks.values()], flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT)], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        pids = [int(pid) for pid in killed.stdout.readline().split()]
        killed.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert len(pids) == 2


# -- beside ours -----------------------------------------------------------------------------------


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Peer:
    """One peer, which is installed; the ranks of pyringar and gloo are fakes, too."""
    made = Peer("impi", "Fake MPI", ("#000000", "o"), ("fake==1",), FAKE)
    (tmp_path / made.name).mkdir()
    (tmp_path / made.name / STAMP).write_text(made.stamp())
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path))
    monkeypatch.setitem(PEERS, made.name, made)
    monkeypatch.setattr(processes, "start_our_ranks", lambda k: start_ranks("ours", FAKE, k))
    return made


def measured(
    cases: list[bench.Case], effort: bench.Effort | None = None, **options: Any
) -> bench.Run:
    section = SECTIONS["processes"]
    efforts = section.efforts | ({} if effort is None else {"smoke": effort})
    benchmark = replace(section, cases=lambda effort: cases, efforts=efforts)
    run = bench.Run(benchmark, "smoke", **options)
    run.measure()
    return run


def test_a_wrong_peer_is_a_failure(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--dry-run", "--peers", "impi", "--candidates", "auto"]
    assert bench.main(SECTIONS["processes"], arguments) == 0
    monkeypatch.setitem(PEERS, "impi", replace(peer, variables={"FAULT": "one element"}))
    assert bench.main(SECTIONS["processes"], arguments) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("NO")]
    assert " impi " in line


def test_a_peer_that_dies_fails_the_run_by_its_name(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "impi", replace(peer, variables={"FAULT": "dies"}))
    with pytest.raises(GroupError, match=r"^Fake MPI, 2 ranks: impi, 4 elements: rank 1: ended"):
        measured([processes.case_of(16, 2, "auto", "impi")])


def test_candidates_take_turns(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    measure = Group.measure

    def noted(self: Group, candidate: str, *arguments: Any) -> Any:
        order.append((self.name, candidate))
        return measure(self, candidate, *arguments)

    names = ("gloo", "impi", "auto", "bound")
    monkeypatch.setattr(Group, "measure", noted)
    run = measured([processes.case_of(16, 2, *names)])
    assert {row.rounds for row in run.results.rows} == {5}
    turns = order[-5 * len(names) :]
    rounds = [turns[i : i + len(names)] for i in range(0, len(turns), len(names))]
    owners = {("Fake MPI", "impi"), ("ours", "gloo"), ("ours", "auto"), ("ours", "bound")}
    assert all(set(found) == owners for found in rounds)
    assert len({tuple(found) for found in rounds}) > 1


def test_a_row_compares_with_the_best_peer(peer: Peer) -> None:
    run = measured([processes.case_of(16, 2, "gloo", "impi", "auto")])
    rows = {row.candidate: row for row in run.results.rows}
    best_s = min(rows["gloo"].median_s, rows["impi"].median_s)
    assert rows["auto"].speedup == best_s / rows["auto"].median_s


@pytest.mark.slow
def test_a_library_that_computes_out_of_turn_fails_the_run(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = processes.case_of(16, 2, "auto", "gloo", "impi")
    run = measured([case])
    assert set(run.results.facts["idle_share"]) == {"ours", "Fake MPI"}
    monkeypatch.setitem(PEERS, "impi", replace(peer, variables={"FAULT": "spins"}))
    # On a busy machine a rank that spins gets nothing for a while: so long that it gets its share.
    monkeypatch.setattr(processes, "LEAST_IDLE_CPU_S", 0.0)
    monkeypatch.setattr("benchmarks.peers.group.LONG_S", 0.0)
    with pytest.raises(GroupError, match=r"Fake MPI: a rank used .*% of a processor while"):
        measured([case], bench.Effort(rounds=10_000, budget_s=2.0))


def test_beside_a_busy_process(peer: Peer) -> None:
    (case,) = processes.beside_a_busy_process((16,), (2,))
    others = set(descendants([os.getpid()]))
    with processes.busy_process():
        (busy,) = set(descendants([os.getpid()])) - others
        assert is_alive(busy)
    run = measured([case])
    assert {row.case for row in run.results.rows} == {"16 B, beside a busy process"}


def test_a_stall_that_few_calls_bear_shows_beside_a_busy_process() -> None:
    answers = [Answer([1e-6] * 99 + [4e-3], 0), Answer([1e-6] * 99 + [2e-3], 0)]
    alone, beside = (processes.timing_of(answers, is_busy) for is_busy in (False, True))
    assert (alone.median_s, alone.max_s, alone.rounds) == (1e-6, 4e-3, 2)
    assert beside.median_s == pytest.approx(31e-6, rel=0.05)


def rows_of(k: int, case: str, **times_us: float) -> list[Row]:
    """A case of ranks in processes, as a run makes it."""
    run = bench.Run(SECTIONS["processes"], "smoke", peers=[])
    timings = {name: Timing.of([us * 1e-6]) for name, us in times_us.items()}
    about = bench.Case(case, k, tuple(timings), ((1024,),))
    return run.rows(about, timings, dict.fromkeys(timings, True), limit_s=None)


def test_the_report_compares_with_the_best_peer_of_each_case() -> None:
    rows = rows_of(2, "4 KiB", gloo=200, impi=3, openmpi=4, limit=1, auto=2, bound=1)
    rows += rows_of(4, "4 KiB", gloo=400, impi=40, openmpi=20, auto=40, bound=25)
    rows += rows_of(2, "4 KiB, beside a busy process", gloo=200, impi=60, auto=10, bound=5)
    facts = {
        "versions": {"Intel MPI": "Intel MPI 1.2"},
        "idle_share": {"Intel MPI": 0.001, "pyringar and gloo": 0.004},
    }
    sections = {"processes": Results("processes", {"cores": 2}, rows=rows, facts=facts)}
    auto, busy, bound, _ = summary.summary_lines(sections)
    assert auto == (
        "One process per rank, against the fastest peer of each case (gloo, Intel MPI, Open MPI): "
        "equally fast in the median of 2 cases, from 0.50 (4 KiB, 4 ranks) to 1.50 (4 KiB, 2 "
        "ranks)."
    )
    assert busy.startswith("One process per rank, beside a busy process, against the same peers: 6")
    assert "from 0.80 (4 KiB, 4 ranks) to 3.0 (4 KiB, 2 ranks)" in bound
    assert summary.headlines(sections) == [auto]
    lines = page.table(sections["processes"]).splitlines()
    assert lines[0].endswith("| best peer / `auto` | best peer / `bound` |")
    assert [line.rsplit(" | ", 2)[1:] for line in lines[2:]] == [
        ["1.50", "3.00 |"],
        ["0.50", "0.80 |"],
        ["6.00", "12.00 |"],
    ]
    assert [" 4, twice the cores |" in line for line in lines[2:]] == [False, True, False]
    assert "Measured: Intel MPI 1.2. A rank used 0.4% of a processor" in page._libraries(
        sections["processes"]
    )


# -- here or not -----------------------------------------------------------------------------------


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No peer is installed."""
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path))
    monkeypatch.setattr(processes, "start_our_ranks", lambda k: start_ranks("ours", FAKE, k))


def test_absent_peers_are_listed(
    nothing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(SECTIONS["processes"], ["--dry-run"]) == 0
    out = capsys.readouterr().out
    whys = [
        f"{PEERS[name].label}: not installed: python benchmarks/peers/install.py {name}"
        for name in processes.LIBRARIES
    ]
    assert [line for line in out.splitlines() if line.startswith("not run:")] == [
        f"not run: {why}" for why in whys
    ]
    status = run_all.main(["--out", str(tmp_path / "report"), "--smoke", "--only", "processes"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert status == 0
    for why in whys:
        assert f"- processes: {why}\n" in text


def test_peers_that_were_not_asked_for_are_listed(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(SECTIONS["processes"], ["--dry-run", "--peers", "none"]) == 0
    assert "not run: Fake MPI: --peers does not name it" in capsys.readouterr().out


@pytest.mark.parametrize("names", ["impi", "mpich,impi", "impy"])
def test_a_peer_that_was_asked_for_must_be_here(
    nothing: None, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (
        lambda: bench.main(SECTIONS["processes"], ["--dry-run", "--peers", names]),
        lambda: run_all.main(["--out", "nowhere", "--smoke", "--peers", names]),
    ):
        with pytest.raises(SystemExit, match="2"):
            main()
        error = capsys.readouterr().err
        assert "argument --peers: " in error
        assert ("'impy' is none of" if names == "impy" else "not installed: python") in error
    assert not Path("nowhere").exists()


def test_an_environment_is_complete_or_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        commands.append(command)
        if "oneccl-cpu==2021.16.2" in command and not works:
            raise subprocess.CalledProcessError(1, command)

    def create(place: Path, with_pip: bool) -> None:
        place.mkdir(parents=True)

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.venv, "create", create)
    works = False
    assert install.main(["oneccl,mpich", "--into", str(tmp_path)]) == 1
    assert "oneccl: Command" in capsys.readouterr().err
    assert PEERS["oneccl"].why_not(tmp_path) is not None
    assert PEERS["mpich"].why_not(tmp_path) is None
    works = True
    commands.clear()
    assert install.main(["oneccl,mpich", "--into", str(tmp_path)]) == 0
    assert commands[-1][:2] == ["g++", "-O3"]  # and nothing for MPICH, which is there
    assert PEERS["oneccl"].why_not(tmp_path) is None
    newer = replace(PEERS["mpich"], requirements=("mpich==99",))
    assert newer.why_not(tmp_path) == (
        "installed in other versions: python benchmarks/peers/install.py mpich"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_real_peer_sums(name: str) -> None:
    if why := PEERS[name].why_not():
        pytest.skip(why)
    with PEERS[name].start(2) as group:
        lists = [] if PEERS[name].section == "lists" else [[16 * 1024] * 64, [5, 9000]]
        for numels in ([1], [17], [5000], [300_001], *lists):
            answer = group.measure(name, numels, 5, 1)
            assert (answer.wrong, len(answer.seconds)) == (0, 5)
        assert group.version.split()[0]
