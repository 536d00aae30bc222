"""Compile a native engine with ninja, into any folder.

There are two engines, `CPU` and `CUDA`, each a Python module. A `Recipe` names the sources and a
`BuildPlan` the compilers. No engine includes torch headers: one build serves every torch version.
They share sources, but a digest covers only files that its engine may include: an edit of csrc/cuda
leaves the CPU engine alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyringar.engine import toolchain
from pyringar.engine.toolchain import Compiler, CudaToolkit
from pyringar.errors import BuildError

BASE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a fused multiply-add would change the bits of sums
    "-pthread",
    "-Wall",
    "-Wextra",
)
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fmad=false",  # no fused multiply-add, as with -ffp-contract=off
    "-prec-div=true",
    "-prec-sqrt=true",
    "-ftz=false",
    "--expt-relaxed-constexpr",
    "-lineinfo",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-Xptxas",
    "-v",  # reports registers and spills; goes to build.log
)
# Libraries that libcudart_static.a needs. At run time it needs no libcudart.so and no driver.
CUDART_NEEDS = ("-ldl", "-lrt", "-lpthread")
# Bindings have no loops over elements; -O1 saves a third of their compile time.
BINDINGS_FLAG = "-O1"
# Compiling kernels for a dozen architectures on two slow cores takes minutes.
COMPILE_DEADLINE_S = 1800.0

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class EngineKind:
    """One native module: its sources and the way to compile them.

    ``compiled``, ``included`` and ``left_out`` are patterns of files below the source root, the
    slow ones first. ``joined``: groups of sources by the beginnings of their names; each group is
    one translation unit, which saves a third of the time. ``repeated``: a source that is compiled
    once for each value of PYRINGAR_DTYPE, and the values. ``cuda``: compile with nvcc, the CUDA
    runtime and GPU architectures, else for this very CPU.
    """

    module: str
    title: str
    compiled: tuple[str, ...]
    included: tuple[str, ...]
    advice: str
    left_out: tuple[str, ...] = ()
    joined: tuple[tuple[str, ...], ...] = ()
    repeated: tuple[str, tuple[str, ...]] = ("", ())
    cuda: bool = False

    @property
    def file(self) -> str:
        return f"{self.module}{toolchain.extension_suffix()}"

    def files(self, root: Path, patterns: Sequence[str]) -> list[Path]:
        left_out = {path for pattern in self.left_out for path in root.glob(pattern)}
        found = (path for pattern in patterns for path in sorted(root.glob(pattern)))
        return [path for path in found if path not in left_out]


DTYPES = ("kFloat64", "kFloat32", "kFloat16", "kBFloat16", "kInt8", "kUInt8", "kInt32", "kInt64")
_CPU_FLOORS = ("process", "cpu", "os", "bucket", "core")
CPU = EngineKind(
    module="_engine",
    title="the engine",
    compiled=tuple(f"{floor}/**/*.cpp" for floor in ("bindings", *_CPU_FLOORS)),
    included=tuple(f"{floor}/**/*.h" for floor in ("bindings", *_CPU_FLOORS)),
    left_out=("bindings/cuda_*",),
    joined=(
        ("bindings/module.", "bindings/tensor.", "bindings/torch_functions."),
        ("bindings/process.", "bindings/prepare.", "bindings/call_"),
        ("cpu/",),
        ("process/", "os/", "core/"),
    ),
    advice="g++ 11 or clang++ 14 and newer can build it; try another compiler (`CXX=clang++`), "
    "then `pyringar build --verbose`.",
)
CUDA = EngineKind(
    module="_cuda_engine",
    title="the CUDA engine",
    compiled=(
        "cuda/**/*.cu",
        "cuda/**/*.cpp",
        "cuda_process/**/*.cpp",
        "bindings/cuda_*.cpp",
        "bindings/prepare.cpp",
        "bindings/tensor.cpp",
        "bindings/torch_functions.cpp",
        "bindings/call_cache.cpp",
        # Ranks in processes synchronise on the host, with or without GPUs.
        "process/**/*.cpp",
        "os/**/*.cpp",
        "core/**/*.cpp",
        "cpu/fused.cpp",
        "cpu/kernels*.cpp",
        "cpu/strided.cpp",
    ),
    included=(
        "cuda/**/*.cuh",
        "cuda/**/*.h",
        "cuda_process/**/*.h",
        *(f"{floor}/**/*.h" for floor in ("bindings", *_CPU_FLOORS)),
    ),
    joined=(("cpu/",), ("process/",), ("os/",)),
    repeated=("cuda/kernels.cu", DTYPES),
    cuda=True,
    advice="nvcc 12.1 and newer can build it, with a C++ compiler that it supports; try others "
    "(PYRINGAR_NVCC, CXX), then `pyringar build --cuda --verbose`.",
)


@dataclass(frozen=True)
class Recipe:
    """An engine to build; by default pyringar's CPU engine.

    ``_prebuilt`` beside ``source_root`` may hold engines. ``baseline``: compile for any CPU of this
    architecture, not for this CPU.
    """

    source_root: Path | None = None
    kind: EngineKind = CPU
    baseline: bool = False

    @property
    def cpu(self) -> str:
        return "any CPU of this architecture" if self.baseline else "this CPU"

    def root(self) -> Path:
        if self.source_root is not None:
            return self.source_root
        here = Path(__file__).parents[1]  # pyringar
        for root in (here / "_csrc", here.parent / "csrc"):
            if (root / "bindings").is_dir():
                return root
        raise BuildError(
            f"the engine's sources are in neither {here / '_csrc'} nor {here.parent / 'csrc'}: "
            "this installation is incomplete, install pyringar again"
        )

    def files(self) -> list[Path]:
        return self.kind.files(self.root(), (*self.kind.compiled, *self.kind.included))

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "module": self.kind.module,
            "sources": self._digest_of_sources(),
            "flags": [*BASE_FLAGS, f"bindings: {BINDINGS_FLAG}", *toolchain.link_flags()],
            "abi": toolchain.extension_suffix(),
            "libc": toolchain.libc_version(),
        }
        if self.kind.cuda:
            content["flags"] += [*NVCC_FLAGS, *CUDART_NEEDS]
            content["archs"] = list(toolchain.cuda_archs_wanted())
        else:
            cpu = {} if self.baseline else asdict(toolchain.read_cpu())
            content["cpu"] = {**cpu, "flags": toolchain.cpu_flags(self.baseline)}
        return content

    def _digest_of_sources(self) -> str:
        digest, root = hashlib.sha256(), self.root()
        try:
            for path in self.files():
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
                digest.update(data)
        except OSError as error:
            raise BuildError(f"cannot read the engine's sources: {error}") from error
        return digest.hexdigest()


@dataclass(frozen=True)
class BuildPlan:
    """A recipe with its compilers. ``content`` and ``toolchain`` form the key of the build."""

    recipe: Recipe
    compiler: Compiler
    nvcc: Compiler | None
    content: Mapping[str, Any]
    toolchain: Mapping[str, Any]

    @property
    def compilers(self) -> str:
        return " and ".join(str(found) for found in (self.nvcc, self.compiler) if found)


def plan_build(recipe: Recipe, content: Mapping[str, Any]) -> BuildPlan:
    """Find the compilers for a recipe. Raises CompilerNotFoundError."""
    nvcc = toolchain.find_nvcc() if recipe.kind.cuda else None
    compiler = toolchain.find_compiler()
    made_with: dict[str, Any] = {
        "command": list(compiler.command),
        "identity": list(compiler.identity),
        "pybind11": toolchain.pybind11_version(),
    }
    if nvcc is not None:
        made_with |= {"nvcc": list(nvcc.command), "nvcc_identity": list(nvcc.identity)}
    return BuildPlan(recipe, compiler, nvcc, content, made_with)


def compile_into(folder: Path, plan: BuildPlan, *, verbose: bool = False) -> None:
    """Compile into ``folder``: write build.json, then the engine. The caller holds the lock.

    Raises BuildError with the compiler's output.
    """
    started, kind = time.monotonic(), plan.recipe.kind
    version, ninja = toolchain.compiler_version(plan.compiler), toolchain.find_ninja()
    toolkit = toolchain.read_cuda_toolkit(plan.nvcc, plan.compiler) if plan.nvcc else None
    archs = toolchain.cuda_archs_built(plan.content["archs"], toolkit) if toolkit else ()
    # Unlike info, a warning is shown without any configuration of logging.
    log.warning(
        "compiling %s for %s with %s, once; it is kept in %s",
        kind.title,
        f"compute capability {', '.join(archs)}" if archs else plan.recipe.cpu,
        plan.compilers,
        folder,
    )
    with tempfile.TemporaryDirectory(
        prefix=f"tmp-{kind.module}-", dir=folder.parent, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        _copy_sources(plan, work / "csrc")
        flags = _accepted_flags(plan, work)
        script = _ninja_script(work, plan, toolkit, archs, flags)
        (work / "build.ninja").write_text(script, encoding="utf-8")
        (work / toolchain.EXPORTS_FILE).write_text(toolchain.EXPORTS, encoding="utf-8")
        _run_ninja(ninja, work, folder / "build.log", plan, verbose=verbose)
        seconds = time.monotonic() - started
        record = {
            "content": plan.content,
            "toolchain": plan.toolchain,
            "compiler": version,
            "flags": flags,
            "build_s": round(seconds, 2),
        }
        if toolkit is not None:
            record |= {"nvcc": str(toolkit), "archs": list(archs)}
        (work / "build.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        for finished in ("build.json", kind.file):  # each file is moved atomically
            with open(work / finished, "rb") as file:
                os.fchmod(file.fileno(), 0o755)  # only the owner can write it
                os.fsync(file.fileno())
            os.replace(work / finished, folder / finished)
    log.info("compiled %s in %.1f s with %s: %s", kind.title, seconds, version, folder / kind.file)


def _copy_sources(plan: BuildPlan, root: Path) -> None:
    """Copy the sources, so that an edit during the build has no effect."""
    for source in plan.recipe.files():
        target = root / source.relative_to(plan.recipe.root())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _accepted_flags(plan: BuildPlan, work: Path) -> list[str]:
    """Return the C++ flags, without the flags for this CPU if the compiler refuses them."""
    compiler = plan.compiler
    tuning = () if plan.recipe.kind.cuda else plan.content["cpu"]["flags"]
    probe = work / "probe.cpp"
    probe.write_text("int probe;\n", encoding="utf-8")

    def try_out(flags: Sequence[str]) -> list[str]:
        command = [*compiler.command, *flags, "-c", str(probe), "-o", str(work / "probe.o")]
        toolchain.run_tool(command, f"{compiler} cannot compile C++20")
        return list(flags)

    try:
        return try_out([*BASE_FLAGS, *tuning])
    except BuildError:
        if not tuning:
            raise
    accepted = try_out(BASE_FLAGS)
    log.warning("%s refuses %s: building without it", compiler, " ".join(tuning))
    return accepted


def _translation_units(work: Path, kind: EngineKind) -> list[str]:
    """Return the files to compile, relative to ``work``/csrc. Writes the joined files."""
    root = work / "csrc"
    names = [file.relative_to(root).as_posix() for file in kind.files(root, kind.compiled)]
    units = []
    for group in kind.joined:
        inside = [name for name in names if name.startswith(group)]
        if len(inside) > 1:
            unit = f"{group[0].strip('/.')}.joined.cpp"
            text = "".join(f'#include "{name}"\n' for name in inside)
            (root / unit).write_text(text, encoding="utf-8")
            units.append(unit)
            names = [name for name in names if name not in inside]
    source, values = kind.repeated
    for value in values if source in names else ():
        unit = f"{source.split('/')[-1].removesuffix('.cu')}_{value}.cu"
        text = f'#define PYRINGAR_DTYPE {value}\n#include "{source}"\n'
        (root / unit).write_text(text, encoding="utf-8")
        units.append(unit)
    return [*units, *(name for name in names if name != source)]


def _ninja_script(
    work: Path,
    plan: BuildPlan,
    toolkit: CudaToolkit | None,
    archs: Sequence[str],
    flags: Sequence[str],
) -> str:
    kind = plan.recipe.kind
    inputs = _translation_units(work, kind)

    def command(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")

    # File names in csrc hold neither blanks nor colons, so ninja needs no escapes.
    objects = [re.sub(r"[/.]", "_", name) + ".o" for name in inputs]
    includes = toolchain.python_include_dirs()
    if toolkit:
        includes += map(str, toolkit.includes)
    system = [word for include in includes for word in ("-isystem", include)]
    compile_words = command(*plan.compiler.command, *flags, "-I", "csrc", *system)
    link_words = command(*plan.compiler.command, *flags, *toolchain.link_flags())
    libraries = command(str(toolkit.cudart), *CUDART_NEEDS) if toolkit else ""
    lines = [
        "rule compile",
        f"  command = {compile_words} $floor_flags -c $in -o $out",
        "rule link",
        f"  command = {link_words} $in {libraries} -o $out",
    ]
    if toolkit:
        nvcc = [*toolkit.nvcc.command, *toolchain.nvcc_host_flags(plan.compiler), *NVCC_FLAGS]
        nvcc += [*toolchain.gencode_flags(archs), "-I", "csrc"]
        lines += ["rule compile_cuda", f"  command = {command(*nvcc)} -c $in -o $out"]
    for obj, name in zip(objects, inputs, strict=True):
        rule = "compile_cuda" if name.endswith(".cu") else "compile"
        lines.append(f"build {obj}: {rule} csrc/{name}")
        if name.startswith("bindings/"):
            lines.append(f"  floor_flags = {BINDINGS_FLAG}")
    lines += [f"build {kind.file}: link {' '.join(objects)}", f"default {kind.file}"]
    return "\n".join(lines) + "\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run_ninja(ninja: str, work: Path, log_path: Path, plan: BuildPlan, *, verbose: bool) -> None:
    command = [ninja, "-v", "-j", str(toolchain.cores_allowed())]
    ending = ""
    with open(log_path, "wb") as output:
        process = subprocess.Popen(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if status := process.wait(timeout=COMPILE_DEADLINE_S):
                ending = f"ended with status {status}"
        except BaseException as error:  # also KeyboardInterrupt
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            ending = f"was ended after {COMPILE_DEADLINE_S:.0f} s"
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    if verbose:
        for line in lines:
            log.info("%s", line)
    if not ending:
        return
    failed = next((n for n, line in enumerate(lines) if line.startswith("FAILED")), 0)
    shown = lines[failed:]
    if len(shown) > 30:
        shown = [*shown[:4], f"... {len(shown) - 29} lines ...", *shown[-25:]]
    kind = plan.recipe.kind
    raise BuildError(
        f"compiling {kind.title} with {plan.compilers} {ending}. It said\n"
        f"{toolchain.indent(shown)}\n"
        f"  All of it: {log_path}\n"
        f"  What to do: {kind.advice}"
    )
