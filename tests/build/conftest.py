"""A cache and a compiler of each test's own, and the sources of a tiny engine."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_engine import MODULE_CPP

from pyringar import _build, _native


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, not there yet, and no environment variable of the user's."""
    for name in ("CXX", *(name for name in os.environ if name.startswith("PYRINGAR_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> _build.Recipe:
    """The sources of an engine whose value() is 42."""
    root = tmp_path / "csrc"
    for floor in _build.FLOORS:
        (root / floor).mkdir(parents=True)
    (root / "core/value.h").write_text("#pragma once\ninline constexpr long kValue = 42;\n")
    (root / "bindings/module.cpp").write_text(MODULE_CPP)
    return _build.Recipe(root)


@pytest.fixture
def wrapper(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make CXX a script: given lines of shell, then the real compiler. Returns its log."""

    def make(lines: str) -> Path:
        log = tmp_path / "compiler.log"
        script = tmp_path / "my-c++"
        real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {log}\n{textwrap.dedent(lines)}\nexec {real} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    return make


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that this process has not loaded the engine."""
    monkeypatch.delitem(sys.modules, _native._NAME, raising=False)
    yield
    sys.modules.pop(_native._NAME, None)
