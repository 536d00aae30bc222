"""Define the interface between machines, and implement it with torch.distributed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pyringar.comm.arguments import REDUCE_OPS
from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.topology import check_device
from pyringar.distributed.fallback import break_off
from pyringar.errors import ArgumentError, PeerLostError, RingarError

__all__ = ["Inter", "PinnedInter", "TorchInter", "check_place", "compare"]

Wait = Callable[[], object]
_THEIR_OPS = {ours: theirs for theirs, ours in REDUCE_OPS.items()}


class Inter(Protocol):
    """This rank's counterparts on the other machines, one on each, numbered by machine."""

    def all_reduce(self, tensor: Tensor, op: str) -> Wait:
        """Begin to reduce a flat tensor in place; what is returned waits for the end of it.

        Args:
            tensor: Contiguous; of one size and dtype on all machines. On a GPU it is read after
                what is on the current stream, and what comes there after the wait sees the result.
            op: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``. Results must have the same bits on
                all machines.
        """

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """Begin to copy the tensor of machine ``root`` to the others."""

    def abort(self) -> None:
        """Break connections off, so that the others need not wait for this rank."""

    def close(self) -> None:
        """Let go of connections."""


def compare(what: str, begin: Callable[[Tensor], Wait], here: str) -> Wait:
    """Begin to ask the other machines whether they call the same; what is returned raises if not.

    Args:
        what: The call in words, which are the same for equal calls alone.
        begin: Begins to take the maximum of a tensor on the CPU, in place.
        here: This rank, for messages.
    """
    digest = hashlib.blake2b(what.encode(), digest_size=7).digest()
    own = int.from_bytes(digest, "big")
    asked = torch.tensor([own, -own])
    arrived = begin(asked)
    is_asked = True

    def check() -> None:
        nonlocal is_asked
        if is_asked:
            arrived()
            is_asked = False
            if asked.tolist() != [own, -own]:
                raise ArgumentError(
                    f"machines call different things: {here} calls {what}, and its counterparts on "
                    "another machine something else"
                )

    return check


class TorchInter:
    """A process group of torch.distributed, such as one of gloo's.

    Every rank of the job makes one, with equal arguments, at the same point of its program. Where
    torch.distributed is initialised it makes the group (``new_group``); where not, gloo's is made
    on the store, which needs nothing else.

    Args:
        store: Shared by all ranks of the job; this use of it has a name of its own.
        columns: Ranks that belong together, one of each machine; one list for every rank of a
            machine.
        rank: This process's rank.
        backend: Of torch.distributed, for tensors on the CPU; ``"nccl"`` is for those on GPUs, and
            gloo, beside it, for the CPU's.
        timeout_s: How long a collective waits for other machines.

    Raises:
        ArgumentError: Another backend than gloo and torch.distributed is not initialised, or it has
            other ranks; NCCL in a torch without it.
        PeerLostError: Other machines cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        columns: Sequence[Sequence[int]],
        rank: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        self._under_way: list[list[Any]] = []
        timeout = timedelta(seconds=min(timeout_s, 1e9))  # it holds no more than a thousand such
        column = next(i for i, ranks in enumerate(columns) if rank in ranks)
        if backend == "nccl":
            _check_nccl()
            backend = "cpu:gloo,cuda:nccl"
        try:
            with default_float_mode():  # of this thread, and of those that gloo adds in
                if dist.is_initialized():
                    self._group = _new_groups(columns, rank, backend, timeout)[column]
                else:
                    self._group = _make_gloo(store, columns, column, rank, backend, timeout)
        except RingarError:
            raise
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {rank} cannot connect to ranks {list(columns[column])} of the other "
                f"machines: {error}; GLOO_SOCKET_IFNAME names the network to take"
            ) from error

    def all_reduce(self, tensor: Tensor, op: str) -> Wait:
        """See `Inter`."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, _THEIR_OPS[op])
        if op not in ("max", "min") or not tensor.is_floating_point():
            return self._waiter(self._group.allreduce([tensor], options))
        image = _as_integers(tensor, op)  # backends lose NaNs
        arrived = self._waiter(self._group.allreduce([image], options))

        def wait() -> None:
            arrived()
            tensor.copy_(_flip_negative(image).view(tensor.dtype))

        return wait

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """See `Inter`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._waiter(self._group.broadcast([tensor], options))

    def _waiter(self, work: Any) -> Wait:
        """Return a function that waits, and lets go: a work that is held keeps connections open."""
        held = [work]
        self._under_way.append(held)

        def wait() -> None:
            try:
                for work in held:
                    work.wait()
            finally:
                held.clear()
                self._under_way.remove(held)

        return wait

    def abort(self) -> None:
        """See `Inter`; not every backend can."""
        group = self._group
        with suppress(RuntimeError, AttributeError):
            group.abort()  # what is under way fails, and is not waited for
            if hasattr(group, "_get_backend"):
                group = group._get_backend(torch.device("cpu"))
            if group.name() == "gloo":  # whose abort() does nothing
                break_off(group)
        for held in list(self._under_way):
            held.clear()
        self.close()

    def close(self) -> None:
        """See `Inter`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError, AssertionError):  # it is none of its groups
                dist.destroy_process_group(group)


