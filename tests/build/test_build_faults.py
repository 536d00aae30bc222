"""A build that cannot be: what is refused, what does the error say, and what is left behind?"""

from __future__ import annotations

import sys

import pytest
from tiny_engine import leftovers, load, needs_compiler, refusal

from pyringar.engine import build, compile, toolchain
from pyringar.errors import BuildError, CompilerNotFoundError


def test_no_compiler_says_what_to_install(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal(tiny, CompilerNotFoundError)
    for word in ("c++, g++, clang++", str(tmp_path), "apt", "dnf", "xcode-select", "conda", "CXX"):
        assert word in told
    assert not cache.exists()


@pytest.mark.parametrize("cxx", ["no-such-compiler", "/no/such/g++ -O1", "ccache", "g++ 'open"])
def test_missing_cxx_is_not_passed_over(cache, monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompilerNotFoundError, match="CXX="):
        toolchain.find_compiler()


@needs_compiler
def test_built_engine_serves_without_compiler(cache, tiny, tmp_path, monkeypatch):
    build.ensure_engine(tiny)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.ensure_engine(tiny).origin == "cache"


@needs_compiler
@pytest.mark.parametrize(
    ("call", "says", "told"),
    [
        ("*", "licence expired", ["status 1", "--version"]),
        ("*-c*", "no space left", ["C++20", "-std=c++20"]),
        ("*module.cpp*", "out of memory", ["module.cpp", "build.log", "CXX=clang++"]),
        ("*-shared*|*-bundle*", "cannot link", ["build.log"]),
    ],
)
def test_broken_compiler_is_shown(cache, tiny, wrapper, call, says, told):
    wrapper(f'case "$*" in {call}) echo {says}; exit 1;; esac')
    error = refusal(tiny)
    assert [words for words in (says, *told) if words not in error] == []
    assert leftovers(cache) == []
    wrapper("")
    assert load(tiny).value() == 42


@needs_compiler
def test_error_in_sources_is_shown(cache, tiny):
    (tiny.root() / "cpu/wrong.cpp").write_text("int wrong() { return nonsense; }\n")
    told = refusal(tiny)
    assert "wrong.cpp:1" in told
    assert "nonsense" in told


def test_missing_tools_name_their_package(cache, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(BuildError, match=r"Python.h.*apt install python3.*-dev"):
            toolchain.python_include_dirs()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pybind11", None)
        with pytest.raises(BuildError, match="pip install pybind11"):
            toolchain.pybind11_version()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match="pip install ninja"):
            toolchain.find_ninja()


def test_missing_sources_are_named(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "pyringar/engine/compile.py"))
    with pytest.raises(BuildError, match="installation is incomplete"):
        build.Recipe().root()
