"""Does the code on the pages of docs/ do what they say, and is what they name there?"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cases import mostly_slow
from doc_pages import Command, blocks_of, changed, check_printed, commands_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITH_CODE = [p for p in PAGES if any(b.kind == "python" and not b.file_name for b in blocks_of(p))]
WITH_COMMANDS = [page for page in PAGES if list(commands_of(page))]
# Whatever names files of this repository.
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
TEXTS += [ROOT / "csrc/README.md", ROOT / "tests/README.md"]


# -- running ---------------------------------------------------------------------------------------


def end(process: subprocess.Popen[str]) -> None:
    """Ask first: torchrun's processes are in groups of their own, and it alone ends them."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()  # or it would stay in the group, dead
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class TorchAbortError(AssertionError):
    pass


def run(command: list[str], folder: Path, timeout_s: float = 100) -> str:
    """What a command prints; it and all that it has started are gone afterwards."""
    path = f"{folder}/bin:{os.environ['PATH']}"
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
            stdout=printed,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            end(process)
        printed.seek(0)
        errors.seek(0)
        text = printed.read()
        if "terminate called without an active exception" in (said := errors.read()):
            raise TorchAbortError(said)
        assert status == 0, f"exit status {status}: {command}\n{text}\n{said}"
    return text


def run_python(page: Path, folder: Path) -> None:
    run([sys.executable, str(Path(__file__).with_name("doc_pages.py")), str(page)], folder)


