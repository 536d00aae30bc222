"""Data parallelism by hand: copy parameters, cut batches, count hits, compare replicas.

The helpers of the book's chapter on several GPUs, for any number of ranks on any devices. One
process drives all ranks: lists hold one entry per rank, in rank order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import kind_of
from pyringar.comm.arguments import is_count
from pyringar.comm.topology import check_device, check_devices
from pyringar.errors import ArgumentError, RingarError

__all__ = [
    "check_replicas_equal",
    "count_correct",
    "cut",
    "cut_batch",
    "digest_of",
    "evaluate_accuracy_gpus",
    "get_params",
    "mismatch_flags",
    "shard_sizes",
    "split_batch",
]

Device = str | torch.device
Shards = tuple[Tensor, ...]
SplitFunction = Callable[
    [Tensor, Tensor, Sequence[torch.device]], tuple[Sequence[Tensor], Sequence[Tensor]]
]
Replica = Callable[[Tensor], Tensor]  # a module, too


def get_params(params: Iterable[Tensor], device: Device) -> list[Tensor]:
    """Copy parameters to a device, as leaves that collect gradients.

    Always a copy, also when a parameter lies on ``device`` already: two replicas on one device
    would otherwise be the same tensors and receive each other's gradients.

    Args:
        params: Floating point tensors, any shapes. Left as they are.
        device: Where the copies go.

    Returns:
        One leaf tensor per parameter, in the same order, of the same shape and dtype, with
        ``requires_grad`` set and no gradient yet.

    Raises:
        ArgumentError: The device is not there, or a parameter cannot have gradients.
    """
    target = check_device(device, "device")
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ArgumentError(
            f"params is {kind_of(params)}, expected tensors: a list, or module.parameters()"
        )
    copies = []
    for i, param in enumerate(params):
        _check_tensor(f"params[{i}]", param)
        if not (param.is_floating_point() or param.is_complex()):
            raise ArgumentError(
                f"params[{i}] is {param.dtype}, expected floating point: others have no gradients"
            )
        copies.append(param.detach().to(target, copy=True).requires_grad_())
    return copies


def shard_sizes(n: int, num_shards: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return how many of ``n`` samples each of ``num_shards`` ranks gets; they add up to n.

    Without weights the sizes differ by at most one and the larger come first, as in
    ``torch.tensor_split``. With weights each rank gets its share rounded down, and what is left
    goes to the largest remainders, the lower rank first among equals.

    Args:
        n: Number of samples, 0 or more.
        num_shards: Number of ranks, 1 or more.
        weights: One number per rank, 0 or more, not all 0. Only their ratios count.

    Raises:
        ArgumentError: A count or weight is out of range.
    """
    if not (is_count(n) and is_count(num_shards, 1)):
        raise ArgumentError(
            f"n is {n!r} and num_shards {num_shards!r}, expected n >= 0 and num_shards >= 1"
        )
    if weights is None:
        small, left_over = divmod(n, num_shards)
        return [small + (rank < left_over) for rank in range(num_shards)]
    # Fractions, because shares that are whole numbers must not be off by one through rounding.
    exact = _check_weights(weights, num_shards)
    total = sum(exact)
    shares = [n * weight / total for weight in exact]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(num_shards), key=lambda rank: (sizes[rank] - shares[rank], rank))
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def _check_weights(weights: Sequence[float], num_shards: int) -> list[Fraction]:
    if isinstance(weights, (str, Mapping)) or not isinstance(weights, Sized):
        raise ArgumentError(f"weights is {weights!r}, expected a list with one number per rank")
    if len(weights) != num_shards:
        raise ArgumentError(
            f"weights has {_entries(weights)} ({list(weights)}), expected one for each of "
            f"{num_shards} ranks"
        )
    exact = []
    for rank, weight in enumerate(weights):
        try:
            exact.append(Fraction(weight))
        except (TypeError, ValueError, OverflowError):  # not a number; NaN; infinite
            exact.append(Fraction(-1))
        if exact[-1] < 0:
            raise ArgumentError(
                f"weights[{rank}] is {weight!r}, expected a finite number, 0 or more"
            )
    if not any(exact):
        raise ArgumentError(f"weights is {list(weights)}, expected at least one above 0")
    return exact


