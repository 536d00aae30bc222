"""Builds the native engine on first use, and finds it again: sources, compiler, cache, lock.

Importing this module compiles nothing. An engine is told apart by two digests:

* *content*: the sources, the flags, the CPU, the Python ABI, the C library. A file whose content
  digest differs is wrong for this machine or this version.
* *toolchain*: the compiler and pybind11. A new compiler builds anew; with no compiler at hand any
  engine of the same content serves.

Layout of the cache, everything in it written under a lock and put in place by an atomic rename::

    <cache>/<content>-<toolchain>/lock                an OS lock: it dies with its owner
    <cache>/<content>-<toolchain>/tmp-XXXX/           a build at work, or one that was killed
    <cache>/<content>-<toolchain>/build.json          what was built, by whom, with which flags
    <cache>/<content>-<toolchain>/_engine.<abi>.so    renamed last: where it is, it is whole

The engine includes no torch header, so one build serves every torch version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar import _toolchain as tools
from pyringar.errors import BuildError, CompilerNotFoundError

__all__ = [
    "Engine",
    "Recipe",
    "build_engine",
    "cache_dir",
    "ensure_engine",
    "find_engine",
    "prebuild",
]

FLOORS = ("bindings", "cpu", "core")  # the slow ones to compile first
# These floors are one translation unit each: their files include much the same, and reading it once
# takes a third of the time. The bindings stay apart, so that the second core has something to do.
JOINED_FLOORS = ("cpu", "core")
MODULE = "_engine"
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
# Bindings hold no loops over elements, and take a third less time to compile like this.
BINDINGS_FLAG = "-O1"
LOCK_NOTICE_S = 3.0
LOCK_DEADLINE_S = 600.0
COMPILE_DEADLINE_S = 600.0

_SOURCE_SUFFIXES = (".cpp", ".h")
_MOVE_CACHE = "Set PYRINGAR_CACHE_DIR to a directory of your own that can be written."

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class Engine:
    """A built engine: ``origin`` is "wheel", "cache" or "built" (just now)."""

    path: Path
    origin: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What to build. The default is pyringar's own engine; tests build tiny ones.

    ``source_root`` holds the floors; ``_prebuilt`` beside it, if it is there, an engine made when
    the wheel was. ``extra_flags`` go to every compiler call ("-Werror", a sanitizer).
    """

    source_root: Path | None = None
    extra_flags: tuple[str, ...] = ()

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
        """Return every source and header, floor by floor, sorted within each."""
        root = self.root()
        found = (path for floor in FLOORS for path in sorted((root / floor).rglob("*")))
        return [path for path in found if path.suffix in _SOURCE_SUFFIXES]

    def content(self) -> dict[str, Any]:
        """Return what an engine must have been made from to be right for this machine."""
        digest, root = hashlib.sha256(), self.root()
        try:
            for path in self.files():
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
                digest.update(data)
        except OSError as error:
            raise BuildError(f"cannot read the engine's sources: {error}") from error
        cpu = tools.read_cpu()
        return {
            "sources": digest.hexdigest(),
            "flags": [
                *(*BASE_FLAGS, f"bindings: {BINDINGS_FLAG}"),
                *(*tools.tuning_flags(), *tools.link_flags(), *self.extra_flags),
            ],
            "cpu": {"machine": cpu.machine, "model": cpu.model, "features": list(cpu.features)},
            "abi": tools.extension_suffix(),
            "libc": tools.libc_version(),
        }


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


def _engine_in(folder: Path, origin: str) -> Engine | None:
    """Return the engine in ``folder`` if a whole one is there."""
    path = folder / f"{MODULE}{tools.extension_suffix()}"
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
    engine = _engine_in(recipe.root().parent / "_prebuilt", "wheel")
    if engine is None:
        return None
    theirs = engine.record["content"]
    same = all(theirs[name] == content[name] for name in ("sources", "flags", "abi", "libc"))
    if same and tools.read_cpu().runs_code_for(theirs["cpu"]):
        return engine
    log.info(
        "the engine in the wheel is not used: it was made for other sources, another CPU (%s), "
        "Python (%s) or C library (%s)",
        theirs["cpu"]["model"],
        theirs["abi"],
        theirs["libc"],
    )
    return None


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
    found = (_engine_in(folder, "cache") for folder in folders)
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
            engine = None if force else _engine_in(folder, "cache")
            if engine is None:
                _sweep(folder)
                _sign(folder)
                _compile_into(folder, plan, verbose=verbose)
                engine = _engine_in(folder, "built")
    except OSError as error:
        raise BuildError(f"cannot build the engine in {folder}: {error}. {_MOVE_CACHE}") from error
    if engine is None:
        raise BuildError(f"the engine was built into {folder}, and something deleted it since")
    return engine


@dataclass(frozen=True)
class _Plan:
    """A recipe, the compiler for it, and the two halves of the key they make."""

    recipe: Recipe
    compiler: tools.Compiler
    content: Mapping[str, Any]
    toolchain: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return cache_dir() / f"{_digest(self.content, 16)}-{_digest(self.toolchain, 8)}"


def _plan(recipe: Recipe, content: Mapping[str, Any]) -> _Plan:
    compiler = tools.find_compiler()
    toolchain = {
        "command": list(compiler.command),
        "identity": list(compiler.identity),
        "pybind11": tools.pybind11_version(),
    }
    return _Plan(recipe, compiler, content, toolchain)


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
    """Compile pyringar's engine into ``folder``, with no cache and no lock: for making a wheel."""
    recipe = Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    _compile_into(folder, _plan(recipe, recipe.content()))
    (folder / "build.log").unlink()


