"""Checks of arguments that all communicators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyringar.choices import OPS as OPS
from pyringar.choices import OpName, check_positive, did_you_mean, kind_of
from pyringar.errors import ArgumentError

REDUCE_OPS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}
"""The engine's name of each torch.distributed.ReduceOp."""
DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
DTYPES = tuple(getattr(torch, name) for name in DTYPE_NAMES)
"""Dtypes that the engine reduces."""
SHARED_MEMORY_HINT = (
    "expected separate memory. If these are gradients, the ranks share their parameters: copy "
    "parameters with pr.get_params(params, device)"
)


def op_name(op: Any) -> OpName:
    """Return the name of a reduction, given as a string or a torch.distributed.ReduceOp."""
    if isinstance(op, str):
        for name in OPS:
            if op == name:
                return name
    elif torch.distributed.is_available():
        c10d = torch.distributed.ReduceOp
        # Check the type before comparing: ReduceOp.SUM == 0 is true, tensor == x is a tensor.
        if isinstance(op, (c10d, c10d.RedOpType)):
            for theirs, ours in zip(REDUCE_OPS, OPS, strict=True):
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
    """Return whether ``value`` is a non-empty list of lists of equal length."""
    return (
        is_list(value)
        and len(value) > 0
        and all(is_list(row) and len(row) == len(value[0]) for row in value)
    )


def check_list(operation: str, value: Any, name: str = "tensors") -> None:
    if not is_list(value):
        raise ArgumentError(f"{operation}: {name} is {kind_of(value)}, expected a list of tensors")


def check_lists(lists: Any) -> None:
    if not is_list(lists) or not lists:
        given = "empty" if is_list(lists) else kind_of(lists)
        raise ArgumentError(f"lists is {given}, expected one list of tensors per rank")
    for rank, tensors in enumerate(lists):
        if not is_list(tensors):
            raise ArgumentError(f"lists[{rank}] is {kind_of(tensors)}, expected a list of tensors")
        if len(tensors) != len(lists[0]):
            raise ArgumentError(
                f"lists[{rank}] has {len(tensors)} entries, expected {len(lists[0])} as rank 0 has"
            )


def check_parts(operation: str, outputs: Tensor, inputs: Tensor, world_size: int) -> None:
    """Raise ArgumentError unless dtypes and sizes fit ``reduce_scatter`` or ``all_gather``."""
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