def split_batch(
    X: Tensor,  # noqa: N803
    y: Tensor,
    devices: Sequence[Device],
    weights: Sequence[float] | None = None,
) -> tuple[Shards, Shards]:
    """Cut a batch into exactly one shard per rank, each on its rank's device.

    There are as many shards as ranks whatever the batch size: with fewer samples than ranks the
    last shards are empty, and an empty shard contributes a gradient of zeros.

    Args:
        X: Samples, ``(n, ...)``.
        y: Labels, ``(n, ...)``.
        devices: One device per rank; ranks may share one.
        weights: Shares of the ranks, for devices of unequal speed; see `shard_sizes`. Sum
            the loss over the shards and divide by ``n``, and any split gives the same gradient.

    Returns:
        ``(X_shards, y_shards)``: two tuples of ``len(devices)`` tensors, in sample order.

    Raises:
        ArgumentError: ``X`` and ``y`` differ in length, a device is not there, or the weights are
            no shares.

    Cost: a shard on the device where the batch lies is a view, without a copy.
    """
    _check_tensor("X", X)
    _check_tensor("y", y)
    if X.ndim == 0 or y.ndim == 0 or X.shape[0] != y.shape[0]:
        raise ArgumentError(
            f"X has shape {tuple(X.shape)} and y {tuple(y.shape)}, expected as many labels as "
            "samples in their first dimension"
        )
    return cut_batch(X, y, check_devices(devices), weights)


def cut_batch(
    X: Tensor,  # noqa: N803
    y: Tensor,
    devices: Sequence[torch.device],
    weights: Sequence[float] | None = None,
) -> tuple[Shards, Shards]:
    """Cut a batch as `split_batch` does, with arguments that were checked before."""
    sizes = shard_sizes(X.shape[0], len(devices), weights)
    return tuple(cut(X, sizes, devices)), tuple(cut(y, sizes, devices))


def cut(
    tensor: Tensor, sizes: Sequence[int], devices: Sequence[torch.device], dim: int = 0
) -> list[Tensor]:
    """Split a tensor along ``dim`` into one shard per rank, each on its rank's device.

    A module may write into its shard. Shards share memory with ``tensor`` where they can. Only the
    first shard with samples shares its version counter: one rank's write must not invalidate what
    autograd saved for another rank. Shards of a tensor that requires a gradient are copies.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        apply: Any = _Cut.apply  # torch 2.13 does not type it, torch 2.15 does
        shards: tuple[Tensor, ...] = apply(tensor, sizes, devices, dim)
        return list(shards)
    starts = accumulate(sizes, initial=0)
    parts = [tensor.narrow(dim, *place) for place in zip(starts, sizes, strict=False)]
    first = next((rank for rank, size in enumerate(sizes) if size), 0)
    own = [part.detach() if rank == first else part.data for rank, part in enumerate(parts)]
    return [part.to(device) for part, device in zip(own, devices, strict=True)]


class _Cut(torch.autograd.Function):
    """Copies of the shards; backward concatenates their gradients."""

    @staticmethod
    def forward(
        tensor: Tensor, sizes: Sequence[int], devices: Sequence[torch.device], dim: int
    ) -> tuple[Tensor, ...]:
        parts = torch.split(tensor, list(sizes), dim)
        return tuple(part.to(d, copy=True) for part, d in zip(parts, devices, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, _, _, ctx.dim = inputs
        ctx.device = tensor.device

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.cat([grad.to(ctx.device) for grad in grads], ctx.dim), None, None, None


def evaluate_accuracy_gpus(
    replicas: Replica | Sequence[Replica],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    split_f: SplitFunction = split_batch,
    *,
    devices: Sequence[Device] | None = None,
) -> float:
    """Return the share of samples that the replicas classify correctly, using every rank.

    Whole numbers are counted and divided once at the end, so that any number of ranks gives the
    very same answer as one. Modules are in eval mode meanwhile, and afterwards in the mode that
    each of their parts had before. Batch norm then uses the running statistics of the replica that
    sees the sample, so ranks with statistics of their own may answer differently from rank 0.

    Args:
        replicas: One module or function per rank: samples ``(n, ...)`` to scores
            ``(n, classes)``. Or one module alone, which may be a `pyringar.DataParallel`.
        data_iter: Batches ``(X, y)`` with class indices ``y`` of shape ``(n,)``.
        split_f: Cuts a batch for the ranks, called as ``split_f(X, y, devices)``.
        devices: One device per rank. Where it is not given, a module's is that of its first
            parameter or buffer, a function's is the CPU.

    Returns:
        Correct answers divided by samples, 0 to 1.

    Raises:
        ArgumentError: No replicas, no samples, shapes that do not fit, or something else than
            batches and functions.

    Cost: one pass over the data; ranks on GPUs work at the same time, and the host waits for them
    once, at the end.
    """
    correct, total = count_correct(replicas, data_iter, split_f, devices=devices)
    return correct / total


def count_correct(
    replicas: Replica | Sequence[Replica],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    split_f: SplitFunction = split_batch,
    *,
    devices: Sequence[Device] | None = None,
) -> tuple[int, int]:
    """Count what `evaluate_accuracy_gpus` divides.

    Args:
        replicas: One module or function per rank, or one module alone; also a part of all ranks, if
            ``split_f`` gives the shards of that part.

    Returns:
        How many samples the replicas classify correctly, and how many there are in all.

    Raises:
        ArgumentError: What that refuses.

    See `evaluate_accuracy_gpus` for the other arguments.
    """
    ranks = _check_replicas(replicas)
    if not callable(split_f):
        raise ArgumentError(f"split_f is {kind_of(split_f)}, expected a function of X, y, devices")
    targets = _replica_devices(ranks, devices)
    modules = [replica for replica in ranks if isinstance(replica, nn.Module)]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            correct, total = _count_correct(ranks, data_iter, split_f, targets)
    finally:
        for part, mode in modes:
            part.training = mode
    if total == 0:
        raise ArgumentError("data_iter has no samples, so there is no accuracy")
    return correct, total


def _check_replicas(given: Any) -> Sequence[Replica]:
    """Return one module or function per rank."""
    if callable(given) and not isinstance(given, nn.ModuleList):
        return [given]
    if not isinstance(given, (list, tuple, nn.ModuleList)):
        raise ArgumentError(
            f"replicas is {kind_of(given)}, expected a module, or a list with one module per rank"
        )
    if not given:
        raise ArgumentError("replicas is empty, expected one per rank")
    for rank, replica in enumerate(given):
        if not callable(replica):
            raise ArgumentError(
                f"replicas[{rank}] is {kind_of(replica)}, expected a module or a function"
            )
    return list(given)


def _replica_devices(
    replicas: Sequence[Replica], devices: Sequence[Device] | None
) -> tuple[torch.device, ...]:
    if devices is not None:
        checked = check_devices(devices)
        if len(checked) != len(replicas):
            raise ArgumentError(
                f"devices has {_entries(checked)}, expected one for each of "
                f"{len(replicas)} replicas"
            )
        return checked
    found = []
    for replica in replicas:
        held: tuple[Tensor, ...] = ()
        if isinstance(replica, nn.Module):
            held = (*replica.parameters(), *replica.buffers())
        found.append(held[0].device if held else torch.device("cpu"))
    return tuple(found)


def _batches(data_iter: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of which it is known that they are pairs, and how many labels they have."""
    if not isinstance(data_iter, Iterable):
        raise ArgumentError(f"data_iter is {kind_of(data_iter)}, expected batches (X, y)")
    for i, batch in enumerate(data_iter):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ArgumentError(f"data_iter gave {kind_of(batch)} as batch {i}, expected (X, y)")
        _check_tensor(f"y of batch {i}", batch[1])
        yield batch[0], batch[1]


