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
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from pyringar.cluster import interpreter
from pyringar.cluster.interpreter import refill, replace, take_environment
from pyringar.cluster.ranks import Rank, belong_to, current
from pyringar.cluster.state import ProcessState
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = [
    "entered",
    "fresh_state",
    "interrupt",
    "plain_torch",
    "process_state",
    "run_in_thread_of",
]

logger = logging.getLogger(__name__)
_said: set[str] = set()

# What torch.distributed keeps of its groups, by the name of the property: an empty one each.
_WORLD: dict[str, Callable[[], Any]] = {
    "default_pg": lambda: None,
    "pg_map": dict,
    "pg_names": dict,
    "pg_group_ranks": dict,
    "pg_backend_config": dict,
    "group_count": int,
    "tags_to_pg": dict,
    "pg_to_tag": dict,
    "pg_coalesce_state": dict,
    "pg_flight_recorder_hooks": dict,
    "comms": list,
}
_OLDEST, _NEWEST = (2, 11), (2, 15)
"""The versions of torch with which this was tried."""
_World: Any = distributed_c10d._World
c10d_cpp: Any = _distributed_c10d
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")


def check_torch() -> None:
    """Refuse a torch with which this was not tried.

    Raises:
        UnsupportedError: Names its version, and those that were tried.
    """
    if not _OLDEST <= _version() <= _NEWEST:
        tried = " to ".join(f"{major}.{minor}" for major, minor in (_OLDEST, _NEWEST))
        raise UnsupportedError(
            f"launch: torch is {torch.__version__}, expected {tried}: ranks that are threads need "
            "names of torch's that are private and may have changed"
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute as torch does by itself: without this thread's modes, subclasses and gradients."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _property_of(name: str) -> Any:
    outside = vars(_World)[name]

    def get(self: Any) -> Any:
        rank = current()
        return outside.fget(self) if rank is None else rank.world[name]

    def put(self: Any, value: Any) -> None:
        rank = current()
        if rank is None:
            outside.fset(self, value)
        else:
            rank.world[name] = value

    return property(get, put)


class _PerRank(_World):  # type: ignore[misc]
    """Keep what torch.distributed knows of its groups: of each rank its own."""


for _name in _WORLD:
    if _name in vars(_World):
        setattr(_PerRank, _name, _property_of(_name))


def is_future_for_reducer(method: str) -> bool:
    """Return whether DistributedDataParallel will wait in C++ for what the caller returns.

    It asks in backward, or from C++, or, for a rank that has joined, through a hook.

    Args:
        method: The caller's name, which Python code that calls it has among its names.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    frame: Any = sys._getframe(2)
    if method not in frame.f_code.co_names:
        return True
    while frame is not None and "_run_comm_hook" not in frame.f_code.co_names:
        frame = frame.f_back
    return frame is not None


def process_state() -> ProcessState:
    """Return what the process has only once, as it is now."""
    return ProcessState(_PARTS)


def fresh_state(number: int) -> ProcessState:
    """Return what a process that has just begun has."""
    return ProcessState.fresh(number, _PARTS)


# Hooks of all modules and optimizers, which contexts such as CommDebugMode set while they last.
_HOOKS: list[dict[Any, Any]] = [
    value
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    for name, value in vars(module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def _read_hooks() -> list[dict[Any, Any]]:
    return [dict(hooks) for hooks in _HOOKS]


def _write_hooks(saved: list[dict[Any, Any]]) -> None:
    for hooks, own in zip(_HOOKS, saved, strict=True):
        refill(hooks, own)


def _read_dtensor() -> Any:
    """Return what a program sets of DTensor: random numbers, and how it treats operators."""
    if "torch.distributed.tensor._api" not in sys.modules:
        return None
    numbers, dispatcher = _dtensor()
    handlers = dispatcher._custom_op_handlers
    return (
        *(numbers._rng_tracker, dispatcher._allow_implicit_replication),
        *(handlers, dict(handlers)),
    )


def _write_dtensor(saved: Any) -> None:
    if "torch.distributed.tensor._api" not in sys.modules:
        return
    numbers, dispatcher = _dtensor()
    if saved is None:  # another rank has imported it meanwhile
        numbers._rng_tracker, dispatcher._allow_implicit_replication = None, False
        return
    numbers._rng_tracker, dispatcher._allow_implicit_replication, handlers, content = saved
    dispatcher._custom_op_handlers = handlers
    refill(handlers, content)


def _dtensor() -> tuple[Any, Any]:
    modules: Any = sys.modules
    dispatcher = modules["torch.distributed.tensor._api"].DTensor._op_dispatcher
    return modules["torch.distributed.tensor._random"], dispatcher


def _read_profiler() -> Any:
    """Return what FSDP is timing: it refuses to time anything twice at once."""
    profiler = _profiler()
    return None if profiler is None else (set(profiler.profiling), copy.copy(profiler.results))


def _write_profiler(saved: Any) -> None:
    profiler = _profiler()
    if profiler is not None:
        new: Any = (set(), type(profiler.results)(float))
        profiler.profiling, profiler.results = new if saved is None else saved


def _profiler() -> Any:
    module: Any = sys.modules.get("torch.distributed.fsdp._debug_utils")
    return getattr(module, "SimpleProfiler", None)


# Which cache torch.compile looks into, see `_separate_compiled`.
_frames: Any = torch._C._dynamo.eval_frame
_get_region = getattr(_frames, "get_eval_frame_isolate_recompiles_id", lambda: -1)
_set_region = getattr(_frames, "set_eval_frame_isolate_recompiles_id", lambda region: None)


def _read_stance() -> Any:
    """Return what torch.compiler.set_stance has set."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


def _write_stance(saved: Any) -> None:
    if saved is not None:
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        frames._stance = saved


def _read_plans() -> dict[str, Any]:
    """Return the plans that planners of checkpoints keep, if they are told to."""
    planner = _planner()
    return {name: dict(getattr(planner, name)) for name in _kept_plans(planner)}


def _write_plans(saved: dict[str, Any]) -> None:
    planner = _planner()
    for name in _kept_plans(planner):
        setattr(planner, name, saved.get(name, {}))


def _planner() -> Any:
    module: Any = sys.modules.get("torch.distributed.checkpoint.planner")
    return getattr(module, "SavePlanner", None)


@functools.cache
def _kept_plans(planner: Any) -> tuple[str, ...]:
    found = () if planner is None else vars(planner).items()
    return tuple(n for n, v in found if n.startswith("_cached_") and isinstance(v, dict))


# More that a process has only once: how to read it, and how to set it.
_PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_read_hooks, _write_hooks),
    (_read_dtensor, _write_dtensor),
    (_read_profiler, _write_profiler),
    (_read_plans, _write_plans),
    (_get_region, _set_region),
    (_read_stance, _write_stance),
    (  # the module whose forward pass runs, which torch.compile asks for
        lambda: DistributedDataParallel._active_ddp_module,
        lambda module: setattr(DistributedDataParallel, "_active_ddp_module", module),
    ),
    *interpreter.PARTS,
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode: torch.set_anomaly_enabled(*mode),
    ),
    (_distributed_c10d.get_debug_level, _distributed_c10d.set_debug_level),
)


