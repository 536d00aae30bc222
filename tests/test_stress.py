"""Run tests/cpp/stress.cpp with each sanitizer, compiler and instruction set.

All tests of this file have the mark `slow`; rarely run variants have the mark `thorough`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
STRESS = ROOT / "tests/cpp"
LAYERS = ("core", "os", "cpu", "process")
ENGINE_SOURCES = [path for layer in LAYERS for path in sorted((CSRC / layer).glob("*.cpp"))]

# -ffp-contract=off, as in the engine's build: the oracle must not use fused multiply-adds either.
BASE_FLAGS = ("-std=c++20", "-ffp-contract=off", "-pthread", f"-I{CSRC}")
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
COMPILE_TIMEOUT_S = 300
RUN_TIMEOUT_S = 600
JOBS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # compiler processes; xdist uses all cores


@dataclass(frozen=True)
class Variant:
    compiler: str
    flags: tuple[str, ...]
    seconds: float
    runner: tuple[str, ...] = ()


THREAD_FLAGS = ("-O1", "-g1", "-fsanitize=thread")
MEMORY_FLAGS = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
VARIANTS = {  # thorough variants run longer, since they run only before a release
    "plain": Variant("g++", ("-O1", NATIVE), 4),
    "thread": Variant("g++", (*THREAD_FLAGS, NATIVE), 12),
    "thread-clang": Variant("clang++", (*THREAD_FLAGS, NATIVE), 30),
    "thread-no-futex": Variant("g++", (*THREAD_FLAGS, NATIVE, "-DPYRINGAR_NO_FUTEX"), 30),
    "memory": Variant("g++", ("-O0", *MEMORY_FLAGS, NATIVE), 12),
    "memory-clang": Variant("clang++", ("-O1", *MEMORY_FLAGS, NATIVE), 30),
    "fast": Variant("g++", ("-O3", NATIVE), 30),
    "fast-clang": Variant("clang++", ("-O3", NATIVE), 30),
    # The fp16 code has three paths: AVX-512, F16C and integers. Wheels are built for x86-64.
    "x86-baseline": Variant("g++", ("-O2", "-march=x86-64"), 30),
    "x86-baseline-clang": Variant("clang++", ("-O2", "-march=x86-64"), 30),
    "x86-f16c": Variant("g++", ("-O2", "-march=x86-64-v3"), 30),
    "x86-f16c-clang": Variant("clang++", ("-O2", "-march=x86-64-v3"), 30),
    "x86-f16c-memory": Variant("g++", ("-O1", *MEMORY_FLAGS, "-march=x86-64-v3"), 30),
    "arm64": Variant(
        "aarch64-linux-gnu-g++", ("-O2", "-march=armv8-a", "-static"), 60, ("qemu-aarch64",)
    ),
}


def run(command: Sequence[str | Path], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def compile_all(commands: Sequence[Sequence[str | Path]], jobs: int = JOBS) -> None:
    def compile_one(command: Sequence[str | Path]) -> str:
        done = run(command, COMPILE_TIMEOUT_S)
        return "" if done.returncode == 0 else f"{' '.join(map(str, command))}\n{done.stdout}"

    with ThreadPoolExecutor(jobs) as pool:
        failures = [failure for failure in pool.map(compile_one, commands) if failure]
    assert not failures, "\n".join(failures)


def require(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def mostly_thorough(names: Iterable[str], *each_time: str) -> list[Any]:
    """Mark all names thorough, except the names in ``each_time``: a build is slow."""
    names = list(names)
    assert set(each_time) <= set(names), f"{each_time} are not all of {names}"
    return [
        pytest.param(name, marks=[] if name in each_time else pytest.mark.thorough)
        for name in names
    ]


def layer_units(folder: Path) -> Iterable[Path]:
    for layer in LAYERS:
        sources = [path for path in ENGINE_SOURCES if path.parent.name == layer]
        if sources:
            unit = folder / f"{layer}_layer.cpp"
            unit.write_text("".join(f'#include "{path}"\n' for path in sources))
            yield unit


def build(variant: Variant, folder: Path) -> Path:
    require(variant.compiler, *variant.runner)
    compiler = [variant.compiler, *BASE_FLAGS, *variant.flags]
    common = folder / "common.h"
    common.write_text(f'#include "{STRESS / "oracle.h"}"\n')
    suffix = ".pch" if "clang" in variant.compiler else ".gch"
    compile_all([[*compiler, "-x", "c++-header", common, "-o", f"{common}{suffix}"]])
    units = [*layer_units(folder), *sorted(STRESS.glob("*.cpp"))]
    objects = {unit: folder / f"{unit.stem}.o" for unit in units}
    compile_all(
        [[*compiler, "-include", common, "-c", unit, "-o", o] for unit, o in objects.items()]
    )
    program = folder / "stress"
    compile_all([[*compiler, *objects.values(), "-o", program]])
    return program


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    built: dict[Variant, Path] = {}

    def program(variant: Variant) -> Path:
        if variant not in built:
            built[variant] = build(variant, tmp_path_factory.mktemp("stress"))
        return built[variant]

    return program


def execute(
    variant: Variant, program: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    command = [*variant.runner, str(program), *map(str, arguments)]
    done = run(command, RUN_TIMEOUT_S)
    if "ThreadSanitizer: unexpected memory mapping" in done.stdout:
        # The kernel randomizes more address bits than ThreadSanitizer supports: disable it.
        require("setarch")
        done = run(["setarch", platform.machine(), "-R", *command], RUN_TIMEOUT_S)
        if "failed to set personality" in done.stdout or "unexpected memory" in done.stdout:
            pytest.skip(f"ThreadSanitizer cannot run on this kernel: {done.stdout.strip()[:200]}")
    return done


def check(variant: Variant, program: Path) -> None:
    start = time.monotonic()
    done = execute(variant, program, "--seconds", variant.seconds)
    print(done.stdout, f"{time.monotonic() - start:.1f} s", sep="")
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}"
    assert done.stdout.rstrip().endswith("ok"), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", mostly_thorough(VARIANTS, "plain", "thread", "memory"))
def test_stress_program_passes(stress: Callable[[Variant], Path], name: str) -> None:
    if name.startswith("x86") and platform.machine() != "x86_64":
        pytest.skip(f"for x86-64, this is {platform.machine()}")
    if "f16c" in name and not {"avx2", "f16c"} <= set(cpu_flags()):
        pytest.skip("this CPU has no AVX2 or no F16C")
    check(VARIANTS[name], stress(VARIANTS[name]))


# All values of `fold` fit in registers, so any access to the stack is a spill.
ONE_FOLD = """
#include "cpu/kernels_impl.h"
using namespace pyringar;
template <typename L>
void fold(const typename L::Element* const* sources, int count, typename L::Element* to) {
  typename L::Vector sum = L::load(sources[0]);
  for (int r = 1; r < count; ++r) sum = combine<L, Sum>(sum, L::load(sources[r]));
  store_vector(L::pack(sum), to);
}
using Lanes = FusedLanesOf<DType::%s>;
template void fold<Lanes>(const Lanes::Element* const*, int, Lanes::Element*);
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the assembly of x86-64")
@pytest.mark.parametrize("dtype", ["kFloat32", "kFloat64", "kBFloat16", "kFloat16", "kInt32"])
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_vectors_stay_in_registers(level: str, dtype: str, tmp_path: Path) -> None:
    """A vector type wider than a register spills to the stack, which takes three times as long."""
    require("g++")
    source = tmp_path / "fold.cpp"
    source.write_text(ONE_FOLD % dtype)
    asm = run(["g++", *BASE_FLAGS, "-O3", f"-march={level}", "-S", source, "-o", "-"], 60).stdout
    assert "ret" in asm, asm
    # A spill has an address relative to the stack pointer or the frame pointer.
    on_stack = [line for line in asm.splitlines() if re.search(r"%[re][sb]p", line)]
    assert not on_stack, "\n".join(on_stack)


def cpu_flags() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith("flags")), [])
