"""Hold what a graded process may do: its life, its deadline, its memory, what it prints.

Memory is what the process and its children have of their own (RssAnon, RssShmem and VmSwap in
/proc), beyond what they have from the grader. A limit of address space (RLIMIT_AS) would not do:
torch reserves far more than it uses, tens of gigabytes with CUDA.
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
    "CAN_SEE_MEMORY",
    "Family",
    "TooMuchError",
    "adopting_orphans",
    "children",
    "die_with_parent",
    "exit_words",
]

_HAS_PROC = sys.platform == "linux"
_MAX_PROCESSES = 64
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_KILL_SECONDS = 5.0
_PRIVATE = ("RssAnon", "VmSwap")  # what a fork hands down
_UNKNOWN = -1  # no status of a process that has ended


class TooMuchError(Exception):
    """A solution takes more than its limit; says what."""


def exit_words(status: int) -> str:
    """Return how a process ended, from what ``os.waitpid`` says."""
    if status == _UNKNOWN:
        return "the process ended instead of answering"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the process ended with status {code} instead of answering"
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was ended by signal {-code}"


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of what solutions leave behind, so that it can be found and ended."""
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
    """A forked process, and all that it starts.

    Args:
        pid: The process, the leader of a group of its own.
        older: The grader's other children, which are none of it.
        max_bytes: The memory that all of them may have together.

    Attributes:
        given_bytes: The most memory that a call has handed out.
    """

    def __init__(self, pid: int, older: set[int], max_bytes: int) -> None:
        self.pid = pid
        self.given_bytes = 0
        self._older = older
        self._max_bytes = max_bytes
        self._at_fork = _own_bytes(os.getpid(), _PRIVATE)
        self._stack = _stats().get(os.getpid(), (0, 0))[1]
        self._status: int | None = None

    def check(self) -> None:
        """Raise TooMuchError if they have too much memory, or are too many."""
        stats = _stats()
        # What has ended and was not waited for has no memory.
        held = {pid: b for pid in self._members(stats) if (b := _own_bytes(pid)) > 0}
        if len(held) > _MAX_PROCESSES:
            raise TooMuchError(f"started more than {_MAX_PROCESSES} processes")
        # Who was forked, and has started no other program, has the grader's memory and the tensors.
        # The memory shared with the grader holds these, and at most two results for each.
        inherited = self._at_fork + self.given_bytes
        forked = {pid for pid in held if stats[pid][1] == self._stack}
        used = sum(max(0, b - inherited * (pid in forked)) for pid, b in held.items())
        if used - 3 * self.given_bytes > self._max_bytes:
            raise TooMuchError(f"used more than {self._max_bytes >> 20} MiB of memory")

    def wait(self, seconds: float) -> int | None:
        """Return the status of the process if it ends in time, else None."""
        ends = time.monotonic() + seconds
        while self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, as whoever started the grader wished
                pid, status = self.pid, _UNKNOWN
            if pid:
                self._status = status
            elif time.monotonic() >= ends:
                break
            else:
                time.sleep(0.001)
        return self._status

    def end(self) -> None:
        """Kill all of them, also those that have left the group."""
        _kill_group(self.pid)
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(_KILL_SECONDS)
        ends = time.monotonic() + _KILL_SECONDS
        while (strays := self._members(_stats())) and time.monotonic() < ends:
            for pid in strays:
                _kill_group(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _members(self, stats: dict[int, tuple[int, int]]) -> set[int]:
        """Return the processes that descend from it: orphans have become the grader's."""
        first = {pid for pid, (parent, _) in stats.items() if parent == os.getpid()} - self._older
        members, new = set(first), first
        while new:
            new = {pid for pid, (parent, _) in stats.items() if parent in new} - members
            members |= new
        return members


def children() -> set[int]:
    """Return the children of this process."""
    return {pid for pid, (parent, _) in _stats().items() if parent == os.getpid()}


def _kill_group(pid: int) -> None:
    """End the whole group that a process leads, at once: none of it can fork in between."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _stats() -> dict[int, tuple[int, int]]:
    """Return of every process that can be seen its parent, and where its stack begins.

    The latter is drawn by chance when a program starts, and a fork keeps it.
    """
    stats = {}
    for entry in Path("/proc").iterdir() if _HAS_PROC else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # A name may hold blanks and brackets: it ends with the last bracket.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                stats[int(entry.name)] = int(fields[1]), int(fields[25])
    return stats


def _own_bytes(pid: int, kinds: tuple[str, ...] = (*_PRIVATE, "RssShmem")) -> int:
    """Return the memory that a process has written to, on whatever it lies; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * sum(int(fields.get(kind, "0").split()[0]) for kind in kinds)


CAN_SEE_MEMORY = _own_bytes(os.getpid()) > 0
