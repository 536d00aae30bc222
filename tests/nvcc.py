"""Marker for tests that need nvcc, and include folders of the CUDA toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyringar.engine import toolchain
from pyringar.errors import BuildError, CompilerNotFoundError


def has_nvcc() -> bool:
    try:
        toolchain.find_nvcc()
    except CompilerNotFoundError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc")


def cuda_includes() -> tuple[Path, ...]:
    try:
        nvcc, host = toolchain.find_nvcc(), toolchain.find_compiler()
        return toolchain.read_cuda_toolkit(nvcc, host).includes
    except BuildError as error:
        pytest.skip(f"no CUDA toolkit: {error}")
