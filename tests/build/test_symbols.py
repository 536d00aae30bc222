"""Is an engine safe beside torch's libstdc++ if its compiler has a static one only?

Exported symbols of a static libstdc++ mix with the shared one's, and streams and locales crash.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from test_stress import require
from tiny_engine import COMPILERS, REPO, needs_compiler, run, script

from pyringar.engine import build, toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no static libstdc++")

LEAK = """
#include <sstream>
__attribute__((visibility("default"))) int leak() { return 0; }
std::string told(int number) { std::ostringstream text; text << number; return text.str(); }
"""
# Errors with integers and fractions; then what /proc tells.
USE = r"""
import os
import torch
import pyringar as pr
from pyringar.engine import load

def tell(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except pr.RingarError as error:
        print(error)

comm = pr.Communicator(["cpu"] * 2, timeout=0.25)
tell(comm.all_reduce, [torch.ones(5), torch.ones(7)])
comm._group.delay_rank(1, 20.0)
tell(comm.all_reduce, [torch.ones(5), torch.ones(5)], algorithm="ring")
comm.close()
engine = load.engine()
tell(engine.open_segment, 0, 0, 2)
pid = os.getppid()
with open(f"/proc/{pid}/stat") as stat:
    start_ticks = int(stat.read().rpartition(")")[2].split()[19])
print("alive:", engine.is_alive(pid, start_ticks), engine.is_alive(pid, start_ticks + 1))
"""
TOLD = r"""all_reduce: tensors\[1\] has shape \(7,\), but tensors\[0\] has \(5,\); .*
all_reduce: ring sum of 5 float32 .* 2 ranks: rank 0 waited 0\.25 s for rank 1 to send at step 0 .*
cannot open /proc/0/fd/0, the [0-9]+ bytes of shared memory for a group of processes: .*
alive: True False
"""


@pytest.fixture
def static(tmp_path, cache, monkeypatch):
    """Make CXX a compiler that links libstdc++ statically; with more flags to compile."""

    def make(compiler: str, *flags: str) -> Path:
        lines = f"""case " $* " in
    *" -c "*) exec {compiler} "$@" {" ".join(flags)} ;;
    *) exec {compiler} "$@" -static-libstdc++ ;;
esac"""
        path = script(tmp_path / f"static-{compiler}", lines)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def exported(engine: build.Engine) -> list[str]:
    table = toolchain.run_tool(["nm", "-D", "--defined-only", str(engine.path)], "nm failed")
    return [line.split()[-1] for line in table.splitlines()]


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS)
def test_engine_exports_init_alone(cache, tiny, static, monkeypatch, compiler):
    is_static = compiler == "g++"  # test_static_libstdcxx_beside_torch tries both
    (tiny.root() / "core/leak.cpp").write_text(LEAK)
    monkeypatch.setenv("CXX", str(static(compiler)) if is_static else compiler)
    engine = build.ensure_engine(tiny)
    assert exported(engine) == ["PyInit__engine"]
    needed = toolchain.run_tool(["readelf", "--dynamic", str(engine.path)], "readelf failed")
    assert ("libstdc++" in needed) == (not is_static)


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_static_libstdcxx_beside_torch(cache, static, compiler):
    """Compiles without warnings; errors are complete and /proc is read."""
    require(compiler)
    # Compiled as it is shipped by g++ alone: clang++ warns before it optimizes.
    cxx = static(compiler, "-Werror", *(["-O1"] if compiler == "clang++" else []))
    engine = build.build_engine(build.Recipe())
    assert exported(engine) == ["PyInit__engine"]
    environment = {"PYRINGAR_CACHE_DIR": cache, "CXX": cxx}
    told = run(sys.executable, "-c", USE, cwd=REPO, **environment)
    assert re.fullmatch(TOLD, told), told
