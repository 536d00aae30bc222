"""Which engine is found, when one is built, and by whom when many want it.

The engines built here are tiny: one C++ file with a few lines, so that a build takes a second.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import alive, child, leftovers, load, needs_compiler, value_of, wait_for

from pyringar.engine import build, compile
from pyringar.engine import load as _native
from pyringar.engine import toolchain
from pyringar.errors import BuildError, CompilerNotFoundError

# --- build, find, key ---


@needs_compiler
def test_builds_once_then_finds_it(cache: Path, tiny: build.Recipe) -> None:
    assert build.find_engine(tiny) is None
    assert not cache.exists(), "looking for an engine must write nothing"
    built = build.ensure_engine(tiny)
    assert (built.origin, _native.load(built).value()) == ("built", 42)
    found = build.ensure_engine(tiny)
    assert (found.origin, found.path) == ("cache", built.path)
    assert found.record["content"] == json.loads(json.dumps(tiny.content()))
    assert found.record["build_s"] > 0
    assert leftovers(cache) == []


@needs_compiler
def test_everything_that_matters_is_in_the_key(
    cache: Path, tiny: build.Recipe, monkeypatch: pytest.MonkeyPatch, wrapper: Any
) -> None:
    root = tiny.root()

    def folder(recipe: build.Recipe = tiny) -> str:
        return build._folder(compile.plan_build(recipe, recipe.content()))

    seen = [folder()]
    assert folder() == seen[0]
    (root / "core/value.h").write_text("#pragma once\ninline constexpr long kValue = 43;\n")
    seen.append(folder())
    (root / "core/value.h").rename(root / "core/renamed.h")
    seen.append(folder())
    (root / "cpu/new.cpp").write_text("int more;\n")
    seen.append(folder())
    seen.append(folder(build.Recipe(root, ("-Werror",))))
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "read_cpu", lambda: toolchain.Cpu("x86_64", "another", ("avx",)))
        seen.append(folder())
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "extension_suffix", lambda: ".cpython-399-other.so")
        seen.append(folder())
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "pybind11_version", lambda: "99.0")
        seen.append(folder())
    wrapper("")
    seen.append(folder())
    wrapper("# upgraded")
    seen.append(folder())
    assert len(set(seen)) == len(seen)
    contents = [name.split("-")[0] for name in seen]
    assert contents[-3:] == [contents[3]] * 3, "the toolchain is the second half of the key"


def test_files_that_are_no_sources_do_not_count(tiny: build.Recipe) -> None:
    before = tiny.content()
    (tiny.root() / "core/notes.md").write_text("hello")
    (tiny.root() / "cuda").mkdir()
    (tiny.root() / "cuda/kernel.cpp").write_text("other floor")
    assert tiny.content() == before


@needs_compiler
def test_an_edit_during_a_build_is_not_filed_under_the_old_key(
    cache: Path, tiny: build.Recipe, wrapper: Any
) -> None:
    header = tiny.root() / "core/value.h"
    wrapper(f'case "$*" in *module.cpp*) sed -i.bak s/42/43/ {header};; esac')
    before = build.ensure_engine(tiny)
    assert header.read_text().count("43") == 1
    assert build.find_engine(tiny) is None
    after = build.ensure_engine(tiny)
    assert before.path != after.path
    assert [value_of(engine) for engine in (before, after)] == ["42", "43"]


@needs_compiler
def test_force_builds_again(cache: Path, tiny: build.Recipe, wrapper: Any) -> None:
    log = wrapper("")
    for force, compiled in ((False, 1), (False, 1), (True, 2)):
        build.build_engine(tiny, force=force)
        assert log.read_text().count("module.cpp") == compiled
    assert load(tiny).value() == 42


@needs_compiler
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_cxx_may_hold_arguments(
    cache: Path, tiny: build.Recipe, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    monkeypatch.setenv("CXX", f"{compiler} -DEXTRA='(1 + 7)'")
    built = build.ensure_engine(tiny)
    assert _native.load(built).value() == 50
    assert "-ffp-contract=off" in built.record["flags"]


@needs_compiler
def test_cxx_may_start_with_a_launcher(
    cache: Path, tiny: build.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "ccache"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} c++")
    assert len(toolchain.find_compiler().identity) == 2, "launcher and compiler both belong to the key"
    assert load(tiny).value() == 42
    monkeypatch.setenv("CXX", f"{launcher} no-such-compiler")
    with pytest.raises(CompilerNotFoundError, match="no-such-compiler"):
        toolchain.find_compiler()


@needs_compiler
def test_paths_with_odd_characters(
    tmp_path: Path, tiny: build.Recipe, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    odd = tmp_path / "a b$c:d'e"
    odd.mkdir()
    shutil.copytree(tiny.root(), odd / "csrc")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(odd / "cache"))
    assert load(build.Recipe(odd / "csrc")).value() == 42


@needs_compiler
def test_a_compiler_without_the_cpu_flag_builds_without_it(
    cache: Path, tiny: build.Recipe, wrapper: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper('case "$*" in *native*) echo "unknown option native" >&2; exit 1;; esac')
    built = build.ensure_engine(tiny)
    assert _native.load(built).value() == 42
    assert not [flag for flag in built.record["flags"] if "native" in flag]
    assert "building without it" in caplog.text


@needs_compiler
def test_a_build_is_announced_without_any_logging_set_up(cache: Path, tiny: build.Recipe) -> None:
    process = child(tiny)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "compiling the engine" in output
    process = child(tiny)
    output, _ = process.communicate(timeout=60)
    assert output == "cache 42\n"


# --- many processes, killed processes, locks ---


@needs_compiler
def test_four_processes_build_once(cache: Path, tiny: build.Recipe, wrapper: Any) -> None:
    log = wrapper('case "$*" in *module.cpp*) sleep 0.5;; esac')
    processes = [child(tiny) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sorted(output.split()[-2] for output in outputs) == ["built", "cache", "cache", "cache"]
    assert log.read_text().count("module.cpp") == 1
    assert leftovers(cache) == []


@needs_compiler
def test_a_killed_builder_blocks_nobody(
    cache: Path, tiny: build.Recipe, tmp_path: Path, wrapper: Any
) -> None:
    slow = tmp_path / "slow"
    log = wrapper(f'case "$*" in *module.cpp*) [ -e {slow} ] && exec sleep 2;; esac')
    slow.touch()
    victim = child(tiny)
    try:
        wait_for(lambda: log.exists() and "module.cpp" in log.read_text())
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate(timeout=10)
    assert len(leftovers(cache)) == 1
    slow.unlink()
    started = time.monotonic()
    built = build.ensure_engine(tiny)
    assert (built.origin, _native.load(built).value()) == ("built", 42)
    assert time.monotonic() - started < 20
    assert leftovers(cache) == []


@needs_compiler
def test_sweeps_after_the_dead_and_spares_the_living(cache: Path, tiny: build.Recipe) -> None:
    from filelock import FileLock

    cache.mkdir(mode=0o700)
    dead, living = cache / "dead/tmp-1", cache / "living/tmp-1"
    for folder in (dead, living):
        folder.mkdir(parents=True)
    with FileLock(str(living.parent / "lock")):
        build.ensure_engine(tiny)
        assert leftovers(cache) == [living]


@needs_compiler
def test_waiting_for_a_lock_is_announced_and_ends(
    cache: Path,
    tiny: build.Recipe,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from filelock import FileLock

    folder = cache / build._folder(compile.plan_build(tiny, tiny.content()))
    cache.mkdir(mode=0o700)
    folder.mkdir()
    (folder / "builder").write_text("process 7 on elsewhere")
    monkeypatch.setattr(build, "LOCK_NOTICE_S", 0.1)
    monkeypatch.setattr(build, "LOCK_DEADLINE_S", 0.2)
    with (
        FileLock(str(folder / "lock")),
        pytest.raises(BuildError, match="process 7 on elsewhere") as caught,
    ):
        build.ensure_engine(tiny)
    assert "PYRINGAR_CACHE_DIR" in str(caught.value)
    assert "waiting for another process" in caplog.text


@needs_compiler
def test_a_compiler_that_hangs_is_ended(
    cache: Path, tiny: build.Recipe, wrapper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrapper(f'case "$*" in *module.cpp*) echo $$ > {tmp_path}/pid; exec sleep 60;; esac')
    monkeypatch.setattr(compile, "COMPILE_DEADLINE_S", 1.5)
    with pytest.raises(BuildError, match="was ended after"):
        build.ensure_engine(tiny)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
    assert leftovers(cache) == []


# --- the engine in the wheel ---


def pretend_wheel(recipe: build.Recipe, **changes: Any) -> Path:
    """Put an engine where ``PYRINGAR_PREBUILD=1`` puts one: beside the sources."""
    folder = recipe.root().parent / "_prebuilt" / recipe.kind.module
    folder.mkdir(parents=True, exist_ok=True)
    content = recipe.content()
    content.update(changes)
    (folder / "build.json").write_text(json.dumps({"content": content, "compiler": "theirs"}))
    engine = folder / f"{recipe.kind.module}{toolchain.extension_suffix()}"
    engine.write_bytes(b"")
    return engine


def test_the_engine_in_the_wheel_is_used_if_it_fits(
    cache: Path, tiny: build.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # and no compiler is asked for
    cpu = toolchain.read_cpu()
    smaller = {"machine": cpu.machine, "model": "older", "features": list(cpu.features[1:])}
    for changes in ({}, {"cpu": smaller} if cpu.features else {}):
        path = pretend_wheel(tiny, **changes)
        found = build.ensure_engine(tiny)
        assert (found.path, found.origin) == (path, "wheel")
    assert not cache.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": "other"},
        {"flags": []},
        {"abi": ".cpython-399.so"},
        {"libc": "glibc 9"},
        {"cpu": {"machine": "sparc", "model": "", "features": []}},
        {"cpu": {"machine": toolchain.read_cpu().machine, "model": "", "features": ["avx9000"]}},
    ],
)
@needs_compiler
def test_an_engine_in_the_wheel_for_another_machine_is_passed_over_aloud(
    cache: Path, tiny: build.Recipe, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    pretend_wheel(tiny, **changes)
    assert load(tiny).value() == 42
    assert "the engine in the wheel is not used" in caplog.text


# --- this CPU ---

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Example CPU @ 2 GHz
flags\t\t: fpu avx avx2
cpu MHz\t\t: 2500.1

processor\t: 1
model name\t: never read
flags\t\t: fpu
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd sve
CPU part\t: 0xd40

processor\t: 1
Features\t: fp asimd
CPU part\t: 0xd05
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS asks sysctl")
def test_read_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(X86)
    cpu = toolchain.read_cpu(str(file))
    assert (cpu.name, cpu.features) == ("Example CPU @ 2 GHz", ("avx", "avx2", "fpu"))
    file.write_text(ARM)
    cpu = toolchain.read_cpu(str(file))
    assert cpu.features == ("asimd", "fp"), "only what every core has"
    assert "0xd05 + 0xd40" in cpu.model
    cpu = toolchain.read_cpu(str(tmp_path / "missing"))
    assert cpu.features == ()
    assert toolchain.read_cpu() == toolchain.read_cpu()
