"""Build the native engines on first use, and find them again: cache, keys, lock.

Importing this module compiles nothing; `pyringar.engine.compile` knows how. Two digests tell builds
apart:

* *content*: the sources, the flags, the Python ABI, the C library; the CPU or the GPU
  architectures. A file whose content digest differs is wrong for this machine or this version.
* *toolchain*: the compilers and pybind11. A new compiler builds anew; without a compiler any
  engine of the same content serves.

A wheel may bring engines of its own, for any CPU of its architecture. They serve at once, until
`build_engine` has built one for this very CPU.

Layout of the cache, everything in it written under a lock and put in place by an atomic rename::

    <cache>/<content>-<toolchain>/lock                an OS lock: it dies with its owner
    <cache>/<content>-<toolchain>/tmp-XXXX/           a build at work, or one that was killed
    <cache>/<content>-<toolchain>/build.json          what was built, with which compiler and flags
    <cache>/<content>-<toolchain>/_engine.<abi>.so    renamed last: if it is there, it is whole
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyringar.engine import toolchain
from pyringar.engine.compile import (
    COMPILE_DEADLINE_S,
    CPU,
    CUDA,
    EngineKind,
    Plan,
    Recipe,
    compile_into,
    plan_build,
)
from pyringar.engine.files import (
    NotPrivateError,
    make_private_dir,
    open_for_owner,
    open_private,
    private_path,
    read_json,
)
from pyringar.engine.levels import levels, libc_serves
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
    "open_engine",
    "prebuild",
]

LOCK_NOTICE_S = 3.0
LOCK_DEADLINE_S = COMPILE_DEADLINE_S

_MOVE_CACHE = (
    "Set PYRINGAR_CACHE_DIR to a directory of your own, with mode 0700 and below folders that "
    "nobody but you and root can write."
)
_MAX_RECORD_BYTES = 64 << 20

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class Engine:
    """A built engine: ``origin`` is "wheel", "cache" or "built" (just now)."""

    path: Path
    origin: str
    record: Mapping[str, Any]


# -- cache -----------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Return the folder of the engines; creates nothing.

    Raises:
        BuildError: ``PYRINGAR_CACHE_DIR`` is in a home that is not there; there is neither a usual
            cache nor a folder for temporary files; or this is Windows.
    """
    return _cache_dirs()[0][0]


def _cache_dirs() -> tuple[list[Path], str]:
    """Return the folders to look in, the best first, and why the usual one is not among them.

    ``PYRINGAR_CACHE_DIR`` alone, if it is set. Else the platform's cache folder, if it is or can be
    made this user's alone; then one in the folder for temporary files, in case that fails.
    """
    if sys.platform == "win32":
        raise BuildError("the engine needs POSIX (Linux, macOS); on Windows use WSL")
    chosen = os.environ.get("PYRINGAR_CACHE_DIR")
    if chosen:
        try:
            return [Path(chosen).expanduser().absolute()], ""
        except (RuntimeError, OSError) as error:  # no such user, no current folder
            raise BuildError(
                f"PYRINGAR_CACHE_DIR is {chosen!r} ({error}). {_MOVE_CACHE}"
            ) from error
    import platformdirs

    usual = Path(platformdirs.user_cache_dir("pyringar", appauthor=False))
    reason = _why_unusable(usual)
    try:
        temporary = Path(tempfile.gettempdir()) / f"pyringar-{os.geteuid()}"
    except OSError as error:
        if reason:
            raise BuildError(f"there is no cache: {reason}; {error}. {_MOVE_CACHE}") from error
        return [usual], ""
    if reason:
        return [temporary], reason
    return [usual] if _why_unusable(temporary) else [usual, temporary], ""


def _why_unusable(folder: Path) -> str:
    """Return why a folder cannot be a cache; "" if it is one, or can be made."""
    if not folder.is_absolute():
        return f"{folder} is no absolute path: this user has no home folder"
    try:
        private_path(folder)
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if there == folder or os.access(there, os.W_OK | os.X_OK):
            return "" if there.is_dir() else f"{there} is not a folder"
        return f"{there} cannot be written"
    except (NotPrivateError, OSError) as error:
        return str(error)


@functools.lru_cache(maxsize=8)
def _warn_of_temporary(folder: Path, reason: str) -> None:
    text = "engines are kept in %s, which may not last: %s. Mend that, or set PYRINGAR_CACHE_DIR"
    log.warning(text, folder, reason)