def run_command(command: Command, folder: Path) -> str:
    """Run it where its files are, with this very Python under the names that readers call it by."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    for name, code in command.files.items():
        (folder / name).write_text(code)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        code = command.code.replace("29500", str(free.getsockname()[1]))
    is_torch_alone = not any("pyringar" in text for text in (code, *command.files.values()))
    return run_again(["bash", "-euo", "pipefail", "-c", code], folder, 4 if is_torch_alone else 0)


def run_again(command: list[str], folder: Path, times: int) -> str:
    """Run it, so many times more where it ends as some of torch's processes do after backward().

    Of gloo's threads one may free what belongs to Python after the interpreter's end: of 90 runs of
    a page's script that uses torch alone 11 ended so.
    """
    for _ in range(times):
        with contextlib.suppress(TorchAbortError):
            return run(command, folder, timeout_s=300)
    return run(command, folder, timeout_s=300)


def sorted_lines(text: str) -> str:
    """Ranks print when they are ready."""
    return "".join(sorted(text.splitlines(keepends=True)))


def check_commands(page: Path, commands: list[Command], folder: Path) -> None:
    first = ""
    for command in commands:
        printed = run_command(command, folder)
        first = first or printed
        expected = command.printed
        if command.prints_as_before:
            expected, printed = sorted_lines(first), sorted_lines(printed)
        check_printed(page, command.line, expected, printed)


@pytest.mark.parametrize(
    "page", mostly_slow(WITH_CODE, DOCS / "hand-written-loop.md"), ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_python(page, tmp_path)


def test_the_pages_for_users_are_among_those_that_run() -> None:
    assert {page.stem for page in WITH_CODE} >= {"replace-dataparallel", "hand-written-loop"}
    assert {page.stem for page in WITH_COMMANDS} >= {"add-to-ddp", "hand-written-loop"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    check_commands(page, list(commands_of(page)), tmp_path)


# -- mistakes that these tests would find ----------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("assert 1 + 1 == 3, 'as planted'", "AssertionError: as planted"),
        ("1 / 0", r'page\.md", line 8'),
        ("print('two')\n```\n\n```text\nthree", r"prints\s+three\s+but it printed\s+two"),
    ],
)
def test_a_block_that_fails_is_noticed(tmp_path: Path, code: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n```python\nx = 1\n```\n\n```python\n{code}\n```\n")
    with pytest.raises(AssertionError, match=message):
        run_python(page, tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python train.py | cat\n```\n\n```text\nfour", "says that this prints\n\nfour"),
        ("python train.py 1 | cat", "exit status 1"),
        ("sleep 600 & exit 3", "exit status 3"),
    ],
)
def test_a_command_that_fails_is_noticed(tmp_path: Path, command: str, message: str) -> None:
    page = tmp_path / "page.md"
    script = "# train.py\nimport sys\nsys.exit(len(sys.argv) - 1)"
    page.write_text(f"```python\n{script}\n```\n\n```sh\n{command}\n```\n")
    with pytest.raises(AssertionError, match=message):
        check_commands(page, list(commands_of(page)), tmp_path)


def test_a_diff_is_applied_and_must_not_change_what_is_printed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    script = (
        "```python\n# train.py\nx = 1\ny = 2\nprint(x + y)\n```\n\n```sh\npython train.py\n```\n"
    )
    for added, is_right in (("y = 1 + 1", True), ("y = 3", False)):
        page.write_text(f"{script}\n```diff\n x = 1\n-y = 2\n+{added}\n```\n")
        commands = list(commands_of(page))
        assert [c.files["train.py"].splitlines()[2] for c in commands] == ["y = 2", added]
        if is_right:
            check_commands(page, commands, tmp_path)
        else:
            with pytest.raises(AssertionError, match=r"prints\s+3\s+but it printed\s+4"):
                check_commands(page, commands, tmp_path)


def test_a_diff_of_lines_that_are_not_there_is_refused() -> None:
    assert changed("a\nb\nc\n", "-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(ValueError, match="'b', which does not follow"):
        changed("a\nb\nc\n", " c\n-b\n")


# -- what the pages name ---------------------------------------------------------------------------

_FOLDERS = ("csrc", "pyringar", "tests", "benchmarks", "docs")
_IN_FOLDERS = ("core", "cpu", "cuda", "bucket", "bindings", "cpp", "build")  # of csrc and tests
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(_FOLDERS + _IN_FOLDERS)})/[\w./*{{}},-]*")
_FILE_NAME = re.compile(r"`([\w{},]+\.(?:py|md|cpp|cuh?|h|ipynb|toml))`")
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def paths_in(text: str) -> set[str]:
    """What looks like a path of this repository; braces expanded."""
    found = [match.rstrip(".,-") for match in _PATH.findall(text)] + _FILE_NAME.findall(text)
    expanded = set()
    for path in found:
        parts = [p.split(",") for p in re.split(r"[{}]", path)]
        parts[::2] = [[",".join(p)] for p in parts[::2]]  # outside of braces
        expanded |= {"".join(choice) for choice in itertools.product(*parts)}
    return expanded


def exists(path: str, text: Path, own_files: set[str]) -> bool:
    """Whether a path is there, from where a reader of ``text`` would look; suffixes may lack."""
    if "/" not in path:
        return path in own_files or any(ROOT.rglob(path))
    folders = (ROOT, text.parent, ROOT / "csrc", ROOT / "tests")
    return any(
        (f / path).exists() or any(f.glob(path + suffix))
        for f in folders
        for suffix in ("", ".*")
        if not path.endswith("/") or not suffix
    )


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_paths_that_are_named_exist(text: Path) -> None:
    own_files = {name for block in blocks_of(text) if (name := block.file_name)}
    missing = {p for p in paths_in(text.read_text()) if not exists(p, text, own_files)}
    assert not missing


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    broken = []
    for target in _LINK.findall(text.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        page = text.parent / name if name else text
        if not page.exists() or (anchor and anchor not in anchors_of(page)):
            broken.append(target)
    assert not broken


def test_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    text = tmp_path / "page.md"
    text.write_text("`csrc/core/no_such.h`, csrc/core/dtype.h, `no_such.py`, cpu/ring, [a](b.md#c)")
    with pytest.raises(AssertionError, match=r"csrc/core/no_such\.h"):
        test_paths_that_are_named_exist(text)
    missing = {p for p in paths_in(text.read_text()) if not exists(p, text, set())}
    assert missing == {"csrc/core/no_such.h", "no_such.py"}
    with pytest.raises(AssertionError, match=r"b\.md#c"):
        test_links_lead_somewhere(text)
    (tmp_path / "b.md").write_text("# B\n")
    with pytest.raises(AssertionError, match=r"b\.md#c"):
        test_links_lead_somewhere(text)
    (tmp_path / "b.md").write_text("# B\n\n## C\n")
    test_links_lead_somewhere(text)
