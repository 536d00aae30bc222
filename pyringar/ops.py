"""All-reduce that returns new tensors: for functions without side effects, and for autograd.

For example:

    first, second = pr.ops.all_reduce(comm, [x, y])
    (first * w).sum().backward()  # through the sum, to x and y
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
    """Return what `Communicator.all_reduce` would write, in new tensors.

    The operator ``torch.ops.pyringar.all_reduce``, which torch.compile and torch.export keep in
    their graphs.

    Args:
        comm: What reduces; each has graphs of its own. A graph knows it by its number in the
            process, devices, algorithm and order: keep it as long as the graph. A program that is
            saved and loaded by another process takes the one made alike there, at the same place
            in the order of making.
        tensors: One for each rank; of a `ProcessCommunicator` a list of this rank's. No arrays of
            other libraries.

    Returns:
        As many tensors, of the same shapes and dtypes.

    Raises:
        UnsupportedError: In backward, through another reduction than sum and mean; compiled, such
            a call is refused at once where a tensor requires grad. In forward mode
            (``torch.func.jvp``), always; torch refuses its other transforms, and ``vmap``.

    See `Communicator.all_reduce` for the other arguments and errors.

    The gradient of every rank's tensor is the sum (mean) of the gradients of all ranks' results:
    backward is one more all-reduce, which with a `ProcessCommunicator` all ranks must come to.

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
    """Return what `Communicator.all_reduce_coalesced` would write, in new tensors.

    Args:
        comm: What reduces.
        lists: ``lists[rank][i]``.

    Returns:
        As many lists of as many tensors.

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
