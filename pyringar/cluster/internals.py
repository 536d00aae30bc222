"""Everything private of torch's that a cluster touches, and puts back."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.autograd import forward_ad
from torch.distributed import device_mesh, distributed_c10d

from pyringar.cluster.ranks import Rank, belong_to, current, this_rank, wrong_thread
from pyringar.cluster.refusals import WAY, replace, take_modules, take_replicas, wrap
from pyringar.cluster.state import Environment, end_fork_server
from pyringar.cluster.store import ThreadStore
from pyringar.comm.exits import drop_failed_backward
from pyringar.errors import UnsupportedError

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
_said: set[str] = set()
# Kept, since to destroy a group waits for threads that a forked process does not have.
_of_parent: list[Any] = []

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
            rank.check_thread()
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


def run_in_thread_of(rank: Rank, program: Callable[[], Any]) -> None:
    """Make this thread a rank's while it runs its program: torch.distributed knows its groups."""
    rank.world = {name: make() for name, make in _WORLD.items()}
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
    # Up to Python 3.11 a thread that it starts has its ident for a moment, and would get it.
    if (frame is None or not _takes_lock(frame)) and rank.starting.acquire(blocking=False):
        try:
            raised = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)
        finally:
            rank.starting.release()


def _takes_lock(frame: FrameType) -> bool:
    code, in_logging = frame.f_code, logging.Handler.acquire.__code__.co_filename
    return code.co_filename == in_logging or code is threading.Condition.__enter__.__code__


@contextlib.contextmanager
def entered(
    make_group: Callable[[Any], Any],
    store: ThreadStore,
    num_ranks: int,
    note: Callable[[str], None],
) -> Iterator[None]:
    """Give the threads of ranks a torch.distributed each, in this process.

    Args:
        make_group: Returns the group of the rank that calls, given torch's options.
        store: The store that ranks share.
        num_ranks: How many there are.
        note: Told of a thread that no rank started, and that asks for a group in vain.
    """
    # The one registers the backend. The other has the world's group for a default argument: that
    # of the rank which imports it, if there is one by then.
    importlib.import_module("pyringar.distributed")
    importlib.import_module("torch.distributed.nn.functional")
    with contextlib.ExitStack() as undo:
        world: Any = distributed_c10d._world
        undo.callback(setattr, world, "__class__", type(world))
        world.__class__ = _PerRank
        c10d_cpp._set_thread_isolation_mode(True)
        undo.callback(c10d_cpp._set_thread_isolation_mode, False)
        replace(undo, sys, "excepthook", sys.excepthook)
        helper = _with_our_backend(distributed_c10d._new_process_group_helper)
        replace(undo, distributed_c10d, "_new_process_group_helper", helper)
        _take_backend(undo, make_group)
        recorder = "_maybe_attach_flight_recorder"  # of torch 2.15: calls of one rank, to it
        if hasattr(distributed_c10d, recorder):
            wrap(undo, distributed_c10d, recorder, _outside_ranks)
        _take_stores(undo, store)
        wrap(undo, device_mesh.DeviceMesh, "__init__", _tell_mesh_apart)
        _take_environment(undo)
        take_replicas(undo)
        _take_dual_levels(undo, store)
        wrap(undo, torch, "set_num_interop_threads", _keep_interop_threads)
        take_modules(undo, num_ranks, {"torch._dynamo.eval_frame": _take_compiler})
        _take_threads(undo, note)
        threads = torch.get_num_threads()
        undo.callback(torch.set_num_threads, threads)
        yield


