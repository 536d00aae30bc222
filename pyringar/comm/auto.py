"""Choose the algorithm that ``auto`` runs: by where the ranks are, their order and a call's size.

A table and no measurement: among CPU ranks of one process ``fused`` was best or within 6 % in every
case measured, and ranks in processes never gained by the ring (docs/report.md has both). The one
border, between GPUs, is a guess until ``benchmarks/gpu_check.py`` has run on several.
"""

from __future__ import annotations

from pyringar.errors import ArgumentError

__all__ = ["choose", "depends_on_size"]

RING_FROM_BYTES = 512 << 10  # of one rank, between GPUs

# By place: rows of (from bytes, algorithm, why). Only `order="any"` may take what adds otherwise
# than in the order of the ranks.
_ONE_PASS = "all ranks share {}, where one pass is the least traffic"
_ANY = {
    "host": [(0, "fused", _ONE_PASS.format("the host's memory"))],
    "gpu": [(0, "fused", _ONE_PASS.format("the memory of one GPU"))],
    "gpus": [
        (0, "direct", f"below {RING_FROM_BYTES} bytes, two barriers beat a ring's steps"),
        (RING_FROM_BYTES, "ring", "between memories a ring moves the least over every link"),
    ],
    "mixed": [(0, "direct", "ranks in the host's memory and on GPUs meet in staging buffers")],
    "processes": [
        (
            *(0, "direct"),
            "processes that share slots of memory: each rank reduces a slice, or small messages"
            " whole",
        )
    ],
}
_TABLE = {
    "any": _ANY,
    "rank": _ANY | {"gpus": [(0, "direct", "rank order between memories")]},
}


def depends_on_size(place: str, order: str) -> bool:
    """Say whether `choose` looks at the number of bytes there."""
    return len(_TABLE[order][place]) > 1


def choose(place: str, order: str, nbytes: int) -> tuple[str, str]:
    """Return the algorithm for a call, and why.

    Args:
        place: ``"host"`` or ``"gpu"``: all ranks of one process share its memory; ``"gpus"``: they
            are on several GPUs; ``"mixed"``: on the host and on GPUs; ``"processes"``: each is in
            a process of its own.
        order: ``"any"`` or ``"rank"``.
        nbytes: Bytes of one rank's data.

    Raises:
        ArgumentError: Unknown ``place`` or ``order``.
    """
    if order not in _TABLE or place not in _ANY:
        raise ArgumentError(
            f"place is {place!r} and order {order!r}, expected one of {', '.join(_ANY)} and "
            "'any' or 'rank'"
        )
    rows = _TABLE[order][place]
    return next((name, why) for begin, name, why in reversed(rows) if nbytes >= begin)
