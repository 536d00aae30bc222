"""Cache, locks and failures of engine builds, with a tiny engine."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import (
    COMPILERS,
    REPO,
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

from pyringar.cli import main
from pyringar.engine import build, compile, toolchain
from pyringar.engine import load as loading
from pyringar.engine.load import load as load_engine
from pyringar.errors import BuildError, CompilerNotFoundError

# --- build, find, key ---


@needs_compiler
def test_second_build_call_finds_cached_engine(cache, tiny):
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
def test_cache_key_covers_sources_and_toolchain(cache, tiny, monkeypatch, wrapper):
    root = tiny.root()

    def folder(recipe=tiny):
        return build._key(compile.plan_build(recipe, recipe.content()))

    seen = [folder()]
    assert folder() == seen[0]
    set_value(tiny, 43)
    seen.append(folder())
    (root / "core/value.h").rename(root / "core/renamed.h")
    seen.append(folder())
    (root / "cpu/new.cpp").write_text("int more;\n")
    seen.append(folder())
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


@needs_compiler
def test_edit_during_build_rebuilds(cache, tiny, wrapper):
    header = tiny.root() / "core/value.h"
    wrapper(f'case "$*" in *module.cpp*) sed -i.bak s/42/43/ {header};; esac')
    before = build.ensure_engine(tiny)
    assert header.read_text().count("43") == 1
    assert build.find_engine(tiny) is None
    after = build.ensure_engine(tiny)
    assert before.path != after.path
    assert [value_of(engine) for engine in (before, after)] == ["42", "43"]


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_cxx_may_have_launcher_and_arguments(cache, tiny, tmp_path, monkeypatch, compiler):
    launcher = script(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{launcher} {compiler} -DEXTRA='(1 + 7)'")
    assert len(toolchain.find_compiler().identity) == 2, "the key must cover launcher and compiler"
    built = build.ensure_engine(tiny)
    assert load_engine(built).value() == 50
    assert "-ffp-contract=off" in built.record["flags"]


@needs_compiler
def test_paths_may_have_special_characters(tmp_path, tiny, monkeypatch, cache):
    odd = tmp_path / "a b$c:d'e"
    shutil.copytree(tiny.root(), odd / "csrc")
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", str(odd / "cache"))
    assert load(build.Recipe(odd / "csrc")).value() == 42


@needs_compiler
def test_unsupported_cpu_flag_is_omitted(cache, tiny, wrapper, caplog):
    wrapper('case "$*" in *native*) echo "unknown option native" >&2; exit 1;; esac')
    built = build.ensure_engine(tiny)
    assert load_engine(built).value() == 42
    assert not [flag for flag in built.record["flags"] if "native" in flag]
    assert "building without it" in caplog.text


# --- several processes, killed processes, locks ---


@needs_compiler
def test_four_processes_build_once(cache, tiny, wrapper):
    log = wrapper('case "$*" in *module.cpp*) sleep 0.5;; esac')
    processes = [child(tiny) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum("compiling the engine" in output for output in outputs) == 1
    assert sorted(output.split()[-2] for output in outputs) == ["built", "cache", "cache", "cache"]
    assert log.read_text().count("module.cpp") == 1
    assert leftovers(cache) == []


@needs_compiler
def test_build_succeeds_after_killed_build(cache, tiny, tmp_path, wrapper):
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
def test_lock_wait_warns_and_times_out(cache, tiny, monkeypatch, caplog):
    from filelock import FileLock

    other = cache / "tmp-_cuda_engine-1"
    other.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    monkeypatch.setattr(build, "LOCK_NOTICE_S", 0.1)
    monkeypatch.setattr(build, "LOCK_DEADLINE_S", 0.2)
    with FileLock(str(cache / "_engine.lock")):
        assert str(cache / "_engine.lock") in refusal(tiny)
    assert "waiting for another process" in caplog.text
    with FileLock(str(cache / "_cuda_engine.lock")):
        build.ensure_engine(tiny)
    assert leftovers(cache) == [other]


@needs_compiler
def test_hanging_compiler_is_killed(cache, tiny, wrapper, monkeypatch, tmp_path):
    wrapper(f'case "$*" in *module.cpp*) echo $$ > {tmp_path}/pid; exec sleep 60;; esac')
    monkeypatch.setattr(compile, "COMPILE_DEADLINE_S", 1.5)
    assert "was ended after" in refusal(tiny)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
    assert leftovers(cache) == []


# --- builds that fail ---


def test_missing_compiler_error_names_package(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    text = refusal(tiny, CompilerNotFoundError)
    assert all(word in text for word in ("c++, g++, clang++", str(tmp_path), "apt", "CXX"))
    assert not cache.exists()


@pytest.mark.parametrize("cxx", ["/no/such/g++ -O1", "ccache", "g++ 'open"])
def test_invalid_cxx_variable_raises(cache, monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompilerNotFoundError, match="CXX="):
        toolchain.find_compiler()


@needs_compiler
def test_cached_engine_needs_no_compiler(cache, tiny, tmp_path, monkeypatch):
    build.ensure_engine(tiny)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.ensure_engine(tiny).origin == "cache"


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "output", "advice"),
    [
        ("*", "licence expired", ["status 1", "--version"]),
        ("*-c*", "no space left", ["C++20", "-std=c++20"]),
        ("*module.cpp*", "out of memory", ["module.cpp", "build.log", "CXX=clang++"]),
        ("*-shared*|*-bundle*", "cannot link", ["build.log"]),
    ],
)
def test_error_shows_failed_compiler_output(cache, tiny, wrapper, arguments, output, advice):
    wrapper(f'case "$*" in {arguments}) echo {output}; exit 1;; esac')
    error = refusal(tiny)
    assert [words for words in (output, *advice) if words not in error] == []
    assert leftovers(cache) == []
    wrapper("")
    assert load(tiny).value() == 42


# --- the engine in the wheel ---


def pretend_wheel(recipe: build.Recipe, **changes: Any) -> Path:
    """Create the files of an engine that a wheel contains, beside the sources."""
    folder = recipe.root().parent / build._IN_WHEEL / recipe.kind.module
    folder.mkdir(parents=True, exist_ok=True)
    content = replace(recipe, baseline=True).content() | changes
    (folder / "build.json").write_text(json.dumps({"content": content, "compiler": "clang"}))
    engine = folder / f"{recipe.kind.module}{toolchain.extension_suffix()}"
    engine.write_bytes(b"")
    return engine


def test_wheel_engine_needs_no_compiler(cache, tiny, tmp_path, monkeypatch):
    path = pretend_wheel(tiny)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "read_cpu", lambda: toolchain.Cpu("", "another", ()))
    found = build.ensure_engine(tiny)
    assert (found.path, found.origin) == (path, "wheel")
    assert not cache.exists()


@needs_compiler
def test_prebuild_compiles_for_any_cpu(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        build, "Recipe", lambda kind, baseline: replace(tiny, kind=kind, baseline=baseline)
    )
    monkeypatch.setattr(toolchain, "_BASELINES", {platform.machine(): "-DEXTRA=1"})
    monkeypatch.delenv("PYRINGAR_CUDA_ARCHS", raising=False)
    build.prebuild(tiny.root().parent)
    home = tiny.root().parent / "_prebuilt"
    engine = f"_engine/_engine{toolchain.extension_suffix()}"
    files = [str(path.relative_to(home)) for path in home.rglob("*")]
    assert sorted(files) == ["_engine", engine, "_engine/build.json"]
    found = build.find_engine(tiny)
    assert value_of(found) == "43"
    assert found.record["content"]["cpu"] == {"flags": ["-DEXTRA=1"]}


@needs_compiler
def test_native_engine_overrides_wheel_engine(cache, tiny, caplog):
    path = pretend_wheel(tiny)
    native = build.build_engine(tiny)
    found = build.ensure_engine(tiny)
    assert (found.origin, found.path) == ("cache", native.path)
    cache.chmod(0o777)
    assert build.ensure_engine(tiny).path == path
    assert "is not loaded" in caplog.text


@pytest.mark.parametrize("changes", [{"sources": "other"}, {"flags": []}])
@needs_compiler
def test_mismatched_wheel_engine_is_ignored(cache, tiny, caplog, changes):
    caplog.set_level(logging.INFO)
    pretend_wheel(tiny, **changes)
    assert load(tiny).value() == 42
    assert f"the engine in the wheel is not used: other {next(iter(changes))}" in caplog.text


# --- this CPU ---


X86 = "model name\t: Example CPU @ 2 GHz\nflags\t\t: fpu avx avx2\ncpu MHz\t\t: 2500.1\n\n"
ARM = "Features\t: fp asimd sve\nCPU part\t: 0xd40\n\nFeatures\t: fp asimd\nCPU part\t: 0xd05\n"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc/cpuinfo")
def test_read_cpu_returns_common_features(tmp_path):
    file = tmp_path / "cpuinfo"
    assert toolchain.read_cpu(str(file)).features == ()
    file.write_text(X86)
    cpu = toolchain.read_cpu(str(file))
    assert (cpu.name, cpu.features) == ("Example CPU @ 2 GHz", ("avx", "avx2", "fpu"))
    file.write_text(ARM)
    cpu = toolchain.read_cpu(str(file))
    assert cpu.features == ("asimd", "fp"), "only features that all cores have"
    assert "0xd05 + 0xd40" in cpu.model
    assert toolchain.read_cpu() == toolchain.read_cpu()


# --- loading ---


@needs_compiler
def test_threads_load_engine_once(cache, tiny, unloaded, monkeypatch):
    built, calls = build.ensure_engine(tiny), []
    assert loading.loaded_engine() is None

    def slow_ensure(recipe: build.Recipe) -> build.Engine:
        calls.append(1)
        time.sleep(0.05)
        return built

    monkeypatch.setattr(build, "ensure_engine", slow_ensure)
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: loading.engine(), range(8)))
    assert len(calls) == 1
    assert all(module is loading.loaded_engine() for module in modules)


@needs_compiler
def test_unloadable_engine_error_suggests_force(cache, tiny, unloaded, monkeypatch):
    built = build.ensure_engine(tiny)
    built.path.write_bytes(b"no machine code")
    monkeypatch.setattr(build, "ensure_engine", lambda recipe: built)
    with pytest.raises(BuildError, match="pyringar build --force") as caught:
        loading.engine()
    assert isinstance(caught.value.__cause__, ImportError)
    assert str(built.path) in str(caught.value)
    assert loading.loaded_engine() is None


def test_import_does_not_load_engine(cache):
    code = (
        "import sys, time, torch; t = time.process_time(); import pyringar; "
        "print(time.process_time() - t, 'pyringar._engine' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    seconds, loaded = done.stdout.split()
    assert loaded == "False"
    assert not cache.exists()
    assert float(seconds) < 0.3


# --- the command line ---


def test_info_command_builds_no_engine(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["info"]) == 0
    report = capsys.readouterr().out
    assert all(words in report for words in ("CompilerNotFoundError", "not built yet", str(cache)))
    assert not cache.exists()


@needs_compiler
def test_build_command_reports_cached_engine(cache, tiny, unloaded, monkeypatch, capsys, caplog):
    monkeypatch.setattr(build.Recipe, "root", lambda self: self.source_root or tiny.source_root)
    caplog.set_level(logging.INFO)

    def output_of(*options: str, status: int = 0) -> str:
        assert main(["build", "--no-cuda", *options]) == status
        return "".join(capsys.readouterr())

    first = output_of("--verbose")
    assert str(cache) in first
    assert "compiler" in first
    assert "module.cpp" in caplog.text
    assert "it was there (cache)" in output_of()
    assert "it was there" not in output_of("--force")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert output_of("--force", status=1).endswith("or name yours in CXX.\n")


LEAK = """
#include <sstream>
__attribute__((visibility("default"))) int leak() { return 0; }
std::string told(int number) { std::ostringstream text; text << number; return text.str(); }
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no static libstdc++")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_engine_exports_only_init(cache, tiny, tmp_path, monkeypatch, compiler):
    """Exported symbols of a static libstdc++ would crash C++ streams of torch's libstdc++."""
    is_static = compiler == "g++"
    (tiny.root() / "core/leak.cpp").write_text(LEAK)
    link = 'case " $* " in *" -c "*) exec g++ "$@";; *) exec g++ "$@" -static-libstdc++;; esac'
    static = script(tmp_path / "static-g++", link)
    monkeypatch.setenv("CXX", str(static) if is_static else compiler)
    engine = build.ensure_engine(tiny)
    table = toolchain.run_tool(["nm", "-D", "--defined-only", str(engine.path)], "nm failed")
    assert [line.split()[-1] for line in table.splitlines()] == ["PyInit__engine"]
    needed = toolchain.run_tool(["readelf", "--dynamic", str(engine.path)], "readelf failed")
    assert ("libstdc++" in needed) == (not is_static)
