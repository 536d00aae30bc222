"""Cache of native engines: find an engine, or build it at first use.

The key of a build has two digests:

* *content*: the sources, the flags, the Python ABI, the C library; the CPU or the GPU
  architectures. An engine with another content digest does not fit this machine or version.
* *toolchain*: the compilers and pybind11. A new compiler rebuilds the engine. Without a compiler
  any engine of the same content is used.

A wheel may contain an engine for any CPU of its architecture. It is used until `build_engine` has
built an engine for this CPU. The layout of the cache:

    <cache>/<module>.lock                             lock of a running build
    <cache>/tmp-<module>-XXXX/                        a running build; the next build deletes it
    <cache>/<content>-<toolchain>/build.json          sources, compiler and flags of the build
    <cache>/<content>-<toolchain>/_engine.<abi>.so    renamed last: if it exists, it is complete
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.engine import toolchain
from pyringar.engine.compile import (
    COMPILE_DEADLINE_S,
    CPU,
    CUDA,
    BuildPlan,
    EngineKind,
    Recipe,
    compile_into,
    plan_build,
)
from pyringar.errors import BuildError, CompilerNotFoundError

_IN_WHEEL = "_prebuilt"  # the folder of engines in a wheel
LOCK_NOTICE_S = 3.0
LOCK_DEADLINE_S = COMPILE_DEADLINE_S

_MOVE_CACHE = "Set PYRINGAR_CACHE_DIR to a folder that you can write and nobody else but root can."

log = logging.getLogger("pyringar")


@dataclass(frozen=True)
class Engine:
    """A built engine. ``origin``: "wheel", "cache" or "built" (by this call)."""

    path: Path
    origin: str
    record: Mapping[str, Any]


def cache_dir() -> Path:
    """Return the cache folder: ``PYRINGAR_CACHE_DIR`` or a default. Creates nothing."""
    if sys.platform == "win32":
        raise BuildError("the engine needs POSIX (Linux, macOS); on Windows use WSL")
    import platformdirs

    chosen = os.environ.get("PYRINGAR_CACHE_DIR")
    try:
        folder = Path(chosen or platformdirs.user_cache_dir("pyringar", appauthor=False))
        return folder.expanduser().resolve()
    except (OSError, RuntimeError) as error:  # the path is too long, or ~user is unknown
        raise BuildError(f"PYRINGAR_CACHE_DIR is {chosen!r}: {error}. {_MOVE_CACHE}") from error


def _check_private(path: Path) -> None:
    """Raise PermissionError if another user, except root, can write the file or folder."""
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, neither to you ({os.geteuid()}) nor to root"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # Linux sets these bits for symbolic links
        raise PermissionError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"`chmod go-w {path}` ends that"
        )


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn a file system error into a BuildError with advice."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise BuildError(f"cannot {doing}: {error}. {_MOVE_CACHE}") from error


def find_engine(recipe: Recipe) -> Engine | None:
    """Find the engine built for this CPU, else the engine in the wheel.

    Needs no compiler. Skips, with a warning, an engine that other users can write.
    """
    content = recipe.content()
    return _engine_in_cache(recipe, content) or _engine_in_wheel(recipe, content)


def ensure_engine(recipe: Recipe | None = None) -> Engine:
    """Find the engine, or build it. A build takes seconds, finding it milliseconds."""
    recipe = recipe or Recipe()
    return find_engine(recipe) or build_engine(recipe)


def _engine_in_cache(recipe: Recipe, content: Mapping[str, Any]) -> Engine | None:
    try:
        key = _key(plan_build(recipe, content))
    except CompilerNotFoundError:
        # Any toolchain: another machine may have built the engine, as in a container image.
        key = f"{_digest(content, 16)}-*"
    with _explained(f"look for {recipe.kind.title}"):
        found = (_private_engine_in(f, recipe.kind) for f in sorted(cache_dir().glob(key)))
        return next(filter(None, found), None)


def _key(plan: BuildPlan) -> str:
    return f"{_digest(plan.content, 16)}-{_digest(plan.toolchain, 8)}"


def _digest(value: Mapping[str, Any], length: int) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _private_engine_in(folder: Path, kind: EngineKind) -> Engine | None:
    engine = _engine_in(folder, "cache", kind)
    if engine is None:
        return None
    try:
        for path in (folder.parent, folder, engine.path):
            _check_private(path)
    except PermissionError as error:
        log.warning("%s in %s is not loaded: %s", kind.title, folder, error)
        return None
    return engine


def _engine_in(folder: Path, origin: str, kind: EngineKind) -> Engine | None:
    path = folder / kind.file
    if not path.is_file():
        return None
    return Engine(path, origin, json.loads((folder / "build.json").read_bytes()))


def _engine_in_wheel(recipe: Recipe, content: Mapping[str, Any]) -> Engine | None:
    """Return the engine in the wheel if its sources, flags and GPU architectures fit."""
    kind = recipe.kind
    # The file is not checked: a user who can write it can write pyringar's Python files, too.
    engine = _engine_in(recipe.root().parent / _IN_WHEEL / kind.module, "wheel", kind)
    if engine is None:
        return None
    built_from = engine.record["content"]
    misfits = [name for name in ("sources", "flags") if built_from[name] != content[name]]
    if kind.cuda and not toolchain.cuda_archs_cover(engine.record["archs"], content["archs"]):
        misfits.append("archs")
    if misfits:
        text = "%s in the wheel is not used: other %s than here"
        log.info(text, kind.title, ", ".join(misfits))
        return None
    return engine


def build_engine(recipe: Recipe, *, force: bool = False, verbose: bool = False) -> Engine:
    """Build the engine into the cache, unless another process has just built it.

    If several processes call this, one builds and the others wait. ``force`` rebuilds an existing
    engine, ``verbose`` logs the compiler's commands and output. Raises BuildError if the build
    fails, the cache cannot be used, or its lock is not free in time.
    """
    kind, plan = recipe.kind, plan_build(recipe, recipe.content())
    folder = cache_dir() / _key(plan)
    with _explained(f"build {kind.title} in {folder}"):
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(made)
        with _locked(folder.parent, kind):
            engine = None if force else _private_engine_in(folder, kind)
            if engine is None:
                for killed in folder.parent.glob(f"tmp-{kind.module}-*"):
                    shutil.rmtree(killed, ignore_errors=True)
                compile_into(folder, plan, verbose=verbose)
                engine = _engine_in(folder, "built", kind)
    if engine is None:
        raise BuildError(f"{kind.title} was built into {folder}, and is there no more")
    return engine


@contextmanager
def _locked(cache: Path, kind: EngineKind) -> Iterator[None]:
    """Hold the lock of builds of this kind; the system releases it if the process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(cache / f"{kind.module}.lock"), mode=0o600)
    try:
        lock.acquire(timeout=LOCK_NOTICE_S)
    except Timeout:
        log.warning("waiting for another process that builds %s in %s", kind.title, cache)
        try:
            lock.acquire(timeout=LOCK_DEADLINE_S)
        except Timeout as error:
            raise BuildError(
                f"waited {LOCK_DEADLINE_S + LOCK_NOTICE_S:.0f} s for another process that builds "
                f"{kind.title} and holds {lock.lock_file}: end that process (`fuser` names it), "
                "or set PYRINGAR_CACHE_DIR to another folder"
            ) from error
    try:
        yield
    finally:
        lock.release()


def prebuild(package: Path) -> None:
    """Compile engines for a wheel into the folder ``package``, without cache and lock.

    The CPU engine is for any CPU of this architecture. The CUDA engine is compiled only if
    ``PYRINGAR_CUDA_ARCHS`` names the GPUs that will use the wheel.
    """
    for kind in (CPU, CUDA) if os.environ.get("PYRINGAR_CUDA_ARCHS") else (CPU,):
        recipe = Recipe(kind=kind, baseline=True)
        folder = package / _IN_WHEEL / kind.module
        folder.mkdir(parents=True, exist_ok=True)
        compile_into(folder, plan_build(recipe, recipe.content()))
        (folder / "build.log").unlink()
