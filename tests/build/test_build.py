"""Which engine is found, when is one built, and by whom when many want it?

The engines built here are tiny: one C++ file with a few lines, so that a build takes a second.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import (
    COMPILERS,
    alive,
    child,
    leftovers,
    load,
    needs_compiler,
    refusal,
    script,
    set_value,
    value_of,
    wait_for,
)

from pyringar.engine import build, compile, toolchain
from pyringar.engine.files import make_private_dir
from pyringar.engine.levels import Level, libc_serves
from pyringar.engine.load import load as load_engine
from pyringar.errors import CompilerNotFoundError

# As Linux tells it of a Haswell of 2013, in part.
X86_64_V3 = (
    "fpu cx16 sse2 ssse3 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm fma bmi1 avx2 bmi2"
)

# --- build, find, key ---


@needs_compiler
def test_builds_once_then_finds_it(cache, tiny):
    assert build.find_engine(tiny) is None
    assert not cache.exists(), "looking for an engine must write nothing"
    built = build.ensure_engine(tiny)
    assert (built.origin, load_engine(built).value()) == ("built", 42)
    found = build.ensure_engine(tiny)
    assert (found.origin, found.path) == ("cache", built.path)
    assert found.record["content"] == json.loads(json.dumps(tiny.content()))
    assert found.record["build_s"] > 0
    assert leftovers(cache) == []


@needs_compiler
def test_everything_that_matters_is_in_the_key(cache, tiny, monkeypatch, wrapper):
    root = tiny.root()

    def folder(recipe=tiny):
        return build._folder(compile.plan_build(recipe, recipe.content()))

    seen = [folder()]
    assert folder() == seen[0]
    set_value(tiny, 43)
    seen.append(folder())
    (root / "core/value.h").rename(root / "core/renamed.h")
    seen.append(folder())
    (root / "cpu/new.cpp").write_text("int more;\n")
    seen.append(folder())
    seen.append(folder(build.Recipe(root, ("-Werror",))))
    for function, answer in {
        "read_cpu": toolchain.Cpu("x86_64", "another", ("avx",)),
        "extension_suffix": ".cpython-399-other.so",
        "pybind11_version": "99.0",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, function, lambda answer=answer: answer)
            seen.append(folder())
    for lines in ("", "# upgraded"):
        wrapper(lines)
        seen.append(folder())
    assert len(set(seen)) == len(seen)
    contents = [name.split("-")[0] for name in seen]
    assert contents[-3:] == [contents[3]] * 3, "the toolchain is the second half of the key"


def test_files_that_are_no_sources_do_not_count(tiny):
    before = tiny.content()
    (tiny.root() / "core/notes.md").write_text("hello")
    (tiny.root() / "cuda").mkdir()
    (tiny.root() / "cuda/kernel.cpp").write_text("other floor")
    assert tiny.content() == before


@needs_compiler
def test_an_edit_during_a_build_is_not_filed_under_the_old_key(cache, tiny, wrapper):
    header = tiny.root() / "core/value.h"
    wrapper(f'case "$*" in *module.cpp*) sed -i.bak s/42/43/ {header};; esac')
    before = build.ensure_engine(tiny)
    assert header.read_text().count("43") == 1
    assert build.find_engine(tiny) is None
    after = build.ensure_engine(tiny)
    assert before.path != after.path
    assert [value_of(engine) for engine in (before, after)] == ["42", "43"]


@needs_compiler
def test_force_builds_again(cache, tiny, wrapper):
    log = wrapper("")
    for force, compiled in ((False, 1), (False, 1), (True, 2)):
        build.build_engine(tiny, force=force)
        assert log.read_text().count("module.cpp") == compiled
    assert load(tiny).value() == 42


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_cxx_may_hold_arguments(cache, tiny, monkeypatch, compiler):
    monkeypatch.setenv("CXX", f"{compiler} -DEXTRA='(1 + 7)'")
    built = build.ensure_engine(tiny)
    assert load_engine(built).value() == 50
    assert "-ffp-contract=off" in built.record["flags"]


@needs_compiler
def test_cxx_may_start_with_a_launcher(cache, tiny, tmp_path, monkeypatch):
    launcher = script(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{launcher} c++")
    assert len(toolchain.find_compiler().identity) == 2, "both belong to the key"
    assert load(tiny).value() == 42
    monkeypatch.setenv("CXX", f"{launcher} no-such-compiler")
    with pytest.raises(CompilerNotFoundError, match="no-such-compiler"):
        toolchain.find_compiler()


@needs_compiler
def test_paths_with_odd_characters(tmp_path, tiny, monkeypatch, cache):
    odd = tmp_path / "a b$c:d'e"
    odd.mkdir()
    shutil.copytree(tiny.root(), odd / "csrc")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(odd / "cache"))
    assert load(build.Recipe(odd / "csrc")).value() == 42


@needs_compiler
def test_a_compiler_without_the_cpu_flag_builds_without_it(cache, tiny, wrapper, caplog):
    wrapper('case "$*" in *native*) echo "unknown option native" >&2; exit 1;; esac')
    built = build.ensure_engine(tiny)
    assert load_engine(built).value() == 42
    assert not [flag for flag in built.record["flags"] if "native" in flag]
    assert "building without it" in caplog.text


@needs_compiler
def test_a_build_is_announced_without_any_logging_set_up(cache, tiny):
    outputs = [child(tiny).communicate(timeout=60)[0] for _ in range(2)]
    assert "compiling the engine" in outputs[0]
    assert outputs[0].endswith("built 42\n")
    assert outputs[1] == "cache 42\n"


# --- many processes, killed processes, locks ---


@needs_compiler
def test_four_processes_build_once(cache, tiny, wrapper):
    log = wrapper('case "$*" in *module.cpp*) sleep 0.5;; esac')
    processes = [child(tiny) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sorted(output.split()[-2] for output in outputs) == ["built", "cache", "cache", "cache"]
    assert log.read_text().count("module.cpp") == 1
    assert leftovers(cache) == []


@needs_compiler
def test_a_killed_builder_blocks_nobody(cache, tiny, tmp_path, wrapper):
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
    assert (built.origin, load_engine(built).value()) == ("built", 42)
    assert time.monotonic() - started < 20
    assert leftovers(cache) == []


@needs_compiler
def test_sweeps_after_the_dead_and_spares_the_living(cache, tiny):
    from filelock import FileLock

    dead, living = cache / "dead/tmp-1", cache / "living/tmp-1"
    for folder in (dead, living):
        make_private_dir(folder)
    with FileLock(str(living.parent / "lock")):
        build.ensure_engine(tiny)
        assert leftovers(cache) == [living]


@needs_compiler
def test_waiting_for_a_lock_is_announced_and_ends(cache, tiny, monkeypatch, caplog):
    from filelock import FileLock

    folder = cache / build._folder(compile.plan_build(tiny, tiny.content()))
    make_private_dir(folder)
    (folder / "builder").write_text("process 7 on elsewhere")
    monkeypatch.setattr(build, "LOCK_NOTICE_S", 0.1)
    monkeypatch.setattr(build, "LOCK_DEADLINE_S", 0.2)
    with FileLock(str(folder / "lock")):
        told = refusal(tiny)
    assert "process 7 on elsewhere" in told
    assert "PYRINGAR_CACHE_DIR" in told
    assert "waiting for another process" in caplog.text


@needs_compiler
def test_a_compiler_that_hangs_is_ended(cache, tiny, wrapper, monkeypatch, tmp_path):
    wrapper(f'case "$*" in *module.cpp*) echo $$ > {tmp_path}/pid; exec sleep 60;; esac')
    monkeypatch.setattr(compile, "COMPILE_DEADLINE_S", 1.5)
    assert "was ended after" in refusal(tiny)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
    assert leftovers(cache) == []


# --- the engine in the wheel ---


def pretend_wheel(recipe: build.Recipe, level: Level, **changes: Any) -> Path:
    """Put an engine where ``PYRINGAR_PREBUILD=1`` puts one: beside the sources."""
    folder = recipe.root().parent / "_prebuilt" / recipe.kind.module / level.name
    folder.mkdir(parents=True, exist_ok=True)
    content = replace(recipe, level=level).content() | changes
    (folder / "build.json").write_text(json.dumps({"content": content, "compiler": "theirs"}))
    engine = folder / f"{recipe.kind.module}{toolchain.extension_suffix()}"
    engine.write_bytes(b"")
    return engine


@pytest.fixture
def three_levels(monkeypatch):
    """Levels of an architecture like this CPU's: it has not the first, has the others."""
    features = toolchain.read_cpu().features
    made_up = (
        Level("future", ("-DEXTRA=3",), frozenset({*features, "avx9000"})),
        Level("present", ("-DEXTRA=2",), frozenset(features)),
        Level("lowest", ("-DEXTRA=1",)),
    )
    monkeypatch.setattr(build, "levels", lambda: made_up)
    return made_up


