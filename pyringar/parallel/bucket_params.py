"""Select the parameters that a bucketer reduces, and check its bucket sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pyringar.errors import ArgumentError

__all__ = ["Replica", "check_alike", "check_caps", "check_replicas", "items_of", "trainable"]

Replica = nn.Module | Sequence[Tensor]


def check_replicas(replicas: Any) -> list[Replica]:
    """Return one module, or one list of parameters, per rank.

    Raises:
        ArgumentError: It is something else, or empty.
    """
    if isinstance(replicas, nn.Module) or not isinstance(replicas, Sequence) or not replicas:
        raise ArgumentError(
            f"replicas is a {type(replicas).__name__}, expected a list with one module, or one "
            "list of parameters, per rank"
        )
    return [r if isinstance(r, nn.Module) else list(r) for r in replicas]


def check_caps(**caps: Any) -> dict[str, int]:
    """Bytes of caps in megabytes, by name.

    Raises:
        ArgumentError: One is no positive number; names it.
    """
    for name, value in caps.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ArgumentError(f"{name} is {value!r}, expected a positive number of megabytes")
    return {name: max(1, int(min(value, 1e12) * 1e6)) for name, value in caps.items()}


def trainable(replica: Replica) -> list[Tensor]:
    """Return the parameters that require grad."""
    params = replica.parameters() if isinstance(replica, nn.Module) else replica
    return [param for param in params if param.requires_grad]


def check_alike(all_params: Sequence[Sequence[Tensor]]) -> None:
    """Refuse ranks whose parameters differ.

    Raises:
        ArgumentError: Numbers, shapes or dtypes differ; names the first.
    """
    for rank, params in enumerate(all_params):
        if len(params) != len(all_params[0]):
            raise ArgumentError(
                f"replicas[{rank}] has {len(params)} parameters that require grad, replicas[0] has "
                f"{len(all_params[0])}"
            )
        for i, (param, other) in enumerate(zip(params, all_params[0], strict=True)):
            if param.shape != other.shape or param.dtype != other.dtype:
                raise ArgumentError(
                    f"parameter {i} of replicas[{rank}] is {tuple(param.shape)} {param.dtype}, of "
                    f"replicas[0] {tuple(other.shape)} {other.dtype}"
                )


def items_of(all_params: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    """Bytes of every parameter, and its kind: the dtype and the devices of all ranks."""
    kinds: dict[Any, int] = {}
    items = []
    for column in zip(*all_params, strict=True):
        key = (column[0].dtype, tuple(param.device for param in column))
        kind = kinds.setdefault(key, len(kinds))
        items.append((column[0].numel() * column[0].element_size(), kind))
    return items
