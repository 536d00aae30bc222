"""Decide which rank runs: one at a time, and another one whenever it waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from pyringar.cluster.calls import Wait
from pyringar.cluster.ranks import Rank
from pyringar.cluster.state import ProcessState

__all__ = ["Schedule", "check_stack"]


def check_stack(levels: int = 40) -> None:
    """Raise RecursionError where the stack is too deep for a call, before the call changes any."""
    if levels:
        check_stack(levels - 1)


class Schedule:
    """Lets ranks run.

    Every wait chooses the next rank, even a wait that is over already: the seed decides which rank
    goes first after a barrier, and not the order of arrival.

    An exception at any line, such as MemoryError, loses no rank: a rank runs when it is marked as
    running, and `look_at_time`, which is called again and again, chooses and wakes where that
    did not happen.

    Args:
        ranks: All of them.
        seed: Decides which rank goes next.
        stuck: Called with the lock held when all ranks wait in vain; ends their waits.

    Cost: 40 us where another rank goes next, on a machine where waking a thread takes 20.
    """

    def __init__(self, ranks: Sequence[Rank], *, seed: int, stuck: Callable[[], object]) -> None:
        self._ranks = ranks
        self._random = random.Random(seed)
        self._clock_s = 0.0  # advances where nothing else can happen
        self._most_running = 1
        self._stuck = stuck
        self.lock = threading.RLock()
        self.ended = threading.Condition(self.lock)
        """Notified when a rank has ended."""
        self.last_event_s = time.monotonic()
        """When something was done for which a rank may wait."""
        self.last_turn_s = time.monotonic()
        """When a rank was last chosen."""

    def end(self, rank: Rank) -> None:
        """Note that a rank has ended, and let another one run."""
        with self.lock:
            rank.has_ended, rank.is_running = True, False
            self._choose()
            self.ended.notify_all()

    def wait(self, what: Wait) -> None:
        """Let other ranks run; return when ``what`` is done and its rank is chosen again."""
        rank = what.rank
        check_stack()
        state = ProcessState()
        try:
            with self.lock:
                what.ends_s = self._clock_s + (what.limit_s or 0.0)
                rank.asks_for = what if what.is_pause and rank.has_asked else None
                rank.has_asked = what.is_pause
                rank.waits_for, rank.is_running = what, False
                self._choose()
        finally:
            rank.await_turn()
            state.restore()

    def run_all(self) -> None:
        """Let all ranks run that can: they are to end."""
        with self.lock:
            self._most_running = len(self._ranks)
            while self._choose():
                pass

    def look(self) -> None:
        """Let ranks go on whose waits are over."""
        with self.lock:
            self.last_event_s = time.monotonic()
            self._choose()

    def _choose(self) -> bool:
        """Let one more rank run, if one can; return whether one was chosen."""
        idle = [rank for rank in self._ranks if not (rank.has_ended or rank.is_running)]
        num_running = sum(rank.is_running for rank in self._ranks)
        if num_running >= self._most_running or not idle:
            return False
        able = [r for r in idle if r.waits_for is None or r.waits_for.is_done]
        if not able and num_running == 0 and not self._have_threads():
            able = self._end_a_wait(idle)
        if not able:
            return False
        chosen = able[0] if len(able) == 1 else self._random.choice(able)
        self.last_turn_s = time.monotonic()
        chosen.waits_for, chosen.is_running = None, True
        chosen.wake()
        return True

    def _end_a_wait(self, idle: Sequence[Rank]) -> list[Rank]:
        """End the first wait that has a limit, or all; return its rank if others wait on."""
        limited = [r.waits_for for r in idle if r.waits_for and r.waits_for.limit_s is not None]
        if not limited:
            self._stuck()
            return []
        first = min(limited, key=lambda wait: wait.ends_s)
        self._clock_s = max(self._clock_s, first.ends_s)  # nothing else happens before that time
        first.give_up()
        return [first.rank]

    def _have_threads(self) -> bool:
        """Return whether a thread lives that a rank has started: its next call ends the run."""
        return any(rank.live_threads() for rank in self._ranks)

    def look_at_time(self, limit_s: float) -> None:
        """End waits in vain in real time, where ranks poll, or have started threads.

        Args:
            limit_s: How long that may last.
        """
        for rank in self._ranks:
            if rank.is_running:
                rank.wake()
        self._choose()
        live = [rank for rank in self._ranks if not rank.has_ended]
        polling = [rank for rank in live if rank.asks_for is not None]
        waits = [r.waits_for for r in live if r.waits_for is not None and not r.waits_for.is_done]
        if {*polling, *(wait.rank for wait in waits)} != set(live):
            return
        idle_s = time.monotonic() - self.last_event_s
        limits = [(wait.limit_s, wait) for wait in waits if wait.limit_s is not None]
        first_s, first = min(limits, key=lambda pair: pair[0], default=(0.0, None))
        if first is not None and idle_s > first_s:
            first.give_up()
            self.look()
        elif idle_s > limit_s:
            self._stuck()
