"""Ranks that are threads: the rank of each thread, and the schedule in which ranks run."""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pyringar.cluster.state import ProcessState
from pyringar.errors import RingarError

if TYPE_CHECKING:
    from pyringar.cluster.rank_calls import Wait

_here = threading.local()


def current() -> RankThread | None:
    """Return the rank that this thread runs or that started it; None without a live rank."""
    rank: RankThread | None = getattr(_here, "rank", None)
    return None if rank is None or rank.is_gone else rank


def this_rank() -> RankThread:
    """Return the rank that runs in this thread; raise RingarError in any other thread."""
    rank = current()
    if rank is None:
        raise RingarError(wrong_thread())
    rank.check_thread()
    return rank


def wrong_thread() -> str:
    return (
        f"torch.distributed was called in {threading.current_thread().name!r}, expected the rank's "
        "own thread: run a program that calls it in several threads or forked children with "
        "pr.launch(..., processes=True), or with torchrun"
    )


def belong_to(rank: RankThread | None) -> None:
    _here.rank = rank


def start_noted(thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
    """Start a thread, and add it to the ``threads`` of the rank that starts it."""
    rank = current()
    if rank is None:
        return start(thread)
    run = thread.run

    def run_noted() -> None:
        belong_to(rank)
        del thread.run  # break the reference cycle
        run()

    thread.run = run_noted  # type: ignore[method-assign]
    with rank.starting:
        start(thread)
        rank.threads = [*rank.live_threads(), thread]


@dataclass(eq=False, repr=False)
class RankThread:
    """State of one rank while its cluster runs."""

    index: int
    device: torch.device
    environment: dict[Any, Any]
    refuse: Callable[[RankThread], BaseException]  # called in a wrong thread; ends the run
    identity: int = field(default_factory=itertools.count(1).__next__)  # unique id in the process
    thread: Any = None
    threads: list[threading.Thread] = field(default_factory=list)  # started by this rank
    starting: Any = field(default_factory=threading.RLock)  # held while this rank starts a thread

    is_running: bool = False  # True: the schedule chose the rank; `_go` wakes its thread
    has_ended: bool = False
    is_gone: bool = False  # the cluster has ended; a remaining thread has no rank
    waits_for: Wait | None = None  # not reset while a polling rank runs
    num_polls: int = 0  # polls without success since the last call
    num_calls: int = 0
    result: Any = None
    error: BaseException | None = None
    world: dict[str, Any] = field(default_factory=dict)  # torch's registry of this rank's groups
    num_groups: dict[Any, int] = field(default_factory=dict)  # by name
    main: ModuleType | None = None  # the rank's ``__main__`` if it runs a script

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._go = threading.Lock()
        self._go.acquire()

    @property
    def polls(self) -> bool:
        return self.num_polls > 1

    def check_thread(self) -> None:
        """Raise RingarError and end the run, unless the calling thread is the rank's thread."""
        if os.getpid() != self._pid:
            raise RingarError(wrong_thread())
        if threading.current_thread() is not self.thread and not self.is_gone:
            raise self.refuse(self)

    def live_threads(self) -> list[threading.Thread]:
        return [thread for thread in self.threads if thread.is_alive()]

    def frame(self) -> FrameType | None:
        ident = None if self.thread is None or self.has_ended else self.thread.ident
        return sys._current_frames().get(ident or 0)

    def wake(self) -> None:
        if self._go.locked():
            self._go.release()

    def await_choice(self) -> None:
        while not self.is_running:
            self._go.acquire()

    def let_go(self) -> None:
        self.is_gone, self.main = True, None
        self.result = self.error = self.waits_for = None
        self.world, self.environment, self.num_groups = {}, {}, {}
        self.threads = []

    def __str__(self) -> str:
        return f"rank {self.index}"


class Schedule:
    """Chooses the rank that runs next, in an order that the seed draws.

    Every wait chooses the next rank, even if its condition already holds. So the seed decides which
    rank runs first after a barrier. If no rank can run, ``stuck`` is called with the lock held, and
    must end the waits. `look` is called regularly, so a rank that an exception such as MemoryError
    left asleep wakes up.

    Cost: 40 us to switch to another rank, on a machine where waking a thread takes 20 us.
    """

    def __init__(
        self, ranks: Sequence[RankThread], *, seed: int, stuck: Callable[[], object]
    ) -> None:
        self._ranks = ranks
        self._random = random.Random(seed)
        self._stuck = stuck
        self._clock_s = 0.0  # virtual time: if no rank can run, it jumps to the next deadline
        self.most_running = 1
        self.lock = threading.RLock()
        self.ended = threading.Condition(self.lock)  # notified when a rank ends
        self.last_choice_s = time.monotonic()  # time of the last choice of a rank
        self.last_event_s = time.monotonic()  # time of the last call or change of the store

    def check_stack(self, levels: int = 40) -> None:
        """Raise RecursionError if the stack has fewer than ``levels`` frames left."""
        if levels:
            self.check_stack(levels - 1)

    def end(self, rank: RankThread) -> None:
        with self.lock:
            rank.has_ended, rank.is_running, rank.waits_for = True, False, None
            self._choose()
            self.ended.notify_all()

    def wait(self, what: Wait) -> None:
        """Let other ranks run until ``what`` is done and the schedule chooses this rank again."""
        rank = what.rank
        self.check_stack()
        state = ProcessState()
        try:
            with self.lock:
                what.ends_s = self._clock_s + (what.limit_s or math.inf)
                rank.num_polls = rank.num_polls + 1 if what.is_pause else 0
                rank.waits_for, rank.is_running = what, False
                self._choose()
        finally:
            rank.await_choice()
            state.restore()

    def look(self) -> None:
        """Wake chosen ranks again, and choose another rank if none runs."""
        with self.lock:
            for rank in self._ranks:
                if rank.is_running:
                    rank.wake()
            self._choose()

    def _choose(self) -> None:
        while (num_running := sum(rank.is_running for rank in self._ranks)) < self.most_running:
            idle = [rank for rank in self._ranks if not (rank.has_ended or rank.is_running)]
            able = [r for r in idle if r.waits_for is None or r.waits_for.is_done]
            if able:
                chosen = able[0] if len(able) == 1 else self._random.choice(able)
                self.last_choice_s = time.monotonic()
                if not chosen.polls:
                    chosen.waits_for = None
                chosen.is_running = True
                chosen.wake()
            elif num_running or not idle or any(rank.live_threads() for rank in self._ranks):
                return  # a thread of a rank may still write to the store
            else:
                self._end_a_wait([r.waits_for for r in idle if r.waits_for is not None])

    def _end_a_wait(self, waits: Sequence[Wait]) -> None:
        first = min(waits, key=lambda wait: wait.ends_s)
        if first.ends_s == math.inf:
            self._stuck()
        else:
            self._clock_s = max(self._clock_s, first.ends_s)
            first.give_up()
