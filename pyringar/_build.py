"""Builds the native engines on first use, and finds them again: sources, compilers, cache, lock.

Importing this module compiles nothing. There are two engines, `CPU` and `CUDA`, each a Python
module of its own. A build is told apart by two digests:

* *content*: the sources, the flags, the Python ABI, the C library; the CPU or the GPU
  architectures. A file whose content digest differs is wrong for this machine or this version.
* *toolchain*: the compilers and pybind11. A new compiler builds anew; with no compiler at hand any
  engine of the same content serves.

Layout of the cache, everything in it written under a lock and put in place by an atomic rename::

    <cache>/<content>-<toolchain>/lock                an OS lock: it dies with its owner
    <cache>/<content>-<toolchain>/tmp-XXXX/           a build at work, or one that was killed
    <cache>/<content>-<toolchain>/build.json          what was built, by whom, with which flags
    <cache>/<content>-<toolchain>/_engine.<abi>.so    renamed last: where it is, it is whole

The engines include no torch header, so one build serves every torch version. They share sources,
but a digest covers only what its engine may include: an edit of csrc/cuda leaves the CPU's alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyringar import _toolchain as tools
from pyringar.errors import BuildError, CompilerNotFoundError

__all__ = [
    "CPU",
    "CUDA",
    "Engine",
    "EngineKind",
    "Recipe",
    "build_engine",
    "cache_dir",
    "ensure_engine",
    "find_engine",
    "prebuild",
]

BASE_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the bits of a sum are a contract: no fused multiply-add behind our back
    "-pthread",
    "-Wall",
    "-Wextra",
)
NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    *("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"),  # the same contract
    "--expt-relaxed-constexpr",
    *("-Xcompiler", "-fPIC,-fvisibility=hidden"),
    *("-Xptxas", "-v"),  # registers and spills: into build.json
)
# What libcudart_static.a needs. With it no libcudart.so is looked for at run time, nor a driver.
CUDART_NEEDS = ("-ldl", "-lrt", "-lpthread")
# Bindings hold no loops over elements, and take a third less time to compile like this.
BINDINGS_FLAG = "-O1"
LOCK_NOTICE_S = 3.0
# Kernels for a dozen architectures, on two slow cores, take minutes.
LOCK_DEADLINE_S = 1800.0
COMPILE_DEADLINE_S = 1800.0

_MOVE_CACHE = "Set PYRINGAR_CACHE_DIR to a directory of your own that can be written."

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class Engine:
    """A built engine: ``origin`` is "wheel", "cache" or "built" (just now)."""

    path: Path
    origin: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class EngineKind:
    """One of the native modules: which sources make it, and how.

    Attributes:
        module: Its name.
        title: What messages call it.
        compiled: Patterns below the source root of what is compiled, the slow ones first.
        included: Patterns of what these may include.
        left_out: Names, to be matched, that the patterns above catch and do not mean.
        joined: Floors that are one translation unit each: their files include much the same, and
            reading it once takes a third of the time. The others keep the other cores busy.
        cuda: Whether nvcc, the CUDA runtime and GPU architectures take part. If not, the engine is
            compiled for this very CPU; with CUDA the loops over elements are the GPU's.
        advice: What to do when it cannot be compiled.
    """

    module: str
    title: str
    compiled: tuple[str, ...]
    included: tuple[str, ...]
    advice: str
    left_out: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    cuda: bool = False

    def files(self, root: Path, patterns: Sequence[str]) -> list[Path]:
        """Return what matches below ``root``, pattern by pattern, sorted within each."""
        found = (path for pattern in patterns for path in sorted(root.glob(pattern)))
        return [
            path
            for path in found
            if not any(path.relative_to(root).match(name) for name in self.left_out)
        ]


CPU = EngineKind(
    module="_engine",
    title="the engine",
    compiled=("bindings/**/*.cpp", "cpu/**/*.cpp", "bucket/**/*.cpp", "core/**/*.cpp"),
    included=("bindings/**/*.h", "cpu/**/*.h", "bucket/**/*.h", "core/**/*.h"),
    left_out=("bindings/cuda_*",),
    joined=("cpu", "core"),
    advice="g++ 11 or clang++ 14 and newer can build it; try another compiler (`CXX=clang++`), "
    "then `pyringar build --verbose`.",
)
CUDA = EngineKind(
    module="_cuda_engine",
    title="the CUDA engine",
    compiled=(
        *("cuda/**/*.cu", "cuda/**/*.cpp", "core/**/*.cpp"),
        *("bindings/cuda_module.cpp", "bindings/prepare.cpp", "bindings/tensor.cpp"),
        "cpu/strided.cpp",
    ),
    included=("cuda/**/*.cuh", "cuda/**/*.h", "bindings/**/*.h", "cpu/**/*.h", "core/**/*.h"),
    cuda=True,
    advice="nvcc 12.0 and newer can build it, with a C++ compiler that it supports; try others "
    "(PYRINGAR_NVCC, CXX), then `pyringar build --cuda --verbose`.",
)


@dataclass(frozen=True)
class Recipe:
    """What to build. The default is pyringar's own CPU engine; tests build tiny ones.

    ``source_root`` holds the floors; ``_prebuilt`` beside it, if it is there, engines made when
    the wheel was. ``extra_flags`` go to every compiler call ("-Werror", a sanitizer).
    """

    source_root: Path | None = None
    extra_flags: tuple[str, ...] = ()
    kind: EngineKind = CPU

    def root(self) -> Path:
        """Return where the floors are: ``pyringar/_csrc`` in a wheel, ``csrc`` in a checkout."""
        if self.source_root is not None:
            return self.source_root
        here = Path(__file__).parent
        for root in (here / "_csrc", here.parent / "csrc"):
            if (root / "bindings").is_dir():
                return root
        raise BuildError(
            f"the engine's sources are in neither {here / '_csrc'} nor {here.parent / 'csrc'}: "
            "this installation is incomplete, install pyringar again"
        )

    def files(self) -> list[Path]:
        """Return every source and header that the engine is made of."""
        return self.kind.files(self.root(), (*self.kind.compiled, *self.kind.included))

    def content(self) -> dict[str, Any]:
        """Return what an engine must have been made from to be right for this machine."""
        content: dict[str, Any] = {
            "module": self.kind.module,
            "sources": self._digest_of_sources(),
            "flags": [
                *(*BASE_FLAGS, f"bindings: {BINDINGS_FLAG}"),
                *(*tools.link_flags(), *self.extra_flags),
            ],
            "abi": tools.extension_suffix(),
            "libc": tools.libc_version(),
        }
        if self.kind.cuda:
            content["flags"] += [*NVCC_FLAGS, *CUDART_NEEDS]
            content["archs"] = list(tools.cuda_archs_wanted())
        else:
            cpu = tools.read_cpu()
            content["flags"] += tools.tuning_flags()
            content["cpu"] = {
                "machine": cpu.machine,
                "model": cpu.model,
                "features": list(cpu.features),
            }
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


# ---------------------------------------------------------------------------------------------
# Cache


def cache_dir() -> Path:
    """Return ``PYRINGAR_CACHE_DIR``, else the platform's cache folder; creates nothing."""
    chosen = os.environ.get("PYRINGAR_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pyringar", appauthor=False))


