"""A build that cannot be: what is refused, what is said, and what is left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import child, leftovers, load, needs_compiler

from pyringar.engine import build, compile, files, toolchain
from pyringar.errors import BuildError, CompilerNotFoundError

# --- the cache is nobody else's ---


@needs_compiler
def test_the_cache_is_created_for_its_owner_alone(cache: Path, tiny: build.Recipe) -> None:
    before = os.umask(0)
    try:
        built = build.ensure_engine(tiny)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert built.path.stat().st_mode & 0o022 == 0
    assert load(tiny).value() == 42


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@needs_compiler
def test_a_cache_that_others_can_write_is_refused(
    cache: Path, tiny: build.Recipe, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(files, "_is_private_group", lambda gid, uid: False)
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(BuildError, match=f"can be written by other users.*{mode:04o}") as caught:
        build.ensure_engine(tiny)
    assert str(cache) in str(caught.value)
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("which", ["cache", "folder", "engine"])
def test_an_engine_that_others_could_replace_is_not_loaded(
    cache: Path, tiny: build.Recipe, which: str
) -> None:
    built = build.ensure_engine(tiny)
    {"cache": cache, "folder": built.path.parent, "engine": built.path}[which].chmod(0o777)
    with pytest.raises(BuildError, match="can be written by other users"):
        build.ensure_engine(tiny)


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(cache: Path, tiny: build.Recipe) -> None:
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    with pytest.raises(BuildError, match="belongs to user 12345"):
        build.ensure_engine(tiny)


# --- failures say what was tried and what to do ---


@pytest.mark.parametrize("place", ["file", "below a file", "/proc"])
@needs_compiler
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, cache: Path, tiny: build.Recipe, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """No permission bits: those do not hold for root, these obstacles do."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    if place == "/proc" and not Path("/proc").is_dir():
        pytest.skip("no /proc")
    where = {"file": blocked, "below a file": blocked / "cache", "/proc": Path("/proc/pyringar")}
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(where[place]))
    with pytest.raises(BuildError, match="PYRINGAR_CACHE_DIR") as caught:
        build.ensure_engine(tiny)
    assert str(where[place]) in str(caught.value)


@needs_compiler
@pytest.mark.skipif(
    sys.platform != "linux", reason="how root is held to permission bits is Linux's"
)
def test_a_read_only_cache(cache: Path, tiny: build.Recipe) -> None:
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


def test_no_compiler(
    cache: Path, tiny: build.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFoundError) as caught:
        build.ensure_engine(tiny)
    for told in ("c++, g++, clang++", str(tmp_path), "apt", "dnf", "xcode-select", "conda", "CXX"):
        assert told in str(caught.value)
    assert not cache.exists()


@pytest.mark.parametrize("cxx", ["no-such-compiler", "/no/such/g++ -O1", "ccache", "g++ 'open"])
def test_a_cxx_that_is_not_there_is_not_passed_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompilerNotFoundError, match="CXX="):
        toolchain.find_compiler()


@needs_compiler
def test_without_a_compiler_an_engine_built_before_still_serves(
    cache: Path, tiny: build.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.ensure_engine(tiny)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.ensure_engine(tiny).origin == "cache"


@needs_compiler
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo licence expired; exit 1", ["licence expired", "status 1", "--version"]),
        (
            'case "$*" in *-c*) echo no space left; exit 1;; esac',
            ["no space left", "C++20", "-std=c++20"],
        ),
        (
            'case "$*" in *module.cpp*) echo out of memory; exit 3;; esac',
            ["out of memory", "module.cpp", "build.log", "CXX=clang++"],
        ),
        (
            'case "$*" in *-shared*|*-bundle*) echo cannot link; exit 1;; esac',
            ["cannot link", "build.log"],
        ),
    ],
)
def test_a_broken_compiler(
    cache: Path, tiny: build.Recipe, wrapper: Any, script: str, told: list[str]
) -> None:
    wrapper(script)
    with pytest.raises(BuildError) as caught:
        build.ensure_engine(tiny)
    for words in told:
        assert words in str(caught.value)
    assert leftovers(cache) == []
    wrapper("")
    assert load(tiny).value() == 42


@needs_compiler
def test_an_error_in_the_sources_is_shown(cache: Path, tiny: build.Recipe) -> None:
    (tiny.root() / "cpu/wrong.cpp").write_text("int wrong() { return nonsense; }\n")
    with pytest.raises(BuildError) as caught:
        build.ensure_engine(tiny)
    assert "wrong.cpp:1" in str(caught.value)
    assert "nonsense" in str(caught.value)


@needs_compiler
def test_werror_is_an_option(cache: Path, tiny: build.Recipe) -> None:
    (tiny.root() / "cpu/warns.cpp").write_text("int f(int unused) { return 0; }\n")
    assert load(tiny).value() == 42
    with pytest.raises(BuildError, match="unused"):
        build.ensure_engine(build.Recipe(tiny.source_root, ("-Werror",)))


def test_missing_headers_and_tools_name_their_package(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_missing_sources(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "pyringar/engine/compile.py"))
    with pytest.raises(BuildError, match="installation is incomplete"):
        build.Recipe().root()
