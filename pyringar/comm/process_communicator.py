"""Communicator with one rank per process, on one machine."""

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

    All ranks make the same calls in the same order; see `Communicator` for the calls. If the calls
    differ, or a rank dies or is missing, all ranks raise before data moves.

    Args:
        store: A torch.distributed store shared by all ranks, new or used. None: the store of the
            initialised torch.distributed, else of torchrun.
        rank: This process's rank; only with ``store``.
        world_size: Number of ranks; only with ``store``.
        name: Name of the group on the store. All ranks create groups of one name in the same order.
        algorithm: ``"auto"`` or ``"direct"``; both run the same algorithm.
        order: See `Communicator`.
        timeout: Seconds that a call waits for a rank that makes no progress. The constructor waits
            as long for all ranks to join.
        device: A GPU of this process; None: the CPU. All ranks use GPUs, or all use the CPU.
        compares_shapes: Check that shapes are equal on all ranks. If False, ranks on the CPU check
            only the number of elements.
        global_ranks: The number of each rank in errors about other ranks, and in the line on stderr
            that names a dead rank: for example its rank in the whole job. A list, equal on all
            ranks. None: 0 to ``world_size - 1``.

    Raises:
        ArgumentError: An argument is wrong, there is no store, or ranks are on several machines.
        CudaError: CUDA cannot share memory with other processes.
        CollectiveTimeout: Ranks did not join in time (names them).
        PeerLostError: A rank died, or the store's process ended.
        RingarError: A rank could not allocate or map the shared memory (names it, on all ranks).
        UnsupportedError: The system is not Linux, the algorithm is not supported, or GPUs cannot
            read each other's memory (every pair is tested with real data).

    Ranks may share a GPU. A call is enqueued on the current stream. The host waits until all ranks
    have enqueued the call, but not for a device. A CUDA graph cannot capture the call.

    After a failure create a new communicator in the same processes. An exception from a signal
    handler, such as KeyboardInterrupt, ends a call or wait within 0.2 s and fails the communicator
    on all ranks. A handler must not call the communicator itself.

    Cost: 1 MB of anonymous shared memory per rank, which the system frees even after SIGKILL. On a
    GPU also 64 MiB of device memory, or up to 256 MiB if all ranks share the GPU. `close` frees it
    if the other ranks close within 0.2 s. Otherwise the next communicator on GPUs or the end of the
    process frees it.
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
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self._configure_rank(name, algorithm, order, timeout, device)
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, self._timeout_s, self._device.type, global_ranks
        ) as rendezvous:
            self._join(rendezvous, rendezvous.exchange_members(), compares_shapes)

    def _configure_rank(
        self, name: Any, algorithm: Any, order: Any, timeout: Any, device: Any
    ) -> None:
        self._device = check_device("cpu" if device is None else device, "device")
        self._has_gpus = self._device.type != "cpu"
        self._configure(algorithm, order, timeout)
        if not isinstance(name, str):
            raise ArgumentError(f"name is {name!r}, expected a string")
        self._name = name

    def _join(self, rendezvous: Rendezvous, members: list[RankInfo], compares_shapes: bool) -> None:
        self._rank, self._world_size = rendezvous.rank, rendezvous.world_size
        self._members, self._global_ranks = members, rendezvous.global_ranks
        check_one_node(members)
        check_agreed(members)
        rendezvous.group = group = rendezvous.engine.ProcessGroup(
            rendezvous.share_memory(),
            self._rank,
            self._world_size,
            rendezvous.token,
            self._timeout_s,
            self._device.index if self._has_gpus else bool(compares_shapes),
        )
        rendezvous.wait_until_mapped(group.absent_ranks)
        self._store = rendezvous.store
        group.seal()
        if self._has_gpus:
            group.connect()
        self._use(
            group,
            f"rank {self._rank} of {self._world_size}, name={self._name!r}, "
            f"device={str(self._device)!r}, algorithm={self._algorithm!r}, order={self._order!r}",
        )
        self._run_barrier = self._bind_call(self._checked("barrier", []))
        # Closing informs the other ranks at once; they detect the end of a process only later.
        close_at_exit(
            self,
            ProcessCommunicator.close,
            abort=ProcessCommunicator.abort,
            progress=ProcessCommunicator._progress,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Return a value that changes while running calls advance; None if no call runs."""
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
