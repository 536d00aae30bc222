"""Replicas of a module for one forward pass of DataParallel.

The parameters of the replicas are outputs of autograd nodes, one per bucket of parameters. The
backward of a node sums the ranks' gradients into the gradients of the module's own parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.weak import WeakTensorKeyDictionary

from pyringar.choices import Order
from pyringar.comm.arguments import DTYPES
from pyringar.comm.communicator import Communicator
from pyringar.errors import ArgumentError, UnsupportedError


class RankCopies:
    """Copies of a module's tensors for ranks 1, 2, ..., which stay allocated between calls.

    Every call rewrites all copies, since a parameter's version misses writes through ``.data``. If
    a pending backward pass has saved a copy, the call allocates a new copy. ``order``: the order of
    the gradients' sum.
    """

    def __init__(self, devices: Sequence[torch.device], order: Order) -> None:
        self.devices = tuple(devices)
        self._comm = Communicator(self.devices, order=order)
        self._entries: Any = WeakTensorKeyDictionary()  # _Entry by tensor of the module
        self.lock = threading.RLock()

    @torch.no_grad()
    def refresh(self, sources: Sequence[Tensor]) -> list[list[Tensor]]:
        """Copy ``sources`` to ranks 1, 2, ...; return the copies, as ``copies[rank - 1][i]``."""
        if torch._C._len_torch_dispatch_stack() or _has_transforms():
            return [[t.detach().to(d, copy=True) for t in sources] for d in self.devices[1:]]
        with self.lock, torch.inference_mode(False):
            entries = [self._entry(source) for source in sources]
            fused = [i for i, entry in enumerate(entries) if entry.is_fused]
            if fused:
                columns = [[sources[i], *entries[i].copies] for i in fused]
                self._comm.broadcast_coalesced([list(mine) for mine in zip(*columns, strict=True)])
            # Detached per call: a tensor that a graph saves then raises the storage's use count, by
            # which is_free_for() detects that the copies are in use.
            copies = [[copy.detach() for copy in entry.copies] for entry in entries]
        return [list(column) for column in zip(*copies, strict=True)]

    @torch.no_grad()
    def reduce(self, lists: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
        """Return the sums of ``lists[rank][i]`` over ranks, on rank 0's device.

        None counts as zeros; for every ``i`` at least one rank has a tensor.
        """
        columns = [list(column) for column in zip(*lists, strict=True)]
        fused = [
            i
            for i, column in enumerate(columns)
            if all(grad is None or _is_fusable(grad) for grad in column)
        ]
        sums: dict[int, Tensor] = {}
        if fused:
            full = [self._without_none(columns[i]) for i in fused]
            outputs = [torch.empty_like(column[0]) for column in full]
            self._comm.reduce_coalesced(outputs, [list(mine) for mine in zip(*full, strict=True)])
            sums = dict(zip(fused, outputs, strict=True))
        home = self.devices[0]
        return [sums[i] if i in sums else _sum(column, home) for i, column in enumerate(columns)]

    def _without_none(self, column: Sequence[Tensor | None]) -> list[Tensor]:
        some = next(grad for grad in column if grad is not None)
        return [
            torch.zeros_like(some, device=device) if grad is None else _without_overlap(grad)
            for grad, device in zip(column, self.devices, strict=True)
        ]

    def _entry(self, source: Tensor) -> _Entry:
        entry: _Entry | None = self._entries.get(source)
        if entry is None or not entry.is_free_for(source):
            entry = self._entries[source] = _Entry(source, self.devices[1:])
        return entry


class _Entry:
    """The copies of one tensor for ranks 1, 2, ...

    ``is_fused``: the communicator can write the copies, so that calls reuse their memory.
    """

    def __init__(self, source: Tensor, devices: Sequence[torch.device]) -> None:
        self.is_fused = _is_fusable(source) and _without_overlap(source) is source
        if self.is_fused:
            self.copies = [torch.empty_like(source.detach(), device=d) for d in devices]
            self._storages = [copy.untyped_storage()._cdata for copy in self.copies]
            self._num_users = [*map(torch._C._storage_Use_Count, self._storages)]
        else:
            self.copies = [source.detach().to(d, copy=True) for d in devices]

    def is_free_for(self, source: Tensor) -> bool:
        """Return True if the copies match the source's layout and no autograd graph holds them."""
        copy = self.copies[0]
        return (
            self.is_fused
            and source.dtype == copy.dtype
            and source.shape == copy.shape
            and source.stride() == copy.stride()
            and [*map(torch._C._storage_Use_Count, self._storages)] == self._num_users
        )


def _is_fusable(tensor: Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
        and tensor.dtype in DTYPES
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        # autograd.grad(is_grads_batched=True) makes legacy batched tensors.
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)
    )


