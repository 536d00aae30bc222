"""The scripts in examples/ run as examples/README.md says, and print what it shows."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "examples/README.md").read_text(encoding="utf-8")
# The command and the output of every script.
SHOWN = {name: re.search(rf"\$ (.*examples/{name}.*)\n([^`]*)", PAGE).groups() for name in SCRIPTS}


def shape(text: str) -> list[str]:
    """Lines with # for numbers and digests: another processor may round otherwise."""
    return sorted(re.sub(r" *(\b[0-9a-f]{12}\b|\d+(\.\d+)?)", "#", text).splitlines())


def run(name: str, folder: Path) -> str:
    command = shlex.split(SHOWN[name][0])
    program = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]
    (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *program, *command[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_book_loop_learns(capsys):
    runpy.run_path(str(ROOT / "examples/book_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert shape(printed) == shape(SHOWN["book_loop.py"][1])
    *_, last = re.findall(r"accuracy (\d\.\d+)", printed)
    assert float(last) > 0.7
    assert printed.endswith("both ranks hold the same bits: True\n")


@pytest.mark.slow
def test_ddp_ranks_stay_equal(tmp_path):
    printed = run("ddp.py", tmp_path)
    assert shape(printed) == shape(SHOWN["ddp.py"][1])
    first, second = re.findall(r"has parameters (\w+)", printed)
    assert first == second


@pytest.mark.slow
def test_class_is_graded(tmp_path):
    printed = run("grade_class.py", tmp_path)
    assert shape(printed) == shape(SHOWN["grade_class.py"][1])
    with (tmp_path / "marks.csv").open(newline="", encoding="utf-8") as file:
        rows = {Path(row["file"]).stem: row for row in csv.DictReader(file)}
    assert rows["ada"]["marks"] == rows["ada"]["out_of"]
    assert [rows[name]["first_look_at"] for name in ("ben", "cleo")] == ["in place", "sum"]
