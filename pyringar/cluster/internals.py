"""Everything private of torch's that a cluster touches, and puts back."""

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.autograd import forward_ad
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from pyringar.cluster.ranks import Rank, belong_to, current, start_noted, wrong_thread
from pyringar.cluster.state import Environment, end_fork_server
from pyringar.cluster.store import ThreadStore
from pyringar.comm.exits import drop_failed_backward
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = [
    "check_torch",
    "entered",
    "forget_groups_of_parent",
    "interrupt",
    "is_future_for_reducer",
    "make_ringar_the_default",
    "run_first_backward",
    "run_in_thread_of",
    "set_device_guard",
]

logger = logging.getLogger(__name__)
_TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # versions of torch
_Call = Callable[..., Any]
_World: Any = distributed_c10d._World
_c10d: Any = _distributed_c10d
_WAY = (
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


def check_torch() -> None:
    """Refuse a torch with which this was not tried."""
    if ".".join(torch.__version__.split(".")[:2]) not in _TRIED:
        raise UnsupportedError(
            f"launch: torch is {torch.__version__}, expected {_TRIED[0]} to {_TRIED[-1]}: ranks "
            "that are threads need names of torch's that are private and may have changed"
        )


def is_future_for_reducer(method: str) -> bool:
    """Return whether DistributedDataParallel waits in C++ for what ``method``, its caller, returns.

    It asks in backward, or from C++, or, for a rank that has joined, through a hook.
    """
    frame: Any = sys._getframe(2)
    if torch._C._current_graph_task_id() != -1 or method not in frame.f_code.co_names:
        return True
    while frame is not None and "_run_comm_hook" not in frame.f_code.co_names:
        frame = frame.f_back
    return frame is not None


def set_device_guard() -> None:
    """Set the guard of FakeTensorMode, which torch 2.11 and 2.12 end with the first thread."""
    run_first_backward()
    torch._C._ensureCUDADeviceGuardSet()


def run_first_backward() -> None:
    """Run a backward pass, so that a process that is forked later can run one.

    torch refuses that where the first pass started threads: beside a GPU, or for FakeTensorMode.
    """
    if torch.cuda.device_count() == 0:
        with contextlib.suppress(RuntimeError):  # this process may be such a fork
            drop_failed_backward()


def forget_groups_of_parent() -> None:
    """Give this process, which was forked, a torch.distributed without groups."""
    # Its groups stay: to destroy one waits for threads that a forked process does not have.
    world: Any = distributed_c10d._world
    world.__class__ = type("_OwnWorld", (_World,), _empty_world())
    _c10d._unregister_all_process_groups()


def make_ringar_the_default() -> None:
    """Let ``init_process_group()`` without a backend make a group of the backend ``ringar``."""
    importlib.import_module("pyringar.distributed")
    own: Any = distributed_c10d._new_process_group_helper

    def make(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        backend = "ringar" if str(backend) == "undefined" else backend
        return own(size, rank, ranks, backend, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def run_in_thread_of(rank: Rank, program: Callable[[], Any]) -> None:
    """Make this thread a rank's while it runs its program: torch.distributed knows its groups."""
    rank.world = _empty_world()
    belong_to(rank)
    cast("Any", os.environ)._data.give_to_process()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    try:
        # Backward then runs in this thread on GPUs, too.
        with torch.autograd.set_multithreading_enabled(False):
            rank.result = program()
            rank.complete_futures()
    finally:
        end_fork_server()
        if not rank.is_gone:  # or they would be the process's
            _c10d._unregister_all_process_groups()
        # A thread's own, whose end would let Python objects go without the GIL.
        torch._C._clear_DTensor_sharding_propagator_cache()
        belong_to(None)


def interrupt(rank: Rank) -> None:
    """Raise KeyboardInterrupt in a rank's thread, unless it takes a lock: that would stay taken."""
    ident: Any = getattr(rank.thread, "ident", None)
    frame = sys._current_frames().get(ident)
    # Up to Python 3.11 a thread that it starts has its ident for a moment, and would get it.
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
    """Give the threads of ranks a torch.distributed each, in this process."""
    # The one registers the backend. The other has the world's group for a default argument: that
    # of the rank which imports it, if there is one by then.
    importlib.import_module("pyringar.distributed")
    importlib.import_module("torch.distributed.nn.functional")
    with ExitStack() as undo:
        _replace(undo, distributed_c10d._world, "__class__", _PerRank)
        _c10d._set_thread_isolation_mode(True)
        undo.callback(_c10d._set_thread_isolation_mode, False)
        _replace(undo, sys, "excepthook", sys.excepthook)
        _wrap(undo, distributed_c10d, "_new_process_group_helper", _make_group)
        _take_backend(undo, make_group)
        # torch 2.15 would give it the calls of one rank.
        _wrap(undo, distributed_c10d, "_maybe_attach_flight_recorder", lambda *_: None)
        _take_stores(undo, store)
        _wrap(undo, device_mesh.DeviceMesh, "__init__", _tell_mesh_apart)
        _take_environment(undo)
        _take_replicas(undo)
        _take_dual_levels(undo, store)
        _wrap(undo, torch, "set_num_interop_threads", _keep_interop_threads)
        _take_modules(undo, num_ranks)
        _take_threads(undo, note)
        noted = functools.partialmethod(start_noted, threading.Thread.start)
        _replace(undo, threading.Thread, "start", noted)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        yield


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo`` ends."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _wrap(undo: ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Give a rank's calls of a function, if there is one, to ``wrapper(rank, function, ...)``."""
    own = getattr(owner, name, None)
    if own is None:
        return

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        return own(*args, **kwargs) if rank is None else wrapper(rank, own, *args, **kwargs)

    _replace(undo, owner, name, call)


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _empty_world() -> dict[str, Any]:
    """Return the values of ``_World``'s properties where there is no group."""
    dicts = (
        "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag pg_coalesce_state "
        "pg_flight_recorder_hooks"
    )
    return {"default_pg": None, "group_count": 0, "comms": [], **{n: {} for n in dicts.split()}}


class _PerRank(_World):  # type: ignore[misc]
    """Give each rank a registry of process groups of its own."""

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


def _make_group(
    _: Rank, own: Any, size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make a rank's group with the backend ``ringar``, also if the program names another."""
    if str(backend).lower() != "fake":
        if str(backend) not in ("ringar", "undefined"):
            _say_once(
                f"init_process_group: {str(backend)!r} was asked for, and ranks that are "
                "threads of one process get 'ringar', whose sums are in rank order"
            )
        backend = "ringar"
        kwargs |= {"device_id": None, "backend_options": None}
    return own(size, rank, ranks, backend, *args, **kwargs)


def _take_backend(undo: ExitStack, make_group: Callable[[Any], Any]) -> None:
    plugins: Any = dist.Backend._plugins
    own = plugins["RINGAR"]

    def create(options: Any, more: Any) -> Any:
        return own.creator_fn(options, more) if current() is None else make_group(options)

    undo.callback(plugins.__setitem__, "RINGAR", own)
    plugins["RINGAR"] = type(own)(create, True)


def _take_stores(undo: ExitStack, root: ThreadStore) -> None:
    """Make TCPStore, FileStore and PrefixStore return views of the cluster's store on ranks."""

    def tcp(_: Rank, own: Any, kind: Any, host_name: str, port: int, *__: Any, **more: Any) -> Any:
        port = port or 49151 + root.add("ports that were chosen", 1)
        return root.view(f"TCPStore({host_name}:{port})", kind=kind, host=host_name, port=port)

    def file(_: Rank, own: Any, kind: Any, file_name: str, *__: Any, **more: Any) -> Any:
        return root.view(f"FileStore({file_name})", kind=kind, path=file_name)

    def prefixed(_: Rank, own: Any, kind: Any, prefix: str, store: Any) -> Any:
        if not isinstance(store, ThreadStore):
            return own(kind)
        base = getattr(store, "_underlying_non_prefix_store", store)
        attributes = {"underlying_store": store, "_underlying_non_prefix_store": base}
        return store.view(prefix, kind=kind, **attributes)

    _wrap(undo, _c10d.TCPStore, "__new__", tcp)
    _wrap(undo, _c10d.FileStore, "__new__", file)
    _wrap(undo, _c10d.PrefixStore, "__new__", prefixed)


def _tell_mesh_apart(rank: Rank, own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a mesh that differs from those of other ranks, which torch's caches take for one."""
    own(self, *args, **kwargs)
    self._thread_id, self._hash = rank.identity, None


def _take_threads(undo: ExitStack, note: Callable[[str], None]) -> None:
    """Refuse threads that are no rank's, also where torch looks for a group in vain."""
    functional: Any = importlib.import_module("torch.distributed._functional_collectives")
    own: Any = distributed_c10d._get_default_group

    def get() -> Any:
        try:
            return own()
        except ValueError as error:
            if current() is not None:
                raise
            note(wrong_thread())
            raise ValueError(f"{error} {wrong_thread()}") from error

    def in_own_thread(rank: Rank, own: Any, *args: Any, **options: Any) -> Any:
        rank.check_thread()
        return own(*args, **options)

    _replace(undo, distributed_c10d, "_get_default_group", get)
    for name in ("_resolve_group", "_resolve_group_name"):  # depends on the version of torch
        _wrap(undo, functional, name, in_own_thread)


def _take_environment(undo: ExitStack) -> None:
    outside = cast("Any", os.environ)._data
    mine = Environment(outside, lambda: getattr(current(), "environment", None))
    _replace(undo, os.environ, "_data", mine)
    _replace(undo, os.environb, "_data", mine)
    undo.callback(mine.give_to_process)


def _take_dual_levels(undo: ExitStack, store: ThreadStore) -> None:
    """Let ranks share the one level of forward AD, whose tangents end when the last one leaves."""
    inside, left = set[Rank](), set[Rank]()
    key = "forward AD, which other ranks have to leave"

    def enter(rank: Rank, own: Any) -> int:
        if rank in left:  # its tangents are there until the last rank leaves
            store.wait([key])
        if rank in inside or not inside:
            own()
        inside.add(rank)
        forward_ad._current_level = 0
        return 0

    def leave(rank: Rank, own: Any, **level: Any) -> None:
        inside.discard(rank)
        if inside:
            left.add(rank)
            store.delete_key(key)
            forward_ad._current_level = -1
        else:
            left.clear()
            store.set(key, "")
            own(**level)

    _wrap(undo, forward_ad, "enter_dual_level", enter)
    _wrap(undo, forward_ad, "exit_dual_level", leave)


def _keep_interop_threads(_: Rank, own: Any, num_threads: Any) -> None:
    if num_threads != torch.get_num_interop_threads():
        _say_once(
            f"torch.set_num_interop_threads: {num_threads} was asked for, and the process keeps "
            f"{torch.get_num_interop_threads()}: {_WAY}"
        )


def _take_modules(undo: ExitStack, num_ranks: int) -> None:
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
                _wrap(undo, owner, "__init__" if kind else name, functools.partial(_refuse, what))

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
    _replace(undo, bootstrap, "_find_spec", functools.partial(find_spec, bootstrap._find_spec))


def _refuse(what: str, *_: Any, **options: Any) -> Any:
    raise UnsupportedError(f"{what}: {_WAY}")


def _take_compiler(undo: ExitStack, frames: Any) -> None:
    """Run compiled functions as they are: Dynamo keeps the code for the first caller's rank."""

    def choose(_: Rank, own: Any, callback: Any) -> Any:
        if callback in (None, False):
            return own(callback)
        _say_once("torch.compile: ranks that are threads of one process run uncompiled")
        return None

    _wrap(undo, frames, "_callback_from_stance", choose)
    _replace(undo, frames, "_stance", frames.DynamoStance("force_eager"))  # fullgraph asks for it


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

    _wrap(undo, module.CustomOpDef, "__init__", init)


def _take_patches(undo: ExitStack, mock: Any) -> None:
    """Refuse to patch what another rank has patched: each would put back the other's."""
    patches: dict[Any, tuple[Any, Rank]] = {}  # the target and the rank of each

    def enter(rank: Rank, own: Any, self: Any) -> Any:
        target = _target_of(self)
        owner = next((owner for known, owner in patches.values() if known == target), rank)
        if owner is not rank:
            name = getattr(self, "attribute", "a dict")
            raise UnsupportedError(f"mock.patch of {name!r}, which {owner} has patched: {_WAY}")
        result = own(self)
        if target is not None:
            patches[self] = target, rank
        return result

    def leave(self: Any, own: Any, *error: Any) -> Any:
        patches.pop(self, None)
        return own(self, *error)

    def end() -> None:
        while patches:
            patch = next(reversed(patches))
            is_started = patch in mock._patch._active_patches
            patch.stop() if is_started else patch.__exit__(None, None, None)

    for kind in (mock._patch, mock._patch_dict):
        _wrap(undo, kind, "__enter__", enter)
        _replace(undo, kind, "__exit__", functools.partialmethod(leave, kind.__exit__))
    undo.callback(end)


def _target_of(patch: Any) -> Any:
    """Return the target of a patch, which is the process's; None: each rank has its own."""
    if hasattr(patch, "in_dict"):
        return None if patch.in_dict in (os.environ, "os.environ") else id(patch.in_dict)
    owner = patch.getter()
    return id(vars(owner) if isinstance(owner, ModuleType) else owner), patch.attribute


def _take_replicas(undo: ExitStack) -> None:
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

    _wrap(undo, DistributedDataParallel, "__init__", init)
