"""PTX as nvcc writes it, the program that runs it, and PTX with faults in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripts

import test_stress
from test_cuda_emulated import MISTAKES, SHARED, Mistake
from test_stress import CSRC, RUN_TIMEOUT_S

from pyringar.engine import compile as _compile
from pyringar.engine import toolchain

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
STEMS = (*(f"kernels_{dtype}" for dtype in DTYPES), "peers")
ARCH = "90"

# Of main.cpp; those that run kernels.
PARTS = ("fused-all", "fused-mean", "fused", "direct-all", "direct", "peers")
PARTS += ("ring-all", "ring", "ring-orders", "ring-withheld")

CXX_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
INCLUDES = tuple(f"-I{at}" for at in (CSRC, TESTS / "cpp", TESTS / "cpp/cuda", FOLDER))
KERNEL_TESTS = [TESTS / f"cpp/cuda/{name}.cpp" for name in ("fused_test", "ring_test", "tensors")]
CORES = len(os.sched_getaffinity(0))
SOURCES = [*sorted(FOLDER.glob("*.cpp")), *KERNEL_TESTS, *SHARED]


def compile_all(commands: Sequence[Sequence[str | Path]]) -> None:
    """Run compilers on all cores: nothing else runs beside `pytest tests/ptx`."""
    test_stress.compile_all(commands, CORES)


def build(folder: Path, *more: str) -> Path:
    """Compile the program."""
    compiler = ["g++", *CXX_FLAGS, *WARNINGS, *INCLUDES, *more]
    objects = {source: folder / f"{source.stem}.o" for source in SOURCES}
    compile_all([[*compiler, "-c", source, "-o", made] for source, made in objects.items()])
    program = folder / "ptx"
    compile_all([[*compiler, *objects.values(), "-o", program]])
    return program


def write_ptx(
    folder: Path, csrc: Path = CSRC, stems: Sequence[str] = STEMS, arch: str = ARCH
) -> Path:
    """Have nvcc write the PTX of files of ``csrc/cuda``, with the flags of the build."""
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    nvcc = [*toolkit.nvcc.command, *_compile.NVCC_FLAGS, f"-arch=compute_{arch}", "-ptx"]
    compile_all(
        [
            [*nvcc, f"-I{csrc}", csrc / f"cuda/{stem}.cu", "-o", folder / f"{stem}.ptx"]
            for stem in stems
        ]
    )
    return folder


def run(program: Path, ptx: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program; its output, errors included, is in `stdout`."""
    command = [program, "--ptx", ptx, *arguments]
    return test_stress.run([str(word) for word in command], RUN_TIMEOUT_S)


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
    """What is planted, in PTX or in the source that nvcc reads, and what must be said of it."""

    name: str
    planted: Edit | Mistake
    said: str
    part: str = "ring"
    dtype: str = "int32"  # that is compiled again

    def plant(self, folder: Path, good: Path) -> Path:
        """Make a folder of PTX with the fault, from one without."""
        ptx = folder / "ptx"
        shutil.copytree(good, ptx)
        if isinstance(self.planted, Mistake):
            return write_ptx(ptx, self.planted.plant(folder), [f"kernels_{self.dtype}"])
        for path in ptx.glob("kernels_*.ptx"):
            path.write_text(self.planted(path.read_text()))
        return ptx


PAST_A_TILE = Mistake(
    "fused.cuh",
    "if (at < vectors.end) UnitFold",
    "if (at < vectors.end + 1) UnitFold",
)
FAULTS = [
    Fault("release dropped", _sub(r"fence\.acq_rel\.\w+;", ""), "a race on slots"),
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
    Fault("payload after flag", MISTAKES["flag-before-barrier"], "a race on"),
    Fault("a slot too few", MISTAKES["slot-too-few"], "a race on slots"),
    Fault(
        "one byte past a tile",
        PAST_A_TILE,
        "16 bytes that are nobody's, at the input",
        "fused",
        "int8",
    ),
    Fault(
        "a kernel parameter misaligned",
        _sub(r"(ld\.param\.u64\s+%rd\d+, \[%rd\d+\+)8\]", r"\g<1>12]"),
        "its address is not a multiple of 8: parameters + 12",
    ),
    Fault(
        "the last rank added first",
        MISTAKES["last-source-first"],
        "CHECK(same) failed: fused ",
        "fused",
        "float32",
    ),
]
