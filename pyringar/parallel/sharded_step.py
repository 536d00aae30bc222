"""ShardedStep: gradients with the same bits on any number of ranks.

The bits of a float sum depend on its grouping. So a batch has a fixed number of shards, ranks
compute each shard separately, and the same tree adds the shards' results on any number of ranks:

    T(lo, hi) = x[lo] if hi - lo == 1 else T(lo, mid) + T(mid, hi)

where mid - lo is the largest power of two below hi - lo. A rank with 2**n consecutive shards
computes a branch of the tree. An all_reduce with ``order="tree"`` adds the branches.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import check_count, kind_of
from pyringar.comm.communicator import Communicator
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.engine.toolchain import read_cpu
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.bucket_params import (
    Comm,
    HookedParams,
    Replica,
    check_agreed,
    check_replicas,
    first_rank,
    give_own_memory,
    grad_dtype,
)
from pyringar.parallel.shards import check_replicas_equal, digest_of

logger = logging.getLogger(__name__)

LossOf = Callable[[Any, int], Tensor | None]
Watch = Callable[..., AbstractContextManager[None]]
# Dtypes whose values fit an int64.
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32}
_INTEGERS |= {torch.int32, torch.int64}


def check_shards(num_shards: Any, num_ranks: int, name: str = "num_shards") -> None:
    """Raise ArgumentError unless each rank gets a power of two of shards, or k is 1."""
    check_count(name, num_shards, 1)
    powers = (1 << n for n in range(num_shards.bit_length()))
    fitting = sorted({1, *(num_shards // power for power in powers if num_shards % power == 0)})
    if num_ranks not in fitting:
        raise ArgumentError(
            f"{name} is {num_shards} on {num_ranks} ranks, expected a power of two of shards per "
            f"rank: {num_shards} shards fit on {', '.join(map(str, fitting))} ranks"
        )


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == num_threads:  # setting it again may change bits: MKL then stops adapting it
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ShardedStep(AbstractContextManager["ShardedStep"]):
    """Computes gradients over a fixed number of shards, with bits independent of the world size.

    Every rank computes its consecutive shards in order and adds their results along a branch of one
    tree over all shards. One all_reduce with ``order="tree"`` completes the tree. Then gradients,
    buffers and loss have on all ranks the bits of one rank with all shards. Ranks may be in one
    process or many, on one machine or several. Machines need equal numbers of ranks, a power of
    two.

    For example:

        step = pr.ShardedStep([net], 8)
        Xs, ys = pr.split_batch(X, y, ["cpu"] * 8)
        loss = step(lambda net, shard: F.cross_entropy(net(Xs[shard]), ys[shard]) / 8)
        optimizer.step()

    Args:
        replicas: One module, or one list of parameters, per rank of this process, with equal
            values.
        num_shards: Shards per batch. All ranks get the same number, a power of two. A single rank
            may have any number.
        comm: Communicator over the ranks. Default: a `Communicator` over the replicas' devices,
            closed with the ShardedStep. For one rank per process: a `ProcessCommunicator` or
            `pyringar.distributed.HierarchicalCommunicator`. All ranks make their ShardedStep
            together.
        num_threads: Torch threads of every CPU rank; bits depend on it. Overrides the caller's
            setting. More ranks gain more speed than more threads.
        seed: Seeds the global generators of torch, NumPy and Python for each shard of each step,
            for example for dropout. Without ``seed``, random numbers drawn in the first step raise
            an error. Draws from a ``Generator`` or ``random.Random`` object go unnoticed: seed the
            object with the shard's number.

    Attributes:
        shards: The shard numbers of each replica.
        num_steps: Finished steps. Set it, with ``seed``, to resume from a checkpoint.

    Raises:
        ArgumentError: Replicas differ or lie on devices of several kinds, the shards do not fit the
            ranks, or a rank differs from rank 0 in a setting on which bits depend: shards, threads,
            seed, torch version, float32 matmul precision, or processor.

    Batch norm normalises each shard by the shard's samples. Every shard starts from the buffers at
    the start of the step. A changed buffer becomes the mean over the shards that changed it, added
    by the tree. Integer means are rounded down, so a step counter grows by one. Buffers of uint64
    and of quantized dtypes are refused.

    Equal bits need shards of equal sizes, dtypes and memory alignment; deterministic operators (on
    GPUs see ``torch.use_deterministic_algorithms``); and processors of one kind.

    Cost: ``num_shards`` forward and backward passes, one pass over the gradients per shard,
    ``log2(shards per rank) + 1`` times their memory, one collective. 16-bit gradients are added in
    float32 and rounded once. Ranks of one process run one after the other; one rank per process
    uses more cores.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        num_shards: int,
        *,
        comm: Comm | None = None,
        num_threads: int = 1,
        seed: int | None = None,
    ) -> None:
        self._replicas = check_replicas(replicas)
        check_count("num_threads", num_threads, 1)
        if seed is not None:
            check_count("seed", seed, 0)
        devices = [_device_of(replica) for replica in self._replicas]
        _check_kinds(devices)
        HookedParams(self._replicas)  # raises if shapes or dtypes differ
        self._num_threads, self._seed = num_threads, seed
        self._owned: Communicator | None = None
        if comm is None and len(devices) > 1:
            comm = self._owned = Communicator(devices, order="tree")
        self._comm = comm
        rank, k = 0, 1
        if comm is not None:
            rank, k = first_rank(comm, len(devices)), comm.world_size
            check_agreed(comm, [_setting(num_shards, num_threads, seed, devices[0])], devices[0])
        check_shards(num_shards, k)
        each = num_shards // k
        ranks = range(rank, rank + len(devices))
        self.shards = [range(rank * each, (rank + 1) * each) for rank in ranks]
        self.num_steps = 0
        self._is_first = self._is_unchecked = True

    def __call__(self, loss_of: LossOf, *, watch: Watch = lambda *_: nullcontext()) -> Tensor:
        """Set every parameter's ``grad`` to the gradient of the sum of all shards' losses.

        Args:
            loss_of: Called with a replica and a shard number, 0 to ``num_shards - 1``. Returns the
                shard's loss, of one element, or None for a shard without samples. The loss must
                depend only on the two arguments.
            watch: Called with ``"forward"``, ``"backward"`` or ``"wait"`` and the indices of
                replicas. Returns a context manager for that phase.

        Returns:
            The sum of all losses: float64, 0-dimensional, on the first replica's device. The host
            does not wait for a GPU.

        Raises:
            ArgumentError: ``loss_of`` is not callable, a loss is not a tensor of one element, or
                before the first step a process has other parameters or buffers than rank 0.
            RingarError: Before the first step a replica has other parameters or buffers than the
                first replica.
            UnsupportedError: Random numbers are drawn without a seed, or a buffer has a dtype that
                cannot be averaged.

        Earlier gradients are dropped. A parameter that a shard does not use counts as zeros there.
        After an error in a shard, buffers are unchanged and gradients are None. Other processes
        then wait for this rank's next call, until their timeout.
        """
        if not callable(loss_of):
            raise ArgumentError(
                f"loss_of is {kind_of(loss_of)}, expected a function of a replica and a shard"
            )
        states = [_ReplicaState(replica) for replica in self._replicas]
        if self._is_unchecked:
            self._check_equal()
        try:
            with self._isolate_draws(), torch_threads(self._num_threads):
                sums: list[list[Tensor]] = [
                    _sum_tree(partial(self._run_shard, state, i, loss_of, watch), self.shards[i])
                    for i, state in enumerate(states)
                ]
            with watch("wait", *range(len(sums))):
                if self._comm is not None:
                    mine: Any = sums if isinstance(self._comm, Communicator) else sums[0]
                    self._comm.all_reduce_coalesced(mine, order="tree")
        except BaseException:
            for state in states:
                state.restore()
                state.clear()
            raise
        for state, total in zip(states, sums, strict=True):
            state.finish(total)
        self._is_first = False
        self.num_steps += 1
        return sums[0][-1]

    def close(self) -> None:
        """Close the communicator if the ShardedStep made it. Idempotent."""
        if self._owned is not None:
            self._owned.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _isolate_draws(self) -> Iterator[None]:
        """Restore the global generators; without a seed, refuse draws in the first step."""
        devices = dict.fromkeys(map(_device_of, self._replicas))
        gpus = [device for device in devices if device.type == "cuda"]
        before = _read_generators(gpus) if self._seed is not None or self._is_first else []
        try:
            yield
        finally:
            if self._seed is not None:
                _restore_generators(before, gpus)
        if self._seed is not None or not self._is_first:
            return
        # Not strict: `after` is longer if a shard is the first to import NumPy.
        after = _read_generators(gpus)
        if any(now != was for now, was in zip(after, before, strict=False)):
            raise UnsupportedError(
                "random numbers of torch, NumPy or Python were drawn for a shard, in an order "
                "that depends on the number of ranks: give seed, from which every shard gets "
                "its own"
            )

    def _run_shard(
        self, state: _ReplicaState, index: int, loss_of: LossOf, watch: Any, shard: int
    ) -> list[Tensor]:
        """Return a shard's gradients, changed buffers, flags of changed buffers, and loss."""
        state.clear()
        if self._seed is not None:
            _seed_all(f"{self._seed} {self.num_steps} {shard}")
        with watch("forward", index):
            loss = loss_of(state.replica, shard)
        total = torch.zeros((), dtype=torch.float64, device=_device_of(state.replica))
        if loss is None:
            return [*state.take(), total]
        is_tensor = isinstance(loss, Tensor)
        if not is_tensor or loss.numel() != 1 or loss.is_complex():
            got = f"of {tuple(loss.shape)}, {loss.dtype}" if is_tensor else kind_of(loss)
            raise ArgumentError(
                f"the loss of shard {shard} is {got}, expected one real number or None"
            )
        if loss.requires_grad:
            with watch("backward", index):
                loss.backward()  # type: ignore[no-untyped-call]
        return [*state.take(), total.copy_(loss.detach().reshape(()))]

    def _check_equal(self) -> None:
        everything = [
            [*_tensors(replica), *(replica.buffers() if isinstance(replica, nn.Module) else ())]
            for replica in self._replicas
        ]
        check_replicas_equal(everything)
        self._is_unchecked = False
        if isinstance(self._comm, RankCommunicator):
            digest = digest_of(everything[0])
            device = _device_of(self._replicas[0])
            check_agreed(self._comm, [f"parameters and buffers {digest}"], device)


