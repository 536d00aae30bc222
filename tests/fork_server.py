"""Fork server for ranks of tests: it imports torch once, since that takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
START_S = 60.0
_PR_SET_PDEATHSIG = 1


class ForkServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control.settimeout(START_S)
        self._replies = self._control.makefile("r")
        ready = self._replies.readline()
        assert ready, "the fork server did not start"
        self._pid = int(ready)
        self._lock = threading.Lock()  # one request at a time

    def fork(self, what: str, descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._control, [f"fork {what}\n".encode()], descriptors)
            return int(self._replies.readline())

    def reap(self, pid: int) -> int:
        with self._lock:
            self._control.sendall(f"reap {pid}\n".encode())
            reply = self._replies.readline()
        assert reply, f"process {pid} does not end"
        return os.waitstatus_to_exitcode(int(reply))

    def children(self) -> set[int]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        return {int(child) for child in children.split()}


@functools.cache
def servers() -> dict[str, ForkServer]:
    if sys.platform != "linux":
        pytest.skip("ranks in processes need Linux")
    from pyringar.engine import load

    load.engine()  # compile now, since waiting ranks could time out
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(HERE / "fork_server.py"), str(theirs.fileno())]
    subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=HERE)
    theirs.close()
    return {"ranks": ForkServer(ours)}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _import(module: str) -> None:
    if module not in sys.modules:
        with contextlib.suppress(BaseException):  # ranks report the error
            importlib.import_module(module)
        gc.freeze()  # the garbage collector of a rank then skips the imported objects


def _mend_torch() -> None:
    """Let torch replace its thread pool now: two threads that do so at once would crash."""
    import torch

    torch.set_num_threads(1)


def _be_rank(channel: int) -> None:
    import rank_processes

    code = 1
    try:
        rank_processes.work(Connection(channel))
        threading._shutdown()  # type: ignore[attr-defined]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(control: socket.socket) -> None:
    """Fork and reap ranks on request, until the tests close the socket."""
    control.sendall(f"{os.getpid()}\n".encode())
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 256, 4)
        if not message:
            return
        verb, what = message.decode().split()
        if verb == "reap":
            reply = os.waitpid(int(what), 0)[1]
        else:
            _import(what)
            reply = os.fork()
            if reply == 0:
                control.close()
                _die_with_parent()
                _mend_torch()
                _be_rank(*descriptors)
            for fd in descriptors:
                os.close(fd)
        control.sendall(f"{reply}\n".encode())


def _main(control: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest; ranks restore the handler
    sys.path.append(str(HERE / "conformance"))  # ranks run functions of its modules
    _die_with_parent()
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # takes seconds; optimizers and DDP import it at first use

    import pyringar
    from pyringar.engine import load

    load.engine()
    for name in pyringar.__all__:
        getattr(pyringar, name)  # import here, not again in each rank
    gc.freeze()
    _serve(control)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
