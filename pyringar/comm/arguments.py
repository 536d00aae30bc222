"""Checks of arguments that all communicators take, and the names that these may have."""

from __future__ import annotations

from typing import Any

import torch

from pyringar.errors import ArgumentError

__all__ = [
    "OPS",
    "ORDERS",
    "check_choice",
    "check_plan",
    "check_ring_order",
    "check_timeout",
    "op_name",
]

OPS = ("sum", "mean", "max", "min", "prod")
ORDERS = ("any", "rank")


def op_name(op: Any) -> str:
    """The name of a reduction given as a string or as torch.distributed.ReduceOp."""
    if isinstance(op, str):
        if op in OPS:
            return op
    elif torch.distributed.is_available():
        c10d = torch.distributed.ReduceOp
        names = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
        # By type first: ReduceOp.SUM equals 0, and a tensor given by mistake equals elementwise.
        if isinstance(op, (c10d, c10d.RedOpType)):
            for theirs, ours in names.items():
                if op == getattr(c10d, theirs):
                    return ours
    raise ArgumentError(f"op is {op!r}, expected one of {', '.join(OPS)} or its ReduceOp")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """An argument that must be one of some strings."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return value


def check_timeout(timeout: Any) -> float:
    """Seconds that a wait may last without progress, positive."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout is {timeout!r}, expected a positive number of seconds")
    return float(timeout)


def check_plan(nbytes: Any, dtype: Any) -> None:
    """The arguments of every ``plan()``: a number of bytes and a dtype."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ArgumentError(f"nbytes is {nbytes!r}, expected a number of bytes, 0 or more")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}, expected a torch.dtype")


def check_ring_order(algorithm: str, order: str, others: str) -> None:
    """A ring adds in its own order; ``others`` keep that of the ranks."""
    if algorithm == "ring" and order == "rank":
        raise ArgumentError(
            "algorithm is 'ring' and order is 'rank': a ring adds in its own order; "
            f"take order='any', or {others} for rank order"
        )
