"""Communicator whose ranks are all driven by one process, on the CPU and on GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import Algorithm, OpName, Order
from pyringar.comm import arrays, reference
from pyringar.comm.background_work import Work
from pyringar.comm.base_communicator import PLAIN_ALGORITHMS
from pyringar.comm.collective_call import CollectiveCall
from pyringar.comm.engine_communicator import EngineCommunicator
from pyringar.comm.plain_group import PlainGroup
from pyringar.comm.topology import Plan, Topology, check_devices, choose
from pyringar.engine import load
from pyringar.errors import ArgumentError, CompilerNotFoundError

_BARRIER = "it is not needed, since one process makes the calls of all ranks in order"
_ABORT = "no rank is on a GPU, and calls on the CPU end by themselves"

logger = logging.getLogger(__name__)


def make_group(devices: Sequence[torch.device], timeout_s: float) -> Any:
    """Return an engine group for the ranks; without devices for any number of CPU ranks."""
    if all(device.type == "cpu" for device in devices):
        return load.engine().Group(len(devices), timeout_s)
    indices = [-1 if device.type == "cpu" else device.index for device in devices]
    group = load.cuda_engine().Group(indices, timeout_s)
    if not group.has_peers():
        logger.warning(
            "the GPUs %s cannot reach each other's memory: every byte goes through the host's",
            ", ".join(f"cuda:{index}" for index in sorted(set(indices) - {-1})),
        )
    return group


class Communicator(EngineCommunicator):
    """A group of ranks, all driven by this process.

    Args:
        devices: One device per rank, for example ``["cpu"] * 4``. Ranks may share a device.
        algorithm: Default of calls: ``"auto"``, ``"fused"``, ``"direct"``, ``"ring"``,
            ``"sharded"`` or ``"naive"``. ``auto`` is ``fused`` if all ranks share one memory, else
            ``direct``; see `plan`.
        order: Default of calls. ``"rank"``: the bits of ``((x0 + x1) + x2) + ...``. ``"tree"``: the
            bits of a balanced tree, which 1, 2, 4 or 8 ranks can share. ``"exact"``, on the CPU:
            the correctly rounded sum, or the mean of it. ``"any"``: rank order, but ``ring`` adds
            in ring order. Bits are equal on all ranks and in every run; see `Guarantee`.
        timeout: Seconds that a call waits for a rank without progress.

    Raises:
        ArgumentError: An argument is wrong, for example a missing device.
        BuildError: The engine cannot be built. ``naive`` and ``sharded`` warn and run without it.

    On GPUs a call is enqueued on each device's current stream, and the host does not wait. It
    waits if some ranks are on the CPU. ``async_op`` uses the communicator's streams, and
    ``Work.wait()`` makes the current streams wait for them. After a timeout of a ``ring`` the next
    call, `check` or `close` raises; a ``cudaFree`` in another thread can delay the ring.

    A CUDA graph can capture all collectives except ``ring``, if all ranks are on GPUs with peer
    access; otherwise they raise `UnsupportedError`. The current streams of all GPUs must be in the
    capture: each waits for the captured stream at the start, and the captured stream for each at
    the end. A graph may be replayed beside other calls, and after `close`.

    ``torch.compile`` keeps `all_reduce` and `all_reduce_coalesced` in its graph as an operator;
    other calls break the graph. `pyringar.ops` returns new tensors instead.

    Several threads may use one communicator; its collectives run one at a time. On CPUs ``fused``
    uses torch's OpenMP threads; ``torch.set_num_threads`` sets their number.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device],
        *,
        algorithm: Algorithm = "auto",
        order: Order = "any",
        timeout: float = 30.0,
    ) -> None:
        self._devices = check_devices(devices)
        self._world_size = len(self._devices)
        self._topology = Topology.of(self._devices)
        self._has_gpus = any(device.type != "cpu" for device in self._devices)
        self._refused = {"barrier": _BARRIER} | ({} if self._has_gpus else {"abort": _ABORT})
        self._auto, self._why = choose(self._topology.place)
        self._configure(algorithm, order, timeout)
        try:
            group = make_group(self._devices, self._timeout_s)
        except CompilerNotFoundError as error:
            if self._algorithm not in PLAIN_ALGORITHMS:
                raise
            logger.warning("%s runs in plain torch, without the engine: %s", algorithm, error)
            group = PlainGroup(self._devices, str(error))
        self._use(group, f"{self._topology}, algorithm={algorithm!r}, order={order!r}")
        self._plain_calls: dict[str, float] = dict.fromkeys(PLAIN_ALGORITHMS, 0)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of every rank."""
        return self._devices

    def _run_plain(self, call: CollectiveCall, async_op: bool) -> Work | None:
        self._group.check_call(call.operation, call.outputs)
        is_list = call.operation == "all_reduce"
        given = [[tensor] for tensor in call.outputs] if is_list else call.outputs
        lists = [arrays.as_tensors(tensors) for tensors in given]
        if call.algorithm == "sharded":
            reference.sharded_all_reduce(lists, call.op)
        else:
            for tensors in zip(*lists, strict=True):
                reference.naive_all_reduce(tensors, call.op)
        self._plain_calls[call.algorithm] += 1
        return Work(None, {}, *call.words()) if async_op else None

    def _begin_bucket(self, lists: list[list[Tensor]], op: OpName, after: Any) -> Work | None:
        """Launch a bucket. ``after``: GPU events of the gradients, and the index of the bucket."""
        algorithm, order = self._default
        # torch and the plain algorithms use the current streams, which must wait for the events.
        is_read_by_torch = algorithm in PLAIN_ALGORITHMS or any(
            tensor.is_neg() or not tensor.is_contiguous() for mine in lists for tensor in mine
        )
        if is_read_by_torch:
            ready, bucket = after
            for rank in range(self._world_size):
                ready.make_wait(bucket, rank)
            return self.all_reduce_coalesced(lists, op, async_op=True)
        call = CollectiveCall("all_reduce_coalesced", lists, None, op, algorithm, order)
        return self._begun(self._group.run(call, self._in_flight, after), call)

    def _order_of(self, algorithm: str, order: str) -> str:
        added_in = super()._order_of(algorithm, order)
        if algorithm == "fused" and not self._topology.is_one_memory:
            raise ArgumentError(
                f"algorithm is 'fused', which needs all ranks in one memory; here are "
                f"{self._topology}; take auto, direct or ring"
            )
        return added_in

    def _check(self) -> None:
        self._group.check_usable()

    def _abort(self, why: str) -> None:
        self._group.abort()

    def _make_plan(self, nbytes: int, dtype: torch.dtype) -> Plan:
        algorithm, order = self._default
        return Plan.of(algorithm, self._reason, self._topology, nbytes, order)

    def _stats(self) -> dict[str, dict[str, float]]:
        plain = {name: {"calls": calls} for name, calls in self._plain_calls.items() if calls}
        return super()._stats() | plain

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"Communicator({closed}{self._topology}, algorithm={self._algorithm!r}, "
            f"order={self._order!r}, timeout={self._timeout_s:g} s)"
        )
