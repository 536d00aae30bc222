"""Are the CUDA kernels right on CPU threads, without a GPU?

Sanitizers, both compilers, and kernels with a mistake planted, which must be noticed. One build per
test; all are slow, sanitizers, -O3 and most mistakes thorough. The lines of `flag.cuh` that nvcc
alone compiles are checked in its PTX.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from nvcc import needs_nvcc
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

from pyringar.engine import compile as engine_compile
from pyringar.engine import toolchain

EMULATED = STRESS / "cuda"
SHARED = [STRESS / f"{name}.cpp" for name in ("check", "oracle", "stress")]
TEST_SOURCES = [*sorted(EMULATED.glob("*.cpp")), *SHARED]
KERNEL_HEADERS = sorted(
    [*(CSRC / "cuda").glob("*.cuh"), CSRC / "cuda/args.h", CSRC / "cuda/table.h"]
)

# A kernel reads the same bytes as elements and as vectors, as CUDA code may.
FLAGS = ("-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
FEW_THREADS = "-DPYRINGAR_EMULATED_THREADS=4"
MANY_THREADS = "-DPYRINGAR_EMULATED_THREADS=32"

PLAIN = Variant("g++", ("-O0", FEW_THREADS), 3)  # compiled longer than it runs
THREAD = Variant("g++", (*THREAD_FLAGS, FEW_THREADS), 30)
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
WITHOUT_THREADS = {"fused-all", "fused-mean"}


@dataclass(frozen=True)
class Mistake:
    file: str
    line: str
    instead: str
    part: str = ""

    def plant(self, folder: Path) -> Path:
        return planted(folder, f"cuda/{self.file}", {self.line: self.instead})


MISTAKES = {
    "flag-before-barrier": Mistake(
        "ring.cuh",
        "    if (!is_settled_) settle(shared_.scope);\n    is_settled_ = true;\n"
        "    signal(flag, n, shared_.scope);\n",
        "    signal(flag, n, shared_.scope);\n"
        "    if (!is_settled_) settle(shared_.scope);\n    is_settled_ = true;\n",
        "ring",
    ),
    "fence-before-barrier": Mistake(
        "flag.cuh",
        "  block_barrier();\n  if (thread_index() == 0) fence(scope);\n",
        "  if (thread_index() == 0) fence(scope);\n  block_barrier();\n",
        "ring",
    ),
    "no-fence": Mistake("flag.cuh", "if (thread_index() == 0) fence(scope)", "(void)scope", "ring"),
    "device-scope-between-devices": Mistake(
        "ring.cuh", "sees_prev() && sees_next() ?", "sees_prev() || sees_next() ?", "ring"
    ),
    "no-release": Mistake("flag.cuh", "__ATOMIC_RELEASE", "__ATOMIC_RELAXED", "ring"),
    "no-acquire": Mistake(
        "flag.cuh",
        "__atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(word, __ATOMIC_RELAXED)",
        "ring",
    ),
    "no-barrier-after-wait": Mistake(
        "flag.cuh", "return block_told(came);", "return came || thread_index() != 0;", "ring"
    ),
    "all-lose-patience-at-once": Mistake(
        "flag.cuh", "static_cast<std::uint64_t>(step) * kNsPerStep", "0 * step", "ring-withheld"
    ),
    "slot-freed-early": Mistake(
        "ring.cuh",
        "    RingMove<E> move(args_, shared_);\n",
        "    RingMove<E> move(args_, shared_);\n    free_message(n_in);\n",
        "ring",
    ),
    "slot-not-awaited": Mistake(
        "ring.cuh", "n - args_.num_slots", "n - 2 * args_.num_slots", "ring"
    ),
    "slot-of-a-partial-not-awaited": Mistake(
        "ring.cuh", "0 < action && action < args_.world_size - 1", "action < 0", "ring"
    ),
    "result-in-place-not-fenced": Mistake(
        "ring.cuh",
        "if (move.is_shared) is_settled_",
        "if (move.sent != nullptr) is_settled_",
        "ring",
    ),
    "every-partial-is-an-own-part": Mistake(
        "ring.cuh", "&& first.begin <= range.begin && range.begin < first.end", "", "ring"
    ),
    "no-tail-of-a-piece": Mistake("ring_moves.cuh", "  move_units<1>(tail, n, job);\n", "", "ring"),
    "channels-share-slots": Mistake(
        "ring.cuh",
        "static_cast<std::size_t>(channel) * args.num_slots * args.slot_bytes",
        "0",
        "ring",
    ),
    "rounded-twice": Mistake(
        "ring_moves.cuh",
        "divided(sum, divisor)",
        "divided(E::widened(E::narrowed(sum)), divisor)",
        "ring",
    ),
    "group-added-backwards": Mistake(
        "fused.cuh",
        "Unit::widened(raw[r], i))",
        "Unit::widened(raw[kGroup - 1 - r], i))",
        "fused-all",
    ),
    "remainder-too-long": Mistake(
        "fused.cuh", "(num - 1) % kGroup + 1", "num % kGroup + 1", "fused-all"
    ),
    "tree-slots-too-far": Mistake(
        "fused.cuh", "slots[slot - 1][i], sum", "slots[to][i], sum", "fused-all"
    ),
    "no-tail": Mistake(
        "fused.cuh",
        "fold_elements<E, Op, order>(table, segment, vectors.end, segment.numel);",
        "",
        "fused-all",
    ),
    "tile-always-full": Mistake("fused.cuh", "if (at < vectors.end) ", "", "fused-all"),
    "every-divisor-multiplied": Mistake(
        "kernels.cu",
        "(fold.divisor & (fold.divisor - 1)) == 0",
        "fold.divisor > 0",
        "fused-mean",
    ),
    "quotient-not-corrected": Mistake(
        "pack.cuh", "fma(rest, divisor.reciprocal, guess)", "guess", "fused-mean"
    ),
    "zero-loses-its-sign": Mistake("pack.cuh", "x + x != x", "x - x == 0", "fused-mean"),
    "divisor-as-an-element": Mistake(
        "pack.cuh", "x / divisor.value", "x / static_cast<T>(divisor.value)", "fused-mean"
    ),
    "head-in-bytes": Mistake(
        "table.h", "(16 - misalignment(0)) % 16 / item_", "(16 - misalignment(0)) % 16", "fused-all"
    ),
}


def kernel_units(folder: Path, dtypes: Sequence[str] = engine_compile.DTYPES) -> list[Path]:
    """Write a file per dtype, as the engine's build does."""
    units = [folder / f"kernels_{dtype}.cu" for dtype in dtypes]
    for unit, dtype in zip(units, dtypes, strict=True):
        unit.write_text(f'#define PYRINGAR_DTYPE {dtype}\n#include "cuda/kernels.cu"\n')
    return units


