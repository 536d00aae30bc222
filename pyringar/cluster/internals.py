"""Patch torch's private functions while ranks are threads, and undo the patches."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import FrameType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary

from pyringar.cluster.rank_threads import RankThread, belong_to, current, start_noted, wrong_thread
from pyringar.cluster.state import Environment, end_fork_server
from pyringar.cluster.store import ThreadStore
from pyringar.comm.exits import drop_failed_backward
from pyringar.errors import ArgumentError, UnsupportedError

logger = logging.getLogger(__name__)
_TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # versions of torch that the tests have run
_Call = Callable[..., Any]
_World: Any = distributed_c10d._World
_c10d: Any = _distributed_c10d
_WRAPPERS: dict[str, _Call] = {}  # key: path of the wrapped function
_replaceable = threading.local()  # `group`: the default group that a mark has made
_LEVEL = "forward AD, which other ranks have to leave"  # a key of the store; error tables show it
_WAY = (
    "a process has it once, and the ranks of pr.launch are threads of one process; expected "
    "processes: pr.launch(fn, ranks, processes=True), or pyringar run --processes"
)
_OURS = "ProcessCommunicator, HierarchicalCommunicator, ddp_hook"
# Path of a function that ranks on threads must not call, and its name in the error. The function
# keeps one rank per process, or connects processes. A path without a function forbids an import.
_REFUSED = {
    "accelerate.state:PartialState.__init__": "accelerate",
    "deepspeed.comm.torch:TorchBackend.__init__": "deepspeed",
    "lightning": "lightning",
    "lightning.fabric.fabric:Fabric.__init__": "lightning",
    "lightning.pytorch.trainer.trainer:Trainer.__init__": "lightning",
    "lightning_fabric": "lightning_fabric",
    "lightning_fabric.fabric:Fabric.__init__": "lightning_fabric",
    "megatron.core.parallel_state:initialize_model_parallel": "megatron",
    "pyringar.comm.rendezvous:Rendezvous.__init__": _OURS,
    "pyringar.comm.stores:_environment_store": _OURS,
    "pytorch_lightning": "pytorch_lightning",
    "pytorch_lightning.trainer.trainer:Trainer.__init__": "pytorch_lightning",
    "torch.distributed.tensor.experimental._context_parallel._attention:"
    "_enable_context_parallel_dispatcher_impl": "context_parallel, which patches torch",
}


def check_torch() -> None:
    if ".".join(torch.__version__.split(".")[:2]) not in _TRIED:
        raise UnsupportedError(
            f"launch: torch is {torch.__version__}, expected {_TRIED[0]} to {_TRIED[-1]}: ranks "
            "that are threads need names of torch's that are private and may have changed"
        )


def set_device_guard() -> None:
    """Set FakeTensorMode's device guard here: in torch 2.11 and 2.12 it dies with its thread."""
    run_first_backward()
    torch._C._ensureCUDADeviceGuardSet()


def run_first_backward() -> None:
    """Run a backward pass, so that processes forked from this one can run backward.

    torch forbids this if the first pass started threads: with a GPU, or under FakeTensorMode.
    """
    if torch.cuda.device_count() == 0:
        with contextlib.suppress(RuntimeError):  # this process may itself be forked
            drop_failed_backward()


def forget_groups_of_parent() -> None:
    """Give this forked process a torch.distributed without groups."""
    # Do not destroy the parent's groups: that waits for threads, which a fork does not copy.
    world: Any = distributed_c10d._world
    world.__class__ = type("_OwnWorld", (_World,), _empty_world())
    _c10d._unregister_all_process_groups()


