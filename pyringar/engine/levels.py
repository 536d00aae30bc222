"""The engines in a wheel: for any CPU of its architecture, one for each level of instructions.

Whoever makes a wheel does not know the CPU that will run it, and AVX-512 converts and adds 16-bit
floats many times as fast as what every x86-64 has. So the same sources are compiled for each of the
levels that compilers know by name, and the best that this CPU runs is loaded. All levels compute
the same bits.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

__all__ = ["Level", "levels", "libc_serves"]


@dataclass(frozen=True)
class Level:
    """A set of instructions: ``features`` as /proc/cpuinfo names them, none for the lowest."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


# https://gitlab.com/x86-psABIs/x86-64-ABI; Linux calls LZCNT abm.
_X86_64_V3 = frozenset(
    (
        *("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "xsave"),
        *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
    )
)
_X86_64_V4 = _X86_64_V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_LEVELS = {
    "x86_64": (
        Level("x86-64-v4", ("-march=x86-64-v4",), _X86_64_V4),
        Level("x86-64-v3", ("-march=x86-64-v3",), _X86_64_V3),
        Level("x86-64", ("-march=x86-64",)),
    ),
    # SVE would change nothing: the engine's vectors have a fixed length.
    "aarch64": (Level("armv8-a", ("-march=armv8-a",)),),
}


def levels() -> tuple[Level, ...]:
    """Return the levels of this machine's architecture, the best first; always at least one."""
    return _LEVELS.get(platform.machine(), (Level("any", ()),))


def libc_serves(here: str, built_with: str) -> bool:
    """Return whether a C library ("glibc 2.36") runs what was linked with another: not a newer."""
    names, versions = zip(*(text.rpartition(" ")[::2] for text in (here, built_with)), strict=True)
    try:
        ours, theirs = ([int(part) for part in version.split(".")] for version in versions)
    except ValueError:
        return here == built_with
    return names[0] == names[1] and ours >= theirs