def test_the_best_engine_in_the_wheel_that_runs_here_is_used(
    cache, tiny, three_levels, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # and no compiler is asked for
    future, present, lowest = three_levels
    pretend_wheel(tiny, future)
    assert build.find_engine(tiny) is None
    for level in (lowest, present):
        path = pretend_wheel(tiny, level, libc="glibc 2.1")
        found = build.ensure_engine(tiny)
        assert (found.path, found.origin) == (path, "wheel")
    monkeypatch.setattr(toolchain, "read_cpu", lambda: toolchain.Cpu("", "no /proc", ()))
    assert build.ensure_engine(tiny).path.parent.name == "lowest"
    assert not cache.exists()


@needs_compiler
def test_prebuild_compiles_every_level(tiny, three_levels, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "Recipe", lambda kind: replace(tiny, kind=kind))
    monkeypatch.delenv("PYRINGAR_CUDA_ARCHS", raising=False)
    build.prebuild(tiny.root().parent)
    home = tiny.root().parent / "_prebuilt" / "_engine"
    assert sorted(path.name for path in home.iterdir()) == ["future", "lowest", "present"]
    found = build.find_engine(tiny)
    assert value_of(found) == "44"
    assert found.record["content"]["cpu"] == {"level": "present", "flags": ["-DEXTRA=2"]}


@needs_compiler
def test_an_engine_for_this_very_cpu_replaces_the_wheels(cache, tiny, three_levels):
    pretend_wheel(tiny, three_levels[2])
    assert build.ensure_engine(tiny).origin == "wheel"
    assert not cache.exists()
    native = build.build_engine(tiny)
    found = build.ensure_engine(tiny)
    assert (found.origin, found.path) == ("cache", native.path)


@pytest.mark.parametrize("trouble", ["open to others", "no home"])
def test_a_cache_that_cannot_be_used_leaves_the_wheels_engine(
    cache, tiny, three_levels, caplog, monkeypatch, trouble
):
    path = pretend_wheel(tiny, three_levels[2])
    if trouble == "no home":
        monkeypatch.delenv("PYRINGAR_CACHE_DIR")
        monkeypatch.setenv("HOME", "/dev/null")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        (cache / build._folder(compile.plan_build(tiny, tiny.content()))).mkdir(parents=True)
        cache.chmod(0o777)
    assert build.ensure_engine(tiny).path == path
    assert ("engine in the wheel is used" in caplog.text) == (trouble == "open to others")


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": "other"},
        {"flags": []},
        {"abi": ".cpython-399.so"},
        {"libc": "glibc 999.1"},
        {"libc": "musl 1.2"},
        {"libc": None},
        {"cpu": {"level": "sparc", "flags": []}},
    ],
)
@needs_compiler
def test_an_engine_in_the_wheel_for_another_machine_is_passed_over(
    cache, tiny, three_levels, caplog, changes
):
    caplog.set_level(logging.INFO)
    pretend_wheel(tiny, three_levels[1], **changes)
    assert load(tiny).value() == 42
    assert "the engine in the wheel is not used" in caplog.text


