"""What the graph of a rank's call leads to, and what modules keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pyringar.parallel import nested
from pyringar.parallel.lockstep import is_in_autocast

__all__ = ["differentiable", "used_params"]

Tensors = Sequence[Tensor]


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in an output that require gradients, in order."""
    found: list[Tensor] = []
    nested.map_tensors(lambda t: found.append(t) if t.requires_grad else None, output)
    return found


def used_params(replica: nn.Module, outputs: Tensors) -> set[int] | None:
    """Return the parameters in a rank's graph, by ``id``; None where that is tied to others.

    Tied is what is not only a graph from a rank's outputs to its parameters: it leads to other
    tensors, modules keep parts of it, for a loss to take, or it has a checkpoint that recomputes in
    a pass of its own (``use_reentrant=True``). Or the module has entered autocast itself and uses a
    parameter twice: how often that is cast depends on when the other ranks leave theirs.

    Every call looks: what a module uses may require gradients from now on, which changes no number
    that torch would tell without a walk.
    """
    own, used = set(map(id, replica.parameters())), set()
    seen = {get_gradient_edge(output).node for output in outputs}
    todo, casts = list(seen), []
    while todo:
        node = todo.pop()
        edges = node.next_functions
        if not edges and hasattr(node, "variable"):
            if id(node.variable) not in own:
                return None
            used.add(id(node.variable))
        if type(node).__name__ == "CheckpointFunctionBackward":
            return None
        for other, _ in edges:
            if other is None:
                continue
            if type(other).__name__ == "ToCopyBackward0":
                casts.append(other)
            if other not in seen:
                seen.add(other)
                todo.append(other)
    is_cast_twice = bool(casts) and not is_in_autocast() and _are_twice_of_a_leaf(casts)
    return None if is_cast_twice or any(map(_keeps_graph, replica.modules())) else used


def _are_twice_of_a_leaf(casts: Sequence[Any]) -> bool:
    """Return whether a leaf is used more than once in another dtype, from one cast or several."""
    leaves = [
        leaf for cast in casts for leaf, _ in cast.next_functions if hasattr(leaf, "variable")
    ]
    return len(set(leaves)) < len(leaves)


# What most of a module's attributes are, and no tensor. A parameter is no part of a graph.
_PLAIN = frozenset({bool, int, float, str, type(None), set})
_HELD = frozenset({"_parameters", "_modules"})


def _keeps_graph(part: nn.Module) -> bool:
    return any(
        isinstance(value, Tensor) and value.grad_fn is not None
        for name, held in vars(part).items()
        if type(held) not in _PLAIN and name not in _HELD
        for value in _items(held) or [held]
        if type(value) not in _PLAIN
    )


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []
