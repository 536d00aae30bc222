"""Decide who runs: one rank at a time, which hands on where it waits, or all at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyringar.cluster.calls import Wait
from pyringar.cluster.ranks import Rank, current, place_of_wait
from pyringar.cluster.state import ProcessState

__all__ = ["Schedule"]

# How often a thread beside a rank's looks whether the rank waits for it, and how many times.
_LOOK_S, _LOOKS = 0.001, 3


class Schedule:
    """Lets ranks run.

    A rank hands on in every wait, also for what is done already: the seed decides who goes first
    after a barrier, and not who came last.

    Args:
        ranks: All of them.
        seed: Decides who goes next.
        is_parallel: All ranks run that can.
        snapshot: Returns what belongs to the rank that runs; None: nothing does.
        stuck: Called with the lock held when all ranks wait in vain; ends their waits.

    Cost: 40 us where another rank goes next, on a machine where waking a thread takes 20.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        seed: int,
        is_parallel: bool,
        snapshot: Callable[[], ProcessState] | None,
        stuck: Callable[[], object],
    ) -> None:
        self._ranks = ranks
        self._random = random.Random(seed)
        self._clock_s = 0.0  # which goes on where nothing else can happen
        self._num_turns = len(ranks) if is_parallel else 1
        self._snapshot = snapshot
        self._stuck = stuck
        self.lock = threading.RLock()
        self.ended = threading.Condition(self.lock)
        """Told when a rank has ended."""
        self._beside = threading.Condition(self.lock)  # told when a wait may be over
        self.beside: set[Wait] = set()
        """Waits of threads that ranks' programs have started."""
        self.last_event_s = time.monotonic()
        """When something was done for which a rank may wait."""
        self.last_turn_s = time.monotonic()
        """When a rank was let run last."""
        self.trace: Any = None
        """Records what ranks do, if that is asked for: a `pyringar.train.trace.Trace`."""

    def start(self) -> None:
        """Let the first rank, or all, go."""
        with self.lock:
            self._give_turns()

    def begin(self, rank: Rank) -> None:
        """Wait for the first turn of this thread's rank."""
        rank.go.acquire()

    def end(self, rank: Rank) -> None:
        """Note that this thread's rank has ended, and hand on."""
        with self.lock:
            self._note(rank, None)
            rank.has_ended = True
            rank.is_running = False
            self._give_turns()
            self.ended.notify_all()

    def wait(self, what: Wait) -> None:
        """Return when ``what`` is done; let other ranks run until then."""
        rank = current()
        what.ends_s = self._clock_s + (what.limit_s or 0.0)
        if rank is None or rank.has_deputy or rank.thread is not threading.current_thread():
            self._wait_beside(what)
        else:
            self._hand_on(rank, what)

    def _hand_on(self, rank: Rank, what: Wait) -> None:
        with self.lock:
            self._note(rank, what)
            rank.asks_for = what if what.is_pause and rank.has_asked else None
            rank.has_asked = what.is_pause
            rank.waits_for = what
            rank.is_running = False
            self._give_turns(handing_on=rank)
            if rank.keeps_turn:
                rank.keeps_turn = False
                return
        rank.go.acquire()
        rank.restore_state()

    def _wait_beside(self, what: Wait) -> None:
        """Wait in a thread that a rank's program has started.

        Where the rank's own thread waits for this one, this one waits for the rank. Else others run
        when the rank hands on.
        """
        rank = what.rank
        with self.lock:
            self.beside.add(what)
        place, num_looks = None, 0
        try:
            while not what.is_done:
                with self.lock:
                    before, place = place, place_of_wait(rank.thread) if rank.is_running else None
                    num_looks = num_looks + 1 if place is not None and place == before else 0
                    is_deputy = num_looks >= _LOOKS and not rank.has_deputy
                    rank.has_deputy |= is_deputy
                    if not is_deputy:
                        self._beside.wait(_LOOK_S)
                if is_deputy:
                    try:
                        self._hand_on(rank, what)
                    finally:
                        rank.has_deputy = False
        finally:
            with self.lock:
                self.beside.discard(what)

    def stop_taking_turns(self) -> None:
        """Let all ranks run that can: they are to end."""
        with self.lock:
            self._num_turns = len(self._ranks)
            self._give_turns()

    def look(self) -> None:
        """Let those go on whose waits are over."""
        with self.lock:
            self.last_event_s = time.monotonic()
            self._beside.notify_all()
            self._give_turns()

    def _give_turns(self, handing_on: Rank | None = None) -> None:
        """Let as many ranks run as may; the one that is handing on may be chosen itself."""
        while sum(rank.is_running for rank in self._ranks) < self._num_turns:
            able = self._able()
            if not able:
                break
            chosen = able[0] if len(able) == 1 else self._random.choice(able)
            self._note(chosen, None)
            chosen.waits_for = None
            chosen.is_running = True
            self.last_turn_s = time.monotonic()
            if chosen is handing_on:
                chosen.keeps_turn = True
                continue
            if handing_on is not None and not handing_on.keeps_turn and self._snapshot is not None:
                handing_on.state = self._snapshot()
            chosen.go.release()

    def look_at_pollers(self, limit_s: float) -> None:
        """End waits in vain where ranks ask again and again for what will not come: in real time.

        Args:
            limit_s: How long they may ask.
        """
        live = [rank for rank in self._ranks if not rank.has_ended]
        if not live or not all(_asks(rank) or _waits(rank) for rank in live):
            return
        idle_s = time.monotonic() - self.last_event_s
        waits = [*self.beside, *(r.waits_for for r in live if r.waits_for is not None)]
        limited = [w for w in waits if w.limit_s is not None and not w.is_done]
        if limited and (first := min(limited, key=_limit)) and idle_s > _limit(first):
            first.give_up()
            self.look()
        elif any(map(_asks, live)) and idle_s > limit_s:
            self._stuck()

    def _note(self, rank: Rank, what: Wait | None) -> None:
        """Keep what a rank has done, or waited for, until now, if that is asked for."""
        if self.trace is None:
            return
        now_ns = time.perf_counter_ns()
        if rank.is_running:
            self.trace.add("run", "run", rank.index, rank.since_ns, now_ns)
        elif rank.waits_for is not None:
            self.trace.add(rank.waits_on[:63], "wait", rank.index, rank.since_ns, now_ns)
        rank.since_ns = now_ns
        if what is not None:
            missing = ", ".join(map(str, what.missing()))
            rank.waits_on = f"{what} for {missing}" if missing else f"{what}"

    def _able(self) -> list[Rank]:
        """Return the ranks that can go on; where all wait in vain, end waits first."""
        while True:
            idle = [rank for rank in self._ranks if not (rank.has_ended or rank.is_running)]
            waits = [rank.waits_for for rank in idle if rank.waits_for is not None]
            able = [r for r in idle if r.waits_for is None or r.waits_for.is_done]
            if able or not waits or any(rank.is_running for rank in self._ranks):
                return able
            limited = [w for w in [*waits, *self.beside] if w.limit_s is not None and not w.is_done]
            if limited:  # nothing else will happen before that time has passed
                first = min(limited, key=lambda wait: wait.ends_s)
                self._clock_s = max(self._clock_s, first.ends_s)
                first.give_up()
            else:
                self._stuck()


def _limit(wait: Wait) -> float:
    return wait.limit_s or 0.0


def _asks(rank: Rank) -> bool:
    """Return whether a rank does nothing but ask again and again."""
    return rank.asks_for is not None


def _waits(rank: Rank) -> bool:
    """Return whether a rank waits for something that is not done."""
    return rank.waits_for is not None and not rank.waits_for.is_done
