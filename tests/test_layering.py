"""Do the floors hold: imports and includes point down only, and every C++ header stands alone?

The floors are drawn in docs/architecture.md. A new module takes its place in ORDER here.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyringar.engine import compile, toolchain
from pyringar.errors import BuildError

ROOT = Path(__file__).resolve().parents[1]

# Ground first. A module may import what stands before it; `__init__` is the public names.
ORDER = {
    "errors": [],
    "choices": [],
    "lazy": [],
    "engine": ["files", "levels", "toolchain", "compile", "build", "load"],
    "comm": [
        *["shown", "exits", "threads", "jobs", "auto", "ring_schedule", "topology", "arrays"],
        *[
            "float_mode",
            "reference",
            "arguments",
            "orders",
            "work",
            "base",
            "operators",
            "plain_group",
            "communicator",
            "default_group",
            "member",
        ],
        *["stores", "rendezvous"],
        *["shared_tensors", "process_communicator"],
    ],
    "ops": [],
    "parallel": [
        *["shards", "bucket_step", "bucket_params", "bucket_ranks", "own_memory"],
        *["bucketer", "replicate", "rank_threads", "batchnorm", "nested"],
        *["sharded_step", "replicated", "module"],
    ],
    "distributed": [],
    "predict": [],
    "audit": ["trees", "probes", "report", "questions", "rank", "ranks"],
    "grading": [
        *["cases", "lists", "solution", "checks", "grader"],
        *["marks", "arena", "processes", "worker", "remote"],
    ],
    "train": [],
    "cluster": [],
    "figures": [],
    "__init__": [],
    "pytest_plugin": [],
    "cli": [],
    "__main__": [],
}
# The same as one list: where a room has an order inside, its modules stand for it.
FLOORS = [
    f"{room}.{module}" if module else room
    for room, modules in ORDER.items()
    for module in (modules or [""])
]
GROUND = {"errors", "choices", "lazy"}  # whoever wants may stand on it
MAX_ARROWS = 37  # between the other rooms
MAX_FILE_LINES = 600
# What `pip install .` runs before torch is there.
WITHOUT_TORCH = ["errors", "choices", "lazy", *(f"engine/{module}" for module in ORDER["engine"])]
# Slow to import or not always there: only inside the functions that need them.
ONLY_IN_FUNCTIONS = {"torchvision", "matplotlib", "tqdm", "cupy", "IPython", "platformdirs"}

# What a file may include of ours, by its folder in csrc.
INCLUDES = {
    "core": {"core"},
    "os": {"core", "os"},
    "cpu": {"core", "os", "cpu"},
    "process": {"core", "os", "cpu", "process"},
    "cuda": {"core", "cuda"},
    "cuda_process": {"core", "os", "cuda", "process", "cuda_process"},
    "bucket": {"core", "bucket"},
    "bindings": {"core", "os", "cpu", "process", "bucket", "bindings"},
}
CUDA_BINDINGS = "bindings/cuda_"  # these files may include the CUDA floors
CUDA_FLOORS = {"cuda", "cuda_process"}
CUDA_HEADERS = {"cuda.h", "cuda_runtime.h", "nvtx3/nvToolsExt.h"}
# Where nvcc does not compile the kernels, the tests' emulator brings CUDA's words.
EMULATED_FILE, EMULATOR = "cuda/device.cuh", "cuda_emulator.h"
# How the CUDA engine orders memory is one file's business.
MEMORY_ORDER = re.compile(r"\b(ld\.acquire|st\.release|fence\.|__threadfence|atomicCAS|membar)")
MEMORY_ORDER_FILE = "cuda/flag.cuh"
# Standard headers with which the ground could start or stop a thread.
THREADS = {"thread", "mutex", "condition_variable", "future", "semaphore", "barrier", "latch"}
THREADS |= {"shared_mutex", "stop_token"}
# Streams and locales break where a static libstdc++ mixes with torch's shared one.
LOCALES = {"iostream", "istream", "ostream", "sstream", "fstream", "syncstream", "streambuf"}
LOCALES |= {"filesystem", "format", "iomanip", "ios", "locale", "print", "regex"}
POSIX = {"pthread.h", "sched.h", "time.h", "unistd.h", "errno.h", "fcntl.h", "signal.h"}
POSIX |= {"dirent.h", "dlfcn.h", "sys/mman.h", "sys/stat.h", "sys/types.h", "sys/wait.h"}
INTRINSICS = {"immintrin.h", "arm_neon.h"}
# Only Linux has these, so only one file may: the rest builds elsewhere.
LINUX_ONLY = {"linux/futex.h", "sys/syscall.h"}
LINUX_FILE = "os/wait.cpp"
TEST_PATH = r"tests/[\w/]+\.\w+"

SOURCE_SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
CSRC_FILES = sorted(
    p.relative_to(ROOT / "csrc").as_posix()
    for p in (ROOT / "csrc").rglob("*")
    if p.suffix in SOURCE_SUFFIXES
)


# -- Python ----------------------------------------------------------------------------------------


def module_name(path: Path, package: Path) -> str:
    """``pyringar/cli/check.py`` is ``pyringar.cli.check``; ``__init__.py`` is its package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, also inside functions and by string."""
    name = module_name(path, package)
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*up, base]) if base else ".".join(up)
            # `from pyringar import _native` imports a module, `import Communicator` a name.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def floor_of(dotted: str, package: Path) -> str:
    """The floor on which a dotted name below ``pyringar`` lives; "" for a room's own file."""
    parts = dotted.split(".")
    if len(parts) == 1:
        return "__init__"
    room = parts[1]
    if (package / room).is_dir():
        return (".".join(parts[1:3]) if len(parts) > 2 else "") if ORDER[room] else room
    return room if (package / f"{room}.py").is_file() else "__init__"


