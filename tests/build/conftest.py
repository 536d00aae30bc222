"""Fixtures: a private cache, a compiler wrapper, sources of a tiny engine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest
from tiny_engine import CUDA_MODULE_CPP, KERNEL_CU, MODULE_CPP, run, script, set_value

from pyringar.engine import build, load


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the path of a new engine cache; unset CXX, CUDA_HOME and PYRINGAR_*."""
    for name in ("CXX", "CUDA_HOME", *os.environ):
        if name in ("CXX", "CUDA_HOME") or name.startswith("PYRINGAR_"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path):
    """Return the recipe of a tiny engine with a function value() that returns 42."""
    root = tmp_path / "csrc"
    for layer in ("bindings", "cpu", "core"):
        (root / layer).mkdir(parents=True)
    (root / "bindings/module.cpp").write_text(MODULE_CPP)
    set_value(build.Recipe(root), 42)
    return build.Recipe(root)


@pytest.fixture
def tiny_cuda(tiny, monkeypatch):
    """Return the recipe of a tiny CUDA engine for one architecture."""
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", "9.0")
    (tiny.root() / "cuda").mkdir()
    (tiny.root() / "cuda/kernel.cu").write_text(KERNEL_CU)
    (tiny.root() / "bindings/cuda_module.cpp").write_text(CUDA_MODULE_CPP)
    return build.Recipe(tiny.root(), kind=build.CUDA)


@pytest.fixture
def python(tmp_path):
    """Return the Python of a new virtual environment with all packages except pyringar."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    found = home / "bin" / "python"
    site = run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "pyringar" not in entry.name and not (borrowed / entry.name).exists():
                (borrowed / entry.name).symlink_to(entry)
    (Path(site.strip()) / "borrowed.pth").write_text(str(borrowed))
    return found


@pytest.fixture
def wrapper(tmp_path, cache, monkeypatch):
    """Return a function that sets CXX to shell lines plus the compiler, and returns its log."""

    def make(lines: str) -> Path:
        log = tmp_path / "compiler.log"
        real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
        text = f'echo "$@" >> {log}\n{textwrap.dedent(lines)}\nexec {real} "$@"'
        monkeypatch.setenv("CXX", str(script(tmp_path / "my-c++", text)))
        return log

    return make


@pytest.fixture
def unloaded(monkeypatch):
    """Remove the engines from sys.modules, before and after the test."""
    names = (load._NAME, load._CUDA_NAME)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)
