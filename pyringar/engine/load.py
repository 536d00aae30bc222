"""Loads the native engines: the one place that does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

from pyringar.engine import build
from pyringar.errors import BuildError

__all__ = ["cuda_engine", "engine", "load", "loaded_cuda_engine", "loaded_engine"]

_NAME = f"pyringar.{build.CPU.module}"
_CUDA_NAME = f"pyringar.{build.CUDA.module}"
# Apart: compiling kernels takes minutes, and the CPU's engine need not wait for it.
# A signal handler may come in between, and want the engine too.
_locks = {_NAME: threading.RLock(), _CUDA_NAME: threading.RLock()}


# Of loaded files, by device and inode.
_descriptors: dict[tuple[int, int], int] = {}


def engine() -> ModuleType:
    """Return the CPU engine's module; the first call of a process finds or builds it, and loads it.

    Threads may call it at once: one loads, all get the same module. Costs a dictionary look-up
    from the second call on.

    Raises:
        CompilerNotFoundError: it must be built and there is no compiler.
        BuildError: it cannot be built or loaded; says what was tried and what to do.
    """
    return sys.modules.get(_NAME) or _load_once(_NAME, build.CPU)


def cuda_engine() -> ModuleType:
    """Return the CUDA engine's module, as `engine` does the CPU's; needs no GPU to be loaded.

    Raises:
        CompilerNotFoundError: it must be built and there is no nvcc, or no C++ compiler.
        BuildError: it cannot be built or loaded; says what was tried and what to do.
    """
    return sys.modules.get(_CUDA_NAME) or _load_once(_CUDA_NAME, build.CUDA)


def loaded_engine() -> ModuleType | None:
    """Return the CPU engine's module if this process has loaded it; loads nothing."""
    return sys.modules.get(_NAME)


def loaded_cuda_engine() -> ModuleType | None:
    """Return the CUDA engine's module if this process has loaded it; loads nothing."""
    return sys.modules.get(_CUDA_NAME)


def _load_once(name: str, kind: build.EngineKind) -> ModuleType:
    with _locks[name]:
        module = sys.modules.get(name)
        if module is None:
            module = load(build.ensure_engine(build.Recipe(kind=kind)))
            sys.modules[name] = module  # last: whoever sees it there may use it
        return module


def load(built: build.Engine) -> ModuleType:
    """Load an engine from its file, and keep it nowhere; callers other than checks want `engine`.

    Raises:
        BuildError: it cannot be loaded; the cause is the ImportError.
    """
    name = f"pyringar.{built.path.name.partition('.')[0]}"
    path = _path_of(build.open_engine(built), built.path)
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise BuildError(f"{built.path} is not a Python extension module")
    before = sys.modules.get(name)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"cannot load the engine {built.path} ({built.origin}, "
            f"{built.record.get('compiler')}): {error}. Build it anew with `pyringar build "
            "--force`. If the message names GLIBCXX, use the compiler that belongs to this Python "
            "(`conda install -c conda-forge cxx-compiler`); if the file system forbids programs "
            "(noexec), set PYRINGAR_CACHE_DIR."
        ) from error
    finally:
        # Modules of single-phase initialisation, as older pybind11 makes them, register themselves.
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
    module.__file__ = spec.origin = str(built.path)
    return module


def _path_of(fd: int, path: Path) -> str:
    """Return a path by which the open file is loaded, and no other that took its place.

    Where there is no /proc (macOS) that is its own: whoever may replace it was looked for. The
    descriptor stays open, for dlopen and Python tell libraries apart by their paths.
    """
    found = os.fstat(fd)
    kept = _descriptors.setdefault((found.st_dev, found.st_ino), fd)
    if kept != fd:
        os.close(fd)
    through = f"/proc/self/fd/{kept}"
    try:
        is_it = os.path.samestat(os.stat(through), found)
    except OSError:
        is_it = False
    # Somebody else may have closed it, and its number serve again.
    return through if is_it and list(_descriptors.values()).count(kept) == 1 else str(path)