def _with_our_backend(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's maker of groups with our backend, whatever a rank names."""

    def make(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None and str(backend).lower() != "fake":
            if str(backend) not in ("ringar", "undefined"):
                _say_once(
                    f"init_process_group: {str(backend)!r} was asked for, and ranks that are "
                    "threads of one process get 'ringar', whose sums are in rank order"
                )
            backend = "ringar"
            kwargs |= {"device_id": None, "backend_options": None}
        return helper(size, rank, ranks, backend, *args, **kwargs)

    return make


def set_device_guard() -> None:
    """Set the guard of FakeTensorMode, which DTensor uses, in the thread that calls `launch`.

    In torch 2.11 and 2.12 the guard is the first thread's, and lives no longer than that.
    """
    run_first_backward()
    torch._C._ensureCUDADeviceGuardSet()


def run_first_backward() -> None:
    """Run a backward pass, so that a process that is forked later can run one.

    The first pass of a process starts threads if there is a GPU, or if FakeTensorMode was used.
    torch then refuses to run one after a fork.
    """
    if torch.cuda.device_count() == 0:
        # This process may be a fork that can run none: then its forks are told when they try.
        with contextlib.suppress(RuntimeError):
            drop_failed_backward()


def forget_groups_of_parent() -> None:
    """Give this process, which was forked, a torch.distributed without groups."""
    world: Any = distributed_c10d._world
    for name in (name for name in _WORLD if hasattr(world, name)):
        value = getattr(world, name)
        if isinstance(value, (dict, list)):
            _of_parent.append(value.copy())
            value.clear()
        else:
            _of_parent.append(value)
            setattr(world, name, _WORLD[name]())
    c10d_cpp._unregister_all_process_groups()


def make_ringar_the_default() -> None:
    """Let ``init_process_group()`` without a backend make a group of the backend ``ringar``."""
    importlib.import_module("pyringar.distributed")
    own: Any = distributed_c10d._new_process_group_helper

    def make(size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        backend = "ringar" if str(backend) == "undefined" else backend
        return own(size, rank, ranks, backend, *args, **kwargs)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def _take_backend(undo: contextlib.ExitStack, make_group: Callable[[Any], Any]) -> None:
    plugins: Any = dist.Backend._plugins
    own = plugins["RINGAR"]

    def create(options: Any, more: Any) -> Any:
        return own.creator_fn(options, more) if current() is None else make_group(options)

    undo.callback(plugins.__setitem__, "RINGAR", own)
    plugins["RINGAR"] = type(own)(create, True)


_PLACES = {
    "TCPStore": ("host_name", "port"),
    "FileStore": ("file_name",),
    "PrefixStore": ("prefix", "store"),
}


def _take_stores(undo: contextlib.ExitStack, store: ThreadStore) -> None:
    """Give ranks stores of the cluster, for the classes of torch that they name."""
    for name in _PLACES:
        own: Any = getattr(distributed_c10d, name, getattr(dist, name))
        kind = type("_Kind", (type(own),), {"__instancecheck__": partial(_is_store_of, own)})
        made = kind(name, (own,), {"__new__": partial(_store_of_rank, own, store)})
        for module in (dist, distributed_c10d, _rendezvous):
            if hasattr(module, name):
                replace(undo, module, name, made)


def _is_store_of(own: Any, store: Any) -> bool:
    return store.kind is own if isinstance(store, ThreadStore) else isinstance(store, own)


def _store_of_rank(own: Any, root: ThreadStore, _: Any, *where: Any, **options: Any) -> Any:
    names = _PLACES[own.__name__]
    place = [*where[: len(names)], *(options.get(name) for name in names[len(where) :])]
    if isinstance(place[-1], ThreadStore):
        return place[-1].view(f"{place[0]}/", own)
    if current() is None or own.__name__ == "PrefixStore" or None in place:
        return own(*where, **options)
    return root.store_at(own, place)


def _outside_ranks(own: Any, *args: Any) -> Any:
    return own(*args) if current() is None else None


def _tell_mesh_apart(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a mesh that differs from those of other ranks, which torch's caches take for one."""
    own(self, *args, **kwargs)
    rank = current()
    if rank is not None:
        self._thread_id, self._hash = rank.identity, None


def _take_environment(undo: contextlib.ExitStack) -> None:
    environ: Any = os.environ
    outside: dict[Any, Any] = environ._data
    mine = Environment(outside, lambda: getattr(current(), "environment", None))

    def put_back() -> None:
        mine.give_to_process()
        environ._data = os.environb._data = outside  # type: ignore[attr-defined]

    undo.callback(put_back)
    environ._data = os.environb._data = mine  # type: ignore[attr-defined]


def _take_compiler(undo: contextlib.ExitStack, frames: Any) -> None:
    """Run compiled functions of ranks as they are: ranks would share what torch compiles.

    Dynamo keeps compiled code with the function, for the rank, group and mesh of the first caller.
    """
    own = frames._callback_from_stance

    def choose(callback: Any) -> Any:
        if current() is None or callback in (None, False):
            return own(callback)
        _say_once("torch.compile: ranks that are threads of one process run uncompiled")
        return None

    replace(undo, frames, "_callback_from_stance", choose)
    replace(undo, frames, "_stance", frames.DynamoStance("force_eager"))  # fullgraph asks for it


def _take_dual_levels(undo: contextlib.ExitStack, store: ThreadStore) -> None:
    """Let several ranks be in the one level of forward AD that C++ has.

    It forgets tangents when the last rank leaves. A rank that comes back waits for that.
    """
    inside: set[Rank] = set()
    left: set[Rank] = set()
    key = "forward AD, which other ranks have to leave"

    def enter(own: Any) -> Any:
        rank = current()
        if rank is None or rank in inside:
            return own()
        if rank in left:
            store.wait([key])
        if not inside:
            own()
        inside.add(rank)
        forward_ad._current_level = 0
        return 0

    def leave(own: Any, **level: Any) -> None:
        rank = current()
        if rank not in inside:
            own(**level)
            return
        inside.discard(rank)
        if inside:
            left.add(rank)
            store.delete_key(key)
            forward_ad._current_level = -1
        else:
            left.clear()
            store.set(key, "")
            own(**level)

    wrap(undo, forward_ad, "enter_dual_level", enter)
    wrap(undo, forward_ad, "exit_dual_level", leave)


def _keep_interop_threads(own: Any, num_threads: Any) -> None:
    if current() is None:
        own(num_threads)
    elif num_threads != torch.get_num_interop_threads():
        _say_once(
            f"torch.set_num_interop_threads: {num_threads} was asked for, and the process keeps "
            f"{torch.get_num_interop_threads()}: {WAY}"
        )


def _take_threads(undo: contextlib.ExitStack, note: Callable[[str], None]) -> None:
    """Refuse threads that are no rank's, also where torch looks for a group in vain."""
    own = distributed_c10d._get_default_group
    functional: Any = importlib.import_module("torch.distributed._functional_collectives")

    def get() -> Any:
        try:
            return own()
        except ValueError as error:
            if current() is not None:
                raise
            note(wrong_thread())
            raise ValueError(f"{error} {wrong_thread()}") from error

    def in_own_thread(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if current() is not None:
                this_rank()
            return function(*args, **options)

        return call

    replace(undo, distributed_c10d, "_get_default_group", get)
    for name in ("_resolve_group", "_resolve_group_name"):  # depends on the version of torch
        if hasattr(functional, name):
            replace(undo, functional, name, in_own_thread(getattr(functional, name)))