def make_ringar_the_default() -> None:
    """Make ``ringar`` the backend of ``init_process_group()`` without a backend."""
    importlib.import_module("pyringar.distributed")
    own: Any = distributed_c10d._new_process_group_helper

    def make(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        backend = "ringar" if str(backend) == "undefined" else backend
        return own(size, rank, ranks, backend, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def let_init_replace_default_group() -> None:
    """Let the next ``init_process_group`` of this thread replace the default group."""
    _wrap_init()
    _replaceable.group = dist.group.WORLD


@functools.cache
def _wrap_init() -> None:
    # Replace the function inside torch's decorator: programs may have imported the outer function.
    cell: Any = cast("Any", dist.init_process_group).__closure__[0]
    own = cell.cell_contents

    @functools.wraps(own)
    def init(*args: Any, **kwargs: Any) -> Any:
        group = vars(_replaceable).pop("group", None)
        if group is not None and group is dist.group.WORLD:
            dist.destroy_process_group()
            distributed_c10d._world.group_count = 1  # a new name: the store keeps the old keys
        return own(*args, **kwargs)

    cell.cell_contents = init


def run_in_thread_of(rank: RankThread, program: Callable[[], Any]) -> None:
    """Run the rank's program in this thread, with the rank's own torch.distributed groups."""
    rank.world = _empty_world()
    belong_to(rank)
    cast("Any", os.environ)._data.give_to_process()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    try:
        # Run backward of CUDA tensors in this thread: other threads belong to no rank.
        with torch.autograd.set_multithreading_enabled(False):
            rank.result = program()
    finally:
        end_fork_server()
        if not rank.is_gone:  # after the launch, the default groups belong to the process
            _c10d._unregister_all_process_groups()
        # Clear this thread-local cache: the thread's end would free its objects without the GIL.
        torch._C._clear_DTensor_sharding_propagator_cache()
        belong_to(None)


def interrupt(rank: RankThread) -> None:
    """Raise KeyboardInterrupt in a rank's thread, except while the thread acquires a lock."""
    ident: Any = getattr(rank.thread, "ident", None)
    frame = sys._current_frames().get(ident)
    # Acquire `starting`: up to Python 3.11 a new thread briefly has the ident of its creator.
    if frame and not _takes_lock(frame) and rank.starting.acquire(blocking=False):
        try:
            raised = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)
        finally:
            rank.starting.release()


def _takes_lock(frame: FrameType) -> bool:
    code, in_logging = frame.f_code, logging.Handler.acquire.__code__.co_filename
    return code.co_filename == in_logging or code is threading.Condition.__enter__.__code__


@contextlib.contextmanager
def entered(make_group: _Call, store: ThreadStore, num_ranks: int, note: _Call) -> Iterator[None]:
    """Give each rank its own torch.distributed while the context is open."""
    # The first import registers the backend. The second module stores the default group as a
    # default argument, so import it before any rank makes a group.
    importlib.import_module("pyringar.distributed")
    importlib.import_module("torch.distributed.nn.functional")
    environ, plugins = cast("Any", os.environ), cast("Any", dist.Backend)._plugins
    variables = Environment(environ._data, lambda: getattr(current(), "environment", None))
    backend = plugins["RINGAR"]
    with ExitStack() as undo:
        _replace(undo, distributed_c10d._world, "__class__", _PerRank)
        _c10d._set_thread_isolation_mode(True)
        undo.callback(_c10d._set_thread_isolation_mode, False)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(plugins.__setitem__, "RINGAR", backend)
        create = _for_ranks(backend.creator_fn, lambda _, own, options, more: make_group(options))
        plugins["RINGAR"] = backend._replace(creator_fn=create)
        undo.callback(variables.give_to_process)
        _replace(undo, os.environ, "_data", variables)
        _replace(undo, os.environb, "_data", variables)
        _replace(undo, sys, "excepthook", sys.excepthook)
        start = functools.partialmethod(start_noted, threading.Thread.start)
        _replace(undo, threading.Thread, "start", start)
        get_group = partial(_get_default_group, distributed_c10d._get_default_group, note)
        _replace(undo, distributed_c10d, "_get_default_group", get_group)
        launch = _Launch(store)
        wrappers: dict[str, _Call] = {path: partial(f, launch) for path, f in _WRAPPERS.items()}
        for path, what in _REFUSED.items():
            if num_ranks > 1 or what is _OURS:
                wrappers[path] = partial(_refuse, what)
        _wrap_functions(undo, wrappers)
        undo.callback(launch.end_patches)
        yield


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _for_ranks(own: _Call, wrapper: _Call) -> _Call:
    """Return a function: ranks call ``wrapper(rank, own, ...)``, other threads call ``own``."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        return own(*args, **kwargs) if rank is None else wrapper(rank, own, *args, **kwargs)

    return call


def _wrap_functions(undo: ExitStack, wrappers: Mapping[str, _Call]) -> None:
    """Wrap functions of imported modules now, and of other modules when they are imported."""
    by_module: dict[str, list[tuple[str, _Call]]] = {}
    for path, wrapper in wrappers.items():
        module, _, function = path.partition(":")
        by_module.setdefault(module, []).append((function, wrapper))

    def wrap(module: Any) -> None:
        for function, wrapper in by_module[module.__name__]:
            kind, _, name = function.rpartition(".")
            owner = getattr(module, kind, None) if kind else module
            if hasattr(owner, name):  # some versions of torch lack the function
                _replace(undo, owner, name, _for_ranks(getattr(owner, name), wrapper))
        if module.__name__ == "torch._dynamo.eval_frame":  # fullgraph=True reads _stance, too
            _replace(undo, module, "_stance", module.DynamoStance("force_eager"))

    def load(own: Any, module: Any) -> None:
        own(module)
        wrap(module)

    def find_spec(own: Any, name: str, *args: Any) -> Any:
        for function, wrapper in by_module.get(name, ()):
            if not function and current() is not None:
                wrapper()
        spec = own(name, *args)
        if spec is not None and name in by_module:
            spec.loader = copy.copy(spec.loader)  # some finders share a loader between modules
            spec.loader.exec_module = partial(load, spec.loader.exec_module)
        return spec

    for name in by_module.keys() & sys.modules.keys():
        wrap(sys.modules[name])
    bootstrap: Any = importlib.import_module("importlib._bootstrap")
    _replace(undo, bootstrap, "_find_spec", partial(find_spec, bootstrap._find_spec))


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _refuse(what: str, *_: Any, **options: Any) -> Any:
    raise UnsupportedError(f"{what}: {_WAY}")


def _get_default_group(own: _Call, note: _Call) -> Any:
    """Extend torch's error if the calling thread belongs to no rank."""
    try:
        return own()
    except ValueError as error:
        if current() is not None:
            raise
        note(wrong_thread())
        raise ValueError(f"{error} {wrong_thread()}") from error


def _empty_world() -> dict[str, Any]:
    dicts = (
        "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state "
        "pg_flight_recorder_hooks"
    )
    return {"default_pg": None, "group_count": 0, "comms": [], **{n: {} for n in dicts.split()}}


class _PerRank(_World):  # type: ignore[misc]
    """torch's registry of process groups, one for each rank."""

    def __getattribute__(self, name: str) -> Any:
        rank = current()
        if rank is None or name not in rank.world:
            return super().__getattribute__(name)
        return rank.world[name]

    def __setattr__(self, name: str, value: Any) -> None:
        rank = current()
        if rank is None:
            super().__setattr__(name, value)
        else:
            rank.check_thread()
            rank.world[name] = value


def _wraps(path: str) -> Callable[[_Call], _Call]:
    """Register a wrapper that replaces ``module:function`` in the threads of ranks."""
    return partial(_WRAPPERS.setdefault, path)


class _Launch:
    """Wrappers of torch functions for the ranks of one launch, and the state that they share."""

    def __init__(self, store: ThreadStore) -> None:
        self.store = store
        self.levels: dict[RankThread, bool] = {}  # True: the rank is inside the level of forward AD
        self.operators: dict[str, RankThread] = {}  # the rank that defined each operator
        self.replicas: Any = WeakIdKeyDictionary()  # the rank that replicates each parameter
        self.patches: dict[Any, RankThread] = {}  # the rank that made each active patch

    @_wraps("torch.distributed.distributed_c10d:_new_process_group_helper")
    def make_group(self, _: Any, own: _Call, *args: Any, **kwargs: Any) -> Any:
        """Make a group with the backend ``ringar`` for any backend that the program names."""
        size, rank, ranks, backend, *more = args
        if str(backend).lower() == "fake":
            return own(*args, **kwargs)
        if str(backend) not in ("ringar", "undefined"):
            _say_once(
                f"init_process_group: backend is {str(backend)!r}, but ranks that are threads of "
                "one process use 'ringar', whose sums are in rank order"
            )
        kwargs |= {"device_id": None, "backend_options": None}
        return own(size, rank, ranks, "ringar", *more, **kwargs)

    # No flight recorder: in torch 2.15 it records the calls of only one rank.
    _wraps("torch.distributed.distributed_c10d:_maybe_attach_flight_recorder")(lambda *_: None)

    @_wraps("torch.distributed._functional_collectives:_resolve_group")
    @_wraps("torch.distributed._functional_collectives:_resolve_group_name")
    def resolve_group(self, rank: RankThread, own: _Call, *args: Any, **kwargs: Any) -> Any:
        rank.check_thread()
        return own(*args, **kwargs)

    @_wraps("torch.distributed.device_mesh:DeviceMesh.__init__")
    def make_mesh(self, rank: RankThread, own: _Call, mesh: Any, *args: Any, **kwargs: Any) -> None:
        """Give the mesh of each rank a unique id, by which torch's caches tell meshes apart."""
        own(mesh, *args, **kwargs)
        mesh._thread_id = rank.identity

    @_wraps("torch.distributed:TCPStore.__new__")
    def tcp_store(
        self, _: Any, own: _Call, kind: Any, host_name: str, port: int, *__: Any, **___: Any
    ) -> Any:
        port = port or 49151 + self.store.add("ports that were chosen", 1)
        prefix = f"TCPStore({host_name}:{port})"
        return self.store.view(prefix, kind=kind, host=host_name, port=port)

    @_wraps("torch.distributed:FileStore.__new__")
    def file_store(self, _: Any, own: _Call, kind: Any, file_name: str, *__: Any) -> Any:
        return self.store.view(f"FileStore({file_name})", kind=kind, path=file_name)

    @_wraps("torch.distributed:PrefixStore.__new__")
    def prefix_store(self, _: Any, own: _Call, kind: Any, prefix: str, store: Any) -> Any:
        if not isinstance(store, ThreadStore):
            return own(kind)
        base = getattr(store, "_underlying_non_prefix_store", store)
        attributes = {"underlying_store": store, "_underlying_non_prefix_store": base}
        return store.view(prefix, kind=kind, **attributes)

    @_wraps("torch.autograd.forward_ad:enter_dual_level")
    def enter_level(self, rank: RankThread, own: _Call) -> int:
        """Enter forward AD, whose only level all ranks share; the last rank to exit clears it."""
        if not self.levels.get(rank, True):  # this rank exited, but others keep tangents
            self.store.wait([_LEVEL])
        if rank in self.levels or not self.levels:
            own()  # raises for a nested level
        self.levels[rank] = True
        forward_ad._current_level = 0
        return 0

    @_wraps("torch.autograd.forward_ad:exit_dual_level")
    def exit_level(self, rank: RankThread, own: _Call, **level: Any) -> None:
        self.levels[rank] = False
        if any(self.levels.values()):
            self.store.delete_key(_LEVEL)
            forward_ad._current_level = -1
        else:
            self.levels.clear()
            self.store.set(_LEVEL, "")
            own(**level)

    @_wraps("torch:set_num_interop_threads")
    def set_num_interop_threads(self, *_: Any) -> None:
        _say_once(f"torch.set_num_interop_threads has no effect: {_WAY}")

    @_wraps("torch._dynamo.eval_frame:_callback_from_stance")
    def choose_compiler(self, _: Any, own: _Call, callback: Any) -> Any:
        """Skip torch.compile: Dynamo would compile for the first rank only."""
        if callback in (None, False):
            return own(callback)
        _say_once("torch.compile: ranks that are threads of one process run uncompiled")
        return None

    @_wraps("torch._library.custom_ops:CustomOpDef.__init__")
    def define_operator(
        self, rank: RankThread, own: _Call, new: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse an operator that two ranks define: torch would free the first and crash."""
        name = "::".join(args[:2])
        owner = self.operators.setdefault(name, rank)
        if owner is not rank:
            raise UnsupportedError(
                f"the operator {name} is defined by {owner} and {rank}, which are threads of one "
                "process; define it in a module, which is imported once"
            )
        own(new, *args, **kwargs)

    @_wraps("torch.nn.parallel:DistributedDataParallel.__init__")
    def replicate(
        self, rank: RankThread, own: _Call, new: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse a module that two ranks wrap in DDP, since both would write its gradients."""
        for name, parameter in module.named_parameters():
            owner = self.replicas.setdefault(parameter, rank) if parameter.requires_grad else rank
            if owner is not rank:
                raise ArgumentError(
                    f"module has {name!r}, which {owner} replicates, too: ranks that are threads "
                    f"share what is made outside the program; make the module in it, on each rank"
                )
        own(new, module, *args, **kwargs)

    @_wraps("unittest.mock:_patch.__enter__")
    @_wraps("unittest.mock:_patch_dict.__enter__")
    def patch(self, rank: RankThread, own: _Call, patch: Any) -> Any:
        """Refuse to patch a target twice: the two ranks would restore each other's values."""
        target = _target_of(patch)
        owners = [owner for other, owner in self.patches.items() if _target_of(other) == target]
        if owners and owners[0] is not rank:
            name = getattr(patch, "attribute", "a dict")
            raise UnsupportedError(f"mock.patch of {name!r}, which {owners[0]} has patched: {_WAY}")
        result = own(patch)
        if target is not None:
            self.patches[patch] = rank
        return result

    @_wraps("unittest.mock:_patch.__exit__")
    @_wraps("unittest.mock:_patch_dict.__exit__")
    def end_patch(self, _: Any, own: _Call, patch: Any, *error: Any) -> Any:
        self.patches.pop(patch, None)
        return own(patch, *error)

    def end_patches(self) -> None:
        for patch in reversed(self.patches):
            active = importlib.import_module("unittest.mock")._patch._active_patches
            with contextlib.suppress(AttributeError):  # patch.multiple may have ended this patch
                patch.stop() if patch in active else patch.__exit__(None, None, None)


def _target_of(patch: Any) -> Any:
    """Return a key for the target of a patch; None if each rank has its own target."""
    if hasattr(patch, "in_dict"):
        return None if patch.in_dict in (os.environ, "os.environ") else id(patch.in_dict)
    owner = patch.getter()
    return id(vars(owner) if isinstance(owner, ModuleType) else owner), patch.attribute
