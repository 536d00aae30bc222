"""One rank of a cluster, and which rank a thread belongs to."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pyringar.cluster.state import ProcessState
from pyringar.errors import RingarError

if TYPE_CHECKING:
    from pyringar.cluster.calls import Wait

__all__ = ["Rank", "belong_to", "current", "noting_threads", "this_rank", "wrong_thread"]

_here = threading.local()
_identities = itertools.count(1)


def current() -> Rank | None:
    """Return the rank that runs in this thread or that started it; None without a live one."""
    rank: Rank | None = getattr(_here, "rank", None)
    return None if rank is None or rank.is_gone else rank


def this_rank() -> Rank:
    """Return the rank that runs in this thread.

    Raises:
        RingarError: It is another thread. If a rank started it, the run ends with this error.
    """
    rank = current()
    if rank is None:
        raise RingarError(wrong_thread())
    rank.check_thread()
    return rank


def wrong_thread() -> str:
    """Return the text of the error for torch.distributed in a thread that is no rank's own."""
    return (
        f"torch.distributed was called in {threading.current_thread().name!r}, expected the rank's "
        "own thread: run a program that calls it in several threads or forked children with "
        "pr.launch(..., processes=True), or with torchrun"
    )


def belong_to(rank: Rank | None) -> None:
    """Make this thread a rank's own; None: no rank's."""
    _here.rank, _here.is_own = rank, True


@contextlib.contextmanager
def noting_threads() -> Iterator[None]:
    """Note which threads ranks start, and which threads these start."""
    start = threading.Thread.start

    def start_noted(thread: threading.Thread) -> None:
        rank = current()
        if rank is None:
            return start(thread)
        run = thread.run

        def run_noted() -> None:
            _here.rank, _here.is_own = rank, False
            del thread.run  # or the thread would refer to itself
            run()

        thread.run = run_noted  # type: ignore[method-assign]
        with rank.starting:
            start(thread)
            rank.threads = [*rank.live_threads(), thread]

    threading.Thread.start = start_noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


class Rank:
    """Hold the state of one rank while its cluster runs.

    Args:
        index: Its number.
        device: Where its tensors are, if its program asks.
        environment: Its ``os.environ``.
        refuse: Ends the run because of a call in a wrong thread; returns the error.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        environment: Mapping[Any, Any],
        refuse: Callable[[], BaseException],
    ) -> None:
        self.index = index
        self.device = device
        self.environment = dict(environment)
        self.identity = next(_identities)
        """Tells meshes of ranks, also of other clusters, apart."""
        self.thread: threading.Thread | None = None
        self.threads: list[threading.Thread] = []
        """Threads that it has started."""
        self.starting = threading.RLock()
        """Held while it starts a thread."""
        self._refuse = refuse
        self._pid = os.getpid()

        self.is_running = False
        """Whether the schedule has chosen it. `_go` only wakes its thread."""
        self._go = threading.Lock()
        self._go.acquire()
        self.waits_for: Wait | None = None
        """None while it runs, before it has begun and when it has ended."""
        self.has_asked = False
        """Its last call asked for something that was not there."""
        self.asks_for: Wait | None = None
        """What it polls without waiting; None: it does not poll."""
        self.has_ended = False
        self.is_gone = False
        """Its cluster is over; a thread that is left behind belongs to no rank."""
        self.result: Any = None
        self.error: BaseException | None = None

        self.num_calls = 0
        self.futures: list[Any] = []  # of its works, not complete
        self.pending_error: BaseException | None = None
        """An exception of a callback that torch would not let through."""
        self.world: dict[str, Any] = {}
        """Its groups, as torch.distributed keeps them."""
        self.main: ModuleType | None = None  # where it runs a script
        self.num_groups: dict[Any, int] = {}  # by name
        self.state: ProcessState | None = None  # with which it begins

    def check_thread(self) -> None:
        """Refuse a thread that is not the rank's own, while there is a run.

        Raises:
            RingarError: It is another one. The run ends with this error: others may wait for the
                call that is refused.
        """
        is_own = getattr(_here, "rank", None) is self and _here.is_own
        if os.getpid() != self._pid:
            raise RingarError(wrong_thread())
        if not (is_own or self.is_gone):
            raise self._refuse()

    def live_threads(self) -> list[threading.Thread]:
        """Return the threads that it has started and that have not ended."""
        return [thread for thread in self.threads if thread.is_alive()]

    def wake(self) -> None:
        """Wake its thread, which looks whether it was chosen."""
        if self._go.locked():
            self._go.release()

    def await_turn(self) -> None:
        """Return when it is chosen."""
        while not self.is_running:
            self._go.acquire()

    def complete_futures(self) -> None:
        """Complete futures whose works are done, one by one: callbacks may wait for others.

        Raises:
            BaseException: A callback raised what no future can hold, such as KeyboardInterrupt.
        """
        for future in list(self.futures):
            if future in self.futures and future.is_over():
                self.futures.remove(future)
                future.complete()
        if self.pending_error is not None:
            error, self.pending_error = self.pending_error, None
            raise error

    def let_go(self) -> None:
        """Forget its program's objects, when it has ended."""
        self.is_gone, self.main = True, None
        futures, self.futures = self.futures, []
        for future in futures:  # C++ would hold their callbacks for ever
            future.complete()
        self.result = self.error = self.state = self.waits_for = None
        self.asks_for = self.pending_error = None
        self.world, self.environment, self.num_groups, self.threads = {}, {}, {}, []

    def __str__(self) -> str:
        return f"rank {self.index}"
