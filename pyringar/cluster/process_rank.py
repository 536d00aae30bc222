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
from pyringar.errors import RingarError, UnsupportedError

__all__ = ["run_rank"]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def run_rank(
    program: Callable[[], Any],
    index: int,
    devices: Sequence[torch.device],
    port: int,
    board: Board,
    channel: Connection,
    outputs: Sequence[int],
    parent: int,
) -> None:
    """Run the program as a rank, in a process forked for it, and send what came of it.

    Args:
        program: The function of `pyringar.launch`.
        index: The rank.
        devices: Of all ranks.
        port: Of the store that all ranks share.
        board: Where the rank publishes its calls.
        channel: To `launch`, in the process ``parent``.
        outputs: File descriptors that become 1 and 2.
        parent: The process that the rank may not outlive.
    """
    _leave_parent(parent, outputs)
    _become_rank(index, devices, port)
    link = _Link(channel, Publisher(board, index, len(devices)))
    try:
        try:
            result = program()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            result = None
        link.send("returned", _pickled(index, result))
    except BaseException as error:
        sys.last_value = error  # tells close_all that the program has failed
        link.send("failed", *_portable(error))
    atexit._run_exitfuncs()
    keep_gloo()
    with contextlib.suppress(RuntimeError):  # told to the other ranks, or in the result
        close_all()
    sys.stdout.flush()
    sys.stderr.flush()


def _leave_parent(parent: int, outputs: Sequence[int]) -> None:
    """Replace what belongs to the process of `launch`: signals, streams, handlers at exit."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before that call
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    multiprocessing.process.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    for fd, (output, name) in enumerate(zip(outputs, ("stdout", "stderr"), strict=True), start=1):
        os.dup2(output, fd)
        os.close(output)
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


def _pickled(index: int, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise RingarError(
            f"rank {index} returned {type(result).__name__}, which cannot be pickled for the "
            f"process that called launch: {text_of(error)}"
        ) from error


def _portable(error: BaseException) -> tuple[bytes, str, float]:
    """Return an exception pickled, its traceback, and the time."""
    lines = traceback.format_exception(type(error), error, of_program(error.__traceback__))
    if "wiki/Autograd-and-Fork" in str(error):
        error = UnsupportedError(
            "launch: ranks that are forked processes cannot run backward, because the first "
            "backward of this process, beside a GPU or after torch.compile, has started threads; "
            "launch before that, or use torchrun"
        )
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # the methods of a program's class may raise any
        data = pickle.dumps(RingarError(text_of(error)))
    return data, "".join(lines), time.monotonic()


class _Link:
    """The rank's end of its pipe to `launch`; a thread answers what the rank does."""

    def __init__(self, channel: Connection, publisher: Publisher) -> None:
        self._channel = channel
        self._publisher = publisher
        self._lock = threading.Lock()
        self._program = threading.get_ident()
        start_thread("state of this rank", self._answer)

    def send(self, kind: str, *values: Any) -> None:
        data = pickle.dumps((kind, *values))
        with self._lock:
            self._channel.send_bytes(data)

    def _answer(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._channel.recv_bytes()
                frame = sys._current_frames().get(self._program)
                stack = stack_of(frame, after=run_rank.__code__)
                self.send("state", *self._publisher.state(), stack)
