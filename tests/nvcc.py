"""Marks the tests that need nvcc."""

from __future__ import annotations

import pytest

from pyringar.engine import toolchain
from pyringar.errors import CompilerNotFoundError


def has_nvcc() -> bool:
    try:
        toolchain.find_nvcc()
    except CompilerNotFoundError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc")
