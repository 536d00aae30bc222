"""Find what the graph of a rank's call leads to, and what modules keep of it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pyringar.parallel import nested
from pyringar.parallel.lockstep import is_in_autocast

__all__ = ["differentiable", "used_params"]

Tensors = Sequence[Tensor]


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in an output that require gradients, in order."""
    leaves = nested.leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def used_params(replica: nn.Module, output: Any) -> set[int] | None:
    """Return the parameters in a rank's graph, by ``id``; None where that is tied to others.

    Tied is what is not only a graph from a rank's outputs to its parameters: it leads to other
    tensors, modules or objects in the output keep parts of it, for a loss to take, the output
    cannot take other tensors, or it has a checkpoint that recomputes in a pass of its own
    (``use_reentrant=True``). Or the module has entered autocast itself and uses a parameter twice:
    how often that is cast depends on when the other ranks leave theirs.

    Every call looks: what a module uses may require gradients from now on, which changes no number
    that torch would tell without a walk.
    """
    if not nested.can_rebuild(output):
        return None
    own, used = set(map(id, replica.parameters())), set()
    seen = {get_gradient_edge(tensor).node for tensor in differentiable(output)}
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
    others = [leaf for leaf in nested.leaves(output) if not isinstance(leaf, Tensor)]
    return None if is_cast_twice or _lead_to_graph([replica, *others]) else used


def _are_twice_of_a_leaf(casts: Sequence[Any]) -> bool:
    """Return whether a leaf is used more than once in another dtype, from one cast or several."""
    leaves = [
        leaf for cast in casts for leaf, _ in cast.next_functions if hasattr(leaf, "variable")
    ]
    return len(set(leaves)) < len(leaves)


_ENDS = (Tensor, type, ModuleType, FunctionType)
_MOST_OBJECTS = 100_000  # a tenth of a second in each call


def _lead_to_graph(values: Sequence[Any]) -> bool:
    """Return whether modules, containers or other objects lead to a tensor that has a graph.

    What functions refer to does not count, nor do classes and Python's modules, which lead to
    everything. True also where there are too many objects to look at in each call.
    """
    seen: set[int] = set()
    level: Sequence[Any] = [values]
    while level:
        # What Python's collector does not track, as numbers and dicts of them, holds no tensors.
        found = {id(v): v for v in gc.get_referents(*level) if gc.is_tracked(v)}
        fresh = [found[key] for key in found.keys() - seen]
        # By type(): isinstance() also asks the object, and a proxy may have nothing behind it.
        if any(issubclass(type(v), Tensor) and v.grad_fn is not None for v in fresh):
            return True
        seen |= found.keys()
        if len(seen) > _MOST_OBJECTS:
            return True
        level = [v for v in fresh if not issubclass(type(v), _ENDS)]
    return False
