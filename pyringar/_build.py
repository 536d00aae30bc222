"""Builds the native engines on first use, and finds them again: cache, keys, lock.

Importing this module compiles nothing; `pyringar._compile` knows how. A build is told apart by two
digests:

* *content*: the sources, the flags, the Python ABI, the C library; the CPU or the GPU
  architectures. A file whose content digest differs is wrong for this machine or this version.
* *toolchain*: the compilers and pybind11. A new compiler builds anew; with no compiler at hand any
  engine of the same content serves.

Layout of the cache, everything in it written under a lock and put in place by an atomic rename::

    <cache>/<content>-<toolchain>/lock                an OS lock: it dies with its owner
    <cache>/<content>-<toolchain>/tmp-XXXX/           a build at work, or one that was killed
    <cache>/<content>-<toolchain>/build.json          what was built, by whom, with which flags
    <cache>/<content>-<toolchain>/_engine.<abi>.so    renamed last: where it is, it is whole
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar import _toolchain as tools
from pyringar._compile import CPU, CUDA, EngineKind, Plan, Recipe, compile_into, plan_build
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

LOCK_NOTICE_S = 3.0
# Kernels for a dozen architectures, on two slow cores, take minutes.
LOCK_DEADLINE_S = 1800.0

_MOVE_CACHE = "Set PYRINGAR_CACHE_DIR to a directory of your own that can be written."

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class Engine:
    """A built engine: ``origin`` is "wheel", "cache" or "built" (just now)."""

    path: Path
    origin: str
    record: Mapping[str, Any]


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


def _folder(plan: Plan) -> Path:
    """Return where the cache has, or will have, what this plan makes."""
    return cache_dir() / f"{_digest(plan.content, 16)}-{_digest(plan.toolchain, 8)}"


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
        folders = [_folder(plan_build(recipe, content))]
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
    plan = plan_build(recipe, recipe.content())
    folder = _folder(plan)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_others_can_write(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        with _locked(folder):
            engine = None if force else _engine_in(folder, "cache", recipe.kind)
            if engine is None:
                _sweep(folder)
                _sign(folder)
                compile_into(folder, plan, verbose=verbose)
                engine = _engine_in(folder, "built", recipe.kind)
    except OSError as error:
        raise BuildError(
            f"cannot build {recipe.kind.title} in {folder}: {error}. {_MOVE_CACHE}"
        ) from error
    if engine is None:
        raise BuildError(f"{recipe.kind.title} was built into {folder}, and is there no more")
    return engine


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
        compile_into(own, plan_build(recipe, recipe.content()))
        (own / "build.log").unlink()