class _ReplicaState:
    """A replica, and copies of its buffers at the start of the step."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.params = [param for param in _tensors(replica) if param.requires_grad]
        modules = replica.modules() if isinstance(replica, nn.Module) else ()
        # (buffers of a module, name): by name, because a module may replace the tensor.
        self._held: list[tuple[dict[str, Any], str]] = []
        for part in modules:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    _check_has_sums(name, buffer)
                    self._held.append((part._buffers, name))
        self.old = [buffer.detach().clone() for buffer in self.buffers]

    @property
    def buffers(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self._held]

    def take(self) -> list[Tensor]:
        """Return gradients, changed buffers and flags of changed buffers.

        Sets gradients to None, and buffers to their values at the start of the step.
        """
        for param in self.params:
            give_own_memory(param)
        found = [
            _wide(torch.zeros_like(p, dtype=grad_dtype(p)) if p.grad is None else p.grad)
            for p in self.params
        ]
        self.clear()
        now = self.buffers
        if now:
            values = [_wide(buffer) for buffer in now]
            old = map(_wide, self.old)
            changed = [(new != was).any() for new, was in zip(values, old, strict=True)]
            found += [torch.where(c, new, 0) for c, new in zip(changed, values, strict=True)]
            found.append(torch.stack(changed).to(torch.int64))
            self.restore()
        return found

    def clear(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        if self.old:
            torch._foreach_copy_(self.buffers, self.old)

    @torch.no_grad()
    def finish(self, sums: Sequence[Tensor]) -> None:
        """Set gradients, and buffers to the mean over the shards that changed them."""
        for param, grad in zip(self.params, sums, strict=False):
            param.grad = _narrow(grad, grad_dtype(param))
        totals = sums[len(self.params) :]
        for i, (buffer, was) in enumerate(zip(self.buffers, self.old, strict=True)):
            total, count = totals[i], sums[-2][i]
            divisor = count.clamp(min=1)
            mean = total / divisor if total.is_floating_point() else total // divisor
            buffer.copy_(_narrow(torch.where(count > 0, mean, _wide(was)), was.dtype))


def _sum_tree(run: Callable[[int], list[Tensor]], shards: Sequence[int]) -> list[Tensor]:
    """Return T over the shards' results; the module docstring defines T."""
    if len(shards) == 1:
        return run(shards[0])
    mid = 2 ** ((len(shards) - 1).bit_length() - 1)
    left, right = _sum_tree(run, shards[:mid]), _sum_tree(run, shards[mid:])
    with torch.no_grad():
        torch._foreach_add_(left, right)
    return left


