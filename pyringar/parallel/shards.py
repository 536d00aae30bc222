"""Helpers for data parallel loops: copies of parameters, shards, accuracy, equality of replicas.

One process drives all ranks. Lists hold one entry per rank, in rank order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import check_count, kind_of
from pyringar.comm.arguments import is_list
from pyringar.comm.topology import check_device, check_devices
from pyringar.errors import ArgumentError, RingarError

Device = str | torch.device
Devices = Sequence[torch.device]  # one device per rank
Shards = tuple[Tensor, ...]
Split = tuple[Shards, Shards]  # shards of samples, shards of labels
SplitFunction = Callable[[Tensor, Tensor, Devices], tuple[Sequence[Tensor], Sequence[Tensor]]]
Replica = Callable[[Tensor], Tensor]  # a function or module


def get_params(params: Iterable[Tensor], device: Device) -> list[Tensor]:
    """Copy parameters to a device, as new leaves with ``requires_grad``.

    Args:
        params: Floating point or complex tensors of any shape; unchanged.
        device: Device of the copies. Parameters on this device are copied, too.

    Returns:
        One leaf per parameter, with its shape and dtype, ``requires_grad`` and no gradient.

    Raises:
        ArgumentError: The device does not exist, or a parameter cannot have gradients.
    """
    target = check_device(device, "device")
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        raise ArgumentError(
            f"params is {kind_of(params)}, expected tensors: a list, or module.parameters()"
        )
    copies = []
    for i, param in enumerate(params):
        check_tensor(f"params[{i}]", param)
        if not (param.is_floating_point() or param.is_complex()):
            raise ArgumentError(f"params[{i}] is {param.dtype}, expected floating point or complex")
        copies.append(param.detach().to(target, copy=True).requires_grad_())
    return copies


def shard_sizes(n: int, num_shards: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return the number of samples of each rank; the sizes add up to ``n``.

    Without weights, sizes are as in ``torch.tensor_split``. With weights, shares are rounded down,
    and the ranks with the largest remainders get one more sample. On ties the lower rank gets it.
    """
    check_count("n", n, 0)
    check_count("num_shards", num_shards, 1)
    if weights is None:
        small, left_over = divmod(n, num_shards)
        return [small + (rank < left_over) for rank in range(num_shards)]
    # Fractions, because floats may round the share of a rank down by one sample.
    exact = _check_weights(weights, num_shards)
    total = sum(exact)
    shares = [n * weight / total for weight in exact]
    sizes = [int(share) for share in shares]
    by_remainder = sorted(range(num_shards), key=lambda rank: sizes[rank] - shares[rank])
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def _check_weights(weights: Sequence[float], num_shards: int) -> list[Fraction]:
    if isinstance(weights, (str, Mapping)) or not isinstance(weights, Sized):
        raise ArgumentError(f"weights is {weights!r}, expected a list with one number per rank")
    if len(weights) != num_shards:
        raise ArgumentError(
            f"weights has length {len(weights)} ({list(weights)}), expected one for each of "
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
    X: Tensor, y: Tensor, devices: Sequence[Device], weights: Sequence[float] | None = None
) -> Split:
    """Cut a batch into one shard per rank, on the rank's device.

    With fewer samples than ranks the last shards are empty, and their gradients are zeros.

    Args:
        X: Samples, ``(n, ...)``.
        y: Labels, ``(n, ...)``.
        devices: One device per rank. Ranks may share a device.
        weights: Relative shares of the ranks, for devices of unequal speed. Divide the sum of the
            losses of a shard by ``n``: then every split gives the same gradient.

    Returns:
        ``(X_shards, y_shards)``: two tuples of ``len(devices)`` tensors, in sample order. A shard
        on the device of the batch is a view.

    Raises:
        ArgumentError: ``X`` and ``y`` differ in length, or a device or weight is wrong.
    """
    check_tensor("X", X)
    check_tensor("y", y)
    if X.ndim == 0 or y.ndim == 0 or X.shape[0] != y.shape[0]:
        raise ArgumentError(
            f"X has shape {tuple(X.shape)} and y {tuple(y.shape)}, expected as many labels as "
            "samples in their first dimension"
        )
    checked = check_devices(devices)
    sizes = shard_sizes(X.shape[0], len(checked), weights)
    return tuple(cut(X, sizes, checked)), tuple(cut(y, sizes, checked))


