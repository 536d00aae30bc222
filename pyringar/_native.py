"""Loads the native engine: the one place that does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from types import ModuleType

from pyringar import _build
from pyringar.errors import BuildError

__all__ = ["engine", "load", "loaded_engine"]

_NAME = f"pyringar.{_build.MODULE}"
_lock = threading.Lock()


def engine() -> ModuleType:
    """Return the engine's module; the first call of a process finds or builds it, then loads it.

    Threads may call it at once: one loads, all get the same module. Costs a dictionary look-up
    from the second call on.

    Raises:
        CompilerNotFoundError: it must be built and there is no compiler.
        BuildError: it cannot be built or loaded; says what was tried and what to do.
    """
    module = sys.modules.get(_NAME)
    if module is not None:
        return module
    with _lock:
        module = sys.modules.get(_NAME)
        if module is None:
            module = load(_build.ensure_engine())
            sys.modules[_NAME] = module  # last: whoever sees it there may use it
        return module


def loaded_engine() -> ModuleType | None:
    """Return the engine's module if this process has loaded it; loads nothing."""
    return sys.modules.get(_NAME)


def load(built: _build.Engine) -> ModuleType:
    """Load the engine from its file, and keep it nowhere; callers other than checks want `engine`.

    Raises:
        BuildError: it cannot be loaded; the cause is the ImportError.
    """
    path = str(built.path)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is not a Python extension module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"cannot load the engine {path} ({built.origin}, {built.record.get('compiler')}): "
            f"{error}. Build it anew with `pyringar build --force`. If the message names GLIBCXX, "
            "use the compiler that belongs to this Python (`conda install -c conda-forge "
            "cxx-compiler`); if the file system forbids programs (noexec), set PYRINGAR_CACHE_DIR."
        ) from error
    return module
