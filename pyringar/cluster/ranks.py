"""One rank of a cluster, and which rank a thread belongs to."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pyringar.cluster.state import ProcessState

if TYPE_CHECKING:
    from pyringar.cluster.calls import Wait

__all__ = ["Rank", "belong_to", "current", "place_of_wait", "this_rank"]

_here = threading.local()
_identities = itertools.count(1)
# Where threads wait for each other: modules, and their functions.
_WAITING = (
    *("threading", "queue", "concurrent.futures._base", "concurrent.futures.thread"),
    "selectors",  # asyncio's loops
)
_WAITS = ("wait", "wait_for", "join", "_wait_for_tstate_lock", "acquire", "get", "result", "select")


def current() -> Rank | None:
    """Return the rank whose thread this is; None: no rank's, or of one whose cluster is gone."""
    rank: Rank | None = getattr(_here, "rank", None)
    return None if rank is None or rank.is_gone else rank


def this_rank() -> Rank:
    """Return the rank whose thread this is, in code that only ranks run."""
    rank: Rank = _here.rank
    return rank


def belong_to(rank: Rank | None) -> None:
    """Make this thread a rank's, or nobody's."""
    _here.rank = rank


def place_of_wait(thread: threading.Thread | None) -> tuple[int, int] | None:
    """Return where a thread waits for another by Python's own means, as a join; None: it does not.

    Who looks again and finds the same place knows that it has not gone on meanwhile.
    """
    frame: Any = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    if frame is None or frame.f_globals.get("__name__", "") not in _WAITING:
        return None
    if frame.f_code.co_name not in _WAITS:
        return None
    caller: Any = frame
    while caller is not None and caller.f_globals.get("__name__", "") in _WAITING:
        if caller.f_code.co_name == "start":
            return None  # until the other has begun
        caller = caller.f_back
    return id(frame), frame.f_lasti


class Rank:
    """Hold what belongs to one rank while its cluster runs.

    Args:
        index: Its number.
        device: Where its tensors are, if its program asks.
        environment: What it finds in ``os.environ``.
    """

    def __init__(self, index: int, device: torch.device, environment: Mapping[Any, Any]) -> None:
        self.index = index
        self.device = device
        self.environment = dict(environment)
        self.identity = next(_identities)
        """Tells meshes of ranks, also of other clusters, apart."""
        self.thread: threading.Thread | None = None

        self.go = threading.Lock()
        """Held while others run; released when it is this rank's turn."""
        self.go.acquire()
        self.is_running = False
        self.keeps_turn = False
        """It was chosen again while it handed on."""
        self.has_deputy = False
        """A thread that it has started, and for which it waits, waits for it."""
        self.waits_for: Wait | None = None
        """None while it runs, before it has begun and when it has ended."""
        self.since_ns = 0
        """When it began to do what it does."""
        self.waits_on = ""
        """The same as ``waits_for`` in words, and which ranks it waited for when it began to."""
        self.has_asked = False
        """What it did last was to ask for something that was not there."""
        self.asks_for: Wait | None = None
        """What it asks for again and again without waiting; None: it does not."""
        self.is_dead = False
        """A fault has ended it: what it still calls is not called."""
        self.has_ended = False
        self.is_gone = False
        """Its cluster is over; threads that it has left behind are nobody's."""
        self.helpers: list[threading.Thread] = []
        """Threads that its program has started, and which a process would wait for at its end."""
        self.tasks: set[Future[Any]] = set()
        """What its program has given to pools of threads, and is not done."""
        self.result: Any = None
        self.error: BaseException | None = None

        self.num_calls = 0
        """Collectives and messages that it has begun, in all groups."""
        self.held_back: Callable[[], None] | None = None
        """Begins a call that a fault has it make after the next one."""
        self.futures: list[Any] = []
        """Of its works, not complete."""
        self.pending_error: BaseException | None = None
        """What a callback raised and torch would not let through."""
        self.world: dict[str, Any] = {}
        """Its groups, as torch.distributed keeps them."""
        self.main: ModuleType | None = None
        """Its ``__main__``, where it runs a script."""
        self.home: Any = None
        """The world that it has entered: others may have made another one, at another address."""
        self.num_groups: dict[Any, int] = {}
        """How many groups of a name it has made."""
        self.state: ProcessState | None = None
        """The process's, as this rank left it."""

    def restore_state(self) -> None:
        """Give the process what this rank left; nothing where ranks run at once."""
        if self.state is not None:
            self.state.restore()

    def complete_futures(self) -> None:
        """Complete those whose works are done, one by one: callbacks may wait for others.

        Raises what a callback raised that no future can hold, such as KeyboardInterrupt.
        """
        for future in list(self.futures):
            if future in self.futures and future.is_over():
                self.futures.remove(future)
                future.complete()
        if self.pending_error is not None:
            error, self.pending_error = self.pending_error, None
            raise error

    def join_helpers(self) -> None:
        """Wait for what its program has left to other threads, as a process does at its end."""
        while self.helpers or self.tasks:
            wait(list(self.tasks))
            while self.helpers:
                self.helpers.pop().join()

    def let_go(self) -> None:
        """Forget its program's objects, when it has ended."""
        self.is_gone, self.main, self.home = True, None, None
        self.result = self.error = self.state = self.waits_for = self.held_back = None
        self.asks_for = self.pending_error = None
        self.world, self.environment, self.futures, self.num_groups = {}, {}, [], {}
        self.helpers, self.tasks = [], set()

    def __str__(self) -> str:
        return f"rank {self.index}"
