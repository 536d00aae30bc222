"""Does the command line answer at once, say in one line what is wrong, and end as others do?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import pyringar
from pyringar.cli import _COMMANDS, main

COMMAND = [sys.executable, "-m", "pyringar"]

WITHOUT_TORCH = """
import sys
from pyringar.cli import main

for argv in {lines!r}:
    try:
        main(argv)
    except SystemExit:
        pass
    heavy = {{"torch", "numpy", "matplotlib"}} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""


def run(argv: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv.split()], stderr=subprocess.PIPE, text=True, timeout=60, **options
    )


def refused(capsys: pytest.CaptureFixture[str], argv: str) -> str:
    try:
        status = main(argv.split())
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err.rstrip("\n")


def test_help_imports_no_torch():
    lines = [[], ["--help"], ["--version"], ["trian"], ["train", "lenet", "--rank", "2"]]
    lines += [[name, "--help"] for name in _COMMANDS]
    program = WITHOUT_TORCH.format(lines=lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SHOWN = {
    "--help": "check",
    "--version": f"pyringar {pyringar.__version__}\n",
    "check --help": "This runs the code that it grades, with your rights",
}


@pytest.mark.parametrize("argv", [*SHOWN, *(f"{name} --help" for name in _COMMANDS)])
def test_help_fits_a_terminal(argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(argv.split())
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert " ".join(SHOWN.get(argv, "usage").split()) in " ".join(shown.split())
    if argv == "--help":
        assert main([]) == 0
        assert capsys.readouterr().out == shown
        assert all(f"\n    {name} " in shown for name in _COMMANDS)


@pytest.mark.parametrize("argv", ["info", "build --no-cuda"])
def test_tables_fit_a_terminal(argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    too_long = [line for line in lines if len(line) > 80]
    assert [line for line in too_long if not re.search(r"[ (]/", line)] == []  # but for paths
    assert main([*argv.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("trian", "pyringar: COMMAND is 'trian', expected one of train, "),
        ("--frobnicate", "pyringar: there is no option --frobnicate (pyringar --help)"),
        ("info --jsn", "pyringar info: there is no option --jsn; did you mean '--json'?"),
        ("info now", "pyringar info: 'now' is one argument too many"),
        ("train lenet --rank 3", "pyringar train: there is no option --rank; did you mean '--rank"),
        ("train lenet --ranks", "pyringar train: --ranks: expected one argument"),
        ("train lenet --lr fast", "pyringar train: --lr is 'fast', expected a number"),
        ("train", "pyringar train: the following arguments are required: model"),
        ("train lenett", "pyringar train: model is 'lenett', expected one of lenet, resnet18; did"),
        ("train lenet --allreduce rings", "--allreduce is 'rings', expected one of auto, fused, "),
        ("train lenet --ranks 0", "pyringar train: --ranks is 0, expected a whole number, 1 or"),
        ("train lenet --devices gpu:0", "pyringar train: --devices[0] is 'gpu:0', expected a"),
        ("train lenet --devices cuda:91", "--devices[0] is 'cuda:91', which is not on this"),
        ("train lenet --ranks 3 --devices cpu,cpu", "--ranks is 3, but devices names 2"),
        ("train lenet --weights auto", "--weights: 'auto' is not numbers"),
        ("train lenet --plot curve.pdf", "--plot is 'curve.pdf', expected"),
    ],
)
def test_mistake_is_one_line(argv, message, capsys):
    line = refused(capsys, argv)
    assert message in line
    assert "ArgumentError" not in line


def test_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = run("--help", stdout=pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = run("--help", stdout=full)
    assert done.stderr == "pyringar: standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "pyringar info: interrupted"),
        (pyringar.BuildError("no engine"), 1, "pyringar info: no engine"),
        (pyringar.ArgumentError("json is odd"), 2, "pyringar info: --json is odd"),
        (PermissionError(13, "Permission denied", "/x"), 1, "pyringar info: /x: Permission denied"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_are_one_line(error, status, line, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("pyringar.cli.info.gather", fail)
    monkeypatch.setattr("pyringar.cli._forget_stdout", lambda: None)
    assert main(["info"]) == status
    assert capsys.readouterr() == ("", f"{line}\n" if line else "")