def _without_overlap(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its elements may overlap in memory."""
    is_dense = tensor.ndim in (4, 5) and tensor.is_contiguous(
        memory_format=torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    )
    return tensor if is_dense else tensor.contiguous()


def _sum(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    first, *others = (tensor.to(device) for tensor in tensors if tensor is not None)
    total = first.clone()
    for tensor in others:
        is_sparse = total.layout != torch.strided and tensor.layout == torch.strided
        total = tensor + total if is_sparse else total + tensor
    return total


class _Replicate(torch.autograd.Function):
    """Copy each parameter to all ranks; backward sums the gradients over ranks."""

    @staticmethod
    def forward(
        owner: RankCopies, copies: Sequence[Sequence[Tensor]], *params: Tensor
    ) -> tuple[Tensor, ...]:
        # A detached tensor shares memory and version counter with its source.
        return tuple(tensor.detach() for mine in copies for tensor in mine)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.owner, _, *params = inputs
        ctx.num_params = len(params)
        # Enter the stream of rank 0's device last, so that this device is current.
        devices = ctx.owner.devices
        gpus = {device for device in devices if device.type == "cuda"}
        ordered = sorted(gpus, key=lambda gpu: gpu == devices[0])
        ctx.streams = [torch.cuda.current_stream(gpu) for gpu in ordered]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n = ctx.num_params
        by_rank = [grads[begin : begin + n] for begin in range(0, len(grads), n)]
        used = [i for i in range(n) if any(mine[i] is not None for mine in by_rank)]
        found: list[Tensor | None] = [None] * n
        if used:
            apply: Any = _Reduce.apply  # Any: torch 2.13 has no type for `apply`
            with ExitStack() as stack:
                for stream in ctx.streams:
                    stack.enter_context(torch.cuda.stream(stream))
                sums = apply(ctx.owner, len(used), *(mine[i] for mine in by_rank for i in used))
            for i, total in zip(used, sums, strict=True):
                found[i] = total
        return None, None, *found


class _Reduce(torch.autograd.Function):
    """Sum tensors over ranks. Double backward copies gradients to all ranks."""

    generate_vmap_rule = True  # for batched gradients, such as rows of a Jacobian

    @staticmethod
    def forward(owner: RankCopies, num_tensors: int, *sources: Tensor | None) -> tuple[Tensor, ...]:
        starts = range(0, len(sources), num_tensors)
        return tuple(owner.reduce([sources[start : start + num_tensors] for start in starts]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        owner, _, *sources = inputs
        ctx.devices = owner.devices
        ctx.are_given = [source is not None for source in sources]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        copies = [grad.to(device) for device in ctx.devices for grad in grads]
        given = zip(copies, ctx.are_given, strict=True)
        return None, None, *(copy if is_given else None for copy, is_given in given)


class _Bucket:
    """Tensors that one autograd node replicates, when a layer first reads any of them."""

    def __init__(self, owner: RankCopies, home: int) -> None:
        self._owner, self._home = owner, home
        self._by_rank: list[list[Tensor]] | None = None
        self.tensors: list[Tensor] = []
        self.nbytes = 0

    def add(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        self.nbytes += tensor.numel() * tensor.element_size()

    def tensor(self, rank: int, i: int) -> Tensor:
        with self._owner.lock:
            if self._by_rank is None:
                self._by_rank = self._replicate()
        return self._by_rank[rank][i]

    def _replicate(self) -> list[list[Tensor]]:
        by_rank = [list(self.tensors), *self._owner.refresh(self.tensors)]
        by_rank[self._home] = list(self.tensors)
        trained = [i for i, tensor in enumerate(self.tensors) if tensor.requires_grad]
        if trained:
            copies = [[mine[i] for i in trained] for mine in by_rank]
            apply: Any = _Replicate.apply
            # The first read may be under no_grad, but other layers need gradients.
            with torch.enable_grad():
                outputs = iter(apply(self._owner, copies, *copies[self._home]))
            for mine in by_rank:
                for i in trained:
                    mine[i] = next(outputs)
                    # Keep attributes that a user set on the parameter.
                    vars(mine[i]).update(vars(self.tensors[i]))
        return by_rank


class Replicas:
    """The replicas of a module for one forward pass.

    A replica is a shallow copy, as in ``nn.DataParallel``: it shares everything with the module
    except parameters, buffers and children. The rank ``home``, on rank 0's device, uses the
    module's own memory and buffers. ``bucket_bytes``: bytes of parameters per autograd node; None:
    one node. Raises ArgumentError for a lazy parameter or a tensor on another device than rank 0,
    UnsupportedError for a scripted module.
    """

    def __init__(
        self, module: nn.Module, owner: RankCopies, home: int, bucket_bytes: int | None
    ) -> None:
        self._module, self._owner, self._home = module, owner, home
        self._modules: list[Any] = list(module.modules())
        self._places: dict[int, tuple[_Bucket, int]] = {}  # bucket and index, by id of the tensor
        self._limit = float("inf") if bucket_bytes is None else bucket_bytes
        self._buckets: list[_Bucket] = []
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                where = f"the module '{name}'" if name else "the module"
                raise UnsupportedError(
                    f"{where} is scripted or traced (a {type(part).__name__}), whose parameters "
                    "cannot be replaced; use the module that it was made from"
                )
        for name, param in module.named_parameters():
            self._add(name, param, self._bucket_for(param))
        buffers = _Bucket(owner, home)
        for name, buffer in module.named_buffers():
            self._add(name, buffer, buffers)
        self._is_lazy = len(self._buckets) > 1 and not _has_transforms()

    @property
    def is_compiled(self) -> bool:
        """Return True if a submodule is compiled: compiled code cannot run on a shallow copy."""
        return any(m._compiled_call_impl or "_orig_mod" in m._modules for m in self._modules)

    def make(self, rank: int) -> nn.Module:
        """Return the replica of a rank. Make all replicas before the first one runs."""
        twins = {id(part): _shallow_copy(part) for part in self._modules}
        for part in self._modules:
            twin = twins[id(part)]
            for name, child in part._modules.items():
                twin._modules[name] = None if child is None else twins[id(child)]
            state = vars(twin)
            if self._is_lazy:
                state["_parameters"] = _WhenUsed(self, part._parameters, rank)
            else:
                state["_parameters"] = self._tensors(part._parameters, rank)
            if rank != self._home:
                state["_buffers"] = self._tensors(part._buffers, rank)
        replica: nn.Module = twins[id(self._module)]
        return replica

    def named_tensors(self, rank: int) -> dict[str, Tensor]:
        """Return a rank's parameters and buffers by name; for ``home`` only parameters."""
        named: list[tuple[str, Tensor]] = [*self._module.named_parameters(remove_duplicate=False)]
        if rank != self._home:
            named += self._module.named_buffers(remove_duplicate=False)
        return {name: self.tensor(tensor, rank) for name, tensor in named}

    def tensor(self, tensor: Tensor, rank: int) -> Tensor:
        bucket, i = self._places[id(tensor)]
        return bucket.tensor(rank, i)

    def _tensors(self, own: Mapping[str, Any], rank: int) -> dict[str, Any]:
        return {name: None if t is None else self.tensor(t, rank) for name, t in own.items()}

    def _add(self, name: str, tensor: Tensor, bucket: _Bucket) -> None:
        home = self._owner.devices[0]
        if nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"module has the lazy parameter '{name}', which has no shape and no values yet: "
                "call the module once on a sample"
            )
        if tensor.device != home:
            raise ArgumentError(
                f"module has '{name}' on {tensor.device}, expected {home}, the device of rank 0: "
                f"call module.to('{home}')"
            )
        self._places[id(tensor)] = bucket, len(bucket.tensors)
        bucket.add(tensor)

    def _bucket_for(self, param: Any) -> _Bucket:
        # Autograd runs the hooks of all parameters of a node, even of unused parameters. So a
        # parameter with hooks gets a node by itself.
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            return _Bucket(self._owner, self._home)
        if not self._buckets or self._buckets[-1].nbytes >= self._limit:
            self._buckets.append(_Bucket(self._owner, self._home))
        return self._buckets[-1]


