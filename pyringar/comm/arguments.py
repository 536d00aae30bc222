"""Check arguments that all communicators take; name the values that these may have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyringar.choices import check_positive, did_you_mean, kind_of
from pyringar.errors import ArgumentError

REDUCE_OPS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
"""The engine's names, by those of torch.distributed.ReduceOp."""
OPS = tuple(REDUCE_OPS.values())
DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)
"""Those that the engine reduces."""


def op_name(op: Any) -> str:
    """Return the name of a reduction given as a string or as torch.distributed.ReduceOp."""
    if isinstance(op, str):
        if op in OPS:
            return op
    elif torch.distributed.is_available():
        c10d = torch.distributed.ReduceOp
        # By type first: ReduceOp.SUM equals 0, and a tensor given by mistake equals elementwise.
        if isinstance(op, (c10d, c10d.RedOpType)):
            for theirs, ours in REDUCE_OPS.items():
                if op == getattr(c10d, theirs):
                    return ours
    raise ArgumentError(
        f"op is {op!r}, expected one of {', '.join(OPS)} or its ReduceOp{did_you_mean(op, OPS)}"
    )


def is_count(value: Any, least: int = 0, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_timeout(timeout: Any) -> float:
    check_positive("timeout", timeout, "number of seconds")
    return float(timeout)


def check_root(root: Any, world_size: int, operation: str) -> None:
    if not is_count(root, 0, world_size - 1):
        raise ArgumentError(
            f"{operation}: root is {root!r}, expected a rank from 0 to {world_size - 1}"
        )


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def are_lists(value: Any) -> bool:
    """Return whether it may be lists of one length, one for each rank."""
    return (
        is_list(value)
        and len(value) > 0
        and all(is_list(one) and len(one) == len(value[0]) for one in value)
    )


def check_list(operation: str, value: Any, name: str = "tensors") -> None:
    if not is_list(value):
        raise ArgumentError(f"{operation}: {name} is {kind_of(value)}, expected a list of tensors")


def check_lists(lists: Any) -> None:
    if not is_list(lists) or not lists:
        what = "empty" if is_list(lists) else kind_of(lists)
        raise ArgumentError(f"lists is {what}, expected one list of tensors per rank")
    for rank, tensors in enumerate(lists):
        if not is_list(tensors):
            raise ArgumentError(f"lists[{rank}] is {kind_of(tensors)}, expected a list of tensors")
        if len(tensors) != len(lists[0]):
            raise ArgumentError(
                f"lists[{rank}] has {len(tensors)} entries, expected {len(lists[0])} as rank 0 has"
            )


def check_parts(operation: str, outputs: Tensor, inputs: Tensor, world_size: int) -> None:
    """Raise ArgumentError unless tensors of ``reduce_scatter`` or ``all_gather`` fit."""
    named = [("outputs", outputs), ("inputs", inputs)]
    (part_name, part), (whole_name, whole) = named[:: -1 if operation == "all_gather" else 1]
    if part.dtype != whole.dtype:
        raise ArgumentError(
            f"{operation}: {part_name} has dtype {part.dtype}, but {whole_name} has {whole.dtype}"
        )
    if part.numel() * world_size != whole.numel():
        raise ArgumentError(
            f"{operation}: {whole_name} has {whole.numel()} {whole.dtype} elements and {part_name} "
            f"has {part.numel()}; expected {world_size} times as many, one part per rank"
        )


def check_plan(nbytes: Any, dtype: Any) -> None:
    if not is_count(nbytes):
        raise ArgumentError(f"nbytes is {nbytes!r}, expected a number of bytes, 0 or more")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}, expected a torch.dtype")
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ArgumentError(f"dtype is {name!r}, expected one of {', '.join(DTYPE_NAMES)}")
