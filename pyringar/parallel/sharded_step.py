"""Gradients of a batch in a fixed number of shards: the same bits on any number of ranks.

A sum of floats depends on how it is grouped. So the batch is cut into shards, whatever the ranks,
every shard is computed by itself, and the shards' results are added by one tree:

    T(lo, hi) = x[lo] if hi - lo == 1 else T(lo, mid) + T(mid, hi)

with mid - lo the largest power of two below hi - lo. A rank that has 2**n consecutive shards has a
whole branch of it, and ``order="tree"`` adds the branches of all ranks to the tree.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import kind_of
from pyringar.comm.arguments import is_count
from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.engine.toolchain import read_cpu
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.bucket_params import HookedParams, Replica, check_replicas
from pyringar.parallel.own_memory import give_own_memory
from pyringar.parallel.shards import check_replicas_equal, digest_of

__all__ = ["ShardedStep", "check_shards", "torch_threads"]

logger = logging.getLogger(__name__)

_SETTING_BYTES = 300  # of the text by which ranks in processes compare what they compute with

LossOf = Callable[[Any, int], Tensor | None]


def check_shards(num_shards: Any, num_ranks: int, name: str = "num_shards") -> None:
    """Raise unless every rank has a branch of the tree over all shards.

    Args:
        num_shards: How many there are.
        num_ranks: How many ranks share them.
        name: Of the argument, for messages.

    Raises:
        ArgumentError: One rank has no power of two of them; names the numbers of ranks that fit.
    """
    if not is_count(num_shards, 1):
        raise ArgumentError(f"{name} is {num_shards!r}, expected a whole number, 1 or more")
    powers = (1 << n for n in range(num_shards.bit_length()))
    fitting = sorted({1, *(num_shards // power for power in powers if num_shards % power == 0)})
    if num_ranks not in fitting:
        raise ArgumentError(
            f"{name} is {num_shards} on {num_ranks} ranks, expected a power of two of shards on "
            f"every rank: {num_shards} shards fit on {', '.join(map(str, fitting))} ranks"
        )


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch use as many threads in a ``with`` block."""
    before = torch.get_num_threads()
    try:
        if before != num_threads:
            torch.set_num_threads(num_threads)
        yield
    finally:
        if before != num_threads:
            torch.set_num_threads(before)


