"""Replicas of a module for one forward pass, whose gradients reach the module's own parameters.

The parameters of a replica are outputs of one autograd node per bucket. The node's backward is the
reduction of the ranks' gradients in rank order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.comm.communicator import Communicator
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["RankCopies", "Replicas"]

_DTYPES = frozenset(
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    ]
)


class RankCopies:
    """Copies of a module's tensors on ranks 1, 2, ..., which stay allocated between calls.

    Every call writes them anew: an assignment through ``.data`` changes a parameter without a trace
    in its version counter. Their own version counters move only with the source's, so that a second
    forward pass before backward is allowed exactly where the plain module allows it.

    Args:
        devices: One per rank.
        order: Of the reduction; see `Communicator`.
    """

    def __init__(self, devices: Sequence[torch.device], order: str) -> None:
        self.devices = tuple(devices)
        self._comm = Communicator(self.devices, order=order)
        self._entries: dict[int, _Entry] = {}  # by id of the source, which the entry holds
        self._lock = threading.RLock()

    def forget_all_but(self, sources: Sequence[Tensor]) -> None:
        """Free the copies of tensors that the module has no longer."""
        ids = set(map(id, sources))
        with self._lock:
            for key in self._entries.keys() - ids:
                del self._entries[key]

    @torch.no_grad()
    def refresh(self, sources: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return ``copies[rank - 1][i]``, which hold what ``sources[i]`` holds now."""
        with self._lock, torch.inference_mode(False):
            entries = [self._entry(source) for source in sources]
            fused = [entry for entry in entries if entry.is_fused]
            if fused:
                targets = [
                    [entry.memory[r] for entry in fused] for r in range(len(self.devices) - 1)
                ]
                self._comm.broadcast_coalesced([[entry.source for entry in fused], *targets])
            for entry in entries:
                entry.finish()
        return [list(column) for column in zip(*(entry.copies for entry in entries), strict=True)]

    @torch.no_grad()
    def reduce(self, lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums of ``lists[rank][i]`` over ranks, on rank 0's device."""
        sums: list[Tensor | None] = [
            None if _is_fusable(first) else _sum([mine[i] for mine in lists])
            for i, first in enumerate(lists[0])
        ]
        fused = [i for i, total in enumerate(sums) if total is None]
        if fused:
            sources = [[_without_overlap(mine[i]) for i in fused] for mine in lists]
            outputs = [torch.empty_like(tensor) for tensor in sources[0]]
            self._comm.reduce_coalesced(outputs, sources)
            for i, output in zip(fused, outputs, strict=True):
                sums[i] = output
        return [total for total in sums if total is not None]

    def _entry(self, source: Tensor) -> _Entry:
        entry = self._entries.get(id(source))
        if entry is None or not entry.fits():
            entry = self._entries[id(source)] = _Entry(source, self.devices[1:])
        return entry


class _Entry:
    """The copies of one tensor.

    Attributes:
        copies: What replicas use.
        memory: The same memory, with version counters of its own.
        is_fused: Whether the engine can write them.
    """

    def __init__(self, source: Tensor, devices: Sequence[torch.device]) -> None:
        self.source = source
        self._devices = devices
        self.is_fused = _is_fusable(source) and _without_overlap(source) is source
        self._version = _version(source)
        self.copies: list[Tensor] = []
        self.memory: list[Tensor] = []
        if self.is_fused:
            self.copies = [torch.empty_like(source.detach(), device=d) for d in devices]
            self.memory = [copy.data for copy in self.copies]

    def fits(self) -> bool:
        """Return whether the source still has the shape, strides and dtype of the copies."""
        if not self.is_fused:
            return True
        source, copy = self.source, self.copies[0]
        return (
            source.dtype == copy.dtype
            and source.shape == copy.shape
            and source.stride() == copy.stride()
        )

    def finish(self) -> None:
        """Move the copies' version counters if the source's has moved; copy what is not fused."""
        version = _version(self.source)
        if not self.is_fused:
            self.copies = [self.source.detach().to(d, copy=True) for d in self._devices]
        elif version != self._version:
            torch.autograd.graph.increment_version(self.copies)
        self._version = version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_fusable(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor or isinstance(tensor, (nn.Parameter, nn.Buffer))
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return (
        is_plain and not is_wrapped and tensor.layout == torch.strided and tensor.dtype in _DTYPES
    )


def _without_overlap(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if several of its elements may share memory."""
    is_dense = tensor.ndim in (4, 5) and tensor.is_contiguous(
        memory_format=torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    )
    return tensor if is_dense else tensor.contiguous()


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Add in rank order, on the first tensor's device."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor.to(total.device)
    return total


class _Replicate(torch.autograd.Function):
    """Parameters to one tensor per rank and parameter; backward reduces over ranks."""

    @staticmethod
    def forward(
        owner: RankCopies, copies: Sequence[Sequence[Tensor]], *params: Tensor
    ) -> tuple[Tensor, ...]:
        # A detached tensor shares memory and version counter with its source.
        return tuple(tensor.detach() for mine in (params, *copies) for tensor in mine)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.owner, ctx.copies, *ctx.params = inputs
        ctx.streams = _current_streams(ctx.owner.devices)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.params)
        by_rank = [grads[begin : begin + n] for begin in range(0, len(grads), n)]
        used = [i for i in range(n) if any(mine[i] is not None for mine in by_rank)]
        like = [ctx.params, *ctx.copies]
        sources: list[Tensor] = []
        for tensors, mine in zip(like, by_rank, strict=True):
            for i in used:
                grad = mine[i]
                sources.append(torch.zeros_like(tensors[i]) if grad is None else grad)
        found: list[Tensor | None] = [None] * n
        if used:
            apply: Any = _Reduce.apply  # torch 2.13 does not type it, torch 2.15 does
            with ExitStack() as stack:
                for stream in ctx.streams:
                    stack.enter_context(torch.cuda.stream(stream))
                sums = apply(ctx.owner, len(used), *sources)
            for i, total in zip(used, sums, strict=True):
                found[i] = total
        return None, None, *found


class _Reduce(torch.autograd.Function):
    """Sum over ranks; backward, for gradients of gradients, copies to all ranks."""

    @staticmethod
    def forward(owner: RankCopies, num_tensors: int, *sources: Tensor) -> tuple[Tensor, ...]:
        starts = range(0, len(sources), num_tensors)
        return tuple(owner.reduce([sources[start : start + num_tensors] for start in starts]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.devices = inputs[0].devices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.to(device) for device in ctx.devices for grad in grads)


def _current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
    """Return the current streams of all GPUs, rank 0's last."""
    gpus = {device for device in devices if device.type == "cuda"}
    ordered = sorted(gpus, key=lambda gpu: gpu == devices[0])
    return [torch.cuda.current_stream(gpu) for gpu in ordered]


class _Bucket:
    """Tensors of the module that are replicated by one autograd node, when first used."""

    def __init__(self, owner: RankCopies) -> None:
        self._owner = owner
        self._lock = threading.RLock()
        self._by_rank: list[list[Tensor]] | None = None
        self.tensors: list[Tensor] = []
        self.nbytes = 0

    def add(self, tensor: Tensor) -> None:
        """Add a tensor, before the first use."""
        self.tensors.append(tensor)
        self.nbytes += tensor.nbytes

    def tensor(self, rank: int, i: int) -> Tensor:
        """Return what a rank uses in place of ``tensors[i]``."""
        with self._lock:
            if self._by_rank is None:
                self._by_rank = self._replicate()
        return self._by_rank[rank][i]

    def _replicate(self) -> list[list[Tensor]]:
        by_rank = [list(self.tensors), *self._owner.refresh(self.tensors)]
        trained = [i for i, tensor in enumerate(self.tensors) if tensor.requires_grad]
        if trained:
            copies = [[mine[i] for i in trained] for mine in by_rank[1:]]
            apply: Any = _Replicate.apply
            # A layer under no_grad may be the first to use the bucket, and not the last.
            with torch.enable_grad():
                outputs = iter(apply(self._owner, copies, *(self.tensors[i] for i in trained)))
            for mine in by_rank:
                for i in trained:
                    mine[i] = next(outputs)
                    vars(mine[i]).update(vars(self.tensors[i]))  # attributes, as of a user's tags
        return by_rank


class Replicas:
    """The replicas of a module for one forward pass.

    A replica is a shallow copy, as ``nn.DataParallel`` makes it: it shares everything with the
    module but parameters, buffers and children. Rank 0 shares the buffers, too.

    Args:
        module: The module; its tensors are on rank 0's device.
        owner: Holds the copies for ranks 1, 2, ...
        bucket_bytes: Of the tensors of one autograd node; None: one node for all.

    Raises:
        ArgumentError: A tensor is on another device, or a lazy parameter has no values; names it.
        UnsupportedError: A scripted module; names it.
    """

    def __init__(self, module: nn.Module, owner: RankCopies, bucket_bytes: int | None) -> None:
        self._module = module
        self._modules: list[Any] = list(module.modules())
        self._places: dict[int, tuple[_Bucket, int]] = {}  # by id of the tensor
        self._buckets: list[_Bucket] = []
        for part in self._modules:
            if isinstance(part, torch.jit.ScriptModule):
                _refuse_scripted(module, part)
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is None or id(tensor) in self._places:
                    continue
                if nn.parameter.is_lazy(tensor) or tensor.device != owner.devices[0]:
                    _refuse_tensor(module, tensor, owner.devices[0])
                self._bucket(owner, bucket_bytes).add(tensor)
                self._places[id(tensor)] = self._buckets[-1], len(self._buckets[-1].tensors) - 1
        owner.forget_all_but([t for bucket in self._buckets for t in bucket.tensors])

    @property
    def is_compiled(self) -> bool:
        """Return whether a part is compiled, and so bound to the module itself."""
        return any(m._compiled_call_impl or "_orig_mod" in m._modules for m in self._modules)

    def make(self, rank: int) -> nn.Module:
        """Return the replica of a rank."""
        twins = {id(part): _shallow_copy(part) for part in self._modules}
        for part in self._modules:
            twin = twins[id(part)]
            for name, child in part._modules.items():
                twin._modules[name] = None if child is None else twins[id(child)]
            state = vars(twin)
            state["_parameters"] = self._tensors(part._parameters, rank)
            state["_buffers"] = self._tensors(part._buffers, rank) if rank else part._buffers
            if isinstance(part, nn.RNNBase):
                names: list[str] = part._flat_weights_names
                twin._flat_weights = [getattr(twin, name, None) for name in names]
        replica: nn.Module = twins[id(self._module)]
        return replica

    def named_tensors(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a rank by their names in the module, buffers only from rank 1."""
        named: list[tuple[str, Tensor]]
        named = [*self._module.named_parameters(remove_duplicate=False)]
        if rank > 0:
            named += self._module.named_buffers(remove_duplicate=False)
        return {name: self._tensor(tensor, rank) for name, tensor in named}

    def _bucket(self, owner: RankCopies, bucket_bytes: int | None) -> _Bucket:
        is_full = bool(self._buckets) and self._buckets[-1].nbytes >= (bucket_bytes or float("inf"))
        if is_full or not self._buckets:
            self._buckets.append(_Bucket(owner))
        return self._buckets[-1]

    def _tensor(self, tensor: Tensor, rank: int) -> Tensor:
        bucket, i = self._places[id(tensor)]
        return bucket.tensor(rank, i)

    def _tensors(self, own: Mapping[str, Any], rank: int) -> dict[str, Any]:
        if len(self._buckets) > 1:
            return _WhenUsed(self, own, rank)
        return {name: None if t is None else self._tensor(t, rank) for name, t in own.items()}


def _shallow_copy(part: Any) -> Any:
    kind: Any = type(part)
    if kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        return part._replicate_for_data_parallel()
    twin = kind.__new__(kind)  # as torch's, without its calls of __setattr__: a third of the time
    vars(twin).update(vars(part), _modules={}, _is_replica=True)
    return twin


class _WhenUsed(dict[str, Any]):
    """A replica's parameters or buffers by name, replicated when they are first read."""

    def __init__(self, replicas: Replicas, own: Mapping[str, Any], rank: int) -> None:
        super().__init__(own)
        self._own = own  # a tensor that is still here has not been replicated
        self._replicas, self._rank = replicas, rank

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)
        if held is not None and held is self._own[name]:
            held = self[name] = self._replicas._tensor(held, self._rank)
        return held

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor of that name."""
        if name not in self:
            return default
        return self[name]

    def values(self) -> Any:
        """Return all tensors."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return all names and tensors."""
        return [(name, self[name]) for name in self]


def _names(module: nn.Module, wanted: object) -> Iterator[str]:
    for named in (module.named_parameters(), module.named_buffers(), module.named_modules()):
        yield from (name for name, value in named if value is wanted)


def _refuse_tensor(module: nn.Module, tensor: Tensor, device: torch.device) -> None:
    name = next(_names(module, tensor))
    if nn.parameter.is_lazy(tensor):
        raise ArgumentError(
            f"module has the lazy parameter '{name}', which has no shape and no values yet: call "
            "the module once on a sample"
        )
    raise ArgumentError(
        f"module has '{name}' on {tensor.device}, expected {device}, the device of rank 0: call "
        f"module.to('{device}')"
    )


def _refuse_scripted(module: nn.Module, part: nn.Module) -> None:
    name = next(_names(module, part))
    where = f"the module '{name}'" if name else "the module"
    raise UnsupportedError(
        f"{where} is scripted or traced (a {type(part).__name__}), whose parameters cannot be "
        "replaced; use the module that it was made from"
    )
