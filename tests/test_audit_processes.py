"""Audits of libraries in processes, and the command `pyringar audit`."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from programs import programs

from pyringar.audit.library_ranks import LibraryTarget
from pyringar.audit.probes import TargetError, find_order
from pyringar.audit.questions import audit, order_of
from pyringar.audit.trees import describe, fold
from pyringar.cli import main

SUM = [torch.ones(3), torch.full((3,), 2.0)]


@pytest.mark.slow
def test_gloo_order_is_ring():
    """Two ranks have only one order of addition; three and four ranks add around the ring."""
    with LibraryTarget("gloo", 4) as gloo:
        assert gloo.name == f"gloo torch {torch.__version__}"
        for k in (2, 3, 4):
            regions, found = order_of(gloo, k, 1000)
            assert found.verdict == ("rank" if k == 2 else "ring"), found
        assert len(regions) == 4
        assert describe(regions, 4)[1].startswith("chunk c adds ranks c-1, c-2, ..., c-4 (mod 4)")
        assert find_order(gloo, 4, 1)[0][0].tree == fold([3, 2, 1, 0])


@pytest.mark.slow
def test_ringar_adds_in_rank_order():
    with LibraryTarget("ringar", 3, order="rank") as ringar:
        assert "order=rank" in ringar.name
        for numel in (1, 1000, 70_000):
            regions, found = order_of(ringar, 3, numel)
            assert (found.verdict, len(regions)) == ("rank", 1)
        report = audit(ringar, (8, 1000))
    verdicts = {f.name: f.verdict for s in report.sections for f in s.findings}
    assert verdicts["bfloat16"] == "once"
    assert {verdicts[n] for n in ("on every rank", "at every size", "async")} == {"yes"}


def test_killed_rank_is_named_and_replaced():
    with LibraryTarget("gloo", 2) as gloo:
        before, processes = gloo.reduce(SUM), list(gloo._processes)
        processes[1].kill()
        processes[1].join()
        with pytest.raises(TargetError, match="3 elements, 2 ranks, in place: rank 1 ended"):
            gloo.reduce(SUM)
        assert active_children() == []
        assert [x.tolist() for x in gloo.reduce(SUM)] == [x.tolist() for x in before]
        assert len(active_children()) == 2
    assert active_children() == []


def test_stopped_rank_is_named_and_killed():
    with LibraryTarget("gloo", 2, timeout_s=1.0) as gloo:
        gloo.reduce(SUM)
        os.kill(gloo._processes[1].pid, signal.SIGSTOP)
        with pytest.raises(TargetError, match=r"no answer of rank 0, 1 in time|rank 1"):
            gloo.reduce([torch.ones(70_000), torch.ones(70_000)])
        assert active_children() == []


def test_rank_error_is_reported():
    with LibraryTarget("gloo", 2) as gloo:
        processes = list(gloo._processes)
        with pytest.raises(TargetError, match="float8_e5m2, 3 elements, 2 ranks, in place, rank 0"):
            gloo.reduce([x.to(torch.float8_e5m2) for x in SUM])
        assert gloo.reduce(SUM)[1].tolist() == [3.0, 3.0, 3.0]
        assert gloo._processes == processes


KILLED = """
import time, torch
from pyringar.audit.library_ranks import LibraryTarget
ranks = LibraryTarget("gloo", 2)
ranks.reduce([torch.ones(1), torch.ones(1)])
print(*(process.pid for process in ranks._processes), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_exit_after_auditor_dies():
    with programs(KILLED, []) as (auditor,):
        ranks = [int(word) for word in auditor.stdout.readline().split()]
        os.kill(auditor.pid, signal.SIGKILL)
        auditor.wait(10)
        deadline = time.monotonic() + 10
        while any(map(is_running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(map(is_running, ranks))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SOLUTION = """
import time
def allreduce(data):
    total = data[0].clone()
    for tensor in data[1:]:
        total += tensor
    for tensor in data:
        tensor.copy_(total)
def mute(data):
    print("called")
    time.sleep(60)
"""


@pytest.fixture
def solution(tmp_path):
    path = tmp_path / "solution.py"
    path.write_text(SOLUTION)
    return path


def test_audit_command_prints_table_or_json(solution, capfd):
    words = ["audit", f"{solution}:allreduce", "--ranks", "3", "--sizes", "8,30"]
    assert main(words) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("solution.py:allreduce, 3 ranks\n\nthe sum\n  is right  yes")
    assert "\n  8 to 30 elements  rank  (0+1)+2 (also tree and recursive doubling)\n" in printed
    assert main([*words, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["target"], document["ranks"]) == ("solution.py:allreduce", 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["glo"], "TARGET is 'glo', expected one of gloo, ringar, nccl, MODULE:FUNCTION, "),
        (["gloo", "--ranks", "1"], "--ranks is 1, expected 2 to 30"),
        (["gloo", "--sizes", "1,x"], "--sizes is '1,x', expected numbers from 1 to"),
        (["gloo", "--order", "rank"], "--order is 'rank', but only the target ringar takes one"),
        (["no_such_module:f"], "nothing was audited: there is no module 'no_such_module'"),
    ],
)
def test_wrong_audit_arguments_print_one_line(words, message, capfd):
    assert main(["audit", *words]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"pyringar audit: {message}")
    assert error.count("\n") == 1
