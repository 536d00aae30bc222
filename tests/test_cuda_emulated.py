"""The CUDA engine without a GPU, and planted mistakes that these tests must notice.

The kernels run on CPU threads (`cpp/cuda`). The host code runs on a model of CUDA's runtime
(`cpp/cuda_model`): streams run late and in any order that CUDA allows, and every memory access is
checked for races. The memory order of the ring kernels is checked in nvcc's PTX.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from nvcc import cuda_includes, needs_nvcc
from test_stress import (
    BASE_FLAGS,
    COMPILE_TIMEOUT_S,
    CSRC,
    ENGINE_SOURCES,
    MEMORY_FLAGS,
    RUN_TIMEOUT_S,
    STRESS,
    THREAD_FLAGS,
    Variant,
    check,
    compile_all,
    execute,
    mostly_thorough,
    require,
    run,
)

from pyringar.engine import compile as engine_compile
from pyringar.engine import toolchain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)]

# Kernels access the same bytes as elements and as vectors, which CUDA allows.
FLAGS = ("-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
FEW_THREADS = "-DPYRINGAR_EMULATED_THREADS=4"
PLAIN = Variant("g++", ("-O0", FEW_THREADS), 3)
THREAD = Variant("g++", (*THREAD_FLAGS, FEW_THREADS), 30)
# The model intercepts calls of memcpy, so the compiler must not inline them.
ON_MODEL = Variant("g++", (*PLAIN.flags, "-fno-builtin-memcpy", "-Wno-psabi"), 0)
VARIANTS = {
    "plain": PLAIN,
    "thread": THREAD,
    "thread-clang": Variant("clang++", (*THREAD_FLAGS, FEW_THREADS), 30),
    "memory": Variant("g++", ("-O1", *MEMORY_FLAGS, FEW_THREADS), 15),
    "fast-clang": Variant("clang++", ("-O3", "-DPYRINGAR_EMULATED_THREADS=32"), 15),
}

SHARED = [STRESS / f"{name}.cpp" for name in ("check", "oracle", "stress")]
MODEL = [STRESS / "cuda/cuda_emulator.cpp", *sorted((STRESS / "cuda_model").glob("*.cpp"))]
KERNELS = [CSRC / "cuda/kernels.cpp"]  # plus one unit per dtype
BOTH = [CSRC / "cuda/folds.cpp", CSRC / "cuda/runtime.cpp"]
HOST = "background device_group device_ring devices staging_buffers"
HOST_SOURCES = [CSRC / f"cuda/{name}.cpp" for name in HOST.split()]
PROCESS_SOURCES = [*sorted((CSRC / "cuda_process").glob("*.cpp")), *ENGINE_SOURCES]
PROCESS_SOURCES += [STRESS / "process_calls.cpp"]
MODELLED = KERNELS + BOTH + SHARED + MODEL
PROGRAMS = {
    "kernels": KERNELS + sorted((STRESS / "cuda").glob("*.cpp")) + SHARED,
    "host": HOST_SOURCES + sorted((STRESS / "cuda_host").glob("*.cpp")) + MODELLED,
    "processes": PROCESS_SOURCES + sorted((STRESS / "cuda_processes").glob("*.cpp")) + MODELLED,
}
INCLUDED = ("", "cuda", "cuda_model", "cuda_host", "cuda_processes")


class Mistake(NamedTuple):
    part: str  # a test of the program "kernels", or the program "host" or "processes"
    file: str
    line: str
    changed: str = ""


GROUP, WATCH = "cuda_process/cuda_process_group.cpp", "cuda_process/device_watch.cpp"
SLOTS = "cuda_process/process_staging"
# Slow tests plant ALWAYS. Thorough tests, run before a release, plant MISTAKES.
ALWAYS = Mistake("host", "cuda/device_group.cpp", "[&] { meeting.meet(streams); }", "[] {}")
# One mistake per rule of the model and per check of the kernel tests.
MISTAKES = [
    Mistake("ring", "cuda/flag.cuh", "if (thread_index() == 0) fence(scope)", "(void)scope"),
    Mistake("ring", "cuda/flag.cuh", "__ATOMIC_RELEASE", "__ATOMIC_RELAXED"),
    Mistake("ring", "cuda/flag.cuh", "word, __ATOMIC_ACQUIRE)", "word, __ATOMIC_RELAXED)"),
    Mistake("ring", "cuda/flag.cuh", "block_broadcast(came)", "came || thread_index() != 0"),
    Mistake(
        "ring", "cuda/ring.cuh", "sees_prev() && sees_next() ?", "sees_prev() || sees_next() ?"
    ),
    Mistake("ring", "cuda/ring.cuh", "n - args_.num_slots", "n - 2 * args_.num_slots"),
    Mistake("ring", "cuda/ring_jobs.cuh", "  move_units<1>(tail, n, job);\n"),
    Mistake("fused-all", "cuda/fused.cuh", "raw[r], i))", "raw[kGroup - 1 - r], i))"),
    Mistake("fused-all", "cuda/fused.cuh", "(num - 1) % kGroup + 1", "num % kGroup + 1"),
    Mistake("fused-all", "cuda/fused.cuh", "if (at < vectors.end) "),
    Mistake("fused-mean", "cuda/pack.cuh", "fma(rest, divisor.reciprocal, guess)", "guess"),
    Mistake("fused-mean", "cuda/pack.cuh", "x + x != x", "x - x == 0"),
    Mistake("host", "cuda/device_group.cpp", "  if (ring_ != nullptr) ring_->abort();\n"),
    Mistake("host", "cuda/device_group.cpp", "    last_use_->wait_for();\n"),
    Mistake("host", "cuda/runtime.cpp", "return kBrokenCapture;", "return 0;"),
    Mistake("host", "cuda/runtime.cpp", "if (has_context(before_)) {", "if (device >= 0) {"),
    Mistake("host", "cuda/staging_buffers.cpp", "  const auto lock = lock_launches();\n"),
    Mistake("host", "cuda/staging_buffers.cpp", "!is_on_host_, wanted", "true, wanted"),
    Mistake("host", "cuda/background.cpp", "    last_->wait_for();\n"),
    Mistake("host", "cuda/background.cpp", "if (bucket.ready != nullptr) {", "if (false) {"),
    Mistake("host", "cuda/devices.cpp", "    events_[d].make_wait(streams[0], devices_[0]);\n"),
    Mistake("processes", SLOTS + ".cpp", "WAIT_VALUE_GEQ", "WAIT_VALUE_EQ"),
    Mistake("processes", GROUP, "    staging_.await_reduced(n, stream_);\n"),
    Mistake("processes", SLOTS + ".cpp", "  staging_.last_call_.record(stream_);\n"),
    Mistake("processes", SLOTS + ".h", "message % kStagingSlots", "message % 3"),
    Mistake("processes", WATCH, "  release(culprit);\n"),
    Mistake("processes", WATCH, "!stillness_.is_late(culprit)) return", "culprit < 999) return"),
    Mistake("processes", GROUP, "    raise_unreported();\n"),
    Mistake("processes", GROUP, "(is_idle && all_peers_have_closed(*host_))", "(true)"),
]
HANGS_AFTER_S = 150  # four times the run time without a mistake


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


class Builder:
    """Compiles each source once per variant, and again if a mistake changes an included file."""

    def __init__(self, new_folder) -> None:
        self.new_folder = new_folder
        self.objects: dict[tuple[Variant, Path], Path] = {}
        units = new_folder("units")
        self.kernels = [units / f"kernels_{dtype}.cu" for dtype in engine_compile.DTYPES]
        for unit, dtype in zip(self.kernels, engine_compile.DTYPES, strict=True):
            unit.write_text(f'#define PYRINGAR_DTYPE {dtype}\n#include "cuda/kernels.cu"\n')

    def build(self, name: str, variant: Variant, mistake: Mistake | None = None) -> Path:
        require(variant.compiler)
        folder = self.new_folder(name)
        compiler = [variant.compiler, *BASE_FLAGS, *(f"-I{STRESS / path}" for path in INCLUDED)]
        if variant is ON_MODEL:
            compiler += [f"-isystem{path}" for path in cuda_includes()]
        compiler += [*FLAGS, *variant.flags, "-x", "c++"]
        csrc = plant(folder, mistake) if mistake else CSRC
        objects, commands = [], []
        for i, source in enumerate([*self.kernels, *PROGRAMS[name]]):
            is_changed = mistake and includes(compiler, source, CSRC / mistake.file)
            made = self.objects.get((variant, source))
            if made is None or is_changed:
                made = folder / f"{i}_{source.name}.o"
                command = [*compiler, "-c", source]
                if is_changed:  # -w: the mistake may leave an unused variable
                    command = [compiler[0], f"-I{csrc}", *compiler[1:], "-w", "-c"]
                    command.append(relocate(source, csrc))
                else:
                    self.objects[variant, source] = made
                commands.append([*command, "-o", made])
            objects.append(made)
        compile_all(commands)
        program = folder / "program"
        wrap = ["-Wl,--wrap=memcpy", "-ldl"] if variant is ON_MODEL else []
        compile_all(
            [[variant.compiler, *variant.flags, *objects, "-pthread", *wrap, "-o", program]]
        )
        return program


def includes(compiler, source: Path, header: Path) -> bool:
    return str(header) in run([*compiler, "-MM", source], COMPILE_TIMEOUT_S).stdout


def relocate(path: Path, csrc: Path) -> Path:
    return csrc / path.relative_to(CSRC) if path.is_relative_to(CSRC) else path


def plant(folder: Path, mistake: Mistake) -> Path:
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    text = (copy / mistake.file).read_text(encoding="utf-8")
    assert mistake.line in text, f"{mistake.file} no longer says {mistake.line!r}"
    (copy / mistake.file).write_text(text.replace(mistake.line, mistake.changed), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return Builder(tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", mostly_thorough(VARIANTS, "plain", "thread"))
def test_kernels_pass_on_cpu_threads(builder, name):
    check(VARIANTS[name], builder.build("kernels", VARIANTS[name]))


@pytest.mark.parametrize(
    ("name", "rounds"), [("host", 24), ("processes", 10), thorough("processes", 40)]
)
def test_engine_passes_on_runtime_model(builder, name, rounds):
    program = builder.build(name, ON_MODEL)
    for seed in range(1, 4):
        done = execute(ON_MODEL, program, "--seed", seed, "--rounds", rounds)
        assert done.returncode == 0, done.stdout


def fails(variant: Variant, program: Path, *options: object) -> bool:
    try:
        done = run([*variant.runner, program, *options], HANGS_AFTER_S)
    except subprocess.TimeoutExpired:
        return True
    print(done.stdout[:2000])
    assert done.returncode != 2, "unknown part"
    return done.returncode != 0


@pytest.mark.parametrize(
    "mistake", [ALWAYS, *map(thorough, MISTAKES)], ids=lambda mistake: mistake.file
)
def test_planted_cuda_mistake_fails_tests(builder, mistake):
    if mistake.part in PROGRAMS:
        program = builder.build(mistake.part, ON_MODEL, mistake)
        noticed = any(  # a single seed finds only half of the missing locks
            fails(ON_MODEL, program, "--seed", seed, "--rounds", 24) for seed in range(1, 13)
        )
    else:
        variant = THREAD if mistake.part == "ring" else PLAIN
        program = builder.build("kernels", variant, mistake)
        noticed = fails(variant, program, "--only", mistake.part, "--rounds", 300)
    assert noticed


# Instructions of ring kernels that order memory. Fences and flags occur with both scopes.
SCOPED = {
    form.format(scope)
    for scope in ("gpu", "sys")
    for form in ("fence.acq_rel.{}", "ld.acquire.{}.u32", "st.relaxed.{}.u32")
}
UNSCOPED = {"atom.global.cas.b32", "st.release.sys.u32"}
ORDERING = re.compile(
    r"(?<![\w.])(?:fence|membar|atom|red|(?:ld|st)\.(?:volatile|relaxed|acquire|release))\.[\w.]+"
)
PTX_MISTAKES = [
    (r"fence\.acq_rel\.\w+", ""),
    (r"fence\.acq_rel\.sys", "fence.acq_rel.gpu"),
    (r"st\.relaxed\.sys", "st.relaxed.gpu"),
    (r"ld\.acquire\.", "ld.relaxed."),
    (r"st\.release\.sys\.u32", "st.global.u32"),
    (r"ld\.global\.cg\.v4", "ld.global.v4"),
]


def has_right_order(ptx: str) -> bool:
    """Return whether all ring kernels have the expected fences, flags and cached loads."""
    kernels = re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)
    rings = [kernel for kernel in kernels if "ring_kernel" in kernel.partition("(")[0]]
    for kernel in rings:
        found = Counter(ORDERING.findall(kernel))
        num_of = {form: found[form] for form in SCOPED}
        if set(found) != SCOPED | UNSCOPED or re.search(r"ld\.global\.v4", kernel):
            return False
        fences, flags = num_of["fence.acq_rel.sys"], num_of["st.relaxed.sys.u32"]
        if fences != num_of["fence.acq_rel.gpu"] or flags != num_of["st.relaxed.gpu.u32"]:
            return False
    return len(rings) > 0


@needs_nvcc
def test_ring_kernel_ptx_orders_memory(tmp_path):
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    nvcc = [*toolkit.nvcc.command, *engine_compile.NVCC_FLAGS, "-arch=compute_90", "-ptx"]
    made = tmp_path / "kernels.ptx"
    nvcc += [f"-I{CSRC}", "-DPYRINGAR_DTYPE=kInt32"]
    done = run([*nvcc, CSRC / "cuda/kernels.cu", "-o", made], COMPILE_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    ptx = made.read_text()
    assert has_right_order(ptx)
    for pattern, changed in PTX_MISTAKES:
        assert not has_right_order(re.sub(pattern, changed, ptx)), f"the check misses {pattern}"
