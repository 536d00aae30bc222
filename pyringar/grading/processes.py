"""Limits of a graded process and all that it starts: its life, its memory, how many there are.

Memory is what the processes have of their own (RssAnon, RssShmem and VmSwap in /proc), beyond what
a fork of the grader has anyway. A limit of address space (RLIMIT_AS) would not do: torch reserves
far more than it uses, tens of gigabytes with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "Family",
    "TooMuchError",
    "adopting_orphans",
    "children",
    "die_with_parent",
    "exit_words",
]

_HAS_PROC = sys.platform == "linux"
_MAX_PROCESSES = 64
# The tensors of the largest call: shared with the grader, the function's own, and two results.
_CALL_BYTES = 4 * 17 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_KILL_SECONDS = 5.0


class TooMuchError(Exception):
    """A solution takes more than its limit; names the limit."""


def exit_words(status: int) -> str:
    """Return how a process ended, from the status of ``os.waitpid``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the process ended with status {code} instead of answering"
    return f"the process was ended by {signal.Signals(-code).name}"


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of orphans that solutions leave behind, to find and end them."""
    if not _HAS_PROC:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that forked it."""
    if _HAS_PROC:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Family:
    """A forked process, the leader of its process group, and all that it starts.

    Args:
        pid: The process.
        older: The grader's other children, which do not belong to it.
        max_bytes: The memory that all of them may have together.
    """

    def __init__(self, pid: int, older: set[int], max_bytes: int) -> None:
        self.pid = pid
        self._older = older
        self._max_bytes = max_bytes
        self._at_fork = _own_bytes(os.getpid())
        self._status: int | None = None

    def check(self) -> None:
        """Raise TooMuchError if they have too much memory, or are too many."""
        # An ended process that its parent has not waited for has no memory.
        held = [size for pid in self._members() if (size := _own_bytes(pid)) > 0]
        if len(held) > _MAX_PROCESSES:
            raise TooMuchError(f"started more than {_MAX_PROCESSES} processes")
        # A fork has the grader's memory and the tensors once more.
        free = self._at_fork + _CALL_BYTES
        if sum(max(0, size - free) for size in held) > self._max_bytes:
            raise TooMuchError(f"used more than {self._max_bytes >> 20} MiB of memory")

    def wait(self, seconds: float) -> int | None:
        """Return the status of the process if it ends in time, else None."""
        ends = time.monotonic() + seconds
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() >= ends:
                break
            else:
                time.sleep(0.001)
        return self._status

    def end(self) -> None:
        """Kill all of them, also those that have left the group."""
        _kill(self.pid)
        self.wait(_KILL_SECONDS)
        ends = time.monotonic() + _KILL_SECONDS
        while (strays := self._members()) and time.monotonic() < ends:
            for pid in strays:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):  # not yet the grader's child
                    os.waitpid(pid, os.WNOHANG)

    def _members(self) -> set[int]:
        """Return the processes that descend from it: orphans have become the grader's."""
        parents = _parents()
        new = {pid for pid, parent in parents.items() if parent == os.getpid()} - self._older
        members: set[int] = set()
        while new:
            members |= new
            new = {pid for pid, parent in parents.items() if parent in new} - members
        return members


def children() -> set[int]:
    """Return the children of this process."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def _kill(pid: int) -> None:
    """End a process, and the whole group that it leads at once: none of it can fork in between."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for zombies
            kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Return the parent of every process that can be seen."""
    parents = {}
    for entry in Path("/proc").iterdir() if _HAS_PROC else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                # The name may hold blanks and brackets: it ends with the last bracket.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    return parents


def _own_bytes(pid: int) -> int:
    """Return the memory that a process has written to, on whatever it lies; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    kinds = ("RssAnon", "RssShmem", "VmSwap")
    return 1024 * sum(int(fields.get(kind, "0").split()[0]) for kind in kinds)