def _refuse_if_others_can_write(path: Path) -> None:
    """Refuse what another user could have put machine code into.

    root is trusted: it can replace this program anyway, and a shared installation is root's.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}): code in it is "
            "not loaded. " + _MOVE_CACHE
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): code "
            f"in it is not loaded. Delete it, or set PYRINGAR_CACHE_DIR to a directory of your own "
            "with mode 0700."
        )


def _digest(value: Mapping[str, Any], length: int) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _engine_in(folder: Path, origin: str, kind: EngineKind) -> Engine | None:
    """Return the engine in ``folder`` if a whole one is there."""
    path = folder / f"{kind.module}{tools.extension_suffix()}"
    try:
        record = json.loads((folder / "build.json").read_text(encoding="utf-8"))
        if not path.is_file():
            return None
        if origin == "cache":
            for checked in (folder.parent, folder, path):
                _refuse_if_others_can_write(checked)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BuildError(
            f"the engine in {folder} cannot be read ({error}): delete that folder. {_MOVE_CACHE}"
        ) from error
    return Engine(path, origin, record)


def _engine_in_wheel(recipe: Recipe, content: Mapping[str, Any]) -> Engine | None:
    """Return the engine that ``PYRINGAR_PREBUILD=1 pip install`` made, if it fits this machine."""
    kind = recipe.kind
    engine = _engine_in(recipe.root().parent / "_prebuilt" / kind.module, "wheel", kind)
    if engine is None:
        return None
    misfits = _misfits(engine.record, content)
    if not misfits:
        return engine
    log.info(
        "%s in the wheel is not used, it was made for others than those here: %s",
        kind.title,
        ", ".join(misfits),
    )
    return None


def _misfits(record: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Return the parts of ``content`` for which the engine of ``record`` is wrong."""
    theirs = record["content"]
    fits = {name: theirs[name] == ours for name, ours in content.items()}
    if "cpu" in content:
        fits["cpu"] = tools.read_cpu().runs_code_for(theirs["cpu"])
    if "archs" in content:
        fits["archs"] = tools.cuda_archs_cover(record["archs"], content["archs"])
    return [f"{name} ({theirs[name]})" for name, fit in fits.items() if not fit]


