"""Notice what others use of the processors that we may use, before and while we measure."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_SHARE = 0.10  # of the processors' time; more than that, and figures are the machine's
_STAT = "/proc/stat"
_IDLE = (3, 4)  # the columns of /proc/stat in which nobody worked: idle, iowait
_COUNTED_TWICE = (8, 9)  # guests, who are in user and nice, too
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Others:
    """Tell what other programs did meanwhile.

    Attributes:
        share: Of the time of the processors that we may use; None where the system does not tell.
        load_before: The system's load average when it began.
        load_after: When it was over; our own processes are in it.
    """

    share: float | None
    load_before: float
    load_after: float

    @property
    def are_many(self) -> bool:
        """True where figures would say more about them than about us."""
        return self.share is not None and self.share > MOST_SHARE

    def __str__(self) -> str:
        """Write the share and the load."""
        share = "an unknown share" if self.share is None else f"{self.share:.0%}"
        return (
            f"{share} of the processors' time, load {self.load_before:.1f} before and "
            f"{self.load_after:.1f} after"
        )


class Watch:
    """Counts the processors' time from its making on.

    Args:
        system_s: Gives the seconds that these processors have worked; None: unknown.
        own_s: Gives the seconds that this process and its children that have ended have worked.
        clock: Gives seconds.
    """

    def __init__(
        self,
        system_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system_s, self._own_s = system_s or processors_s, own_s or own_time_s
        self._clock = clock
        self._load = os.getloadavg()[0]
        self._begin = clock(), self._system_s(), self._own_s()

    def others(self) -> Others:
        """Say what others have done since then. Children of ours must have ended."""
        begin_s, system_begin_s, own_begin_s = self._begin
        seconds, system_s = self._clock() - begin_s, self._system_s()
        share = None
        if system_s is not None and system_begin_s is not None and seconds > 0:
            theirs_s = (system_s - system_begin_s) - (self._own_s() - own_begin_s)
            share = min(1.0, max(0.0, theirs_s / (seconds * len(os.sched_getaffinity(0)))))
        return Others(share, self._load, os.getloadavg()[0])


def others_now(seconds: float = 1.0) -> Others:
    """Say what others do while this process sleeps."""
    watch = Watch()
    time.sleep(seconds)
    return watch.others()


def refusal(others: Others) -> str | None:
    """Return why nothing should be measured now; None if it may be."""
    if not others.are_many:
        return None
    return (
        f"other programs use {others}: what is measured now would be about them.\n"
        "Measure when they are over; or with --allow-busy, which marks every table and summary."
    )


def processors_s() -> float | None:
    """Return the seconds that the processors that we may use have worked, whoever for.

    None where the system does not tell, which Linux does.
    """
    try:
        ours = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        with open(_STAT, encoding="ascii") as file:
            lines = {name: fields for name, *fields in map(str.split, file) if name in ours}
        columns = [n for n in range(10) if n not in _IDLE + _COUNTED_TWICE]
        ticks = sum(int(lines[name][n]) for name in ours for n in columns)
    except (AttributeError, OSError, ValueError, LookupError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def own_time_s() -> float:
    """Return the seconds that this process and its children that have ended have worked.

    A program that leaves its parent, as Open MPI's daemons do on other machines, is a child of ours
    after `adopt_orphans`; without it, the time of all that it starts is other programs'.
    """
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def adopt_orphans() -> None:
    """Become the parent of those of our descendants whose parent ends before them: Linux.

    Raises:
        OSError: The system does not do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def wait_for_orphans(deadline_s: float = 10.0) -> None:
    """Wait for all children of this process, adopted ones included: only then are they counted.

    Raises:
        TimeoutError: One is still there after so many seconds.
    """
    ends = time.monotonic() + deadline_s
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            if time.monotonic() > ends:
                raise TimeoutError(f"a child process has not ended after {deadline_s:g} s")
            time.sleep(0.01)
