"""Are libraries audited as they are, with ranks in processes that always end, by one command?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from pyringar.audit.probes import TargetError, find_order, wide_values
from pyringar.audit.questions import audit, order_of
from pyringar.audit.ranks import Ranks, find_launcher
from pyringar.audit.trees import describe, fold
from pyringar.cli import main
from pyringar.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks.peers.registry import PEERS, default_folder  # noqa: E402

SUM = [torch.ones(3), torch.full((3,), 2.0)]


def ranks_running(folder: str = "pyringar-audit-") -> list[int]:
    """Processes of ranks that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = stat.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "pyringar.audit.rank" in words and folder in words:
            found.append(int(stat.parent.name))
    return found


def folder_of(ranks: Ranks) -> str:
    return ranks._errors.parent.name


# -- libraries -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gloo_adds_around_the_ring():
    """Two ranks have one order; with three and four the ring shows, from the size of k on."""
    with Ranks("gloo", 4) as gloo:
        assert gloo.name == f"gloo torch {torch.__version__}"
        for k in (2, 3, 4):
            regions, found = order_of(gloo, k, 1000)
            assert found.verdict == ("rank" if k == 2 else "ring"), found
        assert len(regions) == 4
        assert describe(regions, 4)[1].startswith("chunk c adds ranks c-1, c-2, ... (mod 4)")
        assert find_order(gloo, 4, 1)[0][0].tree == fold([3, 2, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 4])
def test_gloo_in_full(k):
    with Ranks("gloo", k) as gloo:
        report = audit(gloo, (1, 8, 1000, 70_000))
    verdicts = {f.name: f.verdict for s in report.sections for f in s.findings}
    assert verdicts["is right"] == verdicts["on every rank"] == verdicts["in every run"] == "yes"
    assert verdicts["async"] == "yes"
    assert verdicts["at every size"] == ("yes" if k == 2 else "no")
    assert "failed" not in verdicts.values()


@pytest.mark.slow
def test_ringar_keeps_the_order_it_promises():
    with Ranks("ringar", 3, order="rank") as ringar:
        assert "order=rank" in ringar.name
        for numel in (1, 1000, 70_000):
            regions, found = order_of(ringar, 3, numel)
            assert (found.verdict, len(regions)) == ("rank", 1)
        report = audit(ringar, (8, 1000))
    verdicts = {f.name: f.verdict for s in report.sections for f in s.findings}
    assert verdicts["bfloat16"] == "once"
    assert {verdicts[n] for n in ("on every rank", "at every size", "async")} == {"yes"}


DYNAMIC = {"OMPI_MCA_coll": "basic,libnbc,self,tuned", "OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "variables", "verdict", "detail"),
    [
        ("openmpi", {**DYNAMIC, "OMPI_MCA_coll_tuned_allreduce_algorithm": "1"},
         "rank, last first", "0+(1+(2+(3+4)))"),
        ("openmpi", {**DYNAMIC, "OMPI_MCA_coll_tuned_allreduce_algorithm": "3"},
         "recursive doubling", "((0+1)+2)+(3+4)"),
        ("openmpi", {**DYNAMIC, "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"},
         "ring", "chunk c adds ranks c, c+1, ... (mod 5)"),
    ],
)  # fmt: skip
def test_what_an_mpi_library_is_told_to_do_is_found(peer, variables, verdict, detail, monkeypatch):
    """Its own settings say by which algorithm it adds: an answer that is not ours."""
    if why := PEERS[peer].why_not():
        pytest.skip(why)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    python = str(default_folder() / peer / "bin/python")
    with Ranks("mpi", 5, launcher=find_launcher(python, 5), python=python) as mpi:
        _, found = order_of(mpi, 5, 1000)
        assert (found.verdict, found.detail.partition(";")[0]) == (verdict, detail)
        assert mpi.reduce(SUM * 2, "out of place")[3].tolist() == [6.0] * 3


def test_mpi_that_is_not_there_is_named_with_what_to_install(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'mpi4py'\" >&2\nexit 1\n"
    )
    bare.chmod(0o755)
    with pytest.raises(ArgumentError, match=r"No module named 'mpi4py'.*pip install numpy mpi4py"):
        find_launcher(str(bare), 2)
    with pytest.raises(ArgumentError, match="python is '/no/such/python': No such file"):
        find_launcher("/no/such/python", 2)
    bare.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(ArgumentError, match="launcher is 'no-such-launcher', which is not there"):
        find_launcher(str(bare), 2, "no-such-launcher")


