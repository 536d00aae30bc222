"""Are the CUDA kernels, and the host code that launches them, right on CPU threads without a GPU?

Sanitizers, both compilers, and kernels with a mistake planted, which must be noticed. One build per
test; all are slow, clang++ and most mistakes thorough.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_layering import cuda_includes
from test_stress import (
    BASE_FLAGS,
    COMPILE_TIMEOUT_S,
    CSRC,
    MEMORY_FLAGS,
    RUN_TIMEOUT_S,
    STRESS,
    THREAD_FLAGS,
    Variant,
    check,
    compile_all,
    execute,
    require,
    run,
    some,
)

EMULATED = STRESS / "cuda"
TEST_SOURCES = [*sorted(EMULATED.glob("*.cpp")), STRESS / "check.cpp", STRESS / "oracle.cpp"]
KERNEL_HEADERS = sorted(
    [*(CSRC / "cuda").glob("*.cuh"), CSRC / "cuda/args.h", CSRC / "cuda/table.h"]
)

# A kernel reads the same bytes as elements and as vectors, as CUDA code may.
FLAGS = ("-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
FEW_THREADS = "-DPYRINGAR_EMULATED_THREADS=4"
MANY_THREADS = "-DPYRINGAR_EMULATED_THREADS=32"

PLAIN = Variant("g++", ("-O0", FEW_THREADS), 3)  # compiled longer than it runs
# g++ warns that it does not check fences; barriers order the same, and those it does check.
THREAD = Variant("g++", (*THREAD_FLAGS, "-Wno-tsan", FEW_THREADS), 30)
# g++ computes lanes that are not there beside those that are, and warns of itself.
FAST_FLAGS = ("-O3", "-Wno-uninitialized", "-Wno-maybe-uninitialized", MANY_THREADS)
VARIANTS = {
    "thread": THREAD,
    "thread-clang": Variant("clang++", (*THREAD_FLAGS, FEW_THREADS), 30),
    "memory": Variant("g++", ("-O1", *MEMORY_FLAGS, FEW_THREADS), 15),
    "memory-clang": Variant("clang++", ("-O1", *MEMORY_FLAGS, FEW_THREADS), 15),
    "fast": Variant("g++", FAST_FLAGS, 15),
    "fast-clang": Variant("clang++", ("-O3", MANY_THREADS), 15),
}
WITHOUT_THREADS = {"table", "fused-all", "fused"}


@dataclass(frozen=True)
class Mistake:
    """A line of a kernel, what to write instead, and the part of the test that must notice."""

    file: str
    line: str
    instead: str
    part: str = ""

    def plant(self, folder: Path) -> Path:
        return planted(folder, f"cuda/{self.file}", {self.line: self.instead})


MISTAKES = {
    "flag-before-barrier": Mistake(
        "flag.cuh",
        "  fence_system();\n  block_barrier();\n"
        "  if (thread_index() == 0) store_release(flag, value);\n",
        "  if (thread_index() == 0) store_release(flag, value);\n  block_barrier();\n",
        "ring",
    ),
    "no-release": Mistake("flag.cuh", "__ATOMIC_RELEASE", "__ATOMIC_RELAXED", "ring"),
    "no-acquire": Mistake(
        "flag.cuh",
        "__atomic_load_n(flag, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(flag, __ATOMIC_RELAXED)",
        "direct",
    ),
    "one-answer": Mistake("flag.cuh", "    turn_ ^= 1;\n", "", "ring"),
    "no-barrier-after-wait": Mistake(
        "flag.cuh", "    block_barrier();\n    return answers_", "    return answers_", "ring"
    ),
    "all-lose-patience-at-once": Mistake(
        "flag.cuh", "static_cast<std::uint64_t>(step) * kNsPerStep", "0 * step", "ring-withheld"
    ),
    "deadline-of-the-whole-wait": Mistake(
        "flag.cuh",
        "if (still_since_ns == 0 || seen != last_seen || progress != last_progress) {",
        "if (still_since_ns == 0 || last_seen + last_progress == ~0u) {",
        "direct-withheld",
    ),
    "tiles-show-no-progress": Mistake(
        "direct.cuh", "progressed(flag, tile)", "progressed(flag, 0 * tile)", "direct-withheld"
    ),
    "base-stays": Mistake(
        "ring.cuh", "program.base + ring_num_messages(program)", "program.base", "ring"
    ),
    "slot-too-few": Mistake("ring.cuh", "n % args_.num_slots", "n % (args_.num_slots - 1)", "ring"),
    "slot-freed-early": Mistake(
        "flag.cuh",
        "value) {\n  block_barrier();\n  if (thread_index() == 0) store_release(flag, value);\n",
        "value) {\n  if (thread_index() == 0) store_release(flag, value);\n  block_barrier();\n",
        "ring",
    ),
    "slot-not-awaited": Mistake(
        "ring.cuh", "n - args_.num_slots", "n - 2 * args_.num_slots", "ring"
    ),
    "channels-share-slots": Mistake(
        "ring.cuh",
        "static_cast<std::size_t>(channel) * args.num_slots * args.slot_bytes",
        "0",
        "ring",
    ),
    "rounded-twice": Mistake(
        "ring.cuh",
        "sum.template divide<Op>(args_.divisor);\n",
        "sum = Pack<E>::from_elements(sum.to_elements());\n"
        "sum.template divide<Op>(args_.divisor);\n",
        "ring",
    ),
    "leaves-before-the-others": Mistake(
        "direct.cuh", "  if (!device_barrier(ports, passed + 2, waits)) return;\n", "", "direct"
    ),
    "count-stays": Mistake(
        "direct.cuh",
        "store_release(ports.count + at, passed + 2)",
        "store_release(ports.count + at, passed)",
        "direct",
    ),
    "begins-before-the-others": Mistake(
        "direct.cuh",
        "  if (!device_barrier(ports, passed + 1, waits)) return;\n",
        "  device_barrier(ports, passed, waits);\n",
        "direct",
    ),
    "last-source-first": Mistake(
        "fused.cuh",
        "static_cast<const Element*>(sources_[r])",
        "static_cast<const Element*>(sources_[table_.num_sources - 1 - r])",
        "fused-all",
    ),
    "no-tail": Mistake("fused.cuh", "fold_elements(vectors.end, segment_.numel)", "", "fused-all"),
    "tile-always-full": Mistake(
        "fused.cuh", "begin + tile_elems(kItem) <= vectors.end", "true", "fused-all"
    ),
    "head-in-bytes": Mistake(
        "table.h", "(16 - misalignment(0)) % 16 / item_", "(16 - misalignment(0)) % 16", "table"
    ),
    "tile-not-found": Mistake("table.h", "first_tile <= tile", "first_tile < tile", "table"),
}


def build(variant: Variant, folder: Path, csrc: Path = CSRC) -> Path:
    """Compile and link; kernels from below `csrc`, as C++."""
    require(variant.compiler)
    includes = [f"-I{csrc}", *BASE_FLAGS, f"-I{STRESS}", f"-I{EMULATED}"]
    compiler = [variant.compiler, *includes, *FLAGS, *variant.flags]
    kernels = [csrc / "cuda/kernels.cpp", *sorted((csrc / "cuda").glob("kernels_*.cu"))]
    objects = {source: folder / f"{source.name}.o" for source in [*kernels, *TEST_SOURCES]}
    compile_all([[*compiler, "-x", "c++", "-c", source, "-o", o] for source, o in objects.items()])
    program = folder / "emulated"
    compile_all([[*compiler, *objects.values(), "-o", program]])
    return program


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Build the program of a variant, once."""
    built: dict[Variant, Path] = {}

    def program(variant):
        if variant not in built:
            built[variant] = build(variant, tmp_path_factory.mktemp("emulated"))
        return built[variant]

    return program


