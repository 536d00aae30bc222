"""A build that cannot be: what is refused, what does the error say, and what is left behind?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tiny_engine import child, leftovers, load, needs_compiler, refusal

from pyringar.engine import build, compile, files, toolchain
from pyringar.errors import BuildError, CompilerNotFoundError

# --- the cache is nobody else's ---


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@needs_compiler
def test_a_cache_that_others_can_write_is_refused(cache, tiny, monkeypatch, mode):
    monkeypatch.setattr(files, "_is_private_group", lambda gid, uid: False)
    cache.mkdir()
    cache.chmod(mode)
    told = refusal(tiny)
    assert f"{cache} can be written by other users" in told
    assert f"mode {mode:04o}" in told
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(cache, tiny):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    assert "belongs to user 12345" in refusal(tiny)


@needs_compiler
@pytest.mark.parametrize("which", ["cache", "folder", "engine"])
def test_an_engine_that_others_could_replace_is_not_loaded(cache, tiny, which):
    built = build.ensure_engine(tiny)
    {"cache": cache, "folder": built.path.parent, "engine": built.path}[which].chmod(0o777)
    assert "can be written by other users" in refusal(tiny)


# --- failures say what was tried and what to do ---


@pytest.mark.parametrize("place", ["file", "file/cache", "/proc/pyringar"])
@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path, cache, tiny, monkeypatch, place):
    """No permission bits: those do not hold for root, these obstacles do."""
    if place.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no /proc")
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(tmp_path / place))
    told = refusal(tiny)
    assert "PYRINGAR_CACHE_DIR" in told
    assert str(tmp_path / place) in told


@needs_compiler
@pytest.mark.skipif(
    sys.platform != "linux", reason="how root is held to permission bits is Linux's"
)
def test_a_read_only_cache(cache, tiny):
    cache.mkdir()
    cache.chmod(0o555)
    # CAP_DAC_OVERRIDE is what lets root write anywhere; without it root's child is like any other.
    drop = (
        "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    process = child(tiny, before=["-c", drop])
    output, _ = process.communicate(timeout=60)
    cache.chmod(0o755)
    assert process.returncode != 0
    assert "Permission denied" in output
    assert "PYRINGAR_CACHE_DIR" in output


def test_no_compiler(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal(tiny, CompilerNotFoundError)
    for word in ("c++, g++, clang++", str(tmp_path), "apt", "dnf", "xcode-select", "conda", "CXX"):
        assert word in told
    assert not cache.exists()


@pytest.mark.parametrize("cxx", ["no-such-compiler", "/no/such/g++ -O1", "ccache", "g++ 'open"])
def test_a_cxx_that_is_not_there_is_not_passed_over(cache, monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompilerNotFoundError, match="CXX="):
        toolchain.find_compiler()


@needs_compiler
def test_without_a_compiler_an_engine_built_before_still_serves(cache, tiny, tmp_path, monkeypatch):
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
def test_a_broken_compiler(cache, tiny, wrapper, call, says, told):
    wrapper(f'case "$*" in {call}) echo {says}; exit 1;; esac')
    error = refusal(tiny)
    assert [words for words in (says, *told) if words not in error] == []
    assert leftovers(cache) == []
    wrapper("")
    assert load(tiny).value() == 42


@needs_compiler
def test_an_error_in_the_sources_is_shown(cache, tiny):
    (tiny.root() / "cpu/wrong.cpp").write_text("int wrong() { return nonsense; }\n")
    told = refusal(tiny)
    assert "wrong.cpp:1" in told
    assert "nonsense" in told


@needs_compiler
def test_werror_is_an_option(cache, tiny):
    (tiny.root() / "cpu/warns.cpp").write_text("int f(int unused) { return 0; }\n")
    assert load(tiny).value() == 42
    assert "unused" in refusal(build.Recipe(tiny.source_root, ("-Werror",)))


def test_missing_headers_and_tools_name_their_package(cache, tmp_path, monkeypatch):
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


def test_missing_sources(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "pyringar/engine/compile.py"))
    with pytest.raises(BuildError, match="installation is incomplete"):
        build.Recipe().root()