def find_engine(recipe: Recipe | None = None) -> Engine | None:
    """Find an engine that is right for this machine; builds nothing, needs no compiler.

    Raises:
        BuildError: the cache belongs to, or can be written by, someone else.
    """
    recipe = recipe or Recipe()
    content = recipe.content()
    engine = _engine_in_wheel(recipe, content)
    if engine is not None:
        return engine
    try:
        folders = [_plan(recipe, content).folder]
    except CompilerNotFoundError:
        # Whoever built it is gone (a container image, a node without compilers): still right.
        folders = sorted(cache_dir().glob(f"{_digest(content, 16)}-*"))
    found = (_engine_in(folder, "cache", recipe.kind) for folder in folders)
    return next((engine for engine in found if engine is not None), None)


def ensure_engine(recipe: Recipe | None = None) -> Engine:
    """Find the engine or build it: milliseconds when it is there, seconds, once, when not.

    Raises:
        CompilerNotFoundError: it must be built and there is no compiler.
        BuildError: it must be built and cannot be; says what was tried and what to do.
    """
    return find_engine(recipe) or build_engine(recipe)


# ---------------------------------------------------------------------------------------------
# Build


def build_engine(
    recipe: Recipe | None = None, *, force: bool = False, verbose: bool = False
) -> Engine:
    """Build the engine into the cache, unless another process just did.

    Any number of processes may call this at once: one builds, the others wait for it.

    Args:
        recipe: What to build; pyringar's own engine by default.
        force: Build even if it is there.
        verbose: Log the compiler's commands and output.

    Raises:
        CompilerNotFoundError: no compiler.
        BuildError: the build failed, the cache cannot be used, or its lock was not free in time.
    """
    recipe = recipe or Recipe()
    if sys.platform == "win32":
        raise BuildError("the engine needs POSIX (Linux, macOS); on Windows use WSL")
    plan = _plan(recipe, recipe.content())
    folder = plan.folder
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_others_can_write(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        with _locked(folder):
            engine = None if force else _engine_in(folder, "cache", recipe.kind)
            if engine is None:
                _sweep(folder)
                _sign(folder)
                _compile_into(folder, plan, verbose=verbose)
                engine = _engine_in(folder, "built", recipe.kind)
    except OSError as error:
        raise BuildError(
            f"cannot build {recipe.kind.title} in {folder}: {error}. {_MOVE_CACHE}"
        ) from error
    if engine is None:
        raise BuildError(f"{recipe.kind.title} was built into {folder}, and is there no more")
    return engine


@dataclass(frozen=True)
class _Plan:
    """A recipe, the compilers for it, and the two halves of the key they make."""

    recipe: Recipe
    compiler: tools.Compiler
    nvcc: tools.Compiler | None
    content: Mapping[str, Any]
    toolchain: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return cache_dir() / f"{_digest(self.content, 16)}-{_digest(self.toolchain, 8)}"

    @property
    def compilers(self) -> str:
        return " and ".join(str(found) for found in (self.nvcc, self.compiler) if found)


def _plan(recipe: Recipe, content: Mapping[str, Any]) -> _Plan:
    nvcc = tools.find_nvcc() if recipe.kind.cuda else None
    compiler = tools.find_compiler()
    toolchain = {
        "command": list(compiler.command),
        "identity": list(compiler.identity),
        "pybind11": tools.pybind11_version(),
    }
    if nvcc is not None:
        toolchain |= {"nvcc": list(nvcc.command), "nvcc_identity": list(nvcc.identity)}
    return _Plan(recipe, compiler, nvcc, content, toolchain)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the OS lock of ``folder``; one whose owner died is free."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(folder / "lock"))
    try:
        lock.acquire(timeout=LOCK_NOTICE_S)
    except Timeout:
        log.warning("waiting for another process that builds the engine (%s)", _builder(folder))
        try:
            lock.acquire(timeout=LOCK_DEADLINE_S)
        except Timeout as error:
            raise BuildError(
                f"waited {LOCK_DEADLINE_S + LOCK_NOTICE_S:.0f} s for another process that builds "
                f"the engine ({_builder(folder)}) and holds {folder / 'lock'}: end that process, "
                "or set PYRINGAR_CACHE_DIR to another directory"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _sign(folder: Path) -> None:
    who = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')}"
    (folder / "builder").write_text(who, encoding="utf-8")


def _builder(folder: Path) -> str:
    try:
        return (folder / "builder").read_text(encoding="utf-8")
    except OSError:
        return "unknown"


def _sweep(mine: Path) -> None:
    """Delete what killed builders left; a folder whose lock is held has a live one."""
    from filelock import FileLock, Timeout

    for leftover in mine.parent.glob("*/tmp-*"):
        if leftover.parent == mine:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        try:
            with FileLock(str(leftover.parent / "lock"), timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except Timeout:
            continue


def prebuild(folder: Path) -> None:
    """Compile pyringar's engines below ``folder``, with no cache and no lock: for making a wheel.

    The CUDA engine is one of them if ``PYRINGAR_CUDA_ARCHS`` says for what: who installs a wheel
    may have other GPUs than the machine that makes it.
    """
    for kind in (CPU, CUDA) if os.environ.get("PYRINGAR_CUDA_ARCHS") else (CPU,):
        recipe, own = Recipe(kind=kind), folder / kind.module
        own.mkdir(parents=True, exist_ok=True)
        _compile_into(own, _plan(recipe, recipe.content()))
        (own / "build.log").unlink()


@dataclass(frozen=True)
class _Cuda:
    """The toolkit of one build and the architectures it compiles for."""

    toolkit: tools.CudaToolkit
    archs: tuple[str, ...]

    def record(self, output: str) -> dict[str, Any]:
        """Return what build.json says of it; ``output`` is what the compilers said."""
        return {
            "nvcc": str(self.toolkit),
            "archs": list(self.archs),
            "kernels": [asdict(kernel) for kernel in tools.kernels_in(output)],
        }


def _cuda_of(plan: _Plan) -> _Cuda | None:
    if plan.nvcc is None:
        return None
    toolkit = tools.read_cuda_toolkit(plan.nvcc, plan.compiler)
    return _Cuda(toolkit, tools.cuda_archs_built(plan.content["archs"], toolkit))


def _compile_into(folder: Path, plan: _Plan, *, verbose: bool = False) -> None:
    """Compile, and put the engine and its record into ``folder``, the record first."""
    started, kind = time.monotonic(), plan.recipe.kind
    version, ninja, cuda = tools.compiler_version(plan.compiler), tools.find_ninja(), _cuda_of(plan)
    name = f"{kind.module}{tools.extension_suffix()}"
    # A warning, so that those who did not configure logging know what they wait for.
    log.warning(
        "compiling %s for %s with %s, once; it is kept in %s",
        kind.title,
        "this CPU" if cuda is None else f"compute capability {', '.join(cuda.archs)}",
        plan.compilers,
        folder,
    )
    with tempfile.TemporaryDirectory(
        prefix="tmp-", dir=folder, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        _copy_sources(plan, work / "csrc")
        flags = _accepted_flags(plan, work)
        script = _ninja_script(work, plan, cuda, flags, name)
        (work / "build.ninja").write_text(script, encoding="utf-8")
        output = _run_ninja(ninja, work, folder / "build.log", plan, verbose=verbose)
        seconds = time.monotonic() - started
        record = {
            "content": plan.content,
            "toolchain": plan.toolchain,
            "compiler": version,
            "flags": flags,
            "build_s": round(seconds, 2),
        }
        if cuda is not None:
            record |= cuda.record(output)
        (work / "build.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        for finished in ("build.json", name):
            with open(work / finished, "rb") as file:
                os.fchmod(file.fileno(), 0o755)  # any umask passes _refuse_if_others_can_write
                os.fsync(file.fileno())
            os.replace(work / finished, folder / finished)
    log.info("compiled %s in %.1f s with %s: %s", kind.title, seconds, version, folder / name)


def _copy_sources(plan: _Plan, root: Path) -> None:
    """Copy the sources: an edit during the build must not end up under the key of what was there.

    Relative paths also make messages short and the object code independent of where it was made.
    """
    for source in plan.recipe.files():
        target = root / source.relative_to(plan.recipe.root())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    if replace(plan.recipe, source_root=root).content() != plan.content:
        raise BuildError(f"{plan.recipe.root()} was changed while it was copied: build again")


def _accepted_flags(plan: _Plan, work: Path) -> list[str]:
    """Return the C++ compiler's flags, without the CPU's where the compiler does not know them."""
    compiler, flags = plan.compiler, [*BASE_FLAGS, *plan.recipe.extra_flags]
    tuning = () if plan.recipe.kind.cuda else tools.tuning_flags()
    probe = work / "probe.cpp"
    probe.write_text("int probe;\n", encoding="utf-8")
    tail = ["-c", str(probe), "-o", str(work / "probe.o")]
    if tuning:
        try:
            tools.run_tool([*compiler.command, *flags, *tuning, *tail], "probe")
            return [*flags, *tuning]
        except BuildError:
            log.warning("%s refuses %s: building without it", compiler, " ".join(tuning))
    tools.run_tool([*compiler.command, *flags, *tail], f"{compiler} cannot compile C++20")
    return flags


def _translation_units(work: Path, kind: EngineKind) -> list[str]:
    """Return what to compile, relative to ``work``; writes the files that join a floor."""
    files = kind.files(work / "csrc", kind.compiled)
    names = [file.relative_to(work).as_posix() for file in files]
    for floor in kind.joined:
        inside = [name for name in names if name.startswith(f"csrc/{floor}/")]
        if inside:
            joined = work / f"{floor}.cpp"
            joined.write_text("".join(f'#include "{name}"\n' for name in inside), encoding="utf-8")
            names = [*(name for name in names if name not in inside), joined.name]
    return names


def _ninja_script(
    work: Path, plan: _Plan, cuda: _Cuda | None, flags: Sequence[str], output: str
) -> str:
    """Return a build.ninja that compiles all of ``work``/csrc and links it into ``output``."""
    inputs = _translation_units(work, plan.recipe.kind)
    if not inputs:
        wanted = ", ".join(plan.recipe.kind.compiled)
        raise BuildError(f"there is nothing to compile among the engine's sources ({wanted})")

    def command(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")

    # Floors and file names hold neither blanks nor colons: nothing to escape in what follows.
    objects = [re.sub(r"[/.]", "_", name) + ".o" for name in inputs]
    includes = [*tools.python_include_dirs(), *(map(str, cuda.toolkit.includes) if cuda else ())]
    system = [word for include in includes for word in ("-isystem", include)]
    compile_words = command(*plan.compiler.command, *flags, "-I", "csrc", *system)
    link_words = command(*plan.compiler.command, *flags, *tools.link_flags())
    libraries = command(str(cuda.toolkit.cudart), *CUDART_NEEDS) if cuda else ""
    lines = [
        "rule compile",
        f"  command = {compile_words} $floor_flags -c $in -o $out",
        "  description = compile $out",
        "rule link",
        f"  command = {link_words} $in {libraries} -o $out",
        "  description = link $out",
    ]
    if cuda:
        lines += [
            "rule compile_cuda",
            f"  command = {command(*_nvcc_words(plan, cuda))} -c $in -o $out",
            "  description = compile $out",
        ]
    for obj, name in zip(objects, inputs, strict=True):
        lines.append(f"build {obj}: {'compile_cuda' if name.endswith('.cu') else 'compile'} {name}")
        if name.startswith("csrc/bindings/"):
            lines.append(f"  floor_flags = {BINDINGS_FLAG}")
    lines += [f"build {output}: link {' '.join(objects)}", f"default {output}"]
    return "\n".join(lines) + "\n"


def _nvcc_words(plan: _Plan, cuda: _Cuda) -> list[str]:
    """Return the call of nvcc for one .cu file, without the file."""
    return [
        *(*cuda.toolkit.nvcc.command, *tools.nvcc_host_flags(plan.compiler), *NVCC_FLAGS),
        *(word for flag in plan.recipe.extra_flags for word in ("-Xcompiler", flag)),
        *(*tools.gencode_flags(cuda.archs), "-I", "csrc"),
    ]


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End ninja if the block fails (a deadline, Ctrl-C); asked politely it ends its compilers."""
    try:
        yield
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _run_ninja(ninja: str, work: Path, log_path: Path, plan: _Plan, *, verbose: bool) -> str:
    """Run ninja in ``work`` and return its output, also in ``log_path``; a failure shows it."""
    command = [ninja, "-v", "-j", str(tools.cores_allowed())]
    with open(log_path, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        status: int | None = None
        with suppress(subprocess.TimeoutExpired), _ended(process):
            status = process.wait(timeout=COMPILE_DEADLINE_S)
    said = log_path.read_text(encoding="utf-8", errors="replace")
    lines = said.splitlines()
    if verbose:
        for line in lines:
            log.info("%s", line)
    if status == 0:
        return said
    ending = f"ended with status {status}"
    if status is None:
        ending = f"was ended after {COMPILE_DEADLINE_S:.0f} s"
    failed = next((n for n, line in enumerate(lines) if line.startswith("FAILED")), 0)
    shown = lines[failed:]
    if len(shown) > 30:
        shown = [*shown[:4], f"... {len(shown) - 29} lines ...", *shown[-25:]]
    kind = plan.recipe.kind
    raise BuildError(
        f"compiling {kind.title} with {plan.compilers} {ending}. It said\n{tools.indent(shown)}\n"
        f"  All of it: {log_path}\n"
        f"  What to do: {kind.advice}"
    )
