"""Ranks of other libraries: times, checks, errors that name the rank, and no leftover process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import process_allreduce, run_all
from benchmarks.bench import Run
from benchmarks.peers import registry
from benchmarks.peers.peer_ranks import LibraryRanks, LibraryRanksError
from benchmarks.peers.rank import ROW, CheckedSum
from benchmarks.peers.registry import PEERS, STAMP, Peer, start_ranks

ROOT = Path(__file__).resolve().parents[1]
FAKE = (sys.executable, str(ROOT / "tests" / "fake_peer.py"))


def fake_ranks():
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process exited, or belongs to another user
            if f"STARTED_BY={os.getpid()}\0".encode() in path.read_bytes():
                is_zombie = ") Z " in path.with_name("stat").read_text()
                found |= set() if is_zombie else {int(path.parent.name)}
    return found - {os.getpid()}


@pytest.fixture(autouse=True)
def no_leftover_ranks(monkeypatch):
    monkeypatch.setenv("STARTED_BY", str(os.getpid()))
    yield
    assert not fake_ranks()


def fake(fault="", k=2, **options):
    each = [{"RANK": str(r), "WORLD_SIZE": str(k), "FAULT": fault} for r in range(k)]
    commands = [(*FAKE, "{address}")] * k
    return LibraryRanks("Fake", commands, k, environment={}, each=each, **options)


@pytest.mark.parametrize("fault", ["", "one element", "two swapped", "the call before"])
def test_wrong_sums_are_counted(fault):
    with fake(fault, k=2 if fault else 3) as group:
        answers = [group.measure("any", numel, 8, 2) for numel in (64, 2 * ROW + 9)]
    for answer in answers:
        assert answer.wrong == {"": 0, "the call before": 9}.get(fault, 10)  # counts warm-up calls
        assert len(answer.seconds) == 8
        assert all(0 < s < 1 for s in answer.seconds)


@pytest.mark.parametrize("place", [0, ROW - 1, ROW, 2 * ROW, 2 * ROW + 3])
def test_each_element_is_compared(place):
    array = np.zeros(2 * ROW + 4, np.float32)
    timed = CheckedSum(array, 1, 2, lambda: None, lambda: None)
    timed.fill(3)
    array[...] = 2 * (array - 1) + 1
    assert timed.is_right(3)
    assert not timed.is_right(4)
    array[place] += 1
    assert not timed.is_right(3)


def test_slowest_rank_sets_time():
    with fake("is slow") as group:
        assert min(group.measure("any", 4, 3, 0).seconds) >= 0.02


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("dies", "any, 4: rank 1: exited"),
        ("hangs", "any, 4: no answer of rank 1 within 0.5 s"),
        ("raises", "any, 4: rank 1: ValueError: planted in two lines"),
        ("does not start", "did not start: exited with 1: planted: no such fabric"),
        ("leaves", "did not start: exited with 1: planted: left"),
        ("never comes", "did not start: not all ranks connected in time"),
    ],
)
def test_failed_rank_is_named(fault, text):
    begin_s = time.monotonic()
    start_s = 1.5 if fault == "never comes" else 30.0
    with pytest.raises(LibraryRanksError, match=f"^Fake, 2 ranks: {text}"):
        fake(fault, answer_s=0.5, start_s=start_s).measure("any", 4, 3, 0)
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize("fault", ["hangs", "dies", ""])
def test_launched_ranks_exit(fault):
    ranks = " & ".join(f"RANK={r} setsid {' '.join(FAKE)} $0" for r in range(2))
    shell = ["sh", "-c", f"{ranks} & wait", "{address}"]
    variables = {"WORLD_SIZE": "2", "FAULT": fault}
    group = LibraryRanks("Fake", [shell], 2, environment=variables, each=[{}], answer_s=0.5)
    assert len(fake_ranks()) >= 2
    if fault:
        with pytest.raises(LibraryRanksError, match=r"rank 1"):
            group.measure("any", 4, 1, 0)
    group.close()
    assert not fake_ranks()


@pytest.fixture
def peer(monkeypatch, tmp_path):
    made = Peer("impi", "Fake MPI", ("fake==1",), FAKE)
    (tmp_path / made.name).mkdir()
    (tmp_path / made.name / STAMP).write_text(made.stamp)
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path))
    monkeypatch.setitem(PEERS, made.name, made)
    monkeypatch.setattr(
        process_allreduce, "start_our_ranks", lambda k: start_ranks("ours", FAKE, k)
    )
    return made


def measured(*candidates, suffix=""):
    case = process_allreduce.case_of(16, 2, *candidates, suffix=suffix)
    run = Run(process_allreduce.BENCHMARK, "trial", cases=[case])
    run.measure()
    return run


@pytest.mark.slow
def test_wrong_peer_result_sets_exit_status(peer, monkeypatch, capsys):
    assert run_all.main(["--dry-run", "processes"]) == 0
    monkeypatch.setitem(PEERS, "impi", replace(peer, variables={"FAULT": "one element"}))
    assert run_all.main(["--dry-run", "processes"]) == 1
    assert "WRONG: 4 KiB, 2 ranks, impi\n" in capsys.readouterr().out
    monkeypatch.setitem(PEERS, "impi", replace(peer, variables={"FAULT": "dies"}))
    (failed,) = measured("auto", "impi").results.failed
    assert failed["why"].startswith("LibraryRanksError: Fake MPI, 2 ranks: impi, 4: rank 1: exited")


def test_missing_peers_are_listed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        process_allreduce, "start_our_ranks", lambda k: start_ranks("ours", FAKE, k)
    )
    assert run_all.main(["--dry-run", "processes", "--out", str(tmp_path / "out")]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "out/report.md").read_text()
    for name, peer in PEERS.items():
        why = f"{peer.label}: not installed: python benchmarks/peers/install.py {name}\n"
        assert f"not run: {why}" in printed
        assert f"- processes: {why}" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_installed_library_sums_correctly(name):
    if why := PEERS[name].why_not():
        pytest.skip(why)
    with PEERS[name].start(2) as group:
        for numel in (1, 17, 5000, 300_001):
            answer = group.measure(name, numel, 5, 1)
            assert (answer.wrong, len(answer.seconds)) == (0, 5)
        assert group.version.split()[0]
