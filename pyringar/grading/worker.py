"""The worker process: it calls the graded function on request and describes the results."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError
from pyringar.grading.checks import Raised, Subject
from pyringar.grading.graded_calls import CallCase, OddResult, layouts_of
from pyringar.grading.solution import CannotLoadError, Solution, load

MEMORY_BYTES = 2 << 30
"""Memory that each process of a solution may allocate, and the size limit of its files."""

_ALIGNMENT = 64  # bytes, like torch's allocator
# Bytes for three copies (call, list, tensors) of two million floats on two ranks.
_BYTES = 96 << 20
_BYTES_PER_RANK = 1 << 20  # bytes for three copies of 65,520 floats
_MAX_FILES = 1 << 16
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_exit = os._exit  # saved here: a solution may replace os._exit


class Arena:
    """A block of memory, shared with forked processes. Untouched pages cost nothing."""

    def __init__(self, num_ranks: int) -> None:
        self._memory = mmap.mmap(-1, _BYTES + num_ranks * _BYTES_PER_RANK)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor at an offset in bytes; ValueError if it does not fit."""
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)
        return flat.view(tuple(shape))

    @staticmethod
    def places(case: CallCase, turn: int) -> list[int]:
        """Return the offset of every rank's memory, and the end of the last memory.

        Every other call has descending addresses, so that a function that adds in the order of
        addresses gives unequal results and is detected.
        """
        ranks = range(case.k) if turn % 2 else reversed(range(case.k))
        layouts = layouts_of(case)
        starts, at = [0] * case.k, 0
        for rank in ranks:
            starts[rank] = at
            at = after(at, layouts[rank].base_shape(case.shape), case.dtype)
        return [*starts, at]


def after(offset: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    end = offset + math.prod(shape) * dtype.itemsize
    return (end // _ALIGNMENT + 2) * _ALIGNMENT


def supervise(control: socket.socket, start_worker: Callable[[], object]) -> NoReturn:
    """Fork the worker and report its end, or kill it when the grader closes ``control``.

    This process is the parent of the worker, but not a child of the grader. So a solution that
    kills its ancestors cannot kill the grader. Lines to the grader: the process ids
    of supervisor and worker; ``alive`` for each byte from the grader; at the end the worker's wait
    status, or ``killed``.
    """
    try:
        os.setsid()
        pid = os.fork()
        if pid == 0:  # send the ids before the solution can kill the supervisor
            control.sendall(f"{os.getppid()} {os.getpid()}\n".encode())
            start_worker()
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, _MAX_FILES)
        control.settimeout(_POLL_S)
        ended, status = 0, 0
        while not ended and not _is_closed(control):
            ended, status = os.waitpid(pid, os.WNOHANG)
        kill_group(pid)
        if not ended:
            os.waitpid(pid, 0)
        control.sendall(b"%d\n" % status if ended else b"killed\n")
    finally:
        _exit(0)


def _is_closed(control: socket.socket) -> bool:
    """Return whether the grader closed the socket within ``_POLL_S``; answer each byte."""
    try:
        received = control.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    if received:
        control.sendall(b"alive\n")
    return not received


def serve(
    target: Solution,
    devices: list[str],
    channel: socket.socket,
    output: int,
    arena: Arena,
    import_limit_s: float,
) -> NoReturn:
    """Load the function, then answer calls until the grader closes the channel.

    The request and the answer of a call are a line of JSON each. ``output``: the descriptor that
    receives the solution's output.
    """
    try:
        _isolate(channel, output)
        _serve(target, devices, channel, arena, import_limit_s)
    except BaseException:  # the grader reports the exit; the traceback shows why
        traceback.print_exc()
        _exit(70)
    _exit(0)


def _isolate(channel: socket.socket, output: int) -> None:
    """Isolate this process from the grader's terminal, files and disk."""
    os.setsid()  # a terminal's Ctrl-C reaches the grader alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate([null, output, output]):
        os.dup2(source, number)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY_BYTES, MEMORY_BYTES))
    # Do not limit RLIMIT_AS: torch with CUDA reserves tens of gigabytes of address space.
    most = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # One thread: a fork has no threads of torch's pool.
    torch.set_num_threads(1)


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process that has just started leads no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):  # on macOS for a zombie
            kill(pid, signal.SIGKILL)


def _data_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
        return 1024 * int(fields["VmData"].split()[0])
    return 0


def _serve(
    target: Solution,
    devices: list[str],
    channel: socket.socket,
    arena: Arena,
    import_limit_s: float,
) -> None:
    requests = channel.makefile("rb")

    def answer(message: dict[str, Any]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        ranks = check_devices(devices)
        pid = os.getpid()
        function, remark = load(target, import_limit_s)
        if os.getpid() != pid:
            _exit(0)
        subject = Subject(function, ranks)
    except ArgumentError as error:
        return answer({"no_device": str(error)})
    except CannotLoadError as error:
        return answer({"cannot_load": str(error)})
    answer({"loaded": [str(device) for device in ranks], "remark": remark})
    for line in requests:
        request = json.loads(line)
        answer(_call(subject, CallCase.from_dict(request["case"]), request["places"], arena))


def _call(subject: Subject, case: CallCase, places: list[int], arena: Arena) -> dict[str, Any]:
    layouts = layouts_of(case)
    shared = [
        arena.tensor(places[rank], layout.base_shape(case.shape), case.dtype)
        for rank, layout in enumerate(layouts)
    ]
    bases = [base.to(subject.devices[rank % subject.most]) for rank, base in enumerate(shared)]
    given = [layout.view(base, case.shape) for layout, base in zip(layouts, bases, strict=True)]
    before = [(t.data_ptr(), t.stride()) for t in given]
    data = list(given)
    pid = os.getpid()
    try:
        returned = subject.call(case, data)
    except Raised as failure:
        return {"raised": failure.detail}
    finally:
        if os.getpid() != pid:  # the solution forked this process
            _exit(0)
    items = _ResultItems(case, arena, places[-1])
    moved = [
        None
        if OddResult.of(t, case) is None and (t.data_ptr(), t.stride()) == was
        else items.add(t)
        for t, was in zip(given, before, strict=True)
    ]
    named = [items.name(found, given) for found in data[: 2 * case.k]]
    for target, base in zip(shared, bases, strict=True):
        if base is not target:  # the base is a copy on a GPU
            target.copy_(base)
    return {"returned": returned, "given": moved, "data": named}


class _ResultItems:
    """Describes the items of the list after the call; copies their tensors for the grader."""

    def __init__(self, case: CallCase, arena: Arena, start: int) -> None:
        self.case = case
        self.arena = arena
        self.at = start
        self._places: dict[int, dict[str, Any]] = {}

    def name(self, found: Any, given: list[Tensor]) -> dict[str, Any]:
        same = [rank for rank, tensor in enumerate(given) if found is tensor]
        return {"rank": same[0]} if same else self.add(found)

    def add(self, found: Any) -> dict[str, Any]:
        """Copy a tensor and return its offset; describe other objects."""
        if id(found) in self._places:
            return self._places[id(found)]
        try:
            other = OddResult.of(found, self.case)
            if other is not None:
                return {"other": other.words[:200]}
            self.arena.tensor(self.at, self.case.shape, self.case.dtype).copy_(found.detach())
        except Exception as error:  # raised by a class of the solution
            return {"other": f"a {type(found).__name__} that raises {type(error).__name__}"}
        place = self._places[id(found)] = {"at": self.at}
        self.at = after(self.at, self.case.shape, self.case.dtype)
        return place