class PinnedInter:
    """An inter for tensors on GPUs, by way of pinned host memory and one for tensors on the CPU.

    Tensors that are on the CPU are handed on as they are.

    Args:
        inner: What crosses the wire.

    Cost: a copy of each tensor to the host, for which the host waits, and one back, for which it
    does not; a buffer for each tensor on its way, kept and grown by doubling.
    """

    def __init__(self, inner: Inter) -> None:
        self._inner = inner
        self._idle: list[Tensor] = []  # buffers

    def all_reduce(self, tensor: Tensor, op: str) -> Wait:
        """See `Inter`."""
        return self._cross(tensor, lambda host: self._inner.all_reduce(host, op))

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """See `Inter`."""
        return self._cross(tensor, lambda host: self._inner.broadcast(host, root))

    def _cross(self, tensor: Tensor, begin: Callable[[Tensor], Wait]) -> Wait:
        if tensor.device.type == "cpu":
            return begin(tensor)
        buffer = self._take(tensor.numel() * tensor.itemsize)
        host = buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        host.copy_(tensor)  # the host waits for it: the inner inter reads at once
        arrived = begin(host)

        def wait() -> None:
            arrived()  # what fails keeps its buffer: somebody may still write there
            tensor.copy_(host, non_blocking=True)
            self._idle.append(buffer)  # the next copy into it comes after this one on the stream

        return wait

    def _take(self, nbytes: int) -> Tensor:
        buffer = self._idle.pop() if self._idle else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            size = max(nbytes, 2 * buffer.numel())
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return buffer

    def abort(self) -> None:
        """See `Inter`."""
        self._inner.abort()

    def close(self) -> None:
        """See `Inter`."""
        self._idle.clear()
        self._inner.close()


def check_place(device: str | torch.device | int | None, backend: str) -> torch.device:
    """Return the device of a rank's tensors; None is the CPU.

    Raises:
        ArgumentError: It is not there, or not for this backend.
    """
    if not isinstance(backend, str) or not backend or backend != backend.lower():
        raise ArgumentError(
            f"backend is {backend!r}, expected 'gloo', 'nccl' or another's name, in small letters"
        )
    place = check_device("cpu" if device is None else device, "device")
    if backend == "nccl" and place.type == "cpu":
        raise ArgumentError(
            "backend is 'nccl' and device the CPU, expected a GPU: name it, or take gloo"
        )
    return torch.device("cpu") if place.type == "cpu" else place


def _check_nccl() -> None:
    if not (dist.is_nccl_available() and torch.version.cuda):
        raise ArgumentError(
            "backend is 'nccl', which this torch was built without; take gloo, or a torch with CUDA"
        )
    if not dist.is_initialized():
        raise ArgumentError(
            "backend is 'nccl' and torch.distributed is not initialised, which would connect the "
            "machines with it: call torch.distributed.init_process_group first, or take gloo"
        )


def _as_integers(floats: Tensor, op: str) -> Tensor:
    """Return integers in the order of the floats; a NaN is the most, or for ``min`` the least."""
    kind = {4: torch.int32, 8: torch.int64}[floats.itemsize]
    extreme = torch.iinfo(kind).max if op == "max" else torch.iinfo(kind).min
    return _flip_negative(floats.view(kind)).masked_fill_(floats.isnan(), extreme)


def _flip_negative(bits: Tensor) -> Tensor:
    """Turn the order of negative numbers round, sign apart: there and back."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)


def _new_groups(
    columns: Sequence[Sequence[int]], rank: int, backend: str, timeout: timedelta
) -> list[Any]:
    """Make the group of every column: torch wants every rank to, whether it is in it or not."""
    world_size = sum(map(len, columns))
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ArgumentError(
            f"rank is {rank} of {world_size}, in torch.distributed it is {dist.get_rank()} of "
            f"{dist.get_world_size()}: expected the same ranks"
        )
    return [dist.new_group(list(c), timeout=timeout, backend=backend) for c in columns]


def _make_gloo(
    store: Any,
    columns: Sequence[Sequence[int]],
    column: int,
    rank: int,
    backend: str,
    timeout: timedelta,
) -> Any:
    if backend != "gloo":
        raise ArgumentError(
            f"backend is {backend!r} and torch.distributed is not initialised, which would connect "
            "the machines with it: call torch.distributed.init_process_group first, or take gloo"
        )
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo  # not in every build

    ranks = columns[column]
    prefix = PrefixStore(f"pyringar/gloo/{column}", store)
    group: Any = ProcessGroupGloo(prefix, ranks.index(rank), len(ranks), timeout)
    # Who is connected to all may close at once; to one that still connects it would be lost.
    group.barrier().wait()
    return group
