"""`pyringar run` and the pytest plugin."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import run_programs
from torch.distributed import init_process_group

from pyringar import pytest_plugin
from pyringar.cli import main

PROGRAM = '''
import argparse, os, pickle, sys
import torch
import torch.distributed as dist
from beside import number

class Thing:
    """Pickled by name, as a part of __main__."""

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="")
    fail = parser.parse_args().fail
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    things = [None] * dist.get_world_size()
    dist.all_gather_object(things, Thing())
    assert all(type(thing) is Thing for thing in things)
    if fail == "raise" and rank == 1:
        raise ValueError("bad weights")
    if fail == "exit" and rank == 1:
        sys.exit(3)
    if fail == "mismatch" and rank == 1:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    print(rank, os.environ["LOCAL_RANK"], number, __name__, os.path.basename(sys.argv[0]))
    dist.destroy_process_group()
    sys.exit(0)

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("number = 7\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print('a package', __name__)\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "train.py"
    for name in [n for n in sys.modules if n.partition(".")[0] in ("beside", "package")]:
        del sys.modules[name]


def test_torchrun_program_runs(program, capsys):
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    assert main(["run", "--ranks", "3", str(program)]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"{rank} {rank} 7 __main__ train.py" for rank in range(3)]
    assert main(["run", "--processes", "--ranks", "2", str(program)]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[rank {rank}] {rank} {rank} 7 __main__ train.py" for rank in range(2)]
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


def test_script_has_absolute_file_path(tmp_path, monkeypatch, capsys):
    script = "import os\nos.chdir('/')\nprint(open(__file__).read()[:9])\n"
    (tmp_path / "script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--ranks", "2", "script.py"]) == 0
    assert capsys.readouterr().out == "import os\n" * 2


def test_run_accepts_module_name(program, capsys):
    assert main(["run", "--ranks", "2", "-m", "train"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["run", "--ranks", "2", "-m", "package"]) == 0
    assert capsys.readouterr().out == "a package __main__\n" * 2


def test_rank_error_prints_python_traceback(program, capsys):
    assert main(["run", "--ranks", "3", str(program), "--fail", "raise"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n  File ")
    assert "pyringar/" not in error.replace(str(program.parent), "")
    assert 'raise ValueError("bad weights")' in error
    for options in ([], ["--processes"]):
        with pytest.raises(SystemExit, match="3"):
            main(["run", *options, "--ranks", "3", str(program), "--fail", "exit"])


def test_mismatch_prints_rank_error(program, capsys):
    assert main(["run", "--ranks", "3", "--seed", "5", str(program), "--fail", "mismatch"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pyringar.errors.ArgumentError: ranks call different things")
    assert "rank 1: barrier" in error
    assert "seed=5 repeats this run" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.py"], "script is 'nothing.py', expected a Python file: no such file"),
        (["-m", "no.such.module"], "script is 'no.such.module', expected a module"),
        (["--ranks", "0", "train.py"], "--ranks is 0, expected a whole number, 1"),
        (["--ranks", "2", "--devices", "cpu", "train.py"], "--devices has 1 entries, expected 2"),
        (["--seed", "-1", "train.py"], "--seed is -1"),
        (["--timeout", "0", "train.py"], "--timeout is 0"),
        (["--processes", "--seed", "3", "train.py"], "--seed is 3, expected 0"),
    ],
)
def test_error_names_wrong_run_option(program, capsys, arguments, text):
    assert main(["run", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_option_after_script_gives_hint(program, capsys):
    (program.parent / "plain.py").write_text("print('ran')  # --ranks\n")
    arguments = ["--ranks", "2", "plain.py", "--seed=3", "--ranks", "3", "--other"]
    assert main(["run", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out == "ran\n" * 2
    assert [line.split()[2] for line in err.splitlines()] == ["--ranks", "--seed"]
    assert "belongs to plain.py; an option of pyringar goes before it" in err
    (program.parent / "plain.py").write_text("print('--seed')\n")
    assert main(["run", "plain.py", "--seed", "3"]) == 0
    assert capsys.readouterr().err == "", "the script has this option"


TESTS = """
import os, pytest, unittest, torch, torch.distributed as dist

@pytest.fixture(params=[2, 3])
def numel(request):
    return request.param

