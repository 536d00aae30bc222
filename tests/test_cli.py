"""Test the command line: help, one-line errors, exit statuses, completion and progress."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import pyringar
from pyringar.cli import _COMMANDS, audit, main, status_line

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
    lines += [["help"], ["help", "train"], ["completion", "bash"]]
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
        assert all(re.search(rf"^    {name}\b", shown, re.M) for name in _COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["help", *argv.split()[:-1]])
    assert argv == "--version" or capsys.readouterr().out == shown


@pytest.mark.parametrize("argv", ["info", "build --no-cuda"])
def test_tables_fit_a_terminal(argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    too_long = [line for line in lines if len(line) > 80]
    assert [
        line for line in too_long if not re.search(r"[ (]/", line)
    ] == []  # lines with paths may be longer
    assert main([*argv.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("trian", "pyringar: COMMAND is 'trian', expected one of train, "),
        ("help trian", "pyringar: COMMAND is 'trian', expected one of train, "),
        ("--frobnicate", "pyringar: there is no option --frobnicate (pyringar --help)"),
        ("train lenet --batch 64", "there is no option --batch; did you mean '--batch-size'?"),
        ("info --jsn", "pyringar info: there is no option --jsn; did you mean '--json'?"),
        ("info now", "pyringar info: 'now' is one argument too many"),
        ("train lenet --rank 3", "pyringar train: there is no option --rank; did you mean '--rank"),
        ("train lenet --ranks", "pyringar train: --ranks: expected one argument"),
        ("train lenet --lr fast", "pyringar train: --lr is 'fast', expected a number"),
        ("train", "pyringar train: the following arguments are required: model"),
        ("run", "pyringar run: the following arguments are required: SCRIPT (pyringar run --help)"),
        ("run --nproc-per-node 2 a.py", "no option --nproc-per-node; did you mean '--ranks'?"),
        ("run --nproc_per_node=2 a.py", "no option --nproc_per_node; did you mean '--ranks'?"),
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
def test_wrong_arguments_print_one_line(argv, message, capsys):
    line = refused(capsys, argv)
    assert message in line
    assert "ArgumentError" not in line


@pytest.mark.parametrize(("count", "hint"), [(0, ""), (1, "; did you mean 'cuda'?")])
def test_device_hint_needs_a_gpu(count, hint, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    devices = ", ".join(["cpu", "cuda:0"][: count + 1])
    expected = f"on this machine there are: {devices}{hint}"
    assert refused(capsys, "train lenet --devices gpu").endswith(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pyringar tr", "train trace"),
        ("pyringar train ", "lenet resnet18"),
        ("pyringar train lenet --allr", "--allreduce"),
        ("pyringar train lenet --allreduce s", "sharded"),
        ("pyringar train lenet --save ", ""),
        ("pyringar completion ", "bash zsh"),
        ("pyringar audit ", "gloo ringar nccl"),
    ],
)
def test_bash_completes_words(line, expected, capsys):
    assert main(["completion", "bash"]) == 0
    words = line.split(" ")
    script = capsys.readouterr().out + (
        f"COMP_WORDS=({' '.join(words)} '') COMP_CWORD={len(words) - 1}\n"
        '_pyringar; echo "${COMPREPLY[*]}"'
    )
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (found.stdout.strip(), found.stderr) == (expected, "")


def test_zsh_script_loads_bash_completion(capsys):
    assert main(["completion", "zsh"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert ("bashcompinit" in second, "compinit" in first) == (True, True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [80, 100])
def test_log_line_replaces_progress_and_wraps(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    logger = logging.Logger("a test")
    logger.addHandler(status_line.LogHandler(is_verbose=False))
    status = status_line.STATUS
    monkeypatch.setattr(status, "_last_s", -1e9)
    status.show("progress " * 30)
    logger.warning("%s\nmore", "word " * 30)
    shown, logged = terminal.getvalue().rsplit("\r\x1b[K", 1)
    assert len(shown) == len("\r\x1b[K") + columns - 1
    assert " ".join(logged.split()) == f"pyringar: WARNING: {'word ' * 30}more"
    assert max(map(len, logged.splitlines())) <= columns


@pytest.mark.parametrize("is_verbose", [False, True])
def test_log_shows_start_of_compilation(is_verbose, capsys):
    """A warning of the module `compile` announces a compilation; other messages are details."""
    handler = status_line.LogHandler(is_verbose=is_verbose)
    for level in (logging.INFO, logging.WARNING):
        name = logging.getLevelName(level)
        handler.emit(logging.LogRecord("a test", level, "compile.py", 1, name, (), None))
    details = "pyringar: INFO\n" if is_verbose else ""
    assert capsys.readouterr().err == f"{details}pyringar: WARNING\n"


def test_status_line_shows_elapsed_seconds(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    status = status_line.StatusLine()
    with status.elapsed("compiling"):
        time.sleep(1.5)
    assert terminal.getvalue().startswith("\r\x1b[Kcompiling, 1 s so far")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_audit_shows_calls_and_time_left(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = itertools.count(0, 20)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    target = SimpleNamespace(name="gloo", ranks=2, ways=(), reduce=lambda *_: [])
    audit._Progressive(target, 10).reduce([])
    assert caplog.messages == ["auditing gloo: call 1 of about 10, about 6 min left"]


def test_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = run("--help", stdout=pipe)
    assert (done.returncode, done.stderr) == (141, "")


def test_full_disk_prints_one_line():
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
def test_errors_print_one_line(error, status, line, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("pyringar.cli.info.gather", fail)
    monkeypatch.setattr("pyringar.cli._forget_stdout", lambda: None)
    assert main(["info"]) == status
    assert capsys.readouterr() == ("", f"{line}\n" if line else "")
