"""The code of docs/ and the scripts of examples/ run, and print the output on the page.

`mkdocs build --strict` checks links.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import Block, check_printed, commands_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# gloo itself may abort when a thread frees a Python object after interpreter exit (11 of 90 runs).
GLOO_ABORT = "terminate called without an active exception"


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status = process.wait(300)
        finally:
            process.terminate()  # torchrun kills its ranks, which are in other process groups
            process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed, errors = (folder / "stdout").read_text(), (folder / "stderr").read_text()
        assert status == 0, f"exit status {status}: {command}\n{printed}\n{errors}"
    return printed


def run_command(block: Block, files: dict[str, str], folder: Path) -> str:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    for name, code in files.items():
        (folder / name).write_text(code)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        code = block.code.replace("29500", str(free.getsockname()[1]))
    is_torch_alone = not any("pyringar" in text for text in (code, *files.values()))
    for _ in range(4 if is_torch_alone else 0):
        try:
            return run(["bash", "-euo", "pipefail", "-c", code], folder)
        except AssertionError as error:
            if GLOO_ABORT not in str(error):
                raise
    return run(["bash", "-euo", "pipefail", "-c", code], folder)


def check_commands(page: Path, folder: Path) -> None:
    before: dict[int, list[str]] = {}
    for block, files in commands_of(page):
        printed = run_command(block, files, folder)
        lines = sorted(printed.splitlines())  # ranks print in any order
        assert before.setdefault(block.line, lines) == lines, f"{page.name}:{block.line}"
        check_printed(page, block, printed)


def check_page(page: Path, folder: Path) -> None:
    run([sys.executable, str(Path(__file__).with_name("doc_pages.py")), str(page)], folder)
    check_commands(page, folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation_page_runs(page, tmp_path):
    check_page(page, tmp_path)


# Matches paths relative to the root, csrc/ or tests/.
_PATH = re.compile(
    r"(?<![\w./-])(?:csrc|pyringar|tests|benchmarks|docs|core|cpu|cuda|bucket|bindings|cpp|build)"
    r"/[\w./*-]*\w"
)
_NAMING = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "csrc/README.md"))]


def missing_paths(page: Path) -> set[str]:
    folders = (ROOT, page.parent, ROOT / "csrc", ROOT / "tests")
    names = set(_PATH.findall(page.read_text()))
    return {name for name in names if not any(any(f.glob(f"{name}*")) for f in folders)}


@pytest.mark.parametrize("page", _NAMING, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_docs_exist(page):
    assert missing_paths(page) == set()


SCRIPTS = ("book_loop.py", "ddp.py", "grade_class.py")
EXAMPLES = (ROOT / "examples/README.md").read_text(encoding="utf-8")
# The command and the output of each script in examples/README.md.
SHOWN = {
    name: re.search(rf"\$ (.*examples/{name}.*)\n([^`]*)", EXAMPLES).groups() for name in SCRIPTS
}


def shape(text: str) -> list[str]:
    """Replace numbers and digests by #, because another processor may round differently."""
    return sorted(re.sub(r" *(\b[0-9a-f]{12}\b|\d+(\.\d+)?)", "#", text).splitlines())


def run_example(name: str, folder: Path) -> str:
    command = shlex.split(SHOWN[name][0])
    program = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[command[0]]
    (folder / "examples").symlink_to(ROOT / "examples")
    return run([sys.executable, *program, *command[1:]], folder)


@pytest.mark.slow
def test_book_loop_example_learns(capsys):
    runpy.run_path(str(ROOT / "examples/book_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert shape(printed) == shape(SHOWN["book_loop.py"][1])
    *_, last = re.findall(r"accuracy (\d\.\d+)", printed)
    assert float(last) > 0.7
    assert printed.endswith("both ranks hold the same bits: True\n")


@pytest.mark.slow
def test_ddp_example_ranks_stay_equal(tmp_path):
    printed = run_example("ddp.py", tmp_path)
    assert shape(printed) == shape(SHOWN["ddp.py"][1])
    first, second = re.findall(r"has parameters (\w+)", printed)
    assert first == second


@pytest.mark.slow
def test_grade_class_example_writes_marks(tmp_path):
    printed = run_example("grade_class.py", tmp_path)
    shown = SHOWN["grade_class.py"][1]
    assert shape(printed) == shape(shown)
    assert re.findall(r"\d+/100", printed) == re.findall(r"\d+/100", shown)
    with (tmp_path / "marks.csv").open(newline="", encoding="utf-8") as file:
        rows = {Path(row["file"]).stem: row for row in csv.DictReader(file)}
    assert rows["ada"]["marks"] == rows["ada"]["out_of"]
    assert [rows[name]["first_look_at"] for name in ("ben", "cleo")] == ["in place", "sum"]
