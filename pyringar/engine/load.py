"""Loading of the native engines."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from types import ModuleType

from pyringar.engine import build
from pyringar.engine.compile import CPU, CUDA, EngineKind, Recipe
from pyringar.errors import BuildError

_NAME = f"pyringar.{CPU.module}"
_CUDA_NAME = f"pyringar.{CUDA.module}"
# One lock per engine: the CPU engine need not wait minutes for CUDA kernels to compile.
# Reentrant: a signal handler that interrupts the loading may need the engine.
_locks = {_NAME: threading.RLock(), _CUDA_NAME: threading.RLock()}


def engine() -> ModuleType:
    """Return the module of the CPU engine. The first call finds or builds it, and loads it.

    Thread safe. Later calls cost a dictionary look-up. Raises CompilerNotFoundError if there is
    neither an engine nor a compiler, and BuildError if the build or the load fails.
    """
    return sys.modules.get(_NAME) or _load_once(_NAME, CPU)


def cuda_engine() -> ModuleType:
    """Return the module of the CUDA engine. Loading needs no GPU. See `engine`."""
    return sys.modules.get(_CUDA_NAME) or _load_once(_CUDA_NAME, CUDA)


def loaded_engine() -> ModuleType | None:
    return sys.modules.get(_NAME)


def loaded_cuda_engine() -> ModuleType | None:
    return sys.modules.get(_CUDA_NAME)


def _load_once(name: str, kind: EngineKind) -> ModuleType:
    with _locks[name]:
        if name not in sys.modules:
            sys.modules[name] = load(build.ensure_engine(Recipe(kind=kind)))
        return sys.modules[name]


def load(built: build.Engine) -> ModuleType:
    """Load an engine file without registering the module in ``sys.modules``."""
    name = f"pyringar.{built.path.name.partition('.')[0]}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(built.path))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(built.path))
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
    module.__file__ = str(built.path)
    return module
