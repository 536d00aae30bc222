"""All-reduce into new tensors, for functional code and autograd.

For example:

    first, second = pr.ops.all_reduce(comm, [x, y])
    (first * w).sum().backward()  # reaches x and y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyringar.choices import ALGORITHMS, ORDERS, Algorithm, Op, Order, check_choice, kind_of
from pyringar.comm import operators
from pyringar.comm.arguments import check_list, check_lists
from pyringar.comm.communicator import Communicator
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.errors import ArgumentError

__all__ = ["all_reduce", "all_reduce_coalesced"]


def all_reduce(
    comm: Communicator | ProcessCommunicator,
    tensors: Sequence[Tensor],
    op: Op = "sum",
    *,
    algorithm: Algorithm | None = None,
    order: Order | None = None,
) -> list[Tensor]:
    """Reduce tensors over all ranks; return the results in new tensors.

    torch.compile and torch.export keep the call in their graphs as the operator
    ``torch.ops.pyringar.all_reduce``.

    Args:
        comm: The communicator; keep it as long as a graph that uses it. A saved program that
            another process loads uses the communicator with the same settings and the same
            position in the order of creation.
        tensors: One tensor per rank; with a `ProcessCommunicator` a list of this rank's tensors.
            No arrays of other libraries.

    Returns:
        A list of new tensors with the shapes and dtypes of ``tensors``.

    Raises:
        UnsupportedError: In backward if ``op`` is neither sum nor mean; a compiled call raises
            already in forward if a tensor requires grad. Also in forward-mode autograd
            (``torch.func.jvp``); torch itself refuses ``vmap`` and its other transforms.

    See `Communicator.all_reduce` for the other arguments and errors.

    The gradient of each tensor is the sum (mean) of the gradients of all ranks' results. Backward
    runs one more all-reduce: with a `ProcessCommunicator` all ranks must call it.

    Cost: one copy of every tensor, then the reduction in place.
    """
    check_list("all_reduce", tensors)
    _check(
        "all_reduce",
        comm,
        algorithm,
        order,
        {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)},
    )
    return operators.reduce(comm._handle, tensors, op, algorithm, order, in_place=False)


def all_reduce_coalesced(
    comm: Communicator,
    lists: Sequence[Sequence[Tensor]],
    op: Op = "sum",
    *,
    algorithm: Algorithm | None = None,
    order: Order | None = None,
) -> list[list[Tensor]]:
    """Reduce many tensors per rank in one call; return the results in new tensors.

    Args:
        comm: The communicator.
        lists: ``lists[rank][i]``.

    Returns:
        ``results[rank][i]``: new tensors with the shapes and dtypes of ``lists``.

    See `all_reduce` for the other arguments, gradients, errors and cost.
    """
    given: object = comm
    if isinstance(given, ProcessCommunicator):
        raise ArgumentError(
            "all_reduce_coalesced: comm is a ProcessCommunicator, which has no list for each rank: "
            "take pyringar.ops.all_reduce with this rank's tensors"
        )
    check_lists(lists)
    named = {
        f"lists[{r}][{i}]": tensor for r, mine in enumerate(lists) for i, tensor in enumerate(mine)
    }
    _check("all_reduce_coalesced", comm, algorithm, order, named)
    flat = list(named.values())
    found = operators.reduce(
        comm._handle, flat, op, algorithm, order, num_lists=len(lists), in_place=False
    )
    length = len(lists[0])
    return [found[rank * length : (rank + 1) * length] for rank in range(len(lists))]


def _check(operation: str, comm: Any, algorithm: Any, order: Any, named: dict[str, Any]) -> None:
    if not isinstance(comm, (Communicator, ProcessCommunicator)):
        raise ArgumentError(
            f"{operation}: comm is {kind_of(comm)}, expected a Communicator or ProcessCommunicator"
        )
    if algorithm is not None:
        check_choice("algorithm", algorithm, ALGORITHMS)
    if order is not None:
        check_choice("order", order, ORDERS)
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{operation}: {name} is {kind_of(tensor)}, expected a tensor")