def _count_correct(
    replicas: Sequence[Replica],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    split_f: SplitFunction,
    devices: Sequence[torch.device],
) -> tuple[int, int]:
    # The counts stay on their devices until the end: reading one would wait for its GPU.
    counts = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    total = 0
    for samples, labels in _batches(data_iter):
        sample_shards, label_shards = split_f(samples, labels, devices)
        if len(sample_shards) != len(replicas) or len(label_shards) != len(replicas):
            raise ArgumentError(
                f"split_f gave {len(sample_shards)} and {len(label_shards)} shards, expected one "
                f"for each of {len(replicas)} replicas"
            )
        total += labels.shape[0]
        for rank, replica in enumerate(replicas):
            if sample_shards[rank].shape[0]:
                counts[rank] += _hits(replica, sample_shards[rank], label_shards[rank], rank)
    return sum(int(count) for count in counts), total


def _hits(replica: Replica, samples: Tensor, labels: Tensor, rank: int) -> Tensor:
    scores = replica(samples)
    if scores.ndim != 2 or labels.ndim != 1 or scores.shape[0] != labels.shape[0]:
        raise ArgumentError(
            f"replicas[{rank}] gave shape {tuple(scores.shape)} for labels of shape "
            f"{tuple(labels.shape)}, expected (n, classes) for (n,)"
        )
    return (scores.argmax(dim=1) == labels).sum()


def check_replicas_equal(replicas: Sequence[Sequence[Tensor]]) -> None:
    """Raise unless every rank holds the same bits.

    Compares bits, not numbers: equal NaNs are equal, and 0.0 is not -0.0. Cheap enough for every
    step: a pass over the memory, and one wait per device.

    Args:
        replicas: ``replicas[rank][i]``; tensor ``i`` has one shape and dtype on all ranks.

    Raises:
        RingarError: Names the first parameter that differs, the rank, and how many elements.
        ArgumentError: The ranks hold different numbers, shapes or dtypes of tensors.
    """
    if any(bool(flag) for flag in mismatch_flags(replicas)):
        raise RingarError(_describe_mismatch(replicas))


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of all bits of some tensors: 14 hexadecimal digits, which fit an int64."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        digest.update(_bits(tensor).reshape(-1).cpu().numpy().data)
    return digest.hexdigest()