def _digest(value: Mapping[str, Any], length: int) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _folder(plan: Plan) -> str:
    """Return the name, in a cache, of the folder for the engine of this plan."""
    return f"{_digest(plan.content, 16)}-{_digest(plan.toolchain, 8)}"


@contextmanager
def _explained(path: Path, doing: str) -> Iterator[None]:
    """Turn what the file system refuses into a BuildError that says what to do."""
    try:
        yield
    except NotPrivateError as error:
        raise BuildError(f"{error}: code is not loaded from {path}. {_MOVE_CACHE}") from error
    except (OSError, ValueError) as error:
        raise BuildError(f"{doing}: {error}. {_MOVE_CACHE}") from error


def _engine_in(folder: Path, origin: str, kind: EngineKind) -> Engine | None:
    """Return the engine in ``folder``, None if there is no whole one."""
    path = folder / f"{kind.module}{toolchain.extension_suffix()}"
    with _explained(folder, f"cannot read the engine in {folder}, delete that folder"):
        try:
            if origin != "wheel":
                for checked in (folder.parent, folder, path):
                    private_path(checked)
            record = read_json(folder / "build.json", _MAX_RECORD_BYTES)
            if not path.is_file():
                return None
        except FileNotFoundError:
            return None
    if not (isinstance(record, dict) and isinstance(record.get("content"), dict)):
        raise BuildError(f"{folder / 'build.json'} is no record of a build: delete that folder")
    return Engine(path, origin, record)


def open_engine(engine: Engine) -> int:
    """Open an engine's file, and return the descriptor: the file that is checked is the one loaded.

    An engine in the wheel is not checked: whoever can write it can write pyringar's Python files
    beside it, too.

    Raises:
        BuildError: Another user can replace it, or it cannot be opened.
    """
    with _explained(engine.path, f"cannot open the engine {engine.path}"):
        if engine.origin == "wheel":
            return os.open(engine.path, os.O_RDONLY | os.O_CLOEXEC)
        return open_private(engine.path)


def _engine_in_wheel(recipe: Recipe, content: Mapping[str, Any]) -> Engine | None:
    """Return the best engine in the wheel that runs on this machine, None if there is none."""
    kind, cpu = recipe.kind, None if recipe.kind.cuda else toolchain.read_cpu()
    for made_for in _recipes_in_wheel(recipe):
        level = made_for.level
        if cpu and level and not cpu.has(level):
            continue
        engine = _engine_in(_folder_in_wheel(made_for), "wheel", kind)
        if engine is None:
            continue
        theirs = engine.record["content"]
        wanted = {**content, "cpu": made_for.cpu()} if cpu else content
        fits = {name: theirs.get(name) == ours for name, ours in wanted.items()}
        fits["libc"] = libc_serves(content["libc"], str(theirs.get("libc")))
        if "archs" in content:
            fits["archs"] = toolchain.cuda_archs_cover(engine.record["archs"], content["archs"])
        misfits = [f"{name} ({theirs.get(name)})" for name, fit in fits.items() if not fit]
        if not misfits:
            return engine
        text = "%s in the wheel is not used, it was made for others than those here: %s"
        log.info(text, kind.title, ", ".join(misfits))
    return None


def _recipes_in_wheel(recipe: Recipe) -> list[Recipe]:
    """Return the recipes of the engines in a wheel, the best first."""
    return [recipe] if recipe.kind.cuda else [replace(recipe, level=at) for at in levels()]


def _folder_in_wheel(recipe: Recipe) -> Path:
    folder = recipe.root().parent / "_prebuilt" / recipe.kind.module
    return folder / recipe.level.name if recipe.level else folder


def _engine_in_cache(recipe: Recipe, content: Mapping[str, Any], *, quiet: bool) -> Engine | None:
    """Return the engine that was built on this machine; ``quiet``: no word on where engines go."""
    caches, reason = _cache_dirs()
    if reason and not quiet:
        _warn_of_temporary(caches[0], reason)
    try:
        name = _folder(plan_build(recipe, content))
    except CompilerNotFoundError:
        # Built elsewhere (a container image, a node without compilers), and still right.
        name = f"{_digest(content, 16)}-*"
    with _explained(caches[0], f"cannot look for {recipe.kind.title}"):
        folders = [folder for cache in caches for folder in sorted(cache.glob(name))]
    found = (_engine_in(folder, "cache", recipe.kind) for folder in folders)
    return next((engine for engine in found if engine is not None), None)


