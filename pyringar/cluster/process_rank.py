"""A rank in its forked process: start, status reports, and the calls that it publishes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import mmap
import multiprocessing.process
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partialmethod
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from pyringar import errors
from pyringar.cluster import internals
from pyringar.cluster.rank_calls import call_of_program, is_good_exit, some, text_of
from pyringar.cluster.rank_table import of_program, stack_of
from pyringar.cluster.state import ProcessState, environment_of
from pyringar.comm.exits import close_all
from pyringar.comm.threads import start_thread
from pyringar.distributed import backend
from pyringar.errors import PeerLostError, RingarError, UnsupportedError

REPORT_S = 0.25  # seconds between two status reports of a rank
_SLOT_BYTES = 1 << 16
# Modules with functions that wait for a Work; DistributedDataParallel waits in torch.autograd.
_WAITING = ("pyringar.", "torch.autograd", "torch.distributed", "torch.futures")
# Methods of a process group that wait for other ranks.
_METHODS = re.compile(
    "_allgather|_reduce_scatter|all(?!ocate)|reduce|broadcast|gather|scatter|send|recv|.*barrier"
)
# Functions of torch.distributed, by the methods that DistributedDataParallel calls.
_FUNCTIONS = {"allreduce": "all_reduce", "allgather": "all_gather"}
# torch's text of an error in the callback of a future.
_CALLBACK_ERROR = re.compile(r"Got the following error .* callback: (\w+): (.*?)(\n\nAt:|$)", re.S)


class RankStatus(NamedTuple):
    """Status of a rank, sent to `launch` at intervals and at the end of the program."""

    state: str = "runs"  # shown in tables, such as "waits" or "failed: ValueError"
    stack: str = ""  # stack if the program waits or is late; traceback if it failed
    progress: Any = None  # a value that changes with each call and with moved data
    failed_s: float = 0.0  # time of the failure; 0: no failure
    # The pickled result or exception, and the text of an error if it cannot be unpickled.
    pickled: tuple[bytes, str] = (pickle.dumps(None), "")

    def value(self) -> Any:
        data, text = self.pickled
        try:
            return pickle.loads(data)
        except Exception as error:  # for example, this process lacks the class
            raise RingarError(text) from error


class SharedValue:
    """A value in shared memory, which remains readable after the writing process dies.

    Writes alternate between two slots, so a process killed during a write leaves the old value.
    """

    def __init__(self, default: Any) -> None:
        self._default = default
        self._slots = [mmap.mmap(-1, _SLOT_BYTES) for _ in range(2)]
        self._last = mmap.mmap(-1, 1)  # number of the slot with the current value

    def set(self, value: Any) -> None:
        data = pickle.dumps(value)[:_SLOT_BYTES]
        slot = 1 - self._last[0]
        self._slots[slot][: len(data)] = data
        self._last[0] = slot

    def get(self) -> Any:
        """Return the value; return the default if the value is unset or too long for a slot."""
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            return pickle.loads(self._slots[self._last[0]])
        return self._default


def run_rank(
    index: int,
    pipes: Sequence[Connection],
    last_call: SharedValue,
    state: ProcessState,
    program: Callable[[], Any],
    devices: Sequence[torch.device],
    timeout_s: float,
    port: int,
) -> None:
    channel, *outputs = pipes
    _leave_parent(outputs)
    pid = os.getpid()
    publisher = Publisher(channel, last_call, len(devices))
    me = threading.get_ident()
    observer = start_thread("reports of this rank", publisher.observe, me, timeout_s / 2)
    try:
        _become_rank(index, state, devices, port)
        result = program()
        text = f"rank {index} returned {type(result).__name__}, which cannot be pickled"
        end = RankStatus("returned", pickled=_pickled(result, text))
    except BaseException as error:
        end = _end_by(error)
        if end.failed_s and os.getpid() != pid:  # a child that the program forked failed
            raise
    if os.getpid() == pid:
        publisher.has_ended.set()
        observer.join()
        channel.send(end)
    atexit._run_exitfuncs()
    backend.keep_gloo()
    with contextlib.suppress(RuntimeError):  # a rank has already reported the error
        close_all()


def _leave_parent(outputs: Sequence[Connection]) -> None:
    parent: Any = multiprocessing.process.parent_process()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    if os.getppid() != parent.pid:  # the parent had ended before prctl
        os._exit(1)
    signal.set_wakeup_fd(-1)
    handlers = {signal.SIGINT: signal.default_int_handler}
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, handlers.get(number, signal.SIG_DFL))
    atexit._clear()
    multiprocessing.process.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    for fd, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(outputs[fd - 1].fileno(), fd)
        stream = open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    faulthandler.enable(2)


def _become_rank(
    index: int, state: ProcessState, devices: Sequence[torch.device], port: int
) -> None:
    os.environb.update(environment_of(index, len(devices), devices[index]))
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP cannot start threads after a fork
    torch.set_num_threads(1)
    torch.set_num_threads = _keep_one_thread  # type: ignore[assignment]
    torch.set_grad_enabled(True)
    state.restore()
    internals.forget_groups_of_parent()
    if devices[index].type == "cuda":
        torch.cuda.set_device(devices[index])
    else:
        internals.make_ringar_the_default()


def _keep_one_thread(number: int) -> None:
    if number != 1:
        logging.getLogger(__name__).warning(
            "torch.set_num_threads(%d): ranks that are forked processes compute on one thread, "
            "since OpenMP starts no threads after a fork",
            number,
        )


def _pickled(value: Any, text: str) -> tuple[bytes, str]:
    try:
        return pickle.dumps(value), text
    except Exception as error:  # methods of the program's class may raise any exception
        return b"", f"{text}: {text_of(error)}"


def _end_by(error: BaseException) -> RankStatus:
    if is_good_exit(error):
        return RankStatus("returned")
    sys.last_value = error  # close_all reads it, and aborts running calls
    trace, error = of_program(error.__traceback__), _of_callback(error)
    lines = traceback.format_exception(type(error), error, trace)
    text = text_of(error)
    if "wiki/Autograd-and-Fork" in text:
        error = UnsupportedError(
            "launch: ranks that are forked processes cannot run backward, because the first "
            "backward of this process, beside a GPU or after torch.compile, has started threads; "
            "launch before that, or use torchrun"
        )
    # PeerLostError means that another rank failed, for which this rank waited.
    state = "waits" if isinstance(error, PeerLostError) else f"failed: {type(error).__name__}"
    return RankStatus(state, "".join(lines), None, time.monotonic(), _pickled(error, text))


def _of_callback(error: BaseException) -> BaseException:
    """Return the error of a failed call, whose text is in a RuntimeError of `backward`."""
    found = _CALLBACK_ERROR.match(str(error)) if type(error) is RuntimeError else None
    kind = getattr(errors, found[1], None) if found else None
    return kind(found[2]) if found and kind else error


class Publisher:
    """Publishes the calls of this rank's process groups, and reports its status."""

    def __init__(self, channel: Connection, last_call: SharedValue, world_size: int) -> None:
        self._channel = channel
        self._last_call = last_call
        self._world_size = world_size
        self.has_ended = threading.Event()  # set at the end of the program
        self._numbers: dict[str, int] = {}  # group name to the number of its last call
        self._num_calls = 0
        self._inside: set[int] = set()  # ids of threads inside a call
        self._group: Any = None
        self._work: Any = None
        kinds = (dist.ProcessGroup, backend.RingarProcessGroup)
        for kind in kinds:
            for name in filter(_METHODS.match, dir(kind)):
                setattr(kind, name, self._published(getattr(kind, name), name))
        backend.keep_dynamo_out(*kinds)
        store: Any = dist.Store  # type: ignore[attr-defined]
        for name in ("get", "wait"):
            setattr(store, name, partialmethod(_in_store, getattr(store, name)))
        work: Any = distributed_c10d.Work
        work.wait = partialmethod(_in_work, work.wait)

    def observe(self, thread: int, late_s: float) -> None:
        """Report the status of the program's thread at intervals.

        Read the stack of a running rank only after ``late_s`` seconds without a call: Python 3.11
        may crash when a thread reads the frames of another running thread.
        """
        progress, moved_s = None, time.monotonic()
        while not self.has_ended.wait(REPORT_S):
            before, progress = progress, self._progress()
            if progress != before:
                moved_s = time.monotonic()
            is_pending = self._work is not None and not self._work.is_completed()
            is_late = time.monotonic() - moved_s > late_s
            is_shown = self._inside or is_pending or is_late
            frame = sys._current_frames().get(thread) if is_shown else None
            is_waiting = bool(self._inside) or (is_pending and _may_wait(frame))
            state = "waits" if is_waiting else "waits in the store" if _joins(frame) else "runs"
            stack = "" if frame is None else stack_of(frame, after=run_rank.__code__)
            self._channel.send(RankStatus(state, stack, progress))

    def _progress(self) -> tuple[int, Any]:
        engine = getattr(getattr(self._group, "_comm", None), "_group", None)
        return self._num_calls, engine.progress() if engine is not None else 0

    def _published(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread in self._inside:  # a group method called this method
                return method(group, *args, **kwargs)
            self._inside.add(thread)
            self._group = group
            try:
                self._publish(group, name, [*args, *kwargs.values()])
                self._work = work = method(group, *args, **kwargs)
                return work
            finally:
                self._inside.remove(thread)

        return call

    def _publish(self, group: Any, name: str, args: list[Any]) -> None:
        known = distributed_c10d._world.pg_group_ranks.get(group)
        ranks = list(known or getattr(group, "_global_ranks", None) or range(self._world_size))
        is_world = len(ranks) == self._world_size
        key = "the world" if is_world else f"group {', '.join(map(str, ranks))}"
        groups = distributed_c10d._world.pg_group_ranks.items()
        alike = [other for other, members in groups if list(members) == ranks]
        if group in alike[1:]:
            key += f" #{alike.index(group) + 1}"
        rows = [[t for t in tree_leaves([arg]) if isinstance(t, torch.Tensor)] for arg in args]
        tensors = next((row for row in reversed(rows) if row), [])  # inputs follow outputs
        ops = [a.reduceOp for a in args if hasattr(a, "reduceOp")]
        details = [getattr(op, "op", op).name.lower() for op in ops]
        roots = [a.rootRank for a in args if hasattr(a, "rootRank")]
        details += [f"root {ranks[r] if 0 <= r < len(ranks) else r}" for r in roots]
        number = 0  # stays 0 for a message
        if name in ("send", "recv"):
            ranks = [ranks[args[1]]]
            details.append(f"{'to' if name == 'send' else 'from'} {ranks[0]}")
        elif not name.startswith("recv"):
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
        self._num_calls += 1
        line, function = call_of_program()
        text = function or _FUNCTIONS.get(name, name)
        text += f" ({', '.join(details)})" if details else ""
        shapes = some(tuple(tensor.shape) for tensor in tensors)
        dtypes = some(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
        columns = (text, str(number or ""), key, shapes, dtypes, line)
        self._last_call.set((self._num_calls, number, columns, ranks, self._numbers))


def _joins(frame: FrameType | None) -> bool:
    return frame is not None and any(
        outer.f_globals is vars(distributed_c10d) or outer.f_code is _in_store.__code__
        for outer, _ in traceback.walk_stack(frame)
    )


def _may_wait(frame: FrameType | None) -> bool:
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith(_WAITING)


def _in_work(work: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a C++ method of a Work, in a Python frame that stack traces show."""
    return method(work, *args, **kwargs)


def _in_store(store: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a C++ method of a store, in a Python frame by which `_joins` detects the wait."""
    return method(store, *args, **kwargs)
