"""The parameters that a bucketer reduces, and checks of what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError
from pyringar.parallel.bucket_step import Step

__all__ = ["HookedParams", "Replica", "check_caps", "check_replicas"]

Replica = nn.Module | Sequence[Tensor]


def check_replicas(replicas: Any) -> list[Replica]:
    """Return one module, or one list of parameters, per rank.

    Raises:
        ArgumentError: It is something else, or empty.
    """
    if isinstance(replicas, nn.Module) or not isinstance(replicas, Sequence) or not replicas:
        raise ArgumentError(
            f"replicas is {kind_of(replicas)}, expected a list with one module, or one list of "
            "parameters, per rank"
        )
    return [_check_replica(f"replicas[{rank}]", replica) for rank, replica in enumerate(replicas)]


def _check_replica(name: str, replica: Any) -> Replica:
    if isinstance(replica, nn.Module):
        return replica
    if isinstance(replica, Tensor) or not isinstance(replica, Iterable):
        raise ArgumentError(
            f"{name} is {kind_of(replica)}, expected a module or a list of parameters"
        )
    params = list(replica)
    for i, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise ArgumentError(f"{name}[{i}] is {kind_of(param)}, expected a parameter")
    return params


def check_caps(**caps: Any) -> dict[str, int]:
    """Return the bytes of caps in megabytes, by name.

    Raises:
        ArgumentError: A cap is not a positive number; names it.
    """
    for name, value in caps.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ArgumentError(f"{name} is {value!r}, expected a positive number of megabytes")
    return {name: max(1, int(min(value, 1e12) * 1e6)) for name, value in caps.items()}


class HookedParams:
    """The parameters of all replicas that require grad, each with a hook of the engine's.

    Args:
        replicas: What `check_replicas` returns.

    Attributes:
        by_rank: Parameters of each rank.

    Raises:
        ArgumentError: Numbers, shapes or dtypes differ between ranks; names the first.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._handles: list[Any] = []
        self.by_rank = self._find()
        self._check_alike(self.by_rank)

    def items(self) -> list[tuple[int, int]]:
        """Return the bytes of every parameter, and its kind: the dtype and all ranks' devices."""
        return _items_of(self.by_rank)

    def add_hooks(self, native: Any) -> None:
        """Let every gradient be counted by the engine's bucketer."""
        self._add_hooks(native, self.by_rank)

    def remove_hooks(self) -> None:
        """Count no gradient any more. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def adopt_new(self, native: Any, step: Step) -> None:
        """Give hooks to parameters that were replaced (``load_state_dict(assign=True)``).

        Args:
            native: The engine's bucketer.
            step: The step in which they are found.

        Raises:
            ArgumentError: They are not like those before.
        """
        if not any(isinstance(replica, nn.Module) for replica in self._replicas):
            return
        now = self._find()
        same = all(
            len(new) == len(old) and all(map(is_, new, old))
            for new, old in zip(now, self.by_rank, strict=True)
        )
        if same:
            return
        if _items_of(now) != self.items():
            raise ArgumentError(
                "the replicas' parameters have changed in number, shape, dtype or requires_grad; "
                "make a new GradientBucketer"
            )
        self._check_alike(now)
        native.retire_hooks()  # also one whose handle an interrupt has kept from us
        self.remove_hooks()
        self._add_hooks(native, now)
        step.has_new_params = True
        self.by_rank = now  # last: interrupted, this is done again

    def _find(self) -> list[list[Tensor]]:
        everything = [r.parameters() if isinstance(r, nn.Module) else r for r in self._replicas]
        return [[param for param in params if param.requires_grad] for params in everything]

    def _add_hooks(self, native: Any, by_rank: Sequence[Sequence[Tensor]]) -> None:
        for rank, params in enumerate(by_rank):
            for i, param in enumerate(params):
                hook = native.hook(rank, i, param.grad if param.is_leaf else None)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @staticmethod
    def _check_alike(by_rank: Sequence[Sequence[Tensor]]) -> None:
        first = by_rank[0]
        for rank, params in enumerate(by_rank):
            if len(params) != len(first):
                raise ArgumentError(
                    f"replicas[{rank}] has {len(params)} parameters that require grad, replicas[0] "
                    f"has {len(first)}"
                )
            for i, (param, other) in enumerate(zip(params, first, strict=True)):
                if param.shape != other.shape or param.dtype != other.dtype:
                    raise ArgumentError(
                        f"parameter {i} of replicas[{rank}] is {tuple(param.shape)} {param.dtype}, "
                        f"of replicas[0] {tuple(other.shape)} {other.dtype}"
                    )


def _items_of(by_rank: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    kinds: dict[Any, int] = {}
    items = []
    for column in zip(*by_rank, strict=True):
        key = (column[0].dtype, tuple(param.device for param in column))
        kind = kinds.setdefault(key, len(kinds))
        items.append((column[0].numel() * column[0].element_size(), kind))
    return items
