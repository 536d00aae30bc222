"""The graded process: it calls the function on request, and describes the list afterwards."""

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
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError
from pyringar.grading.graded_calls import CallCase, OddResult, layouts_of
from pyringar.grading.checks import Raised, Subject
from pyringar.grading.solution import CannotLoadError, Solution, load

MEMORY_BYTES = 2 << 30
"""Memory that each process of a solution may allocate, and its largest file."""

_ALIGNMENT = 64  # bytes, as torch aligns
# Two million floats of two ranks three times (the call, the list, the tensors), and some more.
_BYTES = 96 << 20
_BYTES_PER_RANK = 1 << 20  # 65,537 floats three times, and some more
_MAX_FILES = 1 << 16
_PR_SET_PDEATHSIG = 1
_exit = os._exit  # a solution may put something else there


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
        """Return where the memory of every rank begins, and where the last one ends.

        Ranks lie in descending order in every other call, so that addresses tell the function
        nothing.
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


def serve(
    target: Solution, devices: list[str], channel: socket.socket, output: int, arena: Arena
) -> NoReturn:
    """Load the function, then answer calls until the grader closes the channel.

    ``channel`` takes a line of JSON for each call, and returns one. ``output``: the descriptor that
    takes the solution's output.
    """
    try:
        _settle_in(channel, output)
        _serve(target, devices, channel, arena)
    except BaseException:  # the grader says that it ended, this says why
        traceback.print_exc()
        _exit(70)
    _exit(0)


def _settle_in(channel: socket.socket, output: int) -> None:
    """Isolate this process from the grader's terminal, files and disk."""
    os.setsid()  # Ctrl-C is the grader's
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
    # Not RLIMIT_AS: torch reserves far more than it uses, tens of gigabytes with CUDA.
    most = _data_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # The pool of threads that torch had before the fork is not here.
    torch.set_num_threads(1)


def _data_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
        return 1024 * int(fields["VmData"].split()[0])
    return 0


def _serve(target: Solution, devices: list[str], channel: socket.socket, arena: Arena) -> None:
    requests = channel.makefile("rb")

    def answer(message: dict[str, Any]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    try:
        ranks = check_devices(devices)
        pid = os.getpid()
        function = load(target)
        if os.getpid() != pid:
            _exit(0)
        subject = Subject(function, ranks)
    except ArgumentError as error:
        return answer({"no_device": str(error)})
    except CannotLoadError as error:
        return answer({"cannot_load": str(error)})
    answer({"loaded": [str(device) for device in ranks]})
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
        if os.getpid() != pid:  # the solution has forked, and this is its child
            _exit(0)
    things = _Things(case, arena, places[-1])
    moved = [
        None
        if OddResult.of(t, case) is None and (t.data_ptr(), t.stride()) == was
        else things.add(t)
        for t, was in zip(given, before, strict=True)
    ]
    named = [things.name(found, given) for found in data[: 2 * case.k]]
    for target, base in zip(shared, bases, strict=True):
        if base is not target:  # on a GPU
            target.copy_(base)
    return {"returned": returned, "given": moved, "data": named}


class _Things:
    """The items that a function left in the list, described or copied for the grader."""

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
        except Exception as error:  # a class of the solution's own may do anything
            return {"other": f"a {type(found).__name__} that raises {type(error).__name__}"}
        place = self._places[id(found)] = {"at": self.at}
        self.at = after(self.at, self.case.shape, self.case.dtype)
        return place