def cut(tensor: Tensor, sizes: Sequence[int], devices: Devices, dim: int = 0) -> list[Tensor]:
    """Split a tensor along ``dim`` into one shard per rank, on the rank's device.

    Shards on the tensor's device are views that a module may write, or copies if the tensor
    requires a gradient.
    """
    parts = torch.split(tensor, list(sizes), dim)
    if tensor.requires_grad and torch.is_grad_enabled():
        return [part.to(d, copy=True) for part, d in zip(parts, devices, strict=True)]
    # Only the first shard with samples keeps the tensor's version counter. With one counter for
    # all shards, a write by one rank would invalidate tensors that autograd saved on another rank.
    first = next((rank for rank, size in enumerate(sizes) if size), 0)
    own = [part.detach() if rank == first else part.data for rank, part in enumerate(parts)]
    return [part.to(device) for part, device in zip(own, devices, strict=True)]


def evaluate_accuracy_gpus(
    replicas: Replica | Sequence[Replica],
    data_iter: Iterable[tuple[Tensor, Tensor]],
    split_f: SplitFunction = split_batch,
    *,
    devices: Sequence[Device] | None = None,
) -> float:
    """Return the fraction of samples that the replicas classify correctly.

    Every rank classifies its shard of every batch. Correct samples are counted and divided once, so
    the result is the same for any number of ranks. Modules run in eval mode; afterwards their modes
    are restored. Batch norm uses the running statistics of the replica that gets the sample.

    Args:
        replicas: One module or function per rank, from samples ``(n, ...)`` to scores
            ``(n, classes)``. Or a single module, such as a `pyringar.DataParallel`.
        data_iter: Batches ``(X, y)`` with class indices ``y`` of shape ``(n,)``.
        split_f: Cuts a batch for the ranks, called as ``split_f(X, y, devices)``.
        devices: One device per rank. Default: the device of the replica's first parameter or
            buffer, or the CPU.

    Raises:
        ArgumentError: No replicas, no samples, shapes that do not fit, or arguments of other types.

    Cost: one pass over the data. GPUs work at the same time, and the host waits once, at the end.
    """
    correct, total = count_correct(replicas, data_iter, split_f, devices)
    return correct / total


def count_correct(
    replicas: Any, data_iter: Any, split_f: SplitFunction, devices: Sequence[Device] | None
) -> tuple[int, int]:
    """Return the number of correctly classified samples and the number of all samples.

    ``replicas`` may hold local ranks only, if ``split_f`` returns only the shards of local ranks.
    See `evaluate_accuracy_gpus` for arguments and errors.
    """
    is_single = callable(replicas) and not isinstance(replicas, nn.ModuleList)
    ranks: Sequence[Replica] = [replicas] if is_single else replicas
    check_each(ranks, "a module or a function", callable)
    if not callable(split_f):
        raise ArgumentError(f"split_f is {kind_of(split_f)}, expected a function of X, y, devices")
    targets = _devices_of(ranks, devices)
    modules = [replica for replica in ranks if isinstance(replica, nn.Module)]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            correct, total = _count_hits(ranks, data_iter, split_f, targets)
    finally:
        for part, mode in modes:
            part.training = mode
    if total == 0:
        raise ArgumentError("data_iter has no samples, so there is no accuracy")
    return correct, total


def _devices_of(replicas: Sequence[Replica], devices: Sequence[Device] | None) -> Devices:
    if devices is not None:
        checked = check_devices(devices)
        if len(checked) != len(replicas):
            raise ArgumentError(
                f"devices has length {len(checked)}, expected one for each of "
                f"{len(replicas)} replicas"
            )
        return checked
    found = []
    for replica in replicas:
        held = [*replica.parameters(), *replica.buffers()] if isinstance(replica, nn.Module) else []
        found.append(held[0].device if held else torch.device("cpu"))
    return tuple(found)


def _count_hits(
    replicas: Sequence[Replica], data_iter: Any, split_f: SplitFunction, devices: Devices
) -> tuple[int, int]:
    if not isinstance(data_iter, Iterable):
        raise ArgumentError(f"data_iter is {kind_of(data_iter)}, expected batches (X, y)")
    # Counts stay on their devices until the end, because reading a count waits for its GPU.
    hits = [torch.zeros((), dtype=torch.int64, device=device) for device in devices]
    total = 0
    for i, batch in enumerate(data_iter):
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise ArgumentError(f"data_iter gave {kind_of(batch)} as batch {i}, expected (X, y)")
        samples, labels = batch
        check_tensor(f"y of batch {i}", labels)
        Xs, ys = split_f(samples, labels, devices)
        if len(Xs) != len(replicas) or len(ys) != len(replicas):
            raise ArgumentError(
                f"split_f gave {len(Xs)} and {len(ys)} shards, expected one for each of "
                f"{len(replicas)} replicas"
            )
        total += labels.shape[0]
        for rank, (X, y) in enumerate(zip(Xs, ys, strict=True)):
            if X.shape[0] == 0:
                continue
            scores = replicas[rank](X)
            if scores.ndim != 2 or y.ndim != 1 or scores.shape[0] != y.shape[0]:
                raise ArgumentError(
                    f"replicas[{rank}] gave shape {tuple(scores.shape)} for labels of shape "
                    f"{tuple(y.shape)}, expected (n, classes) for (n,)"
                )
            hits[rank] += (scores.argmax(dim=1) == y).sum()
    return sum(int(count) for count in hits), total