def upward_imports(package: Path) -> list[str]:
    """Every import in the package that does not point down, as text."""
    found = []
    for path in sorted(package.rglob("*.py")):
        floor = floor_of(module_name(path, package), package)
        for line, dotted in imported_modules(path, package):
            if dotted.split(".")[0] != package.name:
                continue
            target = floor_of(dotted, package)
            is_down = bool(floor and target) and FLOORS.index(target) < FLOORS.index(floor)
            if target != floor and not is_down:
                found.append(f"{path.relative_to(package.parent)}:{line} imports {target}")
    return found


def test_every_module_has_a_floor():
    package = ROOT / "pyringar"
    rooms = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/*.py")}
    assert rooms == set(ORDER)
    for room, modules in ORDER.items():
        if modules:
            names = {p.stem for p in (package / room).glob("*.py")}
            assert names == {*modules, "__init__"}, room


def test_python_imports_point_down():
    assert upward_imports(ROOT / "pyringar") == []


def test_few_rooms_know_of_each_other():
    package = ROOT / "pyringar"
    arrows = {
        (floor_of(module_name(path, package), package).split(".")[0], target.split(".")[0])
        for path in package.rglob("*.py")
        for _, dotted in imported_modules(path, package)
        if dotted.split(".")[0] == "pyringar" and (target := floor_of(dotted, package))
    }
    between = {(source, target) for source, target in arrows if source != target}
    assert len({arrow for arrow in between if arrow[1] not in GROUND}) <= MAX_ARROWS


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("errors.py", "from pyringar.comm import work\n"),
        ("errors.py", "from pyringar.comm.work import Work\n"),
        ("comm/work.py", "def f():\n    import pyringar.train.step\n"),
        ("comm/work.py", "def f():\n    from pyringar import allreduce\n"),
        ("comm/work.py", "from . import communicator\n"),
        ("comm/work.py", "from .communicator import allreduce\n"),
        ("comm/work.py", "import importlib\nimportlib.import_module('pyringar.cli')\n"),
        ("comm/__init__.py", "from pyringar.comm.work import Work\n"),
        ("train/step.py", "from pyringar.cli.check import run\n"),
        ("train/step.py", "from ..cli import check\n"),
    ],
)
def test_planted_upward_import_is_caught(tmp_path, file, text):
    package = tmp_path / "pyringar"
    rooms = {"": ["errors"], "comm": ["work", "communicator"], "train": ["step"], "cli": ["check"]}
    for room, modules in rooms.items():
        (package / room).mkdir(exist_ok=True)
        (package / room / "__init__.py").write_text("")
        for module in modules:
            (package / room / f"{module}.py").write_text("import pyringar.errors\n" * bool(room))
    assert upward_imports(package) == []
    (package / file).write_text(text)
    assert len(upward_imports(package)) == 1


@pytest.mark.parametrize("floor", WITHOUT_TORCH)
def test_the_build_needs_no_torch(floor):
    package = ROOT / "pyringar"
    for line, dotted in imported_modules(package / f"{floor}.py", package):
        assert dotted.split(".")[0] != "torch", f"{floor}.py:{line} imports {dotted}"


def test_no_file_is_too_long():
    folders = ("pyringar", "csrc", "tests", "benchmarks")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")]
    files = [p for p in files if p.suffix in {".py", *SOURCE_SUFFIXES}]
    assert len(files) > 200
    long = [str(p) for p in files if len(p.read_text().splitlines()) > MAX_FILE_LINES]
    assert long == []


def test_slow_packages_are_imported_in_functions():
    for path in sorted((ROOT / "pyringar").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            heavy = {name.split(".")[0] for name in names} & ONLY_IN_FUNCTIONS
            assert not heavy, f"{path.name}:{node.lineno} imports {heavy} for every user"


# -- C++ -------------------------------------------------------------------------------------------


def wrong_includes(csrc: Path) -> list[str]:
    """Every include in csrc that its floor does not allow, as text."""
    found = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCE_SUFFIXES):
        file = path.relative_to(csrc).as_posix()
        floor = file.split("/")[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if match and not is_allowed(floor, file, quoted=match[1] == '"', name=match[2]):
                found.append(f"{file}:{number} includes {match[2]}")
    return found


def is_allowed(floor: str, file: str, *, quoted: bool, name: str) -> bool:
    if quoted:
        extra = CUDA_FLOORS if file.startswith(CUDA_BINDINGS) else set()
        is_emulator = (file, name) == (EMULATED_FILE, EMULATOR)
        return is_emulator or name.split("/")[0] in INCLUDES[floor] | extra
    is_std = re.fullmatch(r"[a-z_]+", name) is not None and name not in LOCALES
    if floor == "core":
        return is_std and name not in THREADS
    if floor == "bindings":
        is_pybind11 = name.startswith("pybind11/") and name != "pybind11/iostream.h"
        return is_std or is_pybind11 or name == "Python.h"
    if floor in CUDA_FLOORS:
        return is_std or name in CUDA_HEADERS
    return is_std or name in POSIX | INTRINSICS or (name in LINUX_ONLY and file == LINUX_FILE)


def test_every_csrc_folder_has_a_floor():
    folders = {file.split("/")[0] for file in CSRC_FILES}
    assert folders <= set(INCLUDES), f"no place in INCLUDES: {sorted(folders - set(INCLUDES))}"


def test_cpp_includes_point_down():
    assert wrong_includes(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("floor", "line"),
    [
        ("core", '#include "cpu/ring.h"'),
        ("core", "#include <thread>"),
        ("core", "#include <sstream>"),
        ("os", "#include <fstream>"),
        ("cuda", "#include <regex>"),
        ("core", "#include <pthread.h>"),
        ("core", "#include <cuda_runtime.h>"),
        ("os", '#include "cpu/ring.h"'),
        ("cpu", '#include "bindings/tensor.h"'),
        ("cpu", '#include "process/group.h"'),
        ("cpu", "#include <torch/torch.h>"),
        ("cpu", "#  include <pybind11/pybind11.h>"),
        ("cpu", "#include <linux/futex.h>"),
        ("cpu", "#include <cuda_runtime.h>"),
        ("cuda", '#include "cpu/ring.h"'),
        ("cuda", '#include "bindings/tensor.h"'),
        ("cuda", '#include "cuda_emulator.h"'),
        ("cuda", "#include <c10/cuda/CUDAStream.h>"),
        ("cuda", "#include <cooperative_groups.h>"),
        ("bindings", '#include "cuda/group.h"'),
        ("bindings", "#include <iostream>"),
        ("bindings", "#include <pybind11/iostream.h>"),
        ("bindings", "#include <torch/extension.h>"),
        ("bindings", "#include <ATen/ATen.h>"),
        ("bindings", "#include <c10/util/Half.h>"),
    ],
)
def test_planted_include_is_caught(tmp_path, floor, line):
    for name in INCLUDES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "fine.h").write_text('#include <vector>\n#include "core/fine.h"\n')
    assert wrong_includes(tmp_path) == []
    (tmp_path / floor / "wrong.h").write_text(f"#include <vector>\n{line}\n")
    assert len(wrong_includes(tmp_path)) == 1


@pytest.mark.parametrize("kind", [compile.CPU, compile.CUDA], ids=lambda kind: kind.module)
def test_an_engine_is_made_of_all_that_it_includes(kind):
    csrc = ROOT / "csrc"
    files = {path.relative_to(csrc).as_posix() for path in compile.Recipe(csrc, kind=kind).files()}
    included = {
        name
        for file in files
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (csrc / file).read_text(), re.M)
    }
    assert included - files - {EMULATOR} == set()


def test_bindings_are_what_knows_python():
    """The files that include Python, themselves or through another of the bindings."""
    for file in CSRC_FILES:
        text = (ROOT / "csrc" / file).read_text()
        knows_python = re.search(r'#include (<pybind11/|<Python\.h|"bindings/)', text) is not None
        assert knows_python == file.startswith("bindings/"), file


def test_memory_order_is_in_one_file():
    files = [file for file in CSRC_FILES if file.startswith("cuda/")]
    found = [f for f in files if MEMORY_ORDER.search((ROOT / "csrc" / f).read_text())]
    assert found == [MEMORY_ORDER_FILE]


def header_comment(file: str) -> str:
    """The comment with which a file in csrc begins."""
    lines = (ROOT / "csrc" / file).read_text().splitlines()
    return "\n".join(itertools.takewhile(lambda line: line.startswith("//"), lines))


@pytest.mark.parametrize("file", CSRC_FILES)
def test_header_comment_says_what_where_and_tested_by_what(file):
    text = header_comment(file)
    assert text.startswith(f"// {Path(file).stem}: ")
    assert "\n// Tests     " in text


def test_named_tests_exist():
    """Header comments and READMEs say which test would fail; it must be there."""
    texts = {f"csrc/{file}": header_comment(file) for file in CSRC_FILES}
    texts |= {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
    named = {(t, name) for name, text in texts.items() for t in re.findall(TEST_PATH, text)}
    inside = (ROOT / "tests/README.md").read_text()
    named |= {(f"tests/{t}", "tests/README.md") for t in re.findall(r"`(\w+\.py)`", inside)}
    assert [(test, name) for test, name in sorted(named) if not (ROOT / test).is_file()] == []


def compiler() -> str | None:
    """A C++ compiler, as the build would look for one."""
    wanted = os.environ.get("CXX")
    return wanted or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)


def needs_cuda(header: str) -> bool:
    """Whether a header needs the CUDA toolkit's, itself or by what it includes."""
    path = ROOT / "csrc" / header
    names = re.findall(r'^#include [<"](.+)[>"]', path.read_text(), re.M) if path.exists() else []
    return not {"cuda.h", "cuda_runtime.h"}.isdisjoint(names) or any(map(needs_cuda, names))


def cuda_includes() -> tuple[Path, ...]:
    """Where cuda_runtime.h is; skips the test where there is no CUDA toolkit."""
    try:
        nvcc, host = toolchain.find_nvcc(), toolchain.find_compiler()
        return toolchain.read_cuda_toolkit(nvcc, host).includes
    except BuildError as error:
        pytest.skip(f"no CUDA toolkit: {error}")


@pytest.mark.thorough  # minutes, and what includes it in the engine is compiled each time
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("header", [file for file in CSRC_FILES if file.endswith(".h")])
def test_header_compiles_alone(tmp_path, header):
    """In a translation unit of its own, included twice."""
    import pybind11

    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{header}"\n#include "{header}"\n')
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    flags += ["-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]  # hidden: pybind11 wants it
    if needs_cuda(header):
        flags += [f"-isystem{folder}" for folder in cuda_includes()]
    if header.startswith("bindings/"):
        flags += [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"]
    command = [*shlex.split(compiler() or ""), *flags, str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