def below(csrc: Path, path: Path) -> Path:
    """The same file below `csrc`, if it is one of the engine's."""
    return csrc / path.relative_to(CSRC) if path.is_relative_to(CSRC) else path


def planted(folder: Path, file: str, edits: Mapping[str, str]) -> Path:
    """A copy of the engine's source, with other text in a file of it."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    text = (copy / file).read_text(encoding="utf-8")
    for line, instead in edits.items():
        assert line in text, f"{file} no longer says {line!r}"
        text = text.replace(line, instead)
    (copy / file).write_text(text, encoding="utf-8")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
def test_plain(emulated):
    check(PLAIN, emulated(PLAIN))


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", some(VARIANTS, "thread", "memory", "fast"))
def test_variant(emulated, name):
    check(VARIANTS[name], emulated(VARIANTS[name]))


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", some(MISTAKES, "no-release", "slot-freed-early", "no-tail"))
def test_planted_mistake_is_noticed(name, tmp_path):
    mistake = MISTAKES[name]
    variant = PLAIN if mistake.part in WITHOUT_THREADS else THREAD
    program = build(variant, tmp_path, mistake.plant(tmp_path))
    done = execute(variant, program, "--only", mistake.part, "--rounds", 300)
    print(done.stdout[:2000])
    # 2: there is no such part. Anything else is a failed check, a report, a hang or a crash.
    assert done.returncode not in (0, 2), f"{name} went unnoticed\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_headers_stand_alone(compiler):
    require(compiler)
    alone = [compiler, *BASE_FLAGS, f"-I{EMULATED}", f"-I{STRESS}", *FLAGS, "-fsyntax-only"]
    commands: list[Sequence[str | Path]] = [
        [*alone, "-x", "c++", "/dev/null", "-include", header]
        for header in KERNEL_HEADERS
        if header.name != "kernels_impl.cuh"
    ]
    compile_all(commands)


# -- the host's side, on a runtime that is not there -----------------------------------------------

HOST = STRESS / "cuda_host"
PARTS = ("group", "devices", "staging", "ring_links", "folds", "runtime", "kernels")
HOST_SOURCES = [
    *(CSRC / f"cuda/{part}.cpp" for part in PARTS),
    *sorted((CSRC / "cuda").glob("kernels_*.cu")),
    *(EMULATED / "cuda_emulator.cpp", EMULATED / "tensors.cpp"),
    *(STRESS / "check.cpp", STRESS / "oracle.cpp"),
    *sorted(HOST.glob("*.cpp")),
]
HOST_MISTAKES = {
    "every-device-from-the-start": Mistake(
        "tables.h", "slice.begin * item_bytes(tensor.dtype)", "0"
    ),
    "one-part-too-many": Mistake(
        "tables.h",
        "if (next->dtype == dtype && !add_slices(builders, *next)) break;",
        "if (next->dtype == dtype) add_slices(builders, *next);",
        "group",
    ),
    "ring-the-wrong-way-round": Mistake(
        "ring_links.cpp", "as<std::byte>(next.slots)", "as<std::byte>(prev.slots)"
    ),
    "results-stay-in-staging": Mistake(
        "group.cpp", "    staging_.copy_out(collective, staged, streams);\n", ""
    ),
    "failures-unread": Mistake("group.cpp", "if (failure == nullptr) return;", "return;"),
}


def build_host(folder: Path, csrc: Path = CSRC) -> Path:
    """Compile csrc/cuda/group.cpp and its parts with a fake CUDA runtime."""
    includes = [f"-I{path}" for path in (csrc, STRESS, EMULATED, HOST)]
    system = [f"-isystem{path}" for path in cuda_includes()]
    compiler = ["g++", *includes, *BASE_FLAGS, *system, *FLAGS, *PLAIN.flags]
    sources = [below(csrc, path) for path in HOST_SOURCES]
    objects = {source: folder / f"{source.name}.o" for source in sources}
    compile_all([[*compiler, "-x", "c++", "-c", source, "-o", o] for source, o in objects.items()])
    program = folder / "group_test"
    compile_all([["g++", "-pthread", *objects.values(), "-o", program]])
    return program


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
def test_the_group_on_devices_of_threads(tmp_path):
    program = build_host(tmp_path)
    for seed in range(1, 4):
        done = run([program, str(seed), "40"], RUN_TIMEOUT_S)
        assert done.returncode == 0, done.stdout
        assert "ok: 40 rounds" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", some(HOST_MISTAKES, "results-stay-in-staging"))
def test_a_planted_mistake_of_the_group_is_noticed(name, tmp_path):
    program = build_host(tmp_path, HOST_MISTAKES[name].plant(tmp_path))
    try:
        done = run([program, "1", "40"], 60)
    except subprocess.TimeoutExpired:
        return  # a hang is noticed too
    assert done.returncode != 0, f"{name} went unnoticed"
