"""DataParallel: a drop-in replacement for nn.DataParallel."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from pyringar.choices import BATCHNORMS, ORDERS, Order, check_choice, kind_of
from pyringar.comm.topology import check_device, check_devices
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel import scatter_gather
from pyringar.parallel.batchnorm import check_batchnorm, synchronise_batchnorm
from pyringar.parallel.bucket_params import cap_bytes
from pyringar.parallel.forward_replicas import RankCopies, Replicas
from pyringar.parallel.rank_runs import has_modes, run_in_lockstep, run_ranks
from pyringar.parallel.shards import Device, shard_sizes

_DEFAULT_CAP_MB = 10

_Calls: TypeAlias = "dict[int, tuple[tuple[Any, ...], dict[str, Any]]]"  # rank: (args, kwargs)


class DataParallel(nn.Module):
    """Runs a module on several ranks; a drop-in replacement for ``nn.DataParallel``.

    A call splits its tensors along ``dim``, runs one replica per rank, and gathers the outputs. The
    module's own parameters stay the only leaves: replicas get them from autograd nodes whose
    backward sums the ranks' gradients in rank order. So optimizers, hooks, ``grad``,
    ``clip_grad_norm_`` and ``state_dict`` work as on the plain module:

        net = pr.DataParallel(module, ["cuda:0", "cuda:1"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for X, y in data:
            optimizer.zero_grad()
            loss(net(X), y).backward()
            optimizer.step()

    Args:
        module: The module to train, on the device of rank 0. It becomes ``net.module``; names in
            ``state_dict`` begin with ``module.``.
        devices: One device per rank, such as ``["cpu"] * 4`` or ``[0, 1]``; ranks may share one.
            Default: all GPUs, or one CPU rank.
        output_device: Device of the gathered outputs. Default: the device of rank 0.
        dim: Batch dimension of the tensors.
        device_ids: Alias of ``devices``.
        weights: Share of each rank in every batch; see `split_batch`.
        batchnorm: ``"local"``: every rank normalises by its own samples, and the module keeps rank
            0's running statistics, as with ``nn.DataParallel``. ``"sync"``: every rank normalises
            by the statistics of the whole batch, as in the plain module.
        order: Order in which the ranks' gradients are added; see `Communicator`.
        bucket_cap_mb: Parameters per autograd node, in megabytes (10**6 bytes). A bucket is reduced
            while backward still computes the gradients of earlier layers. Default: one bucket for
            ranks on one device, else 10.

    Raises:
        ArgumentError: A missing device, wrong weights, an unknown ``batchnorm`` or ``order``.
        UnsupportedError: With ``batchnorm="sync"``: a batch norm that overrides ``forward``, or a
            `DataParallel` inside the module.

    As with ``nn.DataParallel``, every call makes shallow copies of the module: attributes that a
    forward pass sets are lost, buffers that rank 0 changes are kept. Hooks on modules run once per
    rank. A rank without samples does not run. If rank 0 has no samples, the first rank with samples
    replaces it. With one rank the module itself runs.

    Ranks on one device run one after the other, ranks on several GPUs in one thread per GPU. Copies
    and pickles of ``net`` make new communicators.

    Cost: a call copies the parameters to ranks 1, 2, ..., in one pass per bucket, into memory that
    stays allocated; backward reads one gradient per rank and writes their sum. A link between GPUs
    carries at most about twice the bytes of the parameters. On several GPUs, `GradientBucketer`
    with explicit replicas moves fewer bytes.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device | int] | None = None,
        output_device: Device | int | None = None,
        dim: int = 0,
        *,
        device_ids: Sequence[Device | int] | None = None,
        weights: Sequence[float] | None = None,
        batchnorm: str = "local",
        order: Order = "rank",
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module is {kind_of(module)}, expected a torch.nn.Module")
        self.devices = _check_devices(devices, device_ids)
        output_device = self.devices[0] if output_device is None else output_device
        self.output_device = check_device(output_device, "output_device")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentError(f"dim is {dim!r}, expected a whole number")
        self.dim = dim
        shard_sizes(0, len(self.devices), weights)  # raises for wrong weights
        self._weights = weights
        self._order = check_choice("order", order, ORDERS)
        self._is_synced = check_choice("batchnorm", batchnorm, BATCHNORMS) == "sync"
        if self._is_synced:
            check_batchnorm(module)
            if any(isinstance(part, DataParallel) for part in module.modules()):
                raise UnsupportedError(
                    "batchnorm is 'sync', but the module has a DataParallel inside, whose batch "
                    "norms would see only a part of the batch"
                )
        if bucket_cap_mb is None and len(set(self.devices)) > 1:
            bucket_cap_mb = _DEFAULT_CAP_MB
        self._bucket_bytes = None if bucket_cap_mb is None else cap_bytes(bucket_cap_mb)
        self.module = module
        self._copies: tuple[int, RankCopies] | None = None  # process ID, copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every replica on its shard of the arguments.

        Args:
            *args: Tensors, also in lists, tuples, dicts, their subclasses and dataclasses, are
                split along ``dim``; all must have the same length there. Every rank gets all
                tensors without that dimension, and all other objects.
            **kwargs: Handled like ``args``.

        Returns:
            The ranks' outputs, concatenated along ``dim``; 0-dimensional tensors are stacked. With
            one rank: the module's output.

        Raises:
            ArgumentError: No tensor to split, different lengths, a container that cannot be split,
                a module on another device than rank 0, or outputs whose structure differs between
                ranks. The text names the argument, or the rank and the key.
            UnsupportedError: A scripted module; forward-mode gradients or ``vmap``; compiled parts
                or modes of torch with ``batchnorm="sync"``.
        """
        if torch.compiler.is_dynamo_compiling():
            return _run_eagerly(self._forward, args, kwargs)
        return self._forward(args, kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of ``net``, or of the plain module (names without ``module.``).

        See ``nn.Module.load_state_dict``, also for the result.

        Args:
            state_dict: Tensors by name.
            strict: Whether missing and unexpected names raise.
            assign: Whether the tensors replace the module's. Tied parameters stay tied.
        """
        ties = _tied_names(self) if assign else []
        if not any(name.startswith("module.") for name in state_dict):
            state_dict = _with_prefix(state_dict)
        result = super().load_state_dict(state_dict, strict, assign)
        for first, *others in ties:
            for name in others:
                owner, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(owner), attribute, self.get_parameter(first))
        return result

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.devices) == 1:
            args, kwargs = scatter_gather.move((args, kwargs), self.devices[0])
            return self.module(*args, **kwargs)
        _check_transforms()
        num_samples = scatter_gather.num_samples(args, kwargs, self.dim)
        sizes = shard_sizes(num_samples, len(self.devices), self._weights)
        ranks = [rank for rank, size in enumerate(sizes) if size] or [0]
        scatter = partial(scatter_gather.scatter, sizes=sizes, devices=self.devices, dim=self.dim)
        columns = [scatter(value) for value in args]
        named = {name: scatter(value) for name, value in kwargs.items()}
        calls: _Calls = {
            r: (tuple(column[r] for column in columns), {n: named[n][r] for n in named})
            for r in ranks
        }
        if len(ranks) == 1 and self.devices[ranks[0]] == self.devices[0]:
            outputs = {rank: self.module(*args, **kwargs) for rank, (args, kwargs) in calls.items()}
        else:
            outputs = self._run(calls)
        return scatter_gather.gather(outputs, self.output_device, self.dim)

    def _run(self, calls: _Calls) -> dict[int, Any]:
        home = next((rank for rank in calls if self.devices[rank] == self.devices[0]), 0)
        if self._copies is None or self._copies[0] != os.getpid():
            self._copies = os.getpid(), RankCopies(self.devices, self._order)
        replicas = Replicas(self.module, self._copies[1], home, self._bucket_bytes)
        if self._is_synced:
            check_batchnorm(self.module)
            if replicas.is_compiled:
                raise UnsupportedError("batchnorm is 'sync', which a compiled module cannot do")
            if has_modes():
                raise UnsupportedError(
                    "batchnorm is 'sync', whose ranks run in threads that lack the caller's modes "
                    "(a default device, a dispatch mode, torch.func)"
                )
        if replicas.is_compiled:
            # Compiled code runs only the module itself, so pass it one rank's tensors per call.
            call = partial(torch.func.functional_call, self.module, tie_weights=False)
            tensors = {rank: replicas.named_tensors(rank) for rank in calls}
            return {rank: call(tensors[rank], *arguments) for rank, arguments in calls.items()}
        made = {rank: replicas.make(rank) for rank in calls}
        functions = {r: partial(made[r], *args, **kwargs) for r, (args, kwargs) in calls.items()}
        if self._is_synced and synchronise_batchnorm([*made.values()]):
            return run_in_lockstep(functions, self.devices)
        return run_ranks(functions, self.devices)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copies": None}

    def extra_repr(self) -> str:
        """Describe the ranks."""
        return f"devices={[str(device) for device in self.devices]}"


def _tied_names(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _with_prefix(state_dict: Mapping[str, Any]) -> Any:
    found: Any = OrderedDict((f"module.{name}", value) for name, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", {})  # by module name; "": the outermost
    found._metadata = {f"module.{name}".rstrip("."): entry for name, entry in versions.items()}
    return found


@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without tracing: dynamo cannot trace the engine."""
    return function(*args)


def _check_transforms() -> None:
    functorch: Any = torch._C._functorch
    top = functorch.peek_interpreter_stack()
    is_vmap = top is not None and top.key() == functorch.TransformType.Vmap
    if is_vmap or torch.autograd.forward_ad._current_level >= 0:
        transform = "vmap" if is_vmap else "forward-mode gradients"
        raise UnsupportedError(
            f"DataParallel over several ranks does not support {transform}; call net.module"
        )


def _check_devices(devices: Any, device_ids: Any) -> tuple[torch.device, ...]:
    if devices is not None and device_ids is not None:
        raise ArgumentError(
            "both devices and device_ids are given, expected one of them: device_ids is an alias"
        )
    if device_ids is not None:
        return check_devices(device_ids, "device_ids")
    if devices is None:
        devices = list(range(torch.cuda.device_count())) or ["cpu"]
    return check_devices(devices)
