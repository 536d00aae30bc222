"""PTX as nvcc writes it, the program that runs it, and PTX with faults in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pyringar.engine import compile as _compile
from pyringar.engine import toolchain
from pyringar.errors import CompilerNotFoundError

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
CSRC = TESTS.parent / "csrc"
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
STEMS = (*(f"kernels_{dtype}" for dtype in DTYPES), "peers")
ARCH = "90"

# Of main.cpp; those that run kernels.
PARTS = ("fused-all", "fused", "direct", "peers", "ring", "ring-orders", "ring-withheld")

CXX_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
INCLUDES = tuple(f"-I{at}" for at in (CSRC, TESTS / "cpp", TESTS / "cpp/cuda", FOLDER))
SHARED = [TESTS / f"cpp/{name}.cpp" for name in ("check", "oracle", "rounds")]
KERNEL_TESTS = [TESTS / f"cpp/cuda/{name}.cpp" for name in ("fused_test", "ring_test", "tensors")]
SOURCES = [*sorted(FOLDER.glob("*.cpp")), *KERNEL_TESTS, *SHARED]


def run_all(commands: Sequence[Sequence[str | Path]]) -> None:
    """Run compilers, as many at a time as there are cores; all must succeed."""

    def run(command: Sequence[str | Path]) -> str:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        )
        return "" if done.returncode == 0 else f"{' '.join(map(str, command))}\n{done.stderr}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failures = [failure for failure in pool.map(run, commands) if failure]
    assert not failures, "\n".join(failures)


def has_nvcc() -> bool:
    try:
        toolchain.find_nvcc()
    except CompilerNotFoundError:
        return False
    return True


def build(folder: Path, *more: str) -> Path:
    """Compile the program."""
    compiler = ["g++", *CXX_FLAGS, *WARNINGS, *INCLUDES, *more]
    objects = {source: folder / f"{source.stem}.o" for source in SOURCES}
    run_all([[*compiler, "-c", source, "-o", made] for source, made in objects.items()])
    program = folder / "ptx"
    run_all([[*compiler, *objects.values(), "-o", program]])
    return program


def write_ptx(
    folder: Path, csrc: Path = CSRC, stems: Sequence[str] = STEMS, arch: str = ARCH
) -> Path:
    """Have nvcc write the PTX of files of ``csrc/cuda``, with the flags of the build."""
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    nvcc = [*toolkit.nvcc.command, *_compile.NVCC_FLAGS, f"-arch=compute_{arch}", "-ptx"]
    run_all(
        [
            [*nvcc, f"-I{csrc}", csrc / f"cuda/{stem}.cu", "-o", folder / f"{stem}.ptx"]
            for stem in stems
        ]
    )
    return folder


def run(program: Path, ptx: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program; its output, errors included, is in `stdout`."""
    command = [program, "--ptx", ptx, *arguments]
    return subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )


# -- faults ----------------------------------------------------------------------------------------

Edit = Callable[[str], str]


def _sub(pattern: str, instead: str) -> Edit:
    def edit(text: str) -> str:
        edited, count = re.subn(pattern, instead, text)
        assert count, f"nothing to plant in: no {pattern}"
        return edited

    return edit


def _without_later_barriers(text: str) -> str:
    """Drop all barriers of a kernel but its first, which is behind what thread 0 sets up."""
    kernels = re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE)
    head, behind = "bar.sync \t0;", ""
    edited = []
    for kernel in kernels:
        first, *rest = re.split(r"bar\.sync\s+0;", kernel)
        edited.append(first + (head + behind.join(rest) if rest else ""))
    return "".join(edited)


@dataclass(frozen=True)
class Fault:
    """What is planted, in PTX or in a line of the source that nvcc reads, and what must be said."""

    name: str
    edit: Edit
    said: str
    part: str = "ring"
    file: str = ""  # of csrc/cuda; "": the PTX
    dtype: str = "int32"  # that is compiled again

    def plant(self, folder: Path, good: Path) -> Path:
        """Make a folder of PTX with the fault, from one without."""
        ptx = folder / "ptx"
        shutil.copytree(good, ptx)
        if not self.file:
            for path in ptx.glob("kernels_*.ptx"):
                path.write_text(self.edit(path.read_text()))
            return ptx
        csrc = folder / "csrc"
        shutil.copytree(CSRC, csrc)
        source = csrc / "cuda" / self.file
        source.write_text(self.edit(source.read_text()))
        return write_ptx(ptx, csrc, [f"kernels_{self.dtype}"])


FAULTS = [
    Fault("release dropped", _sub(r"fence\.acq_rel\.\w+;", ""), "a race on"),
    Fault(
        "fence narrowed to one device between devices",
        _sub(r"fence\.acq_rel\.sys;", "fence.acq_rel.gpu;"),
        "a race on",
    ),
    Fault(
        "flag narrowed to one device between devices",
        _sub(r"st\.relaxed\.sys\.", "st.relaxed.gpu."),
        "a race on",
    ),
    Fault(
        "acquire made relaxed",
        _sub(r"ld\.acquire\.(gpu|sys)", r"ld.relaxed.\1"),
        "a race on",
    ),
    Fault("a missing bar.sync before the fence", _without_later_barriers, "a race on"),
    Fault("no bar.sync at all", _sub(r"bar\.sync\s+0;", ""), "a race on shared memory"),
    Fault(
        "payload after flag",
        _sub(
            r"    if \(!is_settled_\) settle\(shared_\.scope\);\n(.*\n)(    signal.*\n)",
            r"\2    if (!is_settled_) settle(shared_.scope);\n\1",
        ),
        "a race on",
        file="ring.cuh",
    ),
    Fault(
        "a slot too few",
        _sub(r"n % args_\.num_slots", "n % (args_.num_slots - 1)"),
        "a race on",
        file="ring.cuh",
    ),
    Fault(
        "one byte past a tile",
        _sub(
            r"fold_packs<false>\(begin, vectors\.end\)", "fold_packs<false>(begin, vectors.end + 1)"
        ),
        "16 bytes that are nobody's, at the input",
        "fused",
        "fused.cuh",
        "int8",
    ),
    Fault(
        "a kernel parameter misaligned",
        _sub(r"(ld\.param\.u64\s+%rd\d+, \[%rd\d+\+)8\]", r"\g<1>12]"),
        "its address is not a multiple of 8: parameters + 12",
    ),
    Fault(
        "the last rank added first",
        _sub(r"sources_\[r\]", "sources_[table_.num_sources - 1 - r]"),
        "CHECK(same) failed: fused ",
        "fused",
        "fused.cuh",
        "float32",
    ),
]