def _shallow_copy(part: Any) -> Any:
    kind: Any = type(part)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return part._replicate_for_data_parallel()
    twin = kind.__new__(kind)  # as torch does, but three times as fast without __setattr__
    vars(twin).update(vars(part), _modules={}, _is_replica=True)
    return twin


def _has_transforms() -> bool:
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def _outside_of_transforms() -> AbstractContextManager[Any]:
    """Suspend the torch.func transforms that the running forward pass has entered."""
    functorch: Any = torch._C._functorch
    keys = [layer.key() for layer in functorch.get_interpreter_stack() or ()]
    if functorch.TransformType.Functionalize in keys:  # torch cannot suspend it: no gradients then
        return nullcontext()
    return temporarily_clear_interpreter_stack()


class _WhenUsed(dict[str, Any]):
    """A replica's parameters by name; the first read of a parameter replicates its bucket."""

    def __init__(self, replicas: Replicas, own: Mapping[str, Any], rank: int) -> None:
        super().__init__(own)
        self._own = dict(own)  # an entry that is still this tensor is not replicated yet
        self._replicas, self._rank = replicas, rank

    def __getitem__(self, name: str) -> Any:
        held, own = super().__getitem__(name), self._own.get(name)
        if own is not None and held is own:
            with _outside_of_transforms():
                held = self[name] = self._replicas.tensor(own, self._rank)
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.items(),)  # copies and pickles are plain dicts

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]