@pytest.mark.parametrize(
    ("here", "built_with", "serves"),
    [
        ("glibc 2.36", "glibc 2.28", True),
        ("glibc 2.36", "glibc 2.36", True),
        ("glibc 2.9", "glibc 2.28", False),
        ("glibc 3.0", "glibc 2.28", True),
        ("", "", True),
        ("", "glibc 2.28", False),
        ("glibc 2.36-odd", "glibc 2.28", False),
    ],
)
def test_a_newer_c_library_runs_what_an_older_linked(here, built_with, serves):
    assert libc_serves(here, built_with) == serves


# --- this CPU ---


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse2", "x86-64"),
        (X86_64_V3, "x86-64-v3"),
        (f"{X86_64_V3} avx512f", "x86-64-v3"),
        (f"{X86_64_V3} avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4"),
    ],
)
def test_the_level_of_a_cpu(tmp_path, monkeypatch, flags, name):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    cpu = toolchain.read_cpu(str(tmp_path / "cpuinfo"))
    assert next(level.name for level in build.levels() if cpu.has(level)) == name


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
def test_read_cpu(tmp_path):
    file = tmp_path / "cpuinfo"
    assert toolchain.read_cpu(str(file)).features == ()
    file.write_text(X86)
    cpu = toolchain.read_cpu(str(file))
    assert (cpu.name, cpu.features) == ("Example CPU @ 2 GHz", ("avx", "avx2", "fpu"))
    file.write_text(ARM)
    cpu = toolchain.read_cpu(str(file))
    assert cpu.features == ("asimd", "fp"), "only what every core has"
    assert "0xd05 + 0xd40" in cpu.model
    assert toolchain.read_cpu() == toolchain.read_cpu()
