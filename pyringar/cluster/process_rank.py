"""One rank that is a forked process: its start, its messages to `launch`, its published calls."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from pyringar.cluster import internals
from pyringar.cluster.calls import call_of_program, some, text_of
from pyringar.cluster.report import of_program, stack_of
from pyringar.cluster.state import ProcessState, environment_of
from pyringar.comm.exits import close_all
from pyringar.comm.threads import start_thread
from pyringar.distributed import backend
from pyringar.distributed.convert import reduction_name
from pyringar.errors import PeerLostError, UnsupportedError

__all__ = ["Board", "run_rank"]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_SLOT_BYTES = 2048
# The methods of a process group that wait for other ranks.
_METHODS = re.findall(
    r"\w+",
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced _allgather_base "
    "all_gather_single allgather_into_tensor_coalesced gather scatter reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced alltoall "
    "alltoall_base all_to_all_single send recv recv_anysource barrier monitored_barrier "
    "all_gather_single_coalesced gather_into_tensor gather_single reduce_scatter_single_coalesced",
)


def run_rank(
    index: int,
    channel: Connection,
    stdout: Connection,
    stderr: Connection,
    program: Callable[[], Any],
    devices: Sequence[torch.device],
    port: int,
    board: Board,
) -> None:
    """Run the program as a rank, in a process forked for it, and send what came of it."""
    _leave_parent([stdout, stderr])
    pid, lock = os.getpid(), threading.Lock()
    publisher = Publisher(board, index, len(devices))
    start_thread("state of this rank", _answer, channel, lock, publisher, threading.get_ident())
    try:
        _become_rank(index, devices, port)
        result = _run(program)
        what = f"rank {index} returned {type(result).__name__}, which cannot be pickled"
        message = {"outcome": "returned", "result": _pickled(result, what)}
    except BaseException as error:
        if os.getpid() != pid:  # a child that the program forked
            raise
        sys.last_value = error  # tells close_all that the program has failed
        message = _failure(error)
    if os.getpid() == pid:
        with lock:
            channel.send(message)
    atexit._run_exitfuncs()
    backend.keep_gloo()
    with contextlib.suppress(RuntimeError):  # told to the other ranks, or in the result
        close_all()


def _leave_parent(outputs: Sequence[Connection]) -> None:
    """Replace what belongs to the process of `launch`: signals, streams, handlers at exit."""
    parent: Any = multiprocessing.process.parent_process()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before that call
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    atexit._clear()
    multiprocessing.process.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    for fd, (output, name) in enumerate(zip(outputs, ("stdout", "stderr"), strict=True), start=1):
        os.dup2(output.fileno(), fd)
        output.close()
        stream = open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if faulthandler.is_enabled():
        faulthandler.enable(2)


def _become_rank(index: int, devices: Sequence[torch.device], port: int) -> None:
    os.environb.update(environment_of(index, len(devices), devices[index]))
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["OMP_NUM_THREADS"] = "1"  # OpenMP's other threads have stayed with the parent
    torch.set_num_threads(1)
    torch.set_num_threads = _keep_one_thread  # type: ignore[assignment]
    torch.set_grad_enabled(True)
    ProcessState.fresh(index).restore()
    internals.forget_groups_of_parent()
    if devices[index].type == "cuda":
        torch.cuda.set_device(devices[index])
    else:
        internals.make_ringar_the_default()


def _keep_one_thread(number: int) -> None:
    if number != 1:
        logger.warning(
            "torch.set_num_threads(%d): ranks that are forked processes compute on one thread, "
            "since OpenMP starts no threads after a fork",
            number,
        )


def _run(program: Callable[[], Any]) -> Any:
    try:
        return program()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _pickled(value: Any, text: str) -> tuple[bytes, str]:
    """Return a value for `launch`, and the text of the error if it cannot be pickled."""
    try:
        return pickle.dumps(value), text
    except Exception as error:  # the methods of a program's class may raise any
        return b"", f"{text}: {text_of(error)}"


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the message for `launch` about an exception of the program."""
    lines = traceback.format_exception(type(error), error, of_program(error.__traceback__))
    text = text_of(error)
    if "wiki/Autograd-and-Fork" in text:
        error = UnsupportedError(
            "launch: ranks that are forked processes cannot run backward, because the first "
            "backward of this process, beside a GPU or after torch.compile, has started threads; "
            "launch before that, or use torchrun"
        )
    is_peers = isinstance(error, PeerLostError)
    return {
        # Its wait has ended because a peer failed.
        "outcome": "waits" if is_peers else f"failed: {type(error).__name__}",
        "error": _pickled(error, text),
        "trace": "".join(lines),
        "failed_s": time.monotonic(),
    }