def run_in_thread_of(rank: Rank, program: Callable[[], Any]) -> None:
    """Make this thread a rank's while it runs its program: torch.distributed knows its groups."""
    rank.world = {name: make() for name, make in _WORLD.items()}
    belong_to(rank)
    interpreter.start_waited_for_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    try:
        # Backward then runs in this thread on GPUs, too.
        with torch.autograd.set_multithreading_enabled(False):
            rank.result = program()
            rank.complete_futures()
            rank.join_helpers()
    finally:
        _forget_groups(rank)
        # A thread's own, whose end would let Python objects go without the GIL.
        torch._C._clear_DTensor_sharding_propagator_cache()
        belong_to(None)


def _forget_groups(rank: Rank) -> None:
    if not rank.is_gone:  # or they would be the process's
        c10d_cpp._unregister_all_process_groups()


def interrupt(rank: Rank) -> None:
    """Raise KeyboardInterrupt in a rank's thread when it runs Python next.

    Do nothing where it takes a lock of logging or of a condition: nobody would release that.
    """
    if rank.thread is None or rank.thread.ident is None:
        return
    ident = rank.thread.ident
    frame = sys._current_frames().get(ident)
    if frame is None or not _takes_lock(frame):
        raised = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)


def _takes_lock(frame: FrameType) -> bool:
    code, in_logging = frame.f_code, logging.Handler.acquire.__code__.co_filename
    return code.co_filename == in_logging or code is threading.Condition.__enter__.__code__


