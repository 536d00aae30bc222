"""Layers of csrc: files include only lower layers, and header comments name the tests.

`lint-imports` checks the layers of Python (`[tool.importlinter]` in pyproject.toml).
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from pyringar.engine import compile

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
FILES = sorted(p.relative_to(CSRC).as_posix() for p in CSRC.rglob("*") if p.suffix in SUFFIXES)
MAX_FILE_LINES = 600

# The folders of csrc that each folder may include.
INCLUDES = {
    "core": {"core"},
    "os": {"core", "os"},
    "cpu": {"core", "os", "cpu"},
    "process": {"core", "os", "cpu", "process"},
    "cuda": {"core", "cuda"},
    "cuda_process": {"core", "os", "cuda", "process", "cuda_process"},
    "bucket": {"core", "bucket"},
    "bindings": {"core", "os", "cpu", "process", "bucket", "bindings"},
    "bindings/cuda_": {"core", "os", "cuda", "process", "cuda_process", "bucket", "bindings"},
}
# The only include from outside csrc: tests/cpp compiles the kernels with this emulator.
EMULATOR = ("cuda/device.cuh", "cuda_emulator.h")
# Headers that only some files may include: pattern of the header -> pattern of these files.
RESTRICTED = {
    r"(torch|ATen|c10)/.*": r"(?!)",
    # Streams and locales break if a static libstdc++ mixes with torch's shared libstdc++.
    r".*stream|pybind11/iostream\.h|filesystem|format|iomanip|ios|locale|print|regex": r"(?!)",
    r"pybind11/.*|Python\.h": r"bindings/",
    r"cuda.*\.h|nvtx3/.*|cooperative_groups.*": r"cuda|bindings/cuda_",
    r"linux/.*|sys/syscall\.h": r"os/wait\.cpp",
    r"thread|mutex|shared_mutex|condition_variable|future|semaphore|barrier|latch|stop_token": (
        r"(?!core/)"
    ),
    r".*\.h": r"(?!core/)",  # headers of POSIX and intrinsics
}
MEMORY_ORDER = re.compile(r"\b(ld\.acquire|st\.release|fence\.|__threadfence|atomicCAS|membar)")


def wrong_includes(file: str, text: str) -> list[str]:
    floor = "bindings/cuda_" if file.startswith("bindings/cuda_") else file.split("/")[0]
    wrong = []
    for kind, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', text, re.MULTILINE):
        if kind == '"':
            is_allowed = name.split("/")[0] in INCLUDES[floor] or (file, name) == EMULATOR
        else:
            allowed = [files for header, files in RESTRICTED.items() if re.fullmatch(header, name)]
            is_allowed = all(re.match(files, file) for files in allowed)
        if not is_allowed:
            wrong.append(name)
    return wrong


def test_includes_follow_layers():
    found = {file: wrong_includes(file, (CSRC / file).read_text()) for file in FILES}
    assert {file: wrong for file, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("kind", [compile.CPU, compile.CUDA], ids=lambda kind: kind.module)
def test_engine_hash_covers_its_includes(kind):
    files = {path.relative_to(CSRC).as_posix() for path in compile.Recipe(CSRC, kind=kind).files()}
    texts = [(CSRC / file).read_text() for file in files]
    included = {n for text in texts for n in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)}
    assert included - files - {EMULATOR[1]} == set()


def test_one_file_orders_gpu_memory():
    files = [file for file in FILES if file.startswith("cuda/")]
    found = [file for file in files if MEMORY_ORDER.search((CSRC / file).read_text())]
    assert found == ["cuda/flag.cuh"]


def test_header_comments_name_file_and_tests():
    for file in FILES:
        lines = (CSRC / file).read_text().splitlines()
        comment = "\n".join(itertools.takewhile(lambda line: line.startswith("//"), lines))
        assert comment.startswith(f"// {Path(file).stem}: "), file
        has_header = Path(file).suffix != ".h" and (CSRC / file).with_suffix(".h").is_file()
        assert has_header or "\n// Tests     " in comment, file
        tests = re.findall(r"tests/[\w/]+\.\w+", comment)
        assert [test for test in tests if not (ROOT / test).is_file()] == [], file


def test_no_file_is_too_long():
    folders = ("pyringar", "csrc", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in {".py", *SUFFIXES}]
    long = [str(path) for path in files if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert long == []