# -- processes -------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_and_new_ones_are_started():
    with Ranks("gloo", 2) as gloo:
        before, folder = gloo.reduce(SUM), folder_of(gloo)
        victim = max(ranks_running(folder))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(TargetError, match=r"3 elements, 2 ranks, in place: rank . ended"):
            gloo.reduce(SUM)
        assert ranks_running(folder) == []
        assert [x.tolist() for x in gloo.reduce(SUM)] == [x.tolist() for x in before]
        folder = folder_of(gloo)
        assert len(ranks_running(folder)) == 2
    assert ranks_running(folder) == []


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_and_all_are_ended():
    with Ranks("gloo", 2, timeout_s=1.0) as gloo:
        gloo.reduce(SUM)
        folder = folder_of(gloo)
        stopped = max(ranks_running(folder))
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(TargetError, match=r"no answer of rank|rank \d"):
            gloo.reduce([torch.ones(70_000), torch.ones(70_000)])
        assert ranks_running(folder) == []


@pytest.mark.slow
def test_what_a_rank_raises_is_told_and_the_ranks_go_on():
    with Ranks("gloo", 2) as gloo:
        folder = folder_of(gloo)
        with pytest.raises(TargetError, match="float8_e5m2, 3 elements, 2 ranks, in place, rank 0"):
            gloo.reduce([x.to(torch.float8_e5m2) for x in SUM])
        assert gloo.reduce(SUM)[1].tolist() == [3.0, 3.0, 3.0]
        assert folder_of(gloo) == folder


@pytest.mark.slow
def test_no_rank_outlives_an_auditor_that_is_killed(tmp_path):
    script = """
        import time, torch
        from pyringar.audit.ranks import Ranks
        ranks = Ranks("gloo", 2)
        ranks.reduce([torch.ones(1), torch.ones(1)])
        print(ranks._errors.parent.name, flush=True)
        time.sleep(60)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as auditor:
        folder = auditor.stdout.readline().strip()
        assert len(ranks_running(folder)) == 2
        auditor.kill()
    deadline = time.monotonic() + 10
    while ranks_running(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks_running(folder) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "pyringar", "audit", "gloo", "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as auditor:
        deadline = time.monotonic() + 60
        while len(ranks_running(str(tmp_path))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        auditor.send_signal(signal.SIGINT)
        assert auditor.wait(30) == 130
        assert auditor.stderr.read() == "pyringar audit: interrupted\n"
    assert ranks_running(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_that_do_not_start_say_why():
    with pytest.raises(TargetError, match=r"did not start: .*invalid|did not start: .*nonsense"):
        Ranks("ringar", 2, order="nonsense").reduce(SUM)


# -- the command -----------------------------------------------------------------------------------

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


def test_the_command_prints_a_table_or_a_document(solution, capfd):
    words = ["audit", f"{solution}:allreduce", "--ranks", "5", "--sizes", "1,8,300"]
    assert main(words) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("solution.py:allreduce, 5 ranks\n\nthe sum\n  is right  yes")
    assert "\n  1 to 300 elements  rank  (((0+1)+2)+3)+4\n" in printed
    assert main([*words, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["target"], document["ranks"]) == ("solution.py:allreduce", 5)


@pytest.mark.slow
def test_a_function_that_never_returns_ends(solution, capfd):
    words = ["audit", f"{solution}:mute", "--ranks", "2", "--sizes", "8", "--timeout", "0.5"]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert "no answer in time" in printed.out
    assert "called" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["glo"], "TARGET is 'glo', expected one of gloo, ringar, nccl, mpi, MODULE:FUNCTION, "
                  "FILE.py:FUNCTION; did you mean 'gloo'?"),
        (["gloo", "--ranks", "1"], "--ranks is 1, expected 2 to 30"),
        (["gloo", "--sizes", "1,x"], "--sizes is '1,x', expected numbers from 1 to"),
        (["gloo", "--sizes", "0"], "--sizes is '0', expected numbers from 1 to"),
        (["gloo", "--timeout", "0"], "--timeout is 0, expected a positive number of seconds"),
        (["gloo", "--order", "rank"], "--order is 'rank', but only the target ringar takes one"),
        (["gloo", "--python", "x"], "--python is 'x', but only the target mpi takes one"),
        (["mpi", "--python", "/no/such"], "--python is '/no/such': No such file or directory"),
        (["no_such_file.py:f"], "there is no file 'no_such_file.py'"),
        (["no_such_module:f"], "nothing was audited: there is no module 'no_such_module'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(words, message, capfd):
    assert main(["audit", *words]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"pyringar audit: {message}")
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_nccl_without_gpus_says_what_is_missing(capfd):
    assert main(["audit", "nccl", "--ranks", "2"]) == 2
    assert "--ranks is 2, but nccl needs a GPU for each, and there are" in capfd.readouterr().err


@pytest.mark.slow
def test_inputs_are_left_as_they_are():
    inputs = wide_values(2, 100, torch.float32)
    before = [x.clone() for x in inputs]
    with Ranks("gloo", 2) as gloo:
        for way in gloo.ways:
            gloo.reduce(inputs, way, [7, 50])
    assert all(map(torch.equal, inputs, before))