@contextlib.contextmanager
def entered(make_group: Callable[[Any], Any], store: Any, *, is_parallel: bool) -> Iterator[None]:
    """Let threads of ranks have a torch.distributed of their own, in this process.

    Args:
        make_group: Returns the group of the rank that calls, given torch's options.
        store: What ranks meet through.
        is_parallel: Ranks run at once, and would import torch's compiler at once, which fails.
    """
    # The one registers the backend. The other has the world's group for a default argument: that
    # of the rank which imports it, if there is one by then.
    importlib.import_module("pyringar.distributed")
    importlib.import_module("torch.distributed.nn.functional")
    if is_parallel:
        importlib.import_module("torch._dynamo")
    # FakeTensorMode, which DTensor uses, has it done by the first thread, in torch 2.11 and 2.12
    # for as long as that lives.
    torch._C._ensureCUDADeviceGuardSet()
    with contextlib.ExitStack() as undo:
        world: Any = distributed_c10d._world
        undo.callback(setattr, world, "__class__", type(world))
        world.__class__ = _PerRank
        c10d_cpp._set_thread_isolation_mode(True)
        undo.callback(c10d_cpp._set_thread_isolation_mode, False)
        replace(undo, sys, "excepthook", sys.excepthook)
        replace(undo, distributed_c10d, "_backend", distributed_c10d._backend)
        replace(
            *(undo, distributed_c10d, "_default_pg_init_method"),
            distributed_c10d._default_pg_init_method,
        )
        replace(
            *(undo, distributed_c10d, "_new_process_group_helper"),
            _with_our_backend(distributed_c10d._new_process_group_helper),
        )
        _take_backend(undo, make_group)
        _take_recorder(undo)
        _forget_numbers(undo)
        _take_stores(undo, store)
        _take_meshes(undo)
        take_environment(undo)
        _take_operators(undo)
        _take_replicas(undo)
        _take_compiler(undo, is_parallel=is_parallel)
        interpreter.take_threads(undo, _in_helper_of)
        interpreter.take_loggers(undo)
        _take_collecting(undo)
        threads = torch.get_num_threads()
        undo.callback(torch.set_num_threads, threads)
        yield


