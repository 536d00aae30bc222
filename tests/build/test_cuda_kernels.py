"""Does the CUDA engine build for all architectures, and what has nvcc made of its kernels?"""

from __future__ import annotations

import sys
from collections import Counter

import cuda_sass
import pytest
from nvcc import needs_nvcc
from tiny_engine import REPO, needs_compiler, run

from pyringar.engine import build

REDUCTIONS = 4  # the mean is the sum's
TREES = 2  # sums and products of floats; others are the same in every order
TABLES = 3


@needs_compiler
@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
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
            for name in ("fused_kernel", "tree_kernel", "ring_kernel")
            if name in k["name"]
        )
        each = len(cuda_sass.DTYPES) * REDUCTIONS
        floats = sum("float" in dtype for dtype in cuda_sass.DTYPES)
        assert count == {
            "fused_kernel": TABLES * each,
            "tree_kernel": TABLES * floats * TREES,
            "ring_kernel": each,
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
    """``read(dtype, *defines)``: the kernels of a dtype, by kind."""
    folder = tmp_path_factory.mktemp("sass")
    try:
        cuda_sass.nvdisasm(folder)
    except OSError as error:
        pytest.skip(str(error))

    def kernels(dtype, *defines):
        source = REPO / f"csrc/cuda/kernels_{dtype}.cu"
        found = cuda_sass.kernels_of(source, folder, defines=defines)
        kinds = {
            kind: [k for k in found if k.name.startswith(kind)]
            for kind in ("fused", "tree", "ring")
        }
        assert len(kinds["fused"]) == TABLES * REDUCTIONS
        assert len(kinds["tree"]) == (TABLES * TREES if "float" in dtype else 0)
        assert len(kinds["ring"]) == REDUCTIONS
        assert [k for k in found if k.spilled_bytes] == []
        # Of more than eight ranks, sums wait there.
        assert [k for k in found if k.local_accesses and k not in kinds["tree"]] == []
        return kinds

    return kernels


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_move_sixteen_bytes_at_a_time_and_fit(read, dtype):
    kinds = read(dtype)
    for kernel in kinds["tree"]:
        assert kernel.loads_in_flight >= 8, kernel  # a pack of eight ranks at once
        assert kernel.wide_stores >= 4, kernel
        assert kernel.blocks(256) >= 2, kernel
        assert kernel.fences == kernel.barriers == 0, kernel
    for kernel in kinds["fused"]:
        # Four packs of two ranks at once; heads and tails go element by element.
        assert kernel.loads_in_flight >= 8, kernel
        assert kernel.wide_stores >= 4, kernel
        assert kernel.blocks(256) >= 2, kernel
        assert kernel.fences == kernel.barriers == 0, kernel
    for kernel in kinds["ring"]:
        assert kernel.loads_in_flight >= 4, kernel
        assert kernel.blocks(512) == 2, kernel


@needs_nvcc
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", cuda_sass.DTYPES)
def test_more_blocks_of_the_narrow_shape_fit_a_multiprocessor(read, dtype):
    for kernel in read(dtype, "PYRINGAR_FUSED_SHAPE=1")["fused"]:
        assert kernel.blocks(256) >= (3 if "int8" in dtype else 4), kernel


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [2, 3, 4])
def test_the_other_shapes_compile(read, shape):
    for kernel in read("uint8", f"PYRINGAR_FUSED_SHAPE={shape}")["fused"]:
        assert kernel.loads_in_flight >= 4, kernel
