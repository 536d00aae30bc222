"""Does the CUDA engine build for all architectures, spill nothing and load 16 bytes at a time?"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest
from tiny_engine import REPO, needs_compiler, needs_nvcc, run

from pyringar.engine import build, toolchain

KERNELS = ("fused_kernel", "direct_kernel", "ring_kernel")
DTYPES = 8
REDUCTIONS = 4  # the mean is the sum's
TABLES = 2
VARIANTS = {"fused_kernel": TABLES, "direct_kernel": TABLES, "ring_kernel": 1}


@needs_compiler
@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_builds_for_all_architectures_and_spills_nothing(cache, monkeypatch):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", "all")
    record = build.build_engine(build.Recipe(kind=build.CUDA)).record
    archs = {kernel["arch"] for kernel in record["kernels"]}
    assert {"sm_75", "sm_80", "sm_90"} <= archs
    for arch in archs:
        count = Counter(
            name
            for k in record["kernels"]
            if k["arch"] == arch
            for name in KERNELS
            if name in k["name"]
        )
        assert count == {n: v * DTYPES * REDUCTIONS for n, v in VARIANTS.items()}, arch
    spilled = [k for k in record["kernels"] if k["spill_store_bytes"] or k["spill_load_bytes"]]
    assert spilled == []
    code = "from pyringar.engine import load; print(load.cuda_engine().num_devices())"
    out = run(
        sys.executable, "-c", code, cwd=REPO, PYRINGAR_CACHE_DIR=cache, PYRINGAR_CUDA_ARCHS="all"
    )
    assert out.strip().isdigit()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "wide"), [("kernels_float.cu", "float"), ("kernels_half.cu", "half")]
)
def test_fused_moves_sixteen_bytes_at_a_time(tmp_path, file, wide):
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    cubin = tmp_path / f"{wide}.cubin"
    flags = ["-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-arch=sm_90"]
    command = [*toolkit.nvcc.command, *flags, f"-I{REPO / 'csrc'}", "-cubin", "-o", str(cubin)]
    subprocess.run([*command, str(REPO / "csrc/cuda" / file)], check=True)
    sass = subprocess.run(
        [nvdisasm(tmp_path), "--print-code", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    functions = re.split(r"^\.text\.(\S+):$", sass, flags=re.MULTILINE)
    fused = {
        n: body
        for n, body in zip(functions[1::2], functions[2::2], strict=True)
        if "fused_kernel" in n
    }
    assert len(fused) == 2 * REDUCTIONS * TABLES
    for name, body in fused.items():
        loads = re.findall(r"\bLDG\S*", body)
        stores = re.findall(r"\bSTG\S*", body)
        # Four packs of two ranks at once; heads and tails go element by element.
        assert sum(".128" in load for load in loads) >= 8, name
        assert sum(".128" in store for store in stores) >= 4, name
        assert not re.search(r"\b(LDL|STL)\b", body), f"{name} uses local memory"


def nvdisasm(folder):
    """The disassembler, from pip: toolkits made for building come without."""
    package = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*package, str(folder / "tools"), "nvidia-cuda-nvdisasm"], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"nvdisasm cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    program = next((folder / "tools").rglob("nvdisasm"))
    program.chmod(0o755)
    return str(program)