def _answer(channel: Connection, lock: threading.Lock, publisher: Publisher, program: int) -> None:
    """Tell `launch`, whenever it asks, what the thread of the program does."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.recv_bytes()
            frame = sys._current_frames().get(program)
            state, progress = publisher.state(frame)
            stack = stack_of(frame, after=run_rank.__code__)
            answer = {"is_asked": False, "state": state, "progress": progress, "stack": stack}
            with lock:
                channel.send(answer)


class Board:
    """Shared memory with two slots for the last calls of each rank, which outlives the rank.

    A rank that is killed while it writes leaves the call before, in the other slot.
    """

    def __init__(self, num_ranks: int) -> None:
        memory = mmap.mmap(-1, num_ranks * (2 * _SLOT_BYTES + 1))
        self._slots = (ctypes.c_char * _SLOT_BYTES * 2 * num_ranks).from_buffer(memory)
        size_bytes = ctypes.sizeof(self._slots)
        self._last = (ctypes.c_byte * num_ranks).from_buffer(memory, size_bytes)

    def write(self, rank: int, call: dict[str, Any]) -> None:
        """Publish a rank's last call."""
        text = json.dumps(call).encode()
        if len(text) >= _SLOT_BYTES:  # the ranks of a large group, the numbers of many groups
            text = json.dumps({**call, "ranks": [], "numbers": {}}).encode()
        slot = 1 - self._last[rank]
        self._slots[rank][slot].value = text[: _SLOT_BYTES - 1]
        self._last[rank] = slot

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's last call; empty before the first, and if it is too long for a slot."""
        try:
            return dict(json.loads(self._slots[rank][self._last[rank]].value))
        except ValueError:
            return {}


class Publisher:
    """Publish each call that this rank makes of a process group, of any backend."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._numbers: dict[str, int] = {}  # of the last call, by group
        self._num_calls = 0
        self._inside: set[int] = set()  # the threads that are in a call
        self._work: Any = None
        self._group: Any = None
        for kind in (dist.ProcessGroup, backend.RingarProcessGroup, backend.RingarBackend):
            for name in _METHODS:
                if hasattr(kind, name):
                    setattr(kind, name, self._published(getattr(kind, name), name))
            backend.keep_dynamo_out(kind)
        store: Any = dist.Store  # type: ignore[attr-defined]
        for name in ("get", "wait"):
            setattr(store, name, partialmethod(_in_store, getattr(store, name)))

    def state(self, frame: FrameType | None) -> tuple[str, Any]:
        """Return whether the program waits in ``frame``, in words, and a count of its progress."""
        engine = getattr(getattr(self._group, "_comm", None), "_group", None)
        progress = (self._num_calls, engine.progress() if engine is not None else 0)
        if self._inside or not (self._work is None or self._work.is_completed()):
            return "waits", progress
        for outer, _ in traceback.walk_stack(frame):
            # It waits for ranks that join a group, or for a key.
            if outer.f_globals is vars(distributed_c10d) or outer.f_code is _in_store.__code__:
                return "waits in the store", progress
        return "runs", progress

    def _published(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread in self._inside:  # one method of a group calls another
                return method(group, *args, **kwargs)
            self._inside.add(thread)
            self._group = group
            try:
                self._publish(group, name, [*args, *kwargs.values()])
                self._work = work = method(group, *args, **kwargs)
            finally:
                self._inside.remove(thread)
            return work

        return call

    def _publish(self, group: Any, name: str, args: list[Any]) -> None:
        ranks = list(distributed_c10d._world.pg_group_ranks.get(group, ()))
        ranks = ranks or getattr(group, "_global_ranks", None) or list(range(self._world_size))
        is_world = len(ranks) == self._world_size
        key = "the world" if is_world else f"group {', '.join(map(str, ranks))}"
        rows = [[t for t in tree_leaves([arg]) if isinstance(t, Tensor)] for arg in args]
        tensors = next((row for row in reversed(rows) if row), [])  # inputs come after outputs
        details = [f"op {_name_of(a.reduceOp)}" for a in args if hasattr(a, "reduceOp")]
        details += [f"root {a.rootRank}" for a in args if hasattr(a, "rootRank")]
        number = 0
        if name in ("send", "recv"):
            ranks = [ranks[args[1]]]
            details.append(f"{'to' if name == 'send' else 'from'} {ranks[0]}")
        elif name != "recv_anysource":
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
        self._num_calls += 1
        line, function = call_of_program()
        columns = [
            (function or name) + (f" ({', '.join(details)})" if details else ""),
            str(number or ""),
            key,
            some(tuple(tensor.shape) for tensor in tensors),
            some(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)),
        ]
        call = {"columns": columns, "line": line, "in": key, "number": number, "ranks": ranks}
        call |= {"numbers": self._numbers, "calls": self._num_calls}
        self._board.write(self._rank, call)


def _in_store(store: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of C++ from a frame of Python, which the stack shows."""
    return method(store, *args, **kwargs)


def _name_of(reduce_op: Any) -> str:
    try:
        return reduction_name(reduce_op, "")
    except UnsupportedError:  # of another backend
        return str(getattr(reduce_op, "op", reduce_op))
