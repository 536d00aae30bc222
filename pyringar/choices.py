"""Choices for public arguments, and their checks. Needs no torch: the command line imports it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from pyringar.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

Algorithm = Literal["auto", "fused", "direct", "ring", "sharded", "naive"]
Order = Literal["any", "rank", "tree", "exact"]
OpName = Literal["sum", "mean", "max", "min", "prod"]
if TYPE_CHECKING:
    Op: TypeAlias = OpName | ReduceOp | ReduceOp.RedOpType
else:  # names for typing.get_type_hints, without importing torch
    Op = OpName

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
ORDERS: tuple[Order, ...] = get_args(Order)
OPS: tuple[OpName, ...] = get_args(OpName)
BATCHNORMS = ("local", "sync")

T = TypeVar("T", bound=str)

# Names in other libraries, and pyringar's names for them.
_SYNONYMS = {
    **{"avg": "mean", "average": "mean", "add": "sum", "plus": "sum"},
    **{"product": "prod", "mul": "prod", "multiply": "prod"},
    **{"gpu": "cuda", "syncbn": "sync", "fp32": "float32", "fp64": "float64"},
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "double": "float64"},
}


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'mean'?"`` for a misspelled name; ``""`` if none is similar."""
    if not isinstance(given, str):
        return ""
    names = list(known)
    word, colon, index = given.strip().lower().partition(":")  # "gpu:0"
    near = [name for name in names if name.startswith(f"{word}-")]  # --batch: --batch-size
    near += difflib.get_close_matches(_SYNONYMS.get(word, word) + colon + index, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: Any, choices: tuple[T, ...]) -> T:
    """Return ``value`` if it is a choice; else raise ArgumentError with the nearest choice."""
    for choice in choices if isinstance(value, str) else ():
        if value == choice:
            return choice
    raise ArgumentError(
        f"{name} is {value!r}, expected one of {', '.join(choices)}{did_you_mean(value, choices)}"
    )


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ArgumentError unless the argument is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ArgumentError(
            f"{name} is {value!r}, expected a whole number, {least} or more and below 2**63"
        )


def check_positive(name: str, value: Any, what: str = "number") -> None:
    """Raise ArgumentError, "expected a positive ``what``", unless the argument is positive."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{name} is {value!r}, expected a positive {what}")


def kind_of(value: Any) -> str:
    """Return the type of a value for messages: ``"an int"``, ``"a Tensor"``, ``"None"``."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
