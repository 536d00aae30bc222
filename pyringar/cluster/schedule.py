"""Decide which rank runs: one at a time, and another one whenever it waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from pyringar.cluster.calls import Wait
from pyringar.cluster.ranks import Rank
from pyringar.cluster.state import ProcessState

__all__ = ["Schedule"]


class Schedule:
    """Lets ranks run.

    Every wait chooses the next rank, even a wait that is over already: the seed decides which rank
    goes first after a barrier, and not the order of arrival.

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

    def start(self) -> None:
        """Let the first rank go."""
        with self.lock:
            self._choose()

    def end(self, rank: Rank) -> None:
        """Note that this thread's rank has ended, and let another one run."""
        with self.lock:
            rank.has_ended = True
            rank.is_running = False
            self._choose()
            self.ended.notify_all()

    def wait(self, what: Wait) -> None:
        """Let other ranks run; return when ``what`` is done and its rank is chosen again."""
        rank = what.rank
        what.ends_s = self._clock_s + (what.limit_s or 0.0)
        with self.lock:
            rank.asks_for = what if what.is_pause and rank.has_asked else None
            rank.has_asked = what.is_pause
            rank.waits_for = what
            rank.is_running = False
            rank.state = ProcessState()
            self._choose()
        rank.go.acquire()
        rank.restore_state()

    def run_all(self) -> None:
        """Let all ranks run that can: they are to end."""
        with self.lock:
            self._most_running = len(self._ranks)
            self._choose()

    def look(self) -> None:
        """Let ranks go on whose waits are over."""
        with self.lock:
            self.last_event_s = time.monotonic()
            self._choose()

    def _choose(self) -> None:
        while sum(rank.is_running for rank in self._ranks) < self._most_running:
            able = self._able()
            if not able:
                break
            chosen = able[0] if len(able) == 1 else self._random.choice(able)
            chosen.waits_for = None
            chosen.is_running = True
            self.last_turn_s = time.monotonic()
            chosen.go.release()

    def _able(self) -> list[Rank]:
        """Return the ranks that can go on; where all wait in vain, end waits first."""
        while True:
            idle = [rank for rank in self._ranks if not (rank.has_ended or rank.is_running)]
            waits = [rank.waits_for for rank in idle if rank.waits_for is not None]
            able = [r for r in idle if r.waits_for is None or r.waits_for.is_done]
            if able or not waits or any(rank.is_running for rank in self._ranks):
                return able
            limited = [w for w in waits if w.limit_s is not None]
            if limited:  # nothing else will happen before that time has passed
                first = min(limited, key=lambda wait: wait.ends_s)
                self._clock_s = max(self._clock_s, first.ends_s)
                first.give_up()
            else:
                self._stuck()

    def look_at_pollers(self, limit_s: float) -> None:
        """End waits in vain where ranks poll for what will not come: in real time.

        Args:
            limit_s: How long they may poll.
        """
        live = [rank for rank in self._ranks if not rank.has_ended]
        polling = [rank for rank in live if rank.asks_for is not None]
        waits = [r.waits_for for r in live if r.waits_for is not None and not r.waits_for.is_done]
        if not polling or {*polling, *(wait.rank for wait in waits)} != set(live):
            return
        idle_s = time.monotonic() - self.last_event_s
        limits = [(wait.limit_s, wait) for wait in waits if wait.limit_s is not None]
        first_s, first = min(limits, key=lambda pair: pair[0], default=(0.0, None))
        if first is not None and idle_s > first_s:
            first.give_up()
            self.look()
        elif idle_s > limit_s:
            self._stuck()
