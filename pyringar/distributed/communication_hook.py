"""A communication hook for DistributedDataParallel on another backend, such as gloo.

No ``from __future__ import annotations`` here, because torch checks a hook's annotations.
"""

from typing import Any, Literal

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pyringar.choices import check_choice
from pyringar.comm.arguments import check_timeout
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.torch_works import Completer, PendingWork
from pyringar.errors import CollectiveTimeout

_OPS = ("mean", "sum")


class HookState:
    """State of `ddp_hook`; make one per DistributedDataParallel.

    Args:
        comm: The communicator. None: the first gradients make a communicator of all processes of
            the default process group. For another group pass a communicator of that group,
            made with ``global_ranks``.
        op: ``"mean"``, as DistributedDataParallel without a hook, or ``"sum"``.
        timeout: Seconds that this communicator waits for a rank that makes no progress.

    Raises:
        ArgumentError: ``op`` is unknown, or ``timeout`` is not a number of seconds.
    """

    def __init__(
        self, comm: Any = None, op: Literal["sum", "mean"] = "mean", *, timeout: float = 1800.0
    ) -> None:
        self.op = check_choice("op", op, _OPS)
        self._timeout_s = check_timeout(timeout)
        self._comm = comm
        self._owns_comm = comm is None
        self._completer = Completer("of ddp_hook")
        close_at_exit(self, HookState.close)

    @property
    def comm(self) -> Any:
        """The communicator. The first access makes it, on all ranks together."""
        if self._comm is None:
            try:
                self._comm = communicator_for(
                    name="ddp_hook", timeout=self._timeout_s, compares_shapes=False
                )
            except CollectiveTimeout as error:
                raise CollectiveTimeout(
                    f"{error}; did every rank register the hook before its first backward?"
                ) from error
        return self._comm

    def __repr__(self) -> str:
        comm = "made with the first gradients" if self._comm is None else repr(self._comm)
        return f"HookState(op={self.op!r}, comm: {comm})"

    def reduce(self, gradients: torch.Tensor) -> Future[torch.Tensor]:
        """Reduce ``gradients`` in place in the background; return a future of them.

        Args:
            gradients: A flat CPU tensor.
        """
        work = self.comm.all_reduce(gradients, self.op, async_op=True)
        return PendingWork(self._completer, (work,), gradients).get_future()

    def close(self) -> None:
        """Wait for running calls, then close the communicator if this state made it.

        Python calls it at exit.
        """
        if is_inherited(self):
            return
        if self._owns_comm and self._comm is not None:
            self._comm.close()
        self._completer.close()


def ddp_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Reduce a bucket of gradients through shared memory, beside any process group.

    Register it on every rank before the first backward pass, with
    ``ddp.register_comm_hook(HookState(), ddp_hook)``. Gradients are CPU tensors. Ranks may be on
    several machines.

    Args:
        state: The state of this DistributedDataParallel.
        bucket: The bucket of DistributedDataParallel; its buffer has a dtype that the engine sums.

    Returns:
        A future of the bucket's buffer, which is averaged over ranks in place (``state.op``).

    Raises:
        ArgumentError: The gradients are not on the CPU.
        RuntimeError: From ``backward()``, with the text of PeerLostError or CollectiveTimeout.

    Cost: that of the communicator's ``all_reduce``, while backward goes on.
    """
    return state.reduce(bucket.buffer())