def _device_of(replica: Replica) -> torch.device:
    return next((tensor.device for tensor in _tensors(replica)), torch.device("cpu"))


def _check_kinds(devices: Sequence[torch.device]) -> None:
    kinds = [_kind_of_device(device) for device in devices]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ArgumentError(
                f"replicas[{rank}] is on {devices[rank]} ({kind}) and replicas[0] on {devices[0]} "
                f"({kinds[0]}), which round differently: expected devices of one model"
            )
    if devices[0].type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        logger.warning(
            "ShardedStep on GPUs has the same bits on any number of ranks only with deterministic "
            "kernels: call torch.use_deterministic_algorithms(True)"
        )


def _kind_of_device(device: torch.device) -> str:
    return read_cpu().name if device.type == "cpu" else torch.cuda.get_device_name(device)


def _setting(num_shards: int, num_threads: int, seed: int | None, device: torch.device) -> str:
    threads = f", {num_threads} torch threads" if device.type == "cpu" else ""
    return (
        f"{num_shards} shards, seed {seed}{threads}, torch {torch.__version__} with "
        f"{torch.get_float32_matmul_precision()} float32 products on {_kind_of_device(device)}"
    )


def _tensors(replica: Replica) -> Iterator[Tensor]:
    yield from replica.parameters() if isinstance(replica, nn.Module) else replica


