"""Names that a caller chooses from, and what is said of one that is not among them.

Without torch: the command line shows them in its help.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pyringar.errors import ArgumentError

ALGORITHMS = ("auto", "fused", "direct", "ring", "sharded", "naive")
ORDERS = ("any", "rank", "tree", "exact")
BATCHNORMS = ("local", "sync")

# What other libraries call it.
_ALSO_CALLED = {
    **{"avg": "mean", "average": "mean", "add": "sum", "plus": "sum"},
    **{"product": "prod", "mul": "prod", "multiply": "prod"},
    **{"gpu": "cuda", "syncbn": "sync", "fp32": "float32", "fp64": "float64"},
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "double": "float64"},
}


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'mean'?"`` where a known name is near; else nothing."""
    if not isinstance(given, str):
        return ""
    word, colon, index = given.strip().lower().partition(":")  # "gpu:0"
    near = difflib.get_close_matches(_ALSO_CALLED.get(word, word) + colon + index, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return an argument; ArgumentError, with the nearest choice, if it is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(
            f"{name} is {value!r}, expected one of {', '.join(choices)}"
            f"{did_you_mean(value, choices)}"
        )
    return value


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ArgumentError unless an argument is a whole number, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ArgumentError(
            f"{name} is {value!r}, expected a whole number, {least} or more and below 2**63"
        )


def check_positive(name: str, value: Any, what: str = "number") -> None:
    """Raise ArgumentError unless an argument is a positive number; ``what`` names its unit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{name} is {value!r}, expected a positive {what}")


def kind_of(value: Any) -> str:
    """Return what a value is, for messages: ``"an int"``, ``"a Tensor"``, ``"None"``."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
