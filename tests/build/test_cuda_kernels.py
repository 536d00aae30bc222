"""The CUDA engine builds for all architectures, and no kernel spills registers."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import NamedTuple

import pytest
from nvcc import needs_nvcc
from test_stress import COMPILE_TIMEOUT_S, CSRC, mostly_thorough, run
from tiny_engine import REPO, needs_compiler
from tiny_engine import run as run_without_settings

from pyringar.engine import build, toolchain
from pyringar.engine.compile import DTYPES, NVCC_FLAGS

# Blocks of a fused kernel, with 256 threads each, that must fit on one multiprocessor at once.
BLOCKS = {
    "float64": 4,
    "float32": 5,
    "float16": 4,
    "bfloat16": 4,
    "int8": 3,
    "uint8": 3,
    "int32": 5,
    "int64": 4,
}
REGISTERS = 65_536  # registers of a multiprocessor; a thread gets a multiple of 8
RING_REGISTERS = 64  # registers per thread, so that two blocks of 512 threads fit
TABLES = 2  # fused and tree kernels take a small or a large pointer table
FUSED_OPS = 5  # fused kernels exist for sum, mean, max, min, prod
TREE_OPS = 3  # sum, mean and prod of floats: other results do not depend on the order
RING_OPS = 4  # sum, max, min, prod; mean uses the kernel of sum
PEER_KERNELS = {"probe": 1, "verify": 1}


class Kernel(NamedTuple):
    kind: str
    arch: str
    registers: int
    spilled_bytes: int


def kernels_in(log: str) -> list[Kernel]:
    _, *parts = re.split(r"Compiling entry function '\S*?\d([a-z]+)_kernel\S*' for '(\w+)'", log)
    return [
        Kernel(
            kind,
            arch,
            int(re.findall(r"Used (\d+) registers", text)[0]),
            sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        )
        for kind, arch, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def expected_kernels(dtypes: list[str]) -> dict[str, int]:
    floats = sum("float" in dtype for dtype in dtypes)
    count = {
        "fused": TABLES * len(dtypes) * FUSED_OPS,
        "tree": TABLES * floats * TREE_OPS,
        "ring": len(dtypes) * RING_OPS,
    }
    return {kind: number for kind, number in count.items() if number}


@needs_compiler
@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_no_kernel_spills_on_any_arch(cache, monkeypatch):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", "all")
    built = build.build_engine(build.Recipe(kind=build.CUDA))
    kernels = kernels_in((built.path.parent / "build.log").read_text())
    archs = {kernel.arch for kernel in kernels}
    assert {"sm_75", "sm_80", "sm_90"} <= archs
    for arch in archs:
        found = Counter(kernel.kind for kernel in kernels if kernel.arch == arch)
        assert found == expected_kernels(list(BLOCKS)) | PEER_KERNELS, arch
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
    code = "from pyringar.engine import load; print(load.cuda_engine().num_devices())"
    environment = {"PYRINGAR_CACHE_DIR": cache, "PYRINGAR_CUDA_ARCHS": "all"}
    out = run_without_settings(sys.executable, "-c", code, cwd=REPO, **environment)
    assert out.strip().isdigit()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", mostly_thorough(BLOCKS, "float32"))
def test_kernels_stay_within_register_limit(tmp_path, dtype):
    toolkit = toolchain.read_cuda_toolkit(toolchain.find_nvcc(), toolchain.find_compiler())
    command = [*toolkit.nvcc.command, *NVCC_FLAGS, "-arch=sm_90", f"-I{CSRC}", "-cubin"]
    named = dict(zip(BLOCKS, DTYPES, strict=True))[dtype]
    command += [f"-DPYRINGAR_DTYPE={named}", str(CSRC / "cuda/kernels.cu")]
    done = run([*command, "-o", tmp_path / "kernels.cubin"], COMPILE_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    kernels = kernels_in(done.stdout)
    assert Counter(kernel.kind for kernel in kernels) == expected_kernels([dtype])
    most = REGISTERS // (256 * BLOCKS[dtype]) // 8 * 8
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.registers <= (RING_REGISTERS if kernel.kind == "ring" else most), kernel
