"""Does the CUDA engine build for all architectures, and what has nvcc made of its kernels?"""

from __future__ import annotations

import sys
from collections import Counter

import cuda_sass
import pytest
from nvcc import needs_nvcc
from test_stress import some
from tiny_engine import REPO, needs_compiler, run

from pyringar.engine import build

FUSED_OPS = 5  # the sum, the mean, the largest, the smallest, the product
TREE_OPS = 3  # sums, means and products of floats; others are the same in every order
RING_OPS = 4  # the sum's kernel divides, too
TABLES = 2


@needs_compiler
@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_no_kernel_spills_on_any_arch(cache, monkeypatch):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", "all")
    record = build.build_engine(build.Recipe(kind=build.CUDA)).record
    archs = {kernel["arch"] for kernel in record["kernels"]}
    assert {"sm_75", "sm_80", "sm_90"} <= archs
    for arch in archs:
        count = Counter(
            name
            for k in record["kernels"]
            if k["arch"] == arch
            for name in ("fused_kernel", "tree_kernel", "ring_kernel")
            if name in k["name"]
        )
        dtypes = len(cuda_sass.DTYPES)
        floats = sum("float" in dtype for dtype in cuda_sass.DTYPES)
        assert count == {
            "fused_kernel": TABLES * dtypes * FUSED_OPS,
            "tree_kernel": TABLES * floats * TREE_OPS,
            "ring_kernel": dtypes * RING_OPS,
        }, arch
    spilled = [k for k in record["kernels"] if k["spill_store_bytes"] or k["spill_load_bytes"]]
    assert spilled == []
    code = "from pyringar.engine import load; print(load.cuda_engine().num_devices())"
    out = run(
        sys.executable, "-c", code, cwd=REPO, PYRINGAR_CACHE_DIR=cache, PYRINGAR_CUDA_ARCHS="all"
    )
    assert out.strip().isdigit()


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """``read(dtype)``: the kernels of a dtype, by kind."""
    folder = tmp_path_factory.mktemp("sass")
    try:
        cuda_sass.nvdisasm(folder)
    except OSError as error:
        pytest.skip(str(error))

    def kernels(dtype):
        found = cuda_sass.kernels_of(REPO / f"csrc/cuda/kernels_{dtype}.cu", folder)
        return {
            kind: [k for k in found if k.name.startswith(kind)]
            for kind in ("fused", "tree", "ring")
        }

    return kernels


def some_dtypes():
    return some(cuda_sass.DTYPES, "float32")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", some_dtypes())
def test_all_loads_precede_first_addition(read, dtype):
    """Of eight sources 16 bytes each, of four others four elements; nothing is spilled."""
    kinds = read(dtype)
    item = int("".join(filter(str.isdigit, dtype))) // 8
    compares = {"Max,", "Min,"}
    assert len(kinds["fused"]) == TABLES * FUSED_OPS
    assert len(kinds["tree"]) == (TABLES * TREE_OPS if "float" in dtype else 0)
    assert len(kinds["ring"]) == RING_OPS
    for kernel in kinds["fused"] + kinds["tree"]:
        # The last byte of eight that are compared waits for a register.
        is_tight = item == 1 and compares & set(kernel.name.split())
        assert kernel.loads_in_flight >= (7 if is_tight else 8), kernel
        assert kernel.elements_in_flight >= (4 if item == 8 else 16), kernel
        assert kernel.wide_stores >= 1, kernel
        assert kernel.blocks(256) >= (3 if is_tight else 5 if item == 4 else 4), kernel
        assert kernel.spilled_bytes == kernel.fences == kernel.barriers == 0, kernel
    # Sums of more than eight ranks wait in local memory, in a tree.
    assert [k for k in kinds["fused"] + kinds["ring"] if k.local_accesses] == []
    for kernel in kinds["ring"]:
        assert kernel.loads_in_flight >= 4, kernel
        assert kernel.blocks(512) == 2, kernel
        assert kernel.spilled_bytes == 0, kernel