def build(variant: Variant, folder: Path, csrc: Path = CSRC, *more: str) -> Path:
    require(variant.compiler)
    includes = [f"-I{csrc}", *BASE_FLAGS, f"-I{STRESS}", f"-I{EMULATED}"]
    compiler = [variant.compiler, *includes, *FLAGS, *variant.flags, *more]
    sources = [*kernel_units(folder), *TEST_SOURCES]
    objects = {source: folder / f"{source.name}.o" for source in sources}
    compile_all([[*compiler, "-x", "c++", "-c", source, "-o", o] for source, o in objects.items()])
    program = folder / "emulated"
    compile_all([[*compiler, *objects.values(), "-o", program]])
    return program


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    built: dict[Variant, Path] = {}

    def program(variant):
        if variant not in built:
            built[variant] = build(variant, tmp_path_factory.mktemp("emulated"))
        return built[variant]

    return program


def below(csrc: Path, path: Path) -> Path:
    return csrc / path.relative_to(CSRC) if path.is_relative_to(CSRC) else path


def planted(folder: Path, file: str, edits: Mapping[str, str]) -> Path:
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
@pytest.mark.parametrize("name", some(VARIANTS))
def test_variant(emulated, name):
    check(VARIANTS[name], emulated(VARIANTS[name]))


@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.parametrize("name", some(MISTAKES, "no-tail"))
def test_planted_mistake_is_noticed(name, tmp_path):
    mistake = MISTAKES[name]
    variant = PLAIN if mistake.part in WITHOUT_THREADS else THREAD
    # A mistake may leave a variable that nobody reads.
    program = build(variant, tmp_path, mistake.plant(tmp_path), "-w")
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
        [*alone, "-x", "c++", "/dev/null", "-include", header] for header in KERNEL_HEADERS
    ]
    compile_all(commands)


# The instructions of a ring kernel that order memory. Every fence and flag has both scopes.
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
    """Check fences, flags and cached loads of all ring kernels."""
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
@pytest.mark.slow
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
def test_ptx_orders_memory(tmp_path):
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    nvcc = [*toolkit.nvcc.command, *engine_compile.NVCC_FLAGS, "-arch=compute_90", "-ptx"]
    made = tmp_path / "kernels.ptx"
    [source] = kernel_units(tmp_path, ["kInt32"])
    done = run([*nvcc, f"-I{CSRC}", source, "-o", made], COMPILE_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    ptx = made.read_text()
    assert has_right_order(ptx)
    for pattern, instead in PTX_MISTAKES:
        assert not has_right_order(re.sub(pattern, instead, ptx)), f"{pattern} went unnoticed"
