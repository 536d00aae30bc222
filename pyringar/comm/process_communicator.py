"""One rank per process: the collectives of `Communicator` for this process's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pyringar import choices
from pyringar.choices import Algorithm, Order
from pyringar.comm.background_work import Work
from pyringar.comm.engine_communicator import EngineCommunicator
from pyringar.comm.exits import close_at_exit
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.rank_info import RankInfo, check_agreed, check_one_node
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan, check_device, choose
from pyringar.errors import ArgumentError, CollectiveTimeout

ALGORITHMS = ("auto", "direct")
_OTHER_ALGORITHMS = [name for name in choices.ALGORITHMS if name not in ALGORITHMS]


class ProcessCommunicator(EngineCommunicator, RankCommunicator):
    """This process's rank in a group of processes on one machine.

    All ranks make the same calls in the same order; see `Communicator` for the calls. If calls
    differ, or a rank dies or stays away, all ranks raise before data moves.

    Args:
        store: A torch.distributed store that all ranks share, new or used. None: that of
            torch.distributed if it is initialised, else torchrun's.
        rank: This process's rank; only with ``store``.
        world_size: Number of ranks; only with ``store``.
        name: Tells groups on one store apart. All ranks make groups of one name in the same order.
        algorithm: ``"auto"`` or ``"direct"``, which are the same.
        order: See `Communicator`.
        timeout: Seconds that a call waits for a rank without progress, or the constructor for all.
        device: A GPU of this process, or the CPU (None). GPUs on all ranks, or on none.
        compares_shapes: Shapes must agree over ranks. False, on the CPU: numbers of elements must.

    Raises:
        ArgumentError: An argument is wrong; no store; ranks on several machines (names them).
        CudaError: CUDA refuses to share memory with other processes.
        CollectiveTimeout: Ranks did not come in time (names them).
        PeerLostError: A rank died, or the store's process ended.
        RingarError: A rank could not make or map the shared memory (names it, on all ranks).
        UnsupportedError: This is not Linux; GPUs that cannot read each other's memory (every pair
            is tried with real data); another algorithm.

    Ranks may share a GPU. A call is enqueued on the current stream; the host waits until the other
    ranks have enqueued theirs, never for a device. A CUDA graph cannot capture it.

    After a failure make a new communicator, in the same processes. An exception from a signal
    handler, such as KeyboardInterrupt, ends the call or wait within 0.2 s and fails the
    communicator on all ranks. A handler must not call the communicator itself.

    Cost: a megabyte of anonymous shared memory per rank, which even SIGKILL does not leak. On a GPU
    also 64 MiB of its memory, up to 256 MiB where all ranks share it. `close` frees it if the other
    ranks close within 0.2 s, else the next communicator on GPUs or the end of the process does.
    """

    _refused: Mapping[str, str] = {
        **RankCommunicator._refused,
        **{f"algorithm is {name!r}": "take 'auto' or 'direct'" for name in _OTHER_ALGORITHMS},
    }
    _auto, _why = choose("processes")

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        name: str = "default",
        algorithm: Algorithm = "auto",
        order: Order = "any",
        timeout: float = 30.0,
        device: str | torch.device | int | None = None,
        compares_shapes: bool = True,
    ) -> None:
        self._configure_rank(name, algorithm, order, timeout, device)
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, self._timeout_s, self._device.type
        ) as meeting:
            self._join(meeting, meeting.exchange_members(), compares_shapes)

    def _configure_rank(
        self, name: Any, algorithm: Any, order: Any, timeout: Any, device: Any
    ) -> None:
        self._device = check_device("cpu" if device is None else device, "device")
        self._has_gpus = self._device.type != "cpu"
        self._configure(algorithm, order, timeout)
        if not isinstance(name, str):
            raise ArgumentError(f"name is {name!r}, expected a string")
        self._name = name

    def _join(self, meeting: Rendezvous, members: list[RankInfo], compares_shapes: bool) -> None:
        self._rank, self._world_size = meeting.rank, meeting.world_size
        self._members = members
        check_one_node(members)
        check_agreed(members)
        meeting.group = group = meeting.engine.ProcessGroup(
            meeting.share_memory(),
            self._rank,
            self._world_size,
            meeting.token,
            self._timeout_s,
            self._device.index if self._has_gpus else bool(compares_shapes),
        )
        meeting.wait_until_mapped(group.absent_ranks)
        self._store = meeting.store
        group.seal()
        if self._has_gpus:
            group.connect()
        self._use(
            group,
            f"rank {self._rank} of {self._world_size}, name={self._name!r}, "
            f"device={str(self._device)!r}, algorithm={self._algorithm!r}, order={self._order!r}",
        )
        self._run_barrier = self._bind_call(self._checked("barrier", []))
        # Tells the others that this rank has left, sooner than they would find its process gone.
        close_at_exit(
            self,
            ProcessCommunicator.close,
            abort=ProcessCommunicator.abort,
            progress=ProcessCommunicator._progress,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Return what changes with each call, and each piece of one that any rank has done."""
        num = sum(not native.is_completed() for native in list(self._in_flight))
        return (num, self._group.progress()) if num else None

    def _set_timeout(self, seconds: float) -> None:
        self._group.set_timeout(seconds)

    def _check(self) -> None:
        self._group.check()

    def _check_peers(self, ranks: Sequence[int]) -> None:
        self._group.check_peers(ranks)

    def _tell(self, error: RuntimeError) -> None:
        self._group.tell(str(error), isinstance(error, CollectiveTimeout))

    def _abort(self, why: str) -> None:
        self._is_closed = True
        if self._group.abort(why):
            self._in_flight.clear()

    def _submit_step(self, step: Callable[[], object]) -> Work:
        return Work(self._group.submit_step(step), {}, "step")

    def _make_plan(self, nbytes: int, dtype: torch.dtype) -> Plan:
        algorithm, num_pieces = self._group.plan(nbytes)
        return Plan.in_processes(
            algorithm, num_pieces, self._reason, self._world_size, nbytes, self._default[1]
        )
