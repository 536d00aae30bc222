"""A cluster: its ranks, their groups, and what becomes of a failure."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pyringar.cluster import internals
from pyringar.cluster.calls import Call, Wait, copy_of, names_of
from pyringar.cluster.faults import Fault, RankDied
from pyringar.cluster.group import ThreadGroup
from pyringar.cluster.meeting import Meeting
from pyringar.cluster.ranks import Rank, this_rank
from pyringar.cluster.report import report
from pyringar.cluster.schedule import Schedule
from pyringar.cluster.state import environment_of
from pyringar.cluster.store import ThreadStore
from pyringar.comm.communicator import Communicator
from pyringar.comm.threads import starting_thread
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    DeadlockError,
    PeerLostError,
    RingarError,
)
from pyringar.train.trace import Trace

__all__ = ["Cluster"]

logger = logging.getLogger(__name__)

# How long ranks that were interrupted may take to end.
_GRACE_S = 5.0


class Cluster:
    """Ranks that are threads of this process, from their start to their end; for one run.

    See `pyringar.launch` for the arguments.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        *,
        parallel: bool,
        seed: int,
        timeout_s: float,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.ranks = [
            Rank(index, len(devices), device, environment_of(index, len(devices), device))
            for index, device in enumerate(devices)
        ]
        self.schedule = Schedule(
            self.ranks,
            seed=seed,
            is_parallel=parallel,
            snapshot=None if parallel else internals.process_state,
            stuck=self._all_wait,
        )
        self._is_parallel = parallel
        self._seed = seed
        self._timeout_s = timeout_s
        self._faults = {(fault.rank, fault.call): fault for fault in faults}
        self._store = ThreadStore(self.wait, self.pause, self.schedule.look)
        self._meetings: dict[Any, Meeting] = {}
        self._engines: dict[tuple[torch.device, ...], Communicator] = {}
        self._failure: BaseException | None = None
        """What went wrong first."""
        self._told: BaseException | None = None
        """What ranks get in their calls since then."""
        self._ends_s = float("inf")

    # -- running -----------------------------------------------------------------------------------

    def run(self, program: Callable[[], Any], trace: Any = None) -> list[Any]:
        """Run a program on every rank; return the results by rank.

        Args:
            program: What to run.
            trace: A file for what ranks did; None: nowhere.

        Raises:
            BaseException: What went wrong first: what a rank raised, or what ended its waits.
        """
        outside = internals.process_state()
        if trace is not None:
            self.schedule.trace = Trace()
            how = "at once" if self._is_parallel else f"in turn, seed {self._seed}"
            self.schedule.trace.title = f"{len(self.ranks)} ranks {how}"
        try:
            with internals.entered(self._make_group, self._store, is_parallel=self._is_parallel):
                self._start(program)
                self._wait_for_end()
        finally:
            outside.restore()
            if trace is not None:
                self.schedule.trace.save(trace)
            failure, results = self._failure, [rank.result for rank in self.ranks]
            is_fine = all(rank.error is None and rank.has_ended for rank in self.ranks)
            self._let_go()
        if failure is not None and not is_fine:
            raise failure
        return results

    def _let_go(self) -> None:
        """Let go of what ranks had: torch's caches may keep a group of theirs."""
        self._told = RingarError("launch has returned, and the ranks of this group are gone")
        for meeting in self._meetings.values():
            meeting.fail(self._told)
        for engine in self._engines.values():
            engine.close()
        for rank in self.ranks:
            rank.let_go()
        self._meetings, self._engines, self._failure = {}, {}, None
        self._store.let_go()

    def _start(self, program: Callable[[], Any]) -> None:
        for rank in self.ranks:
            if not self._is_parallel:
                rank.state = internals.fresh_state(rank.index)
            rank.thread = threading.Thread(
                target=self._run_rank, args=(rank, program), name=f"{rank}", daemon=True
            )
            with starting_thread(rank.thread.name):
                rank.thread.start()
        self.schedule.start()

    def _run_rank(self, rank: Rank, program: Callable[[], Any]) -> None:
        self.schedule.begin(rank)
        try:
            with internals.in_thread_of(rank):
                rank.result = program()
        except RankDied:
            self._lose(rank)
        except BaseException as error:
            self._take_error(rank, error)
        finally:
            self.schedule.end(rank)

    def _wait_for_end(self) -> None:
        """Wait until all ranks have ended, or do not end although they were interrupted."""
        try:
            self._wait_while(self._look_at_time)
        except KeyboardInterrupt as error:
            with self.schedule.lock:
                self._end_all(error, error)
                self._interrupt()
            self._wait_while(lambda: None)
            raise
        finally:
            left = [rank for rank in self.ranks if not self._has_ended(rank)]
            if left:
                logger.warning(
                    "%s and goes on in the background until what it does returns%s",
                    " and ".join(f"{rank} does not end" for rank in left),
                    report(self.ranks, {}, ""),
                )

    def _wait_while(self, look: Callable[[], None]) -> None:
        with self.schedule.lock:
            while not all(map(self._has_ended, self.ranks)) and time.monotonic() < self._ends_s:
                look()
                self.schedule.ended.wait(0.1)
        for rank in self.ranks:
            if rank.thread is not None and rank.has_ended:
                rank.thread.join()

    def _has_ended(self, rank: Rank) -> bool:
        """Return whether it has; also one that an interrupt hit in its very last lines."""
        return rank.has_ended or rank.thread is None or not rank.thread.is_alive()

    def _look_at_time(self) -> None:
        """Fail if others wait for ranks that run without end; interrupt these."""
        running = [rank for rank in self.ranks if rank.is_running]
        late_s = time.monotonic() - self.schedule.last_turn_s
        if not running or late_s < self._timeout_s or self._ends_s < float("inf"):
            return
        if self._failure is None and all(r.is_running or r.has_ended for r in self.ranks):
            return  # nobody waits
        what = (
            f"{' and '.join(map(str, running))} ran for {self._timeout_s:g} s without a call in "
            "which others go on, and these waited"
        )
        self.fail(lambda text: CollectiveTimeout(what + text))
        self._interrupt()

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks that run."""
        self._ends_s = time.monotonic() + _GRACE_S
        for rank in self.ranks:
            if rank.is_running:
                internals.interrupt(rank)

    # -- groups ------------------------------------------------------------------------------------

    def _make_group(self, options: Any) -> ThreadGroup:
        """Return this thread's rank's side of a group."""
        rank = this_rank()
        members = tuple(options.global_ranks_in_group) or tuple(range(len(self.ranks)))
        name = (options.group_id, members)
        rank.num_groups[name] = number = rank.num_groups.get(name, 0) + 1
        with self.schedule.lock:
            meeting = self._meetings.get((name, number))
            if meeting is None:
                meeting = Meeting(self, self._name_of(members), members)
                self._meetings[name, number] = meeting
        return ThreadGroup(meeting, rank, options)

    def _name_of(self, members: Sequence[int]) -> str:
        """Return how people are told of a group: torch's own names are numbers and hashes."""
        name = "the world"
        if len(members) < len(self.ranks):
            name = f"group {', '.join(map(str, members))}"
        same = sum(meeting.ranks == tuple(members) for meeting in self._meetings.values())
        return f"{name} #{same + 1}" if same else name

    def engine(self, devices: Sequence[torch.device]) -> Communicator:
        """Return the communicator of tensors on these devices, one for each rank."""
        key = tuple(devices)
        with self.schedule.lock:
            if key not in self._engines:
                self._engines[key] = Communicator(key, order="rank", timeout=self._timeout_s)
            return self._engines[key]

    # -- calls -------------------------------------------------------------------------------------

    def begin(self, call: Call, post: Callable[[], None]) -> None:
        """Begin a rank's call, or play the fault that was ordered for it.

        Args:
            call: Which.
            post: Begins it.

        Raises:
            RingarError: The cluster has failed, or calls differ.
        """
        rank = call.rank
        rank.num_calls += 1
        fault = self._faults.get((rank.index, rank.num_calls))
        if fault is not None and fault.kind == "dies":
            raise RankDied
        if fault is not None and fault.kind == "late":
            self.wait(_Late(self, rank, fault.late_s))
        if self._told is not None:
            raise copy_of(self._told)
        if fault is not None and fault.kind == "swaps":
            call.finish()  # or the rank would wait for it
            rank.held_back = post
            return
        post()
        if rank.held_back is not None:
            later, rank.held_back = rank.held_back, None
            later()

    def wait(self, what: Wait) -> None:
        """Let other ranks run until a wait is over; raise what it ended with."""
        if self._told is not None and not what.is_done:
            raise copy_of(self._told)
        self.schedule.wait(what)
        what.rank.complete_futures()
        what.raise_error()

    def pause(self, rank: Rank) -> None:
        """Let other ranks run."""
        pause = Wait(rank, "its turn")
        pause.finish()
        self.schedule.wait(pause)
        rank.complete_futures()

    # -- failures ----------------------------------------------------------------------------------

    def fail(
        self, make_error: Callable[[str], BaseException], calls: Mapping[int, Call] | None = None
    ) -> BaseException:
        """End all waits with an error, unless something went wrong before; return what did.

        Args:
            make_error: Makes it, given a report of what all ranks do.
            calls: What it is about, by rank.
        """
        with self.schedule.lock:
            if self._told is None:
                error = make_error(report(self.ranks, calls or {}, self._repeat("\n")))
                self._end_all(error, error)
            assert self._told is not None
            return self._told

    def _repeat(self, separator: str) -> str:
        """Return how to come here again."""
        return "" if self._is_parallel else f"{separator}seed={self._seed} repeats this run"

    def _all_wait(self) -> None:
        """Fail: nobody can go on."""
        with contextlib.suppress(ArgumentError):
            for meeting in self._meetings.values():
                meeting.compare()
        waits = [rank.waits_for for rank in self.ranks if rank.waits_for is not None]
        missing = sorted({index for wait in waits for index in wait.missing()})
        gone = [index for index in missing if self.ranks[index].has_ended]
        if gone:
            have = "has" if len(gone) == 1 else "have"
            what = f"ranks wait for {names_of(gone)}, which {have} ended"
            self.fail(lambda text: PeerLostError(what + text))
        else:
            self.fail(lambda text: DeadlockError(f"all ranks wait for each other{text}"))

    def _take_error(self, rank: Rank, error: BaseException) -> None:
        """Note what a rank's program raised; if it is the first, the others are told."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        rank.error = error
        with self.schedule.lock:
            if self._told is None:
                told = PeerLostError(f"{rank} raised {type(error).__name__}: {error}")
                self._end_all(error, told)
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"raised by {rank} of {len(self.ranks)}{self._repeat(', ')}")

    def pass_time(self, rank: Rank, late_s: float) -> None:
        """Fail if that is longer than others would wait for a rank."""
        if late_s > self._timeout_s:
            what = f"{rank} is late by {late_s:g} s, and others waited {self._timeout_s:g} s for it"
            self.fail(lambda text: CollectiveTimeout(what + text))

    def _lose(self, rank: Rank) -> None:
        """Let the groups of a rank that died fail, as if its process were gone."""
        error = PeerLostError(
            f"{rank} died, in its call {rank.num_calls}: a fault that was ordered"
        )
        with self.schedule.lock:
            for meeting in self._meetings.values():
                if rank.index in meeting.ranks:
                    meeting.fail(error)
        self.schedule.look()

    def _end_all(self, failure: BaseException, told: BaseException) -> None:
        self._failure, self._told = failure, told
        for meeting in self._meetings.values():
            meeting.fail(told)
        for rank in self.ranks:
            if rank.waits_for is not None:
                rank.waits_for.finish(told)
        self.schedule.look()


class _Late(Wait):
    """A wait that ends when all others wait: nothing happens before that time has passed."""

    def __init__(self, cluster: Cluster, rank: Rank, late_s: float) -> None:
        super().__init__(rank, f"{late_s:g} s: a fault that was ordered", late_s)
        self._cluster = cluster

    def give_up(self) -> None:
        """Go on; the others have given up if it is later than the timeout."""
        if self.limit_s is not None:
            self._cluster.pass_time(self.rank, self.limit_s)
        self.finish()