@pytest.mark.ranks(4)
def test_sum(numel):
    mine = torch.ones(numel)
    dist.all_reduce(mine)
    assert mine.tolist() == [4.0] * numel

@pytest.mark.ranks(3)
def test_fails_on_one_rank():
    assert dist.get_rank() != 1, "rank one"

@pytest.mark.ranks(2, seed=4)
def test_deadlock():
    dist.recv(torch.ones(1), 1 - dist.get_rank())

@pytest.mark.ranks(2)
def test_exits():
    raise SystemExit(0)

@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not here")

orders = []

@pytest.mark.ranks(2)
def test_orders():
    dist.barrier()
    orders.append(dist.get_rank())

def test_fixture(launch_ranks):
    assert launch_ranks(lambda: 3, 2) == [3, 3]

@pytest.mark.ranks(2)
async def test_async():
    pass

class TestUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        pass

@pytest.mark.ranks(2)
def test_patches(monkeypatch):
    monkeypatch.setenv("RANK", "77")

def test_nothing_is_left_of_patches():
    assert "RANK" not in os.environ

def test_seeds_were_tried():
    pairs = {tuple(orders[i : i + 2]) for i in range(0, len(orders), 2)}
    assert len(orders) == 20 and pairs == {(0, 1), (1, 0)}
"""


# Name the plugin: pytest does not find it if pyringar is only on PYTHONPATH.
PYTEST = """
import sys, pytest
sys.exit(pytest.main(sys.argv[1:], plugins=["pyringar.pytest_plugin"]))
"""


def test_marked_tests_run_on_ranks(tmp_path):
    (tmp_path / "test_theirs.py").write_text(TESTS)
    options = ["-n", "0", "-rs", "-p", "no:cacheprovider", "-p", "no:pyringar", "-c", "/dev/null"]
    words = [*options, "--strict-markers", "--ranks-seeds", "10", tmp_path]
    (done,) = run_programs(PYTEST, words, timeout_s=100)
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "5 failed, 7 passed, 1 skipped" in told, told
    assert "mark 'ranks' needs a function, not async def" in told
    assert "mark 'ranks' needs a function, not a TestCase" in told
    assert "AssertionError: rank one" in told
    assert "raised by rank 1 of 3" in told or sys.version_info < (3, 11)
    assert "CollectiveTimeout: all ranks wait for each other" in told
    assert "seed=4 repeats this run" in told
    assert told.count("rank  state") == 1, "the table of all ranks"
    assert "not here" in told
    assert "the test ended with SystemExit(0)" in told
    assert "pytest_plugin.py" not in told, "failures do not show frames of the plugin"


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    torch.__version__.split(".")[:2] < ["2", "14"],
    reason="torch's tests profile on every rank, which older ones can do once in a process",
)
def test_torch_distributed_suite_passes():
    pytest.importorskip("expecttest", reason="torch's tests need expecttest")
    script = Path(__file__).with_name("torch_suite_threads.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=380, check=False
    )
    found = re.match(r"(\d+) passed, ", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found is not None
    assert int(found[1]) >= 80


@pytest.mark.ranks(3, processes=True)
def test_ranks_mark_starts_processes(tmp_path):
    assert multiprocessing.current_process().pid != os.getppid()
    mine = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(mine)
    assert mine.tolist() == [3.0] * 2
    (tmp_path / str(dist.get_rank())).touch()


@pytest.mark.parametrize("processes", [False, True])
def test_init_replaces_group_of_mark(launch_ranks, processes):
    def body():
        dist.all_reduce(torch.ones(1))
        init_process_group("gloo")  # replaces the default group of the mark
        assert dist.get_backend() == ("gloo" if processes else "ringar")
        dist.all_reduce(mine := torch.ones(1))
        assert mine.item() == 2
        with pytest.raises(ValueError, match="twice"):
            init_process_group("gloo")
        dist.destroy_process_group()

    launch_ranks(pytest_plugin._run_test, 2, processes=processes, args=(body, {}))


@pytest.mark.ranks(2, processes=True)
def test_ranks_mark_skips_in_processes():
    pytest.skip("a rank may skip")


@pytest.mark.ranks(2, processes=True)
@pytest.mark.xfail(strict=True, reason="its assertion is wrong on both ranks")
def test_ranks_mark_fails_in_processes():
    assert dist.get_rank() == 5