def _compile_into(folder: Path, plan: _Plan, *, verbose: bool = False) -> None:
    """Compile, and put the engine and its record into ``folder``, the record first."""
    started, compiler = time.monotonic(), plan.compiler
    version, ninja = tools.compiler_version(compiler), tools.find_ninja()
    name = f"{MODULE}{tools.extension_suffix()}"
    # A warning, so that those who did not configure logging know what they wait for.
    log.warning(
        "compiling the engine for this CPU with %s, once; it is kept in %s", compiler, folder
    )
    with tempfile.TemporaryDirectory(
        prefix="tmp-", dir=folder, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        _copy_sources(plan, work / "csrc")
        flags = _accepted_flags(compiler, plan.recipe, work)
        script = _ninja_script(work, compiler, flags, name)
        (work / "build.ninja").write_text(script, encoding="utf-8")
        _run_ninja(ninja, work, folder / "build.log", compiler, verbose=verbose)
        seconds = time.monotonic() - started
        record = {
            "content": plan.content,
            "toolchain": plan.toolchain,
            "compiler": version,
            "flags": flags,
            "build_s": round(seconds, 2),
        }
        (work / "build.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        for finished in ("build.json", name):
            with open(work / finished, "rb") as file:
                os.fchmod(file.fileno(), 0o755)  # any umask passes _refuse_if_others_can_write
                os.fsync(file.fileno())
            os.replace(work / finished, folder / finished)
    log.info("compiled the engine in %.1f s with %s: %s", seconds, version, folder / name)


def _copy_sources(plan: _Plan, root: Path) -> None:
    """Copy the sources: an edit during the build must not end up under the key of what was there.

    Relative paths also make messages short and the object code independent of where it was made.
    """
    for source in plan.recipe.files():
        target = root / source.relative_to(plan.recipe.root())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    if Recipe(root, plan.recipe.extra_flags).content() != plan.content:
        raise BuildError(f"{plan.recipe.root()} was changed while it was copied: build again")


def _accepted_flags(compiler: tools.Compiler, recipe: Recipe, work: Path) -> list[str]:
    """Return the compile flags, without the CPU's where the compiler does not know them."""
    flags = [*BASE_FLAGS, *recipe.extra_flags]
    probe = work / "probe.cpp"
    probe.write_text("int probe;\n", encoding="utf-8")
    tail = ["-c", str(probe), "-o", str(work / "probe.o")]
    try:
        tools.run_tool([*compiler.command, *flags, *tools.tuning_flags(), *tail], "probe")
    except BuildError:
        tools.run_tool([*compiler.command, *flags, *tail], f"{compiler} cannot compile C++20")
        log.warning("%s refuses %s: building without it", compiler, " ".join(tools.tuning_flags()))
        return flags
    return [*flags, *tools.tuning_flags()]


def _translation_units(work: Path) -> list[str]:
    """Return what to compile, relative to ``work``; writes the files that join a floor."""
    units: list[str] = []
    for floor in FLOORS:
        files = sorted((work / "csrc" / floor).rglob("*.cpp"))
        names = [file.relative_to(work).as_posix() for file in files]
        if floor in JOINED_FLOORS and names:
            joined = work / f"{floor}.cpp"
            joined.write_text("".join(f'#include "{name}"\n' for name in names), encoding="utf-8")
            names = [joined.name]
        units += names
    return units


def _ninja_script(work: Path, compiler: tools.Compiler, flags: Sequence[str], output: str) -> str:
    """Return a build.ninja that compiles all of ``work``/csrc and links it into ``output``."""
    inputs = _translation_units(work)
    if not inputs:
        raise BuildError(f"there is no .cpp file among the engine's sources ({', '.join(FLOORS)})")

    def command(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")

    system = [word for include in tools.python_include_dirs() for word in ("-isystem", include)]
    compile_words = command(*compiler.command, *flags, "-I", "csrc", *system)
    link_words = command(*compiler.command, *flags, *tools.link_flags())
    # Floors and file names hold neither blanks nor colons: nothing to escape in what follows.
    objects = [name.replace("/", "_").replace(".cpp", ".o") for name in inputs]
    lines = [
        "rule compile",
        f"  command = {compile_words} $floor_flags -c $in -o $out",
        "  description = compile $out",
        "rule link",
        f"  command = {link_words} $in -o $out",
        "  description = link $out",
    ]
    for obj, name in zip(objects, inputs, strict=True):
        lines.append(f"build {obj}: compile {name}")
        if name.startswith("csrc/bindings/"):
            lines.append(f"  floor_flags = {BINDINGS_FLAG}")
    lines += [f"build {output}: link {' '.join(objects)}", f"default {output}"]
    return "\n".join(lines) + "\n"


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


def _run_ninja(
    ninja: str, work: Path, log_path: Path, compiler: tools.Compiler, *, verbose: bool
) -> None:
    """Run ninja in ``work``, its output in ``log_path``; on failure say what it said."""
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
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    if verbose:
        for line in lines:
            log.info("%s", line)
    if status == 0:
        return
    ending = f"ended with status {status}"
    if status is None:
        ending = f"was ended after {COMPILE_DEADLINE_S:.0f} s"
    failed = next((n for n, line in enumerate(lines) if line.startswith("FAILED")), 0)
    shown = lines[failed:]
    if len(shown) > 30:
        shown = [*shown[:4], f"... {len(shown) - 29} lines ...", *shown[-25:]]
    raise BuildError(
        f"compiling the engine with {compiler} {ending}. It said\n{tools.indent(shown)}\n"
        f"  All of it: {log_path}\n"
        "  What to do: g++ 11 or clang++ 14 and newer can build it; try another compiler "
        "(`CXX=clang++`), then `pyringar build --verbose`."
    )
