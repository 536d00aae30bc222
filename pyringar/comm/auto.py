"""Choose the algorithm that ``auto`` runs: by where the ranks are.

A table and no measurement: among CPU ranks of one process ``fused`` was best or within 6 % in every
case measured, and ranks in processes never gained by the ring (docs/report.md has both). Between
GPUs nothing has been measured.
"""

from __future__ import annotations

_ONE_PASS = "all ranks share {}, where one pass is the least traffic"
_TABLE = {
    "host": ("fused", _ONE_PASS.format("the host's memory")),
    "gpu": ("fused", _ONE_PASS.format("the memory of one GPU")),
    "gpus": (
        "direct",
        "each GPU reduces a slice: as many bytes as a ring's, and no kernel waits for another",
    ),
    "mixed": ("naive", "ranks are on CPUs and on GPUs, between which torch copies"),
    "processes": (
        "direct",
        "processes that share slots of memory: each rank reduces a slice, or small messages whole",
    ),
}


def choose(place: str) -> tuple[str, str]:
    """Return the algorithm of calls, and why; it adds in the order of the ranks.

    Args:
        place: ``"host"`` or ``"gpu"``: all ranks of one process share its memory; ``"gpus"``: they
            are on several GPUs; ``"mixed"``: on the host and on GPUs; ``"processes"``: each is in
            a process of its own.
    """
    return _TABLE[place]
