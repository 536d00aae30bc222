"""A communication hook: DistributedDataParallel with another backend, gradients through ours.

No string annotations here: torch reads those of a hook and takes no strings.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pyringar.choices import check_choice
from pyringar.comm.arguments import check_timeout
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.torch_works import Completer, PendingWork

_OPS = ("mean", "sum")


class HookState:
    """Keep the state of `ddp_hook`; one per DistributedDataParallel.

    Args:
        comm: The communicator, or None: made with the first gradients, of all processes of the
            default process group. Make one for a DistributedDataParallel of another group.
        op: ``"mean"``, as DistributedDataParallel without a hook, or ``"sum"``.
        timeout: Seconds that the communicator made here waits for a rank which makes no progress.

    Raises:
        ArgumentError: ``op`` is neither, ``timeout`` is no number of seconds.
    """

    def __init__(self, comm: Any = None, op: str = "mean", *, timeout: float = 1800.0) -> None:
        self.op = check_choice("op", op, _OPS)
        self._timeout_s = check_timeout(timeout)
        self._comm = comm
        self._owns_comm = comm is None
        self._completer = Completer("of ddp_hook")
        close_at_exit(self, HookState.close)

    @property
    def comm(self) -> Any:
        """The communicator; the first call makes it, and all ranks must make that call."""
        if self._comm is None:
            self._comm = communicator_for(
                name="ddp_hook", timeout=self._timeout_s, compares_shapes=False
            )
        return self._comm

    def __repr__(self) -> str:
        comm = "made with the first gradients" if self._comm is None else repr(self._comm)
        return f"HookState(op={self.op!r}, comm: {comm})"

    def reduce(self, gradients: torch.Tensor) -> Future[torch.Tensor]:
        """Return a future of ``gradients``, reduced in place in the background.

        Args:
            gradients: A flat tensor on the CPU.
        """
        work = self.comm.all_reduce(gradients, self.op, async_op=True)
        return PendingWork(self._completer, (work,), gradients).get_future()

    def close(self) -> None:
        """Wait for what runs, then leave the communicator made here. Runs at exit by itself."""
        if is_inherited(self):
            return
        if self._owns_comm and self._comm is not None:
            self._comm.close()
        self._completer.close()


def ddp_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Reduce a bucket of gradients through shared memory, whatever the process group's backend.

    Register it with ``ddp.register_comm_hook(HookState(), ddp_hook)``, on every rank, before the
    first backward pass. Gradients lie on the CPU, on ranks of one machine or of several.

    Args:
        state: Made for this DistributedDataParallel, on every rank.
        bucket: From DistributedDataParallel: its buffer is flat, of one dtype that the engine sums.

    Returns:
        A future of the bucket's buffer, averaged over ranks in place (``state.op``).

    Raises:
        ArgumentError: The gradients are not on the CPU.
        RuntimeError: From ``backward()``, with the text of PeerLostError or CollectiveTimeout.

    Cost: as the communicator's ``all_reduce``, beside the rest of backward.
    """
    return state.reduce(bucket.buffer())