class ShardedStep:
    """Computes gradients over a fixed number of shards; no bit depends on the number of ranks.

    Every rank takes its consecutive shards, one after the other: forward, backward, and the result
    is added in the order of one tree over all shards. One all_reduce with ``order="tree"`` over the
    ranks completes it. Afterwards gradients, buffers and loss have the same bits on all ranks, and
    the bits of one rank that has all shards, of ranks in one process, in many, on one machine or
    several of equally many ranks, a power of two.

    For example:

        step = pr.ShardedStep([net], 8)
        Xs, ys = pr.split_batch(X, y, ["cpu"] * 8)
        loss = step(lambda net, shard: F.cross_entropy(net(Xs[shard]), ys[shard]) / 8)
        optimizer.step()

    Args:
        replicas: One module per rank, or one list of parameters per rank, with equal numbers. With
            one rank per process this process's alone.
        num_shards: Into how many shards every batch is cut. Each rank gets as many, a power of two;
            one rank alone may have any number.
        comm: What reduces; if not given, a communicator over the replicas' devices, closed with
            this. A `ProcessCommunicator` or `pyringar.distributed.HierarchicalCommunicator`: one
            rank per process; all make one at the same time.
        num_threads: Torch threads of every rank on a CPU, which decide the bits of a shard: those
            that the caller has do not count. Threads gain less than as many ranks.
        seed: Where the random numbers of shards come from, such as those of dropout: every shard
            of every step has its own, on any rank. Without it a function that draws from torch's
            generators is refused, in the first step.

    Attributes:
        shards: The shards of every replica.
        num_steps: Steps done. Set it, with ``seed``, when you go on from a checkpoint.

    Raises:
        ArgumentError: Replicas that differ or lie on devices of several kinds; shards that do not
            fit the ranks; ranks that have another number of shards or threads, seed, version of
            torch, precision of its products, or processor than rank 0, which would decide bits.

    A shard is normalised by its own samples where there is batch norm. Every shard starts from the
    buffers, such as running statistics, that the step began with. A buffer that shards have changed
    becomes the mean of what they have made of it, added by the tree; of whole numbers the same,
    rounded down, so that a counter of steps goes on by one.

    Equal bits need equal shards: the same sizes, dtypes and places in memory (cut from a batch on
    all ranks, or alone on all: libraries may treat memory by its alignment); operators
    that are deterministic (on CPUs those of torch are; on GPUs see
    ``torch.use_deterministic_algorithms``); and processors of one kind.

    Ranks of one process compute one after the other: one rank per process uses more cores.

    Cost: forward and backward of ``num_shards`` small batches instead of one per rank, one pass
    over the gradients per shard, ``log2(shards per rank) + 1`` times their memory, one collective.
    16-bit gradients are added in float32 and rounded once.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        num_shards: int,
        *,
        comm: Communicator | RankCommunicator | None = None,
        num_threads: int = 1,
        seed: int | None = None,
    ) -> None:
        self._replicas = check_replicas(replicas)
        if not is_count(num_threads, 1):
            raise ArgumentError(f"num_threads is {num_threads!r}, expected a whole number above 0")
        if seed is not None and not is_count(seed):
            raise ArgumentError(f"seed is {seed!r}, expected a whole number, 0 or more, or None")
        devices = [_device_of(replica) for replica in self._replicas]
        _check_kinds(devices)
        HookedParams(self._replicas)  # says which of them differ
        self._num_threads, self._seed = num_threads, seed
        self._owned: Communicator | None = None
        if comm is None and len(devices) > 1:
            comm = self._owned = Communicator(devices, order="tree")
        self._comm = comm
        rank, k = _place(comm, len(devices))
        if isinstance(comm, RankCommunicator):
            _check_alike(comm, _setting(num_shards, num_threads, seed, devices[0]))
        check_shards(num_shards, k)
        each = num_shards // k
        ranks = range(rank, rank + len(devices))
        self.shards = [range(rank * each, (rank + 1) * each) for rank in ranks]
        self.num_steps = 0
        self._is_first = self._is_unchecked = True

    def __call__(
        self,
        loss_of: LossOf,
        *,
        watch: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> Tensor:
        """Leave the gradient of all shards' losses, summed, in every parameter's ``grad``.

        Args:
            loss_of: Called with a replica and the number of one of its shards, 0 to
                ``num_shards - 1``; returns that shard's loss, of one element, or None for a shard
                without samples. Its result may depend on nothing else.
            watch: Called with ``"forward"``, ``"backward"`` or ``"wait"`` and the indices of
                replicas; what it returns is entered meanwhile.

        Returns:
            The sum of all losses, float64, 0-dimensional, on the first replica's device. It is not
            waited for.

        Raises:
            ArgumentError: ``loss_of`` is no function, a loss no tensor of one element; or processes
                begin with other parameters or buffers than rank 0's.
            RingarError: Replicas that begin with other numbers than rank 0's.
            UnsupportedError: Random numbers are drawn, and there is no seed.

        What ``grad`` held before is dropped; a parameter that a shard does not use counts as
        zeros there. Where a shard fails, buffers are as they were, gradients are None, and other
        processes wait until this one calls again, ends or is late.
        """
        if not callable(loss_of):
            raise ArgumentError(
                f"loss_of is {kind_of(loss_of)}, expected a function of a replica and a shard"
            )
        if self._is_unchecked:
            self._check_equal()
        ranks = [_Rank(replica, self.shards[i]) for i, replica in enumerate(self._replicas)]
        checks_draws = self._is_first and self._seed is None
        before = self._random_states() if checks_draws else []
        try:
            with self._own_draws():
                sums = self._sum_shards(ranks, loss_of, watch)
            after = self._random_states() if checks_draws else []
            if not all(map(torch.equal, before, after)):
                raise UnsupportedError(
                    "random numbers were drawn for a shard, in an order that depends on the number "
                    "of ranks: give seed, from which every shard gets its own"
                )
            with watch("wait", *range(len(sums))):
                self._reduce(sums)
        except BaseException:
            for rank in ranks:
                rank.restore()
                rank.clear()
            raise
        for rank, total in zip(ranks, sums, strict=True):
            rank.finish(total)
        self._is_first = False
        self.num_steps += 1
        loss: Tensor = sums[0][-1]
        return loss

    def close(self) -> None:
        """Close the communicator, unless it was given. May be called again."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> ShardedStep:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sum_shards(
        self, ranks: Sequence[_Rank], loss_of: LossOf, watch: Any
    ) -> list[list[Tensor]]:
        """Return the sum of each rank's shards, computed with as many torch threads as wanted."""
        with torch_threads(self._num_threads):
            return [
                rank.sum_shards(partial(self._run_shard, rank, i, loss_of, watch))
                for i, rank in enumerate(ranks)
            ]

    def _random_states(self) -> list[Tensor]:
        """Return the states of torch's generators for the devices of the replicas."""
        gpus = {d for d in map(_device_of, self._replicas) if d.type == "cuda"}
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]

    def _run_shard(
        self, rank: _Rank, index: int, loss_of: LossOf, watch: Any, shard: int
    ) -> list[Tensor]:
        """Return all that a shard gives, and leave nothing."""
        rank.clear()
        if self._seed is not None:
            torch.manual_seed(_seed_of(self._seed, self.num_steps, shard))
        with watch("forward", index):
            loss = loss_of(rank.replica, shard)
        if loss is not None and (not isinstance(loss, Tensor) or loss.numel() != 1):
            what = kind_of(loss) if not isinstance(loss, Tensor) else f"of {tuple(loss.shape)}"
            raise ArgumentError(f"the loss of shard {shard} is {what}, expected one number or None")
        if loss is not None and loss.requires_grad:
            with watch("backward", index):
                loss.backward()  # type: ignore[no-untyped-call]
        found = rank.take()
        total = torch.zeros((), dtype=torch.float64, device=_device_of(rank.replica))
        return [*found, total if loss is None else total.copy_(loss.detach().reshape(()))]

    def _reduce(self, sums: list[list[Tensor]]) -> None:
        if isinstance(self._comm, RankCommunicator):
            self._comm.all_reduce_coalesced(sums[0], order="tree")
        elif self._comm is not None and len(sums) > 1:
            self._comm.all_reduce_coalesced(sums, order="tree")

    def _check_equal(self) -> None:
        """Raise unless all ranks begin with the same numbers."""
        everything = [
            [*_tensors(replica), *(replica.buffers() if isinstance(replica, nn.Module) else ())]
            for replica in self._replicas
        ]
        check_replicas_equal(everything)
        self._is_unchecked = False
        if isinstance(self._comm, RankCommunicator):
            _check_alike(self._comm, f"parameters and buffers {digest_of(everything[0])}")

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Leave torch's generators as they are, where shards draw from seeds of their own."""
        if self._seed is None:
            yield
            return
        gpus = [d for d in map(_device_of, self._replicas) if d.type == "cuda"]
        with torch.random.fork_rng(devices=gpus):
            yield