def mismatch_flags(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Compare every rank's tensors with rank 0's without waiting for the devices.

    Args:
        replicas: ``replicas[rank][i]``; tensor ``i`` has one shape and dtype on all ranks.

    Returns:
        One 0-dimensional bool tensor for each rank but the first, on the rank's device: True when
        its bits differ. Reading one waits for its device.

    Raises:
        ArgumentError: The ranks hold different numbers, shapes or dtypes of tensors.

    Cost: on a GPU, for elements of each size, one copy of all tensors of a rank into one and one
    comparison: a handful of launches, however many tensors there are. On the CPU nothing is copied.
    """
    _check_alike(replicas)
    packed: dict[torch.device, list[Tensor]] = {}  # rank 0's, wherever others are
    flags = []
    for tensors in replicas[1:]:
        device = tensors[0].device if tensors else torch.device("cpu")
        if _stops_early(device):
            pairs = zip(tensors, replicas[0], strict=True)
            flags.append(torch.tensor(not all(_is_equal(ours, theirs) for ours, theirs in pairs)))
            continue
        if device not in packed:
            packed[device] = [bits.to(device) for bits in _pack(replicas[0], replicas[0])]
        compared = zip(_pack(tensors, replicas[0]), packed[device], strict=True)
        different = [(ours != theirs).any() for ours, theirs in compared]
        flags.append(different[0] if len(different) == 1 else torch.stack(different).any())
    return flags


def _stops_early(device: torch.device) -> bool:
    """Return whether tensors there are best compared one by one, up to the first that differs."""
    return device.type == "cpu"


def _is_equal(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(_bits(ours), _bits(theirs).to(ours.device))


def _pack(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of all tensors, end to end, in a flat tensor for elements of each size.

    Elements come as they lie in the tensors of ``like``: if both lie alike, nothing is transposed.
    """
    by_size: dict[torch.dtype, list[Tensor]] = {}
    for tensor, other in zip(tensors, like, strict=True):
        bits = _bits(tensor)
        order = sorted(range(bits.ndim), key=_bits(other).stride, reverse=True)
        by_size.setdefault(bits.dtype, []).append(bits.permute(order).reshape(-1))
    return [torch.cat(parts) for parts in by_size.values()]


def _bits(tensor: Tensor) -> Tensor:
    """View the memory as integers, which compare bit by bit."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    reals = _reals(tensor)
    return reals.view(integers[reals.element_size()])


def _reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _check_alike(replicas: Sequence[Sequence[Tensor]]) -> None:
    if not isinstance(replicas, (list, tuple)):
        raise ArgumentError(f"replicas is {kind_of(replicas)}, expected a list per rank")
    if not replicas:
        raise ArgumentError("replicas is empty, expected one list of tensors per rank")
    first = replicas[0]
    for rank, tensors in enumerate(replicas):
        if not isinstance(tensors, (list, tuple)):
            raise ArgumentError(
                f"replicas[{rank}] is {kind_of(tensors)}, expected a list of tensors, such as "
                "list(module.parameters())"
            )
        for i, tensor in enumerate(tensors):
            _check_tensor(f"replicas[{rank}][{i}]", tensor)
        if len(tensors) != len(first):
            raise ArgumentError(
                f"replicas[{rank}] has {len(tensors)} tensors, rank 0 has {len(first)}"
            )
        for i, (ours, theirs) in enumerate(zip(tensors, first, strict=True)):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                raise ArgumentError(
                    f"replicas[{rank}][{i}] is {tuple(ours.shape)} {ours.dtype}, on rank 0 it is "
                    f"{tuple(theirs.shape)} {theirs.dtype}"
                )


def _describe_mismatch(replicas: Sequence[Sequence[Tensor]]) -> str:
    """Say where the replicas differ first, in the order of parameters, then of ranks."""
    for i, reference in enumerate(replicas[0]):
        for rank in range(1, len(replicas)):
            ours = _reals(replicas[rank][i])
            theirs = _reals(reference).to(ours.device)
            different = _bits(ours) != _bits(theirs)
            count = int(different.sum())
            if count:
                here, there = ours[different][0].item(), theirs[different][0].item()
                return (
                    f"the replicas have diverged: parameter {i}, shape {tuple(ours.shape)}, on "
                    f"rank {rank} differs from rank 0 in {count} of {ours.numel()} elements "
                    f"(first: {here!r} instead of {there!r})"
                )
    return "the replicas have diverged, but were equal again when looked at: something still writes"


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} is {kind_of(value)}, expected a tensor")


def _entries(given: Sized) -> str:
    return "1 entry" if len(given) == 1 else f"{len(given)} entries"