def _with_our_backend(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's maker of groups with our backend, whatever a rank names."""

    def make(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None and str(backend).lower() != "fake":
            _say_once(backend)
            backend = "ringar"
            kwargs |= {"device_id": None, "backend_options": None}
        return helper(size, rank, ranks, backend, *args, **kwargs)

    return make


def _say_once(backend: Any) -> None:
    if str(backend) not in ("ringar", "undefined", *_said):
        _said.add(str(backend))
        logger.warning(
            "init_process_group: %r was asked for, and ranks that are threads of one process get "
            "'ringar', whose sums are in rank order",
            str(backend),
        )


def _take_backend(undo: contextlib.ExitStack, make_group: Callable[[Any], Any]) -> None:
    plugins: Any = dist.Backend._plugins
    own = plugins["RINGAR"]

    def create(options: Any, more: Any) -> Any:
        return own.creator_fn(options, more) if current() is None else make_group(options)

    undo.callback(plugins.__setitem__, "RINGAR", own)
    plugins["RINGAR"] = type(own)(create, True)


def _take_recorder(undo: contextlib.ExitStack) -> None:
    """Record no calls of ranks: torch 2.15 keeps those of a process, which is of one rank to it."""
    name = "_maybe_attach_flight_recorder"
    own = getattr(distributed_c10d, name, None)
    if own is not None:
        replace(
            *(undo, distributed_c10d, name),
            lambda *args: own(*args) if current() is None else None,
        )


def _forget_numbers(undo: contextlib.ExitStack) -> None:
    """Let ranks begin without DTensor's random numbers, as new processes do."""
    undo.callback(_write_dtensor, _read_dtensor())
    if "torch.distributed.tensor._api" in sys.modules:
        _dtensor()[0]._rng_tracker = None


def _take_stores(undo: contextlib.ExitStack, store: Any) -> None:
    """Let ranks that make a TCPStore or FileStore have a part of the cluster's store."""
    for name in ("TCPStore", "FileStore"):
        own: Any = getattr(distributed_c10d, name, getattr(dist, name))
        made = type(name, (own,), {"__new__": _store_of_rank(own, store)})
        for module in (dist, distributed_c10d, _rendezvous):
            if hasattr(module, name):
                replace(undo, module, name, made)


def _store_of_rank(own: Any, store: Any) -> Callable[..., Any]:
    def make(_: Any, *where: Any, **options: Any) -> Any:
        if current() is None:
            return own(*where, **options)
        named = options.get("host_name", options.get("file_name"))
        place = [named, options.get("port")] if named is not None else where[:2]
        return c10d_cpp.PrefixStore("/".join(map(str, place)), store)

    return make


def _take_meshes(undo: contextlib.ExitStack) -> None:
    """Tell meshes of ranks apart, which torch's caches would take for one."""
    own = device_mesh.DeviceMesh.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        rank = current()
        if rank is not None:
            self._thread_id, self._hash = rank.identity, None

    replace(undo, device_mesh.DeviceMesh, "__init__", init)


def _take_compiler(undo: contextlib.ExitStack, *, is_parallel: bool) -> None:
    """Let each rank compile for itself: torch keeps with a code what it takes for constant."""
    own: Any = torch.compile

    def compile_first(*args: Any, **kwargs: Any) -> Any:
        torch.compile = own
        _separate_compiled(undo, is_parallel)
        return own(*args, **kwargs)

    if "torch._dynamo.eval_frame" in sys.modules:
        _separate_compiled(undo, is_parallel)
    else:
        replace(undo, torch, "compile", compile_first)


def _separate_compiled(undo: contextlib.ExitStack, is_parallel: bool) -> None:
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    # torch has regions with caches of their own from 2.13 on, and one of each thread from 2.15 on.
    if _version() < ((2, 15) if is_parallel else (2, 13)):
        own = frames._callback_from_stance

        def say(callback: Any) -> Any:
            if callback not in (None, False) and current() is not None:
                _say_uncompiled()
            return own(callback)

        replace(undo, frames, "_callback_from_stance", say)
        replace(undo, frames, "_stance", frames.DynamoStance("force_eager"))
        return
    config: Any = importlib.import_module("torch._dynamo.config")
    regions: dict[Any, int] = {}

    def enter(region: int) -> Any:
        rank = current()
        if rank is not None and region not in regions.values():
            place = rank.identity, region
            if place not in regions:
                regions[place] = next(frames._next_isolate_recompiles_id)
            region = regions[place]
            config.accumulated_recompile_limit = sys.maxsize  # of all ranks; a thread's own setting
        return _set_region(region)

    replace(undo, frames, "set_eval_frame_isolate_recompiles_id", enter)
    undo.callback(_forget_compiled, frames, regions)


def _forget_compiled(frames: Any, regions: dict[Any, int]) -> None:
    """Let go of what ranks have compiled: a function may have only so many versions."""
    convert: Any = importlib.import_module("torch._dynamo.convert_frame")
    for kept in (*convert.input_codes.seen, *convert.output_codes.seen):
        code = kept()
        if code is not None and any(
            _frames._get_cache_entries_for_region(code, region) for region in regions.values()
        ):
            frames.reset_code(code)


def _say_uncompiled() -> None:
    if "compile" not in _said:
        _said.add("compile")
        logger.warning(
            "torch.compile: ranks that are threads run uncompiled before torch 2.13, and at once "
            "before 2.15: all would have one cache"
        )


def _take_replicas(undo: contextlib.ExitStack) -> None:
    """Refuse a module that two ranks replicate: each would add to the other's gradients."""
    own, owners = DistributedDataParallel.__init__, cast("Any", WeakIdKeyDictionary())

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        rank = current()
        for name, parameter in module.named_parameters() if rank is not None else ():
            if not parameter.requires_grad:
                continue
            owner = owners.setdefault(parameter, rank)
            if owner is not rank:
                raise ArgumentError(
                    f"module has {name!r}, which {owner} replicates, too: ranks that are threads "
                    f"share what is made outside the program; make the module in it, on each rank"
                )
        own(self, module, *args, **kwargs)

    replace(undo, DistributedDataParallel, "__init__", init)


def _take_operators(undo: contextlib.ExitStack) -> None:
    """Refuse an operator that two ranks define: torch lets the first go, and crashes."""
    module: Any = importlib.import_module("torch._library.custom_ops")
    own, defined = module.CustomOpDef.__init__, dict[Any, Any]()

    def init(self: Any, namespace: str, name: str, *args: Any, **kwargs: Any) -> None:
        rank = current()
        before = defined.setdefault((namespace, name), rank)
        if rank is not None and before is not rank:
            raise UnsupportedError(
                f"the operator {namespace}::{name} is defined by {before} and {rank}, which are "
                "threads of one process; define it in a module, which is imported once"
            )
        own(self, namespace, name, *args, **kwargs)

    replace(undo, module.CustomOpDef, "__init__", init)


def _take_collecting(undo: contextlib.ExitStack) -> None:
    """Wait for several futures before torch does, in C++, where no other rank would be let run."""
    own: Any = torch._C._collect_all

    def collect(futures: Any) -> Any:
        for future in futures if current() is not None else ():
            if hasattr(future, "settle"):
                future.settle()
        return own(futures)

    replace(undo, torch._C, "_collect_all", collect)


def _in_helper_of(rank: Rank, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in any thread as what a rank's program does beside it."""

    def run_as_rank(*args: Any, **kwargs: Any) -> Any:
        if rank.is_gone or current() is rank:
            return run(*args, **kwargs)
        belong_to(rank)
        try:
            for group, name in list(rank.world["pg_names"].items()):
                c10d_cpp._register_process_group(name, group)
            return run(*args, **kwargs)
        finally:
            _forget_groups(rank)
            belong_to(None)

    return run_as_rank