class _Rank:
    """A replica as a step finds it.

    Args:
        replica: A module, or parameters.
        shards: Those of its rank.

    Attributes:
        params: What is trained.
        old: The buffers that the step begins with.
    """

    def __init__(self, replica: Replica, shards: Sequence[int]) -> None:
        self.replica, self._shards = replica, shards
        self.params = [param for param in _tensors(replica) if param.requires_grad]
        modules = replica.modules() if isinstance(replica, nn.Module) else ()
        every = [(part._buffers, name) for part in modules for name in part._buffers]
        # By name: a module may put another tensor there.
        self._held = [(buffers, name) for buffers, name in every if buffers[name] is not None]
        self.old = [buffer.detach().clone() for buffer in self.buffers]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers as they are now."""
        found: Any = [buffers[name] for buffers, name in self._held]
        return list(found)

    def sum_shards(self, run: Callable[[int], list[Tensor]]) -> list[Tensor]:
        """Return the sum over all shards: a binary counter, in which two equals make one."""
        sums: list[tuple[int, list[Tensor]]] = []  # of how many shards each is, the oldest first
        for shard in self._shards:
            sums.append((1, run(shard)))
            while len(sums) > 1 and sums[-2][0] == sums[-1][0]:
                _add_last(sums)
        while len(sums) > 1:  # one rank may have no power of two of them
            _add_last(sums)
        return sums[0][1]

    def take(self) -> list[Tensor]:
        """Return gradients, changed buffers, and how often each was changed; begin again."""
        for param in self.params:
            give_own_memory(param)
        grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.params)
        found = [_wide(grad) for grad in grads]
        self.clear()
        now = self.buffers
        if now:
            changed = [(new != was).any() for new, was in zip(now, self.old, strict=True)]
            found += [torch.where(c, _wide(b), 0) for c, b in zip(changed, now, strict=True)]
            found.append(torch.stack(changed).to(torch.int64))
            self.restore()
        return found

    def clear(self) -> None:
        """Drop gradients."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Set buffers to what the step began with."""
        if self.old:
            torch._foreach_copy_(self.buffers, self.old)

    @torch.no_grad()
    def finish(self, sums: Sequence[Tensor]) -> None:
        """Set gradients, and buffers to the mean over the shards that have changed them."""
        for param, grad in zip(self.params, sums, strict=False):
            param.grad = grad.to(param.dtype)
        totals = sums[len(self.params) :]
        for i, (buffer, was) in enumerate(zip(self.buffers, self.old, strict=True)):
            total, count = totals[i], sums[-2][i]
            few = count.clamp(min=1)
            mean = total / few if total.is_floating_point() else total // few
            buffer.copy_(torch.where(count > 0, mean, was))


