"""One optimizer per replica behind the face of a single one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.errors import RingarError, UnsupportedError

__all__ = ["ReplicaOptimizer"]

ParamGroups = Iterable[Tensor] | Iterable[dict[str, Any]]


class ReplicaOptimizer(torch.optim.Optimizer):
    """Steps one optimizer per replica, so that each rank updates its own full copy.

    Equal gradients and equal state give equal parameters: replicas that held the same bits hold the
    same bits afterwards, on devices of one kind. A ``torch.optim.Optimizer``, so that learning rate
    schedulers and ``GradScaler`` take it: ``param_groups`` has the parameters of all ranks, and
    what is set there counts for all ranks in the next step.

    Args:
        replicas: One module per rank.
        kind: The optimizer's class, such as ``torch.optim.SGD``.
        params: Given a replica, its parameters or parameter groups; all parameters if not given.
        wait: Called before gradients are read: it returns when they are reduced.
        check: Called before a step: it raises where ranks have different gradients.
        **options: Of the optimizer, such as ``lr``.
    """

    def __init__(
        self,
        replicas: Sequence[nn.Module],
        kind: Callable[..., torch.optim.Optimizer],
        params: Callable[[Any], ParamGroups] | None,
        wait: Callable[[], None],
        check: Callable[[], None],
        **options: Any,
    ) -> None:
        self._wait = wait
        self._check = check
        self._is_built = False
        choose = params or nn.Module.parameters
        self.optimizers = tuple(kind(list(choose(r)), **options) for r in replicas)
        merged = []
        for groups in zip(*(one.param_groups for one in self.optimizers), strict=True):
            everywhere = [param for group in groups for param in group["params"]]
            merged.append({**groups[0], "params": everywhere})
        super().__init__(merged, self.optimizers[0].defaults)
        self._is_built = True

    # A property, because whoever asks for the parameters may go on to read their gradients:
    # GradScaler.unscale_ does.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One entry per group; its ``params`` are rank 0's, then rank 1's, and so on.

        Waits for gradients that are being reduced.
        """
        self._wait()
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def __repr__(self) -> str:
        """Show it without a look at the gradients, for which `param_groups` would wait."""
        kind = type(self.optimizers[0]).__name__
        options = [
            ", ".join(f"{name}={value!r}" for name, value in group.items() if name != "params")
            for group in self._groups
        ]
        return f"ReplicaOptimizer({len(self.optimizers)} ranks, each {kind}: {'; '.join(options)})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not once the optimizer is made.

        Args:
            param_group: Whatever it is.

        Raises:
            UnsupportedError: Always; name the groups with ``params`` when it is made.
        """
        if self._is_built:
            raise UnsupportedError(
                "parameter groups cannot be added to the optimizer of replicas: name them when it "
                "is made, net.optimizer(kind, params=lambda module: [...])"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then step on every rank.

        Args:
            closure: Called once, before the step, with gradients recorded.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            RingarError: As `GradientBucketer.wait`, or gradients were changed on some ranks
                only; no parameter was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._wait()
        self._check()
        self._spread_options()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients on all ranks, also those that a failed backward pass left.

        See ``torch.optim.Optimizer.zero_grad``.
        """
        with suppress(RingarError):  # what failed is cleared now, and stays failed if it must
            self._wait()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Rank 0's, as the plain optimizer of the plain module has it."""
        self._spread_options()
        return self.optimizers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into all ranks what `state_dict` gave, here or from a plain optimizer.

        Args:
            state_dict: Each rank takes a copy of its own.
        """
        for optimizer in self.optimizers:
            # A copy for each: torch keeps the tensors it is given, and ranks must share none.
            optimizer.load_state_dict(copy.deepcopy(state_dict))
        for ours, theirs in zip(self._groups, self.optimizers[0].param_groups, strict=True):
            ours.update(_options(theirs))

    def _spread_options(self) -> None:
        """Give all ranks what schedulers and users have set, such as learning rates."""
        for optimizer in self.optimizers:
            for ours, theirs in zip(self._groups, optimizer.param_groups, strict=True):
                theirs.update(_options(ours))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