def find_engine(recipe: Recipe | None = None) -> Engine | None:
    """Find the best engine for this machine; builds nothing, needs no compiler.

    That is one built for this very CPU, else one in the wheel.

    Raises:
        BuildError: There is none in the wheel, and the cache belongs to, or can be written by,
            another user.
    """
    recipe = recipe or Recipe()
    content = recipe.content()
    in_wheel = _engine_in_wheel(recipe, content)
    try:
        return _engine_in_cache(recipe, content, quiet=in_wheel is not None) or in_wheel
    except BuildError as error:
        if in_wheel is None:
            raise
        log.warning(
            "%s in the wheel is used, none that was built here: %s", recipe.kind.title, error
        )
        return in_wheel


def ensure_engine(recipe: Recipe | None = None) -> Engine:
    """Find the engine or build it: milliseconds, or seconds once. Raises what either raises."""
    return find_engine(recipe) or build_engine(recipe)


# -- build -----------------------------------------------------------------------------------------


def build_engine(
    recipe: Recipe | None = None, *, force: bool = False, verbose: bool = False
) -> Engine:
    """Build the engine into the cache, unless another process just did.

    Any number of processes may call this at once: one builds, the others wait for it.

    Args:
        recipe: The engine to build; pyringar's own by default.
        force: Build even if it is there.
        verbose: Log the compiler's commands and output.

    Raises:
        CompilerNotFoundError: There is no compiler.
        BuildError: The build failed, the cache cannot be used, or its lock was not free in time;
            says what was tried and what to do.
    """
    recipe = recipe or Recipe()
    plan = plan_build(recipe, recipe.content())
    folder = _make_folder(recipe.kind, _folder(plan))
    with _explained(folder, f"cannot build {recipe.kind.title} in {folder}"), _locked(folder):
        engine = None if force else _engine_in(folder, "cache", recipe.kind)
        if engine is None:
            _sweep(folder)
            _sign(folder)
            compile_into(folder, plan, verbose=verbose)
            engine = _engine_in(folder, "built", recipe.kind)
    if engine is None:
        raise BuildError(f"{recipe.kind.title} was built into {folder}, and is there no more")
    return engine


def _make_folder(kind: EngineKind, name: str) -> Path:
    """Make and return the folder of a build, in the first cache that can be written."""
    caches, reason = _cache_dirs()
    for cache in caches:
        folder = cache / name
        with _explained(folder, f"cannot build {kind.title} in {folder}"):
            try:
                private_path(cache)
                make_private_dir(folder)
                private_path(folder)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            except OSError as error:
                if cache == caches[-1]:
                    raise
                reason = str(error)
                continue
        if reason:
            _warn_of_temporary(cache, reason)
        return folder
    raise AssertionError("there is no cache at all")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the OS lock of ``folder``; one whose owner died is free."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(folder / "lock"), mode=0o600)
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
    with open(folder / "builder", "w", encoding="utf-8", opener=open_for_owner) as file:
        file.write(who)


def _builder(folder: Path) -> str:
    try:
        return (folder / "builder").read_text(encoding="utf-8")
    except OSError:
        return "unknown"


def _sweep(mine: Path) -> None:
    """Delete what killed builds left; a folder whose lock another process holds has a live one."""
    from filelock import FileLock, Timeout

    for leftover in mine.parent.glob("*/tmp-*"):
        if leftover.parent == mine:  # locked by this process
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        lock = FileLock(str(leftover.parent / "lock"), timeout=0, mode=0o600)
        with suppress(Timeout), lock:
            shutil.rmtree(leftover, ignore_errors=True)


def prebuild(package: Path) -> None:
    """Compile engines into the folder ``package``, without cache and lock: for making a wheel.

    For every level of this machine's architecture. The CUDA engine only if ``PYRINGAR_CUDA_ARCHS``
    is set: whoever installs a wheel may have other GPUs than the machine that makes it.
    """
    for kind in (CPU, CUDA) if os.environ.get("PYRINGAR_CUDA_ARCHS") else (CPU,):
        for recipe in _recipes_in_wheel(Recipe(kind=kind)):
            folder = package / _folder_in_wheel(recipe).relative_to(recipe.root().parent)
            folder.mkdir(parents=True, exist_ok=True)
            compile_into(folder, plan_build(recipe, recipe.content()))
            (folder / "build.log").unlink()