def _add_last(sums: list[tuple[int, list[Tensor]]]) -> None:
    """Add the last sum to the one before it: older + newer."""
    count, newer = sums.pop()
    older_count, older = sums.pop()
    with torch.no_grad():
        torch._foreach_add_(older, newer)
    sums.append((older_count + count, older))


def _place(comm: Any, num_replicas: int) -> tuple[int, int]:
    """Return the rank of the first replica that is here, and the number of ranks."""
    if comm is None:
        return 0, num_replicas
    if not isinstance(comm, (Communicator, RankCommunicator)):
        raise ArgumentError(
            f"comm is {kind_of(comm)}, expected a Communicator, or a ProcessCommunicator"
        )
    rank, here = (comm.rank, 1) if isinstance(comm, RankCommunicator) else (0, comm.world_size)
    if num_replicas != here:
        raise ArgumentError(
            f"replicas has {num_replicas} entries, but comm has {here} of its {comm.world_size} "
            "ranks in this process: expected one replica for each"
        )
    return rank, comm.world_size


def _device_of(replica: Replica) -> torch.device:
    return next((tensor.device for tensor in _tensors(replica)), torch.device("cpu"))


def _check_kinds(devices: Sequence[torch.device]) -> None:
    kinds = [_kind_of_device(device) for device in devices]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ArgumentError(
                f"replicas[{rank}] is on {devices[rank]} ({kind}) and replicas[0] on {devices[0]} "
                f"({kinds[0]}), which round differently: expected devices of one kind"
            )
    if devices[0].type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        logger.warning(
            "shards on GPUs have the same bits everywhere only as far as torch's kernels are "
            "deterministic: see torch.use_deterministic_algorithms"
        )


def _kind_of_device(device: torch.device) -> str:
    return read_cpu().name if device.type == "cpu" else torch.cuda.get_device_name(device)


def _setting(num_shards: int, num_threads: int, seed: int | None, device: torch.device) -> str:
    """Return what decides the bits of a shard beside what is given for each step."""
    threads = f", {num_threads} torch threads" if device.type == "cpu" else ""
    return (
        f"{num_shards} shards, seed {seed}{threads}, torch {torch.__version__} with "
        f"{torch.get_float32_matmul_precision()} float32 products on {_kind_of_device(device)}"
    )


def _check_alike(comm: RankCommunicator, mine: str) -> None:
    """Raise on all ranks if one of them has another text than rank 0."""
    rows = torch.zeros(comm.world_size, _SETTING_BYTES, dtype=torch.uint8)
    text = mine.encode()[:_SETTING_BYTES]
    rows[comm.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    comm.all_reduce_coalesced([rows])
    texts = [bytes(row).rstrip(b"\0").decode() for row in rows.tolist()]
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ArgumentError(
                f"rank {rank} has {other}, but rank 0 has {texts[0]}: expected the same on all "
                "ranks, or their shards would have other bits"
            )


def _tensors(replica: Replica) -> Iterator[Tensor]:
    yield from replica.parameters() if isinstance(replica, nn.Module) else replica


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the type in which it is added up: for floats at least float32."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def _seed_of(seed: int, step: int, shard: int) -> int:
    """Return a number that no other shard of another step has, but by a rare chance."""
    digest = hashlib.blake2b(f"{seed} {step} {shard}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
