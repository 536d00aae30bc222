"""Refuse what a process has once, where ranks that are threads of one process would share it."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from pyringar.cluster.ranks import Rank, current
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["WAY", "replace", "say_once", "take_modules", "take_replicas", "wrap"]

logger = logging.getLogger(__name__)
WAY = (
    "a process has it once, and the ranks of pr.launch are threads of one process; expected "
    "processes: pr.launch(fn, ranks, processes=True), or pyringar run --processes"
)
_OURS = "ProcessCommunicator, HierarchicalCommunicator, ddp_hook"
# Classes and functions that keep a rank, or connect processes, and their names in errors. Modules
# without one do so when they are imported.
_REFUSED = {
    "accelerate.state:PartialState": "accelerate",
    "deepspeed.comm.torch:TorchBackend": "deepspeed",
    "lightning": "lightning",
    "lightning.fabric.fabric:Fabric": "lightning",
    "lightning.pytorch.trainer.trainer:Trainer": "lightning",
    "lightning_fabric": "lightning_fabric",
    "lightning_fabric.fabric:Fabric": "lightning_fabric",
    "megatron.core.parallel_state:initialize_model_parallel": "megatron",
    "pyringar.comm.rendezvous:Rendezvous": _OURS,
    "pyringar.comm.stores:_environment_store": _OURS,
    "pytorch_lightning": "pytorch_lightning",
    "pytorch_lightning.trainer.trainer:Trainer": "pytorch_lightning",
    "torch.distributed.tensor.experimental._context_parallel._attention:"
    "_enable_context_parallel_dispatcher_impl": "context_parallel, which patches torch",
}


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` ends."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def wrap(undo: ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Give a rank's calls of a function, if there is one, to ``wrapper(rank, function, ...)``."""
    own = getattr(owner, name, None)
    if own is None:
        return

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        return own(*args, **kwargs) if rank is None else wrapper(rank, own, *args, **kwargs)

    replace(undo, owner, name, call)


@functools.cache
def say_once(text: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(text)


def take_modules(undo: ExitStack, num_ranks: int) -> None:
    """Change modules that are imported, and others when a program imports them."""
    takers = {
        "torch._dynamo.eval_frame": _take_compiler,
        "torch._library.custom_ops": _take_operators,
        "unittest.mock": _take_patches,
    }
    refused = {path: what for path, what in _REFUSED.items() if num_ranks > 1 or what is _OURS}
    names = {*takers, *(path.partition(":")[0] for path in refused if ":" in path)}

    def load(own: Any, module: Any) -> None:
        own(module)
        if module.__name__ in takers:
            takers[module.__name__](undo, module)
        for path, what in refused.items():
            found, _, name = path.partition(":")
            if found == module.__name__:
                kind = isinstance(getattr(module, name, None), type)
                owner = getattr(module, name) if kind else module
                wrap(undo, owner, "__init__" if kind else name, functools.partial(_refuse, what))

    def find_spec(own: Any, name: str, *args: Any) -> Any:
        if name in refused and current() is not None:
            _refuse(refused[name])
        spec = own(name, *args)
        if spec is not None and name in names:
            spec.loader = copy.copy(spec.loader)  # some finders have one for all modules
            spec.loader.exec_module = functools.partial(load, spec.loader.exec_module)
        return spec

    for name in names & sys.modules.keys():
        load(lambda _: None, sys.modules[name])
    bootstrap: Any = importlib.import_module("importlib._bootstrap")
    replace(undo, bootstrap, "_find_spec", functools.partial(find_spec, bootstrap._find_spec))


def _refuse(what: str, *_: Any, **options: Any) -> Any:
    raise UnsupportedError(f"{what}: {WAY}")


def _take_patches(undo: ExitStack, mock: Any) -> None:
    """Refuse to patch what another rank has patched: each would put back the other's."""
    patches: dict[Any, tuple[Any, Rank]] = {}  # the target and the rank of each

    def enter(rank: Rank, own: Any, self: Any) -> Any:
        target = _target_of(self)
        owner = next((owner for known, owner in patches.values() if known == target), rank)
        if owner is not rank:
            name = getattr(self, "attribute", "a dict")
            raise UnsupportedError(f"mock.patch of {name!r}, which {owner} has patched: {WAY}")
        result = own(self)
        if target is not None:
            patches[self] = target, rank
        return result

    def leave(rank: Rank, own: Any, self: Any, *error: Any) -> Any:
        patches.pop(self, None)
        return own(self, *error)

    def end() -> None:
        for patch in reversed(list(patches)):
            patch.stop()  # does nothing to a patch that was not started, or was stopped

    for kind in (mock._patch, mock._patch_dict):
        wrap(undo, kind, "__enter__", enter)
        wrap(undo, kind, "__exit__", leave)
    undo.callback(end)


def _target_of(patch: Any) -> Any:
    """Return the target of a patch, which is the process's; None: each rank has its own."""
    if hasattr(patch, "in_dict"):
        return None if patch.in_dict in (os.environ, "os.environ") else id(patch.in_dict)
    owner = patch.getter()
    return id(vars(owner) if isinstance(owner, ModuleType) else owner), patch.attribute


def take_replicas(undo: ExitStack) -> None:
    """Refuse a module that two ranks replicate: each would add to the other's gradients."""
    owners: Any = WeakIdKeyDictionary()

    def init(rank: Rank, own: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(parameter, rank) if parameter.requires_grad else rank
            if owner is not rank:
                raise ArgumentError(
                    f"module has {name!r}, which {owner} replicates, too: ranks that are threads "
                    f"share what is made outside the program; make the module in it, on each rank"
                )
        own(self, module, *args, **kwargs)

    wrap(undo, DistributedDataParallel, "__init__", init)


def _take_operators(undo: ExitStack, module: Any) -> None:
    """Refuse an operator that two ranks define: torch lets the first go, and crashes."""
    owners: dict[str, Rank] = {}

    def init(rank: Rank, own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        name = "::".join(args[:2])
        owner = owners.setdefault(name, rank)
        if owner is not rank:
            raise UnsupportedError(
                f"the operator {name} is defined by {owner} and {rank}, which are threads of one "
                "process; define it in a module, which is imported once"
            )
        own(self, *args, **kwargs)

    wrap(undo, module.CustomOpDef, "__init__", init)


def _take_compiler(undo: ExitStack, frames: Any) -> None:
    """Run compiled functions as they are: Dynamo keeps the code for the first caller's rank."""

    def choose(_: Rank, own: Any, callback: Any) -> Any:
        if callback in (None, False):
            return own(callback)
        say_once("torch.compile: ranks that are threads of one process run uncompiled")
        return None

    wrap(undo, frames, "_callback_from_stance", choose)
    replace(undo, frames, "_stance", frames.DynamoStance("force_eager"))  # fullgraph asks for it