def check_replicas_equal(replicas: Sequence[Sequence[Tensor]]) -> None:
    """Raise RingarError unless all ranks hold the same bits.

    NaNs with equal bits are equal; 0.0 and -0.0 differ. Cost: one pass over the memory, one wait
    per device.

    Args:
        replicas: Tensors, as ``replicas[rank][i]``. Tensor ``i`` has one shape and dtype on all
            ranks.

    Raises:
        RingarError: Bits differ. Names the first such parameter, the rank, the number of elements.
        ArgumentError: The ranks hold different numbers, shapes or dtypes of tensors.
    """
    if any(bool(flag) for flag in mismatch_flags(replicas)):
        raise RingarError(_describe_mismatch(replicas))


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of all tensors: 14 hexadecimal digits, which fit an int64."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        digest.update(bits_of(tensor).reshape(-1).cpu().numpy().data)
    return digest.hexdigest()


def mismatch_flags(replicas: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return a 0-dimensional bool for each rank above 0: True if its bits differ from rank 0's.

    A flag is on the rank's device, and the host does not wait for it. Cost on a GPU: one copy and
    one comparison. See `check_replicas_equal` for errors.
    """
    check_each(replicas, "a list of tensors, such as list(module.parameters()),", is_list)
    for rank, tensors in enumerate(replicas):
        for i, tensor in enumerate(tensors):
            check_tensor(f"replicas[{rank}][{i}]", tensor)
    check_alike(replicas, "tensor")
    first, *others = replicas
    if _are_on_cpu(replicas):
        equal = (all(map(has_bits, tensors, first)) for tensors in others)
        return [torch.tensor(not is_equal) for is_equal in equal]
    wanted = _pack(first)
    packed = (_pack(tensors) for tensors in others)  # lazy: packs one rank at a time
    return [(mine != wanted.to(mine.device)).any() for mine in packed]


def _are_on_cpu(replicas: Sequence[Sequence[Tensor]]) -> bool:
    return all(tensor.is_cpu for tensors in replicas for tensor in tensors)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([bits_of(t).contiguous().view(-1).view(torch.uint8) for t in tensors])


def bits_of(tensor: Tensor) -> Tensor:
    """View a tensor as integers, to compare it bit by bit."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    reals = _reals(tensor)
    return reals.view(integers[reals.element_size()])


def has_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


def _reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def check_each(replicas: Any, expected: str, is_right: Callable[[Any], bool]) -> None:
    """Raise ArgumentError unless ``replicas`` is a non-empty list of valid entries."""
    if not isinstance(replicas, (list, tuple, nn.ModuleList)) or not replicas:
        empty = "an empty list" if isinstance(replicas, (list, tuple)) else kind_of(replicas)
        raise ArgumentError(f"replicas is {empty}, expected a list with {expected} per rank")
    for rank, replica in enumerate(replicas):
        if not is_right(replica):
            raise ArgumentError(f"replicas[{rank}] is {kind_of(replica)}, expected {expected}")


def check_alike(replicas: Sequence[Sequence[Tensor]], noun: str) -> None:
    first = replicas[0]
    for rank, tensors in enumerate(replicas):
        if len(tensors) != len(first):
            raise ArgumentError(
                f"replicas[{rank}] has {len(tensors)} {noun}s, replicas[0] has {len(first)}"
            )
        for i, (ours, theirs) in enumerate(zip(tensors, first, strict=True)):
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                raise ArgumentError(
                    f"{noun} {i} of replicas[{rank}] is {tuple(ours.shape)} {ours.dtype}, of "
                    f"replicas[0] {tuple(theirs.shape)} {theirs.dtype}"
                )


def _describe_mismatch(replicas: Sequence[Sequence[Tensor]]) -> str:
    for i, reference in enumerate(replicas[0]):
        for rank in range(1, len(replicas)):
            ours = _reals(replicas[rank][i])
            theirs = _reals(reference).to(ours.device)
            different = bits_of(ours) != bits_of(theirs)
            if count := int(different.sum()):
                value, reference_value = ours[different][0].item(), theirs[different][0].item()
                return (
                    f"the replicas have diverged: parameter {i}, shape {tuple(ours.shape)}, on "
                    f"rank {rank} differs from rank 0 in {count} of {ours.numel()} elements "
                    f"(first: {value!r} instead of {reference_value!r})"
                )
    return "the replicas differed, but are equal now: another thread or stream still writes to them"


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} is {kind_of(value)}, expected a tensor")