def _check_has_sums(name: str, buffer: Tensor) -> None:
    if not (buffer.dtype in _INTEGERS or buffer.is_floating_point() or buffer.is_complex()):
        raise UnsupportedError(
            f"buffer {name!r} has dtype {buffer.dtype}, expected a float, complex, bool or integer "
            "dtype within int64, of which a ShardedStep takes the mean over shards: convert it, or "
            "make it a plain attribute"
        )


def _wide(tensor: Tensor) -> Tensor:
    """Convert to the dtype of sums: float32 or wider, int64, complex numbers as pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        return tensor.float() if tensor.itemsize < 4 else tensor
    return tensor.to(torch.int64)


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a result of `_wide` back to a dtype."""
    if dtype.is_complex:
        return torch.view_as_complex(tensor.to(dtype.to_real()).contiguous())
    return tensor.to(dtype)


def _read_generators(gpus: Sequence[torch.device]) -> list[Any]:
    """Return the states of the global generators as comparable values."""
    states: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    states += [torch.cuda.get_rng_state(gpu).tolist() for gpu in gpus]
    numpy = sys.modules.get("numpy")  # not imported: NumPy has drawn no numbers
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append((kind, keys.tolist(), *rest))
    return states


def _restore_generators(states: Sequence[Any], gpus: Sequence[torch.device]) -> None:
    of_python, of_cpu, *others = states
    random.setstate(of_python)
    torch.set_rng_state(torch.tensor(of_cpu, dtype=torch.uint8, device="cpu"))
    for gpu, state in zip(gpus, others, strict=False):
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"), gpu)
    for state in others[len(gpus) :]:
        sys.modules["numpy"].random.set_state(state)


def _seed_all(text: str) -> None:
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)
