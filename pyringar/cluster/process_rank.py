"""One rank that is a forked process: from the fork to the message with its result."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing.process
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from pyringar.cluster import internals
from pyringar.cluster.board import Board, Publisher
from pyringar.cluster.calls import text_of
from pyringar.cluster.report import of_program, stack_of
from pyringar.cluster.state import ProcessState, environment_of
from pyringar.comm.exits import close_all
from pyringar.comm.threads import start_thread
from pyringar.distributed.backend import keep_gloo
from pyringar.errors import PeerLostError, UnsupportedError

__all__ = ["run_rank"]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


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
    keep_gloo()
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
        # The failure of its peer has ended a wait.
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
            with lock:
                channel.send(
                    {"state": state, "progress": progress, "stack": stack, "is_asked": False}
                )
