"""A cluster: its ranks, their groups, and what becomes of a failure."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from pyringar.cluster import internals
from pyringar.cluster.calls import Call, Pause, Wait, copy_of, names_of, some, text_of
from pyringar.cluster.group import ThreadGroup
from pyringar.cluster.meeting import Meeting
from pyringar.cluster.ranks import Rank, current, noting_threads, this_rank, wrong_thread
from pyringar.cluster.report import is_at_prompt, report, stack_of
from pyringar.cluster.schedule import Schedule, check_stack
from pyringar.cluster.state import ProcessState, environment_of
from pyringar.cluster.store import ThreadStore
from pyringar.comm.communicator import Communicator
from pyringar.comm.threads import Latch, starting_thread
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

__all__ = ["Cluster"]

logger = logging.getLogger(__name__)

# How long ranks that were interrupted may take to end.
_GRACE_S = 5.0
# How many times the timeout a rank may run while others wait for nothing but their turn.
_PATIENCE = 10
# The process has one torch.distributed, one environment and one interpreter to lend.
_running = threading.Lock()


class Cluster:
    """Ranks that are threads of this process, from their start to their end; for one run.

    See `pyringar.launch` for the arguments.
    """

    def __init__(self, devices: Sequence[torch.device], *, seed: int, timeout_s: float) -> None:
        self.ranks = [
            Rank(index, device, environment_of(index, len(devices), device), self._refuse)
            for index, device in enumerate(devices)
        ]
        self.schedule = Schedule(self.ranks, seed=seed, stuck=self._all_wait)
        self._seed = seed
        self._timeout_s = timeout_s
        self._store = ThreadStore(self.wait, self._ask, self._store_has_changed)
        self._meetings: dict[Any, Meeting] = {}
        self._engines: dict[tuple[torch.device, ...], Communicator] = {}
        self._failure: BaseException | None = None
        """What went wrong first."""
        self._told: BaseException | None = None
        """What ranks get in their calls since then."""
        self._is_refused = False
        """Whether a thread that is no rank's called: raised also where ranks handle it."""
        self._stranger: str | None = None
        """What a thread was told that no rank started, and that asked for a group in vain."""
        self._ends_s = float("inf")
        self._left: BaseException | None = None
        """What the caller of `run` was interrupted with, by a signal handler."""
        self._over = Latch()

    # -- running -----------------------------------------------------------------------------------

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Run a program on every rank; return the results by rank.

        A thread of its own starts and ends the ranks: the exception of a signal handler, which
        comes at any line of the caller, ends all ranks, and finds the process as it was.

        Raises:
            BaseException: What went wrong first: what a rank raised, or what ended its waits.
        """
        outcome: list[Any] = []
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._control, program, outcome, signals),
            name="launch",
            daemon=True,
        )
        try:
            internals.set_device_guard()
            # Not by the first rank that adds: it may take minutes to compile, while others wait.
            cpus = [torch.device("cpu")] * len(self.ranks)
            for devices in (cpus, [rank.device for rank in self.ranks]):
                self.engine(devices)
            try:  # Python would count a thread for ever whose start is interrupted
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                with starting_thread(thread.name):
                    thread.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            while not self._over.wait(0.1):
                pass
            thread.join()
        except BaseException as error:
            self._left = error  # the thread looks at it, also before it starts any rank
            while thread.is_alive():
                thread.join(0.1)
            self._let_go()
            raise
        failure, results = outcome
        try:
            if failure is not None:
                raise failure
            return cast("list[Any]", results)
        finally:
            del failure, outcome

    def _control(self, program: Callable[[], Any], outcome: list[Any], signals: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        error: BaseException | None = None
        results: list[Any] = []
        is_first = _running.acquire(blocking=False)
        try:
            if not is_first or self._left is not None:
                raise RingarError(
                    "launch: another one has not ended, and a process can have one at a time"
                )
            outside = ProcessState()
            try:
                enter = internals.entered(
                    self._make_group, self._store, len(self.ranks), self._note_stranger
                )
                with enter, noting_threads():
                    self._run_ranks(program)
            finally:
                outside.restore()
            errors = [rank.error for rank in self.ranks if rank.error is not None]
            if errors or self._is_refused or not all(rank.has_ended for rank in self.ranks):
                error = self._failure or errors[0]
            results = [rank.result for rank in self.ranks]
        except BaseException as caught:
            error = caught
        finally:
            self._let_go()
            if is_first:
                _running.release()
            outcome += [error, results]
            self._over.open()

    def _let_go(self) -> None:
        """Let go of what ranks had: torch's caches may keep a group of theirs."""
        self._told = RingarError("launch has returned, and the ranks of this group are gone")
        for meeting in self._meetings.values():
            meeting.fail(self._told)
        self._end_waits(self._told)
        for engine in self._engines.values():
            engine.close()
        for rank in self.ranks:
            rank.let_go()
        self._meetings, self._engines, self._failure = {}, {}, None
        self._store.let_go()

    def _run_ranks(self, program: Callable[[], Any]) -> None:
        """Start all ranks and wait until they have ended, or are left behind."""
        try:
            for rank in self.ranks:
                rank.state = ProcessState.fresh(rank.index)
                # With the caller's context variables, as a process that it forked.
                run = functools.partial(self._run_rank, rank, program)
                context = contextvars.copy_context()
                rank.thread = threading.Thread(
                    target=context.run, args=(run,), name=f"{rank}", daemon=True
                )
                with starting_thread(rank.thread.name):
                    rank.thread.start()
            self.schedule.look()
        except BaseException as error:
            self._left = error
        self._wait_while()
        left = [rank.index for rank in self.ranks if not self._has_ended(rank)]
        if left:
            logger.warning(
                "%s %s not end, and goes on in the background until what it does returns%s",
                names_of(left),
                "does" if len(left) == 1 else "do",
                report(self.ranks, {}, ""),
            )

    def _run_rank(self, rank: Rank, program: Callable[[], Any]) -> None:
        try:
            try:
                rank.await_turn()
                if self._told is not None:
                    raise copy_of(self._told)
                if rank.state is not None:
                    rank.state.restore()
                internals.run_in_thread_of(rank, program)
            except BaseException as error:
                self._take_error(rank, error)
            finally:
                self.schedule.end(rank)
        except KeyboardInterrupt:  # another one, in the lines above
            pass
        except BaseException as error:
            rank.error = rank.error or error

    def _wait_while(self) -> None:
        with self.schedule.lock:
            while not all(map(self._has_ended, self.ranks)) and time.monotonic() < self._ends_s:
                for rank in self.ranks:
                    if self._has_ended(rank) and not rank.has_ended:
                        self.schedule.end(rank)
                if self._left is not None and self._ends_s == float("inf"):
                    self._end_all(self._left, KeyboardInterrupt())
                    self._ends_s = time.monotonic() + _GRACE_S
                if self._ends_s < float("inf"):
                    self._interrupt()
                else:
                    self._look_at_time()
                self.schedule.ended.wait(0.1)
        for rank in self.ranks:
            if rank.thread is not None and rank.has_ended:
                rank.thread.join()

    def _has_ended(self, rank: Rank) -> bool:
        return rank.has_ended or rank.thread is None or not rank.thread.is_alive()

    def _look_at_time(self) -> None:
        """Fail if others wait for ranks that run, or ask, without end; interrupt these."""
        running = [rank for rank in self.ranks if rank.is_running]
        quiet_s = time.monotonic() - min(self.schedule.last_turn_s, self.schedule.last_event_s)
        # Rarely: Python 3.11 may crash where the frames of a running thread are looked at.
        if quiet_s > self._timeout_s / 2 and any(map(is_at_prompt, running)):
            # Time at a debugger's prompt does not count.
            self.schedule.last_turn_s = self.schedule.last_event_s = time.monotonic()
            return
        self.schedule.look_at_time(self._timeout_s)
        late_s = time.monotonic() - self.schedule.last_turn_s
        others = [rank for rank in self.ranks if not (rank.is_running or rank.has_ended)]
        # Those that wait for their turn alone have more patience: nobody has called anything yet.
        wait = any(rank.waits_for is not None and not rank.waits_for.is_done for rank in others)
        limit_s = self._timeout_s * (1 if wait or self._told is not None else _PATIENCE)
        if not running or late_s < limit_s or not (others or self._told is not None):
            return
        what = (
            f"{names_of([rank.index for rank in running])} ran for {limit_s:g} s without a call in "
            "which others go on, and these waited"
        )
        self.fail(lambda text: CollectiveTimeout(what + text))
        self._ends_s = time.monotonic() + _GRACE_S

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in all ranks, wherever they are; called again and again."""
        self.schedule.run_all()
        for rank in self.ranks:
            if not rank.has_ended:
                internals.interrupt(rank)

    # -- groups ------------------------------------------------------------------------------------

    def _make_group(self, options: Any) -> ThreadGroup:
        """Return the side that this thread's rank has of a group."""
        rank, ranks = this_rank(), tuple(options.global_ranks_in_group)
        if not ranks:
            number, size = options.group_rank, options.group_size
            ranks = tuple(range(len(self.ranks)))
            if (number, size) != (rank.index, len(ranks)):
                raise ArgumentError(
                    f"init_process_group: rank is {number} and world_size {size}, expected rank "
                    f"{rank.index} and world_size {len(ranks)}, the numbers of pr.launch"
                )
        with self.schedule.lock:
            name = (options.group_id, ranks)
            rank.num_groups[name] = number = rank.num_groups.get(name, 0) + 1
            meeting = self._meetings.setdefault((name, number), Meeting(self, ranks))
        return ThreadGroup(meeting, rank, options)

    def name_of(self, meeting: Meeting) -> str:
        """Return how people are told of a group: torch's own names are numbers and hashes."""
        is_world = len(meeting.ranks) == len(self.ranks)
        name = "the world" if is_world else f"group {', '.join(map(str, meeting.ranks))}"
        alike = [each for each in list(self._meetings.values()) if each.ranks == meeting.ranks]
        number = alike.index(meeting) + 1 if meeting in alike else 1
        return f"{name} #{number}" if number > 1 else name

    def engine(self, devices: Sequence[torch.device]) -> Communicator:
        """Return the communicator of tensors on these devices, one for each rank."""
        key = tuple(devices)
        with self.schedule.lock:
            if key not in self._engines:
                self._engines[key] = Communicator(key, order="rank", timeout=self._timeout_s)
            return self._engines[key]

    # -- calls -------------------------------------------------------------------------------------

    def begin(self, call: Call, post: Callable[[], None]) -> None:
        """Begin a rank's call with ``post``; raise if the run has failed, or in a wrong thread."""
        call.rank.check_thread()
        self._check_told()
        check_stack()
        call.rank.num_calls += 1
        call.rank.asks_for, call.rank.has_asked = None, False
        self.schedule.last_event_s = time.monotonic()
        post()

    def wait(self, what: Wait) -> None:
        """Let other ranks run until a wait is over; raise what it ended with."""
        if not what.rank.is_gone:
            if not what.is_done:
                self._check_told()
            self.pause(what)
        what.raise_error()

    def pause(self, what: Wait) -> None:
        """Let other ranks run."""
        what.rank.check_thread()
        self.schedule.wait(what)
        if isinstance(self._told, KeyboardInterrupt):
            raise copy_of(self._told)
        what.rank.complete_futures()

    def _ask(self, what: str) -> None:
        """Let other ranks run; fail where there is no hope."""
        rank = this_rank()
        self._check_told()
        self.pause(Pause(rank, what))
        self._check_told()

    def _store_has_changed(self) -> None:
        rank = current()
        if rank is not None:
            rank.check_thread()
        self.schedule.look()

    def _check_told(self) -> None:
        if self._told is not None:
            raise copy_of(self._told)

    # -- failures ----------------------------------------------------------------------------------

    def fail(
        self, make_error: Callable[[str], BaseException], calls: Mapping[int, Call] | None = None
    ) -> BaseException:
        """End all waits with an error, unless the run has failed before; return that error.

        Args:
            make_error: Makes it, given a report of what all ranks do.
            calls: The calls it is about, by rank.
        """
        with self.schedule.lock:
            if self._told is None:
                error = make_error(
                    report(self.ranks, calls or {}, f"\nseed={self._seed} repeats this run")
                )
                self._end_all(error, error)
            assert self._told is not None
            return self._told

    def _all_wait(self) -> None:
        if self._told is not None:  # a rank began to wait at the same moment
            self._end_waits(self._told)
            return
        with contextlib.suppress(ArgumentError):
            for meeting in self._meetings.values():
                meeting.compare()
        waits = [w for rank in self.ranks for w in (rank.waits_for, rank.asks_for) if w is not None]
        missing = sorted({index for wait in waits for index in wait.missing()})
        gone = [index for index in missing if self.ranks[index].has_ended]
        threads = [thread.name for rank in self.ranks for thread in rank.live_threads()]
        more = f"; {self._stranger}" if self._stranger else ""
        if threads:
            more += (
                f"; threads that ranks started still run, {some(threads)}: if these are to call "
                "torch.distributed, use pr.launch(..., processes=True)"
            )
        kind: type[RingarError] = PeerLostError if gone else CollectiveTimeout
        if gone:
            have = "has" if len(gone) == 1 else "have"
            what = f"ranks wait for {names_of(gone)}, which {have} ended"
        else:
            each = "each other" if missing else "what nobody will do"
            what = f"{'all ranks' if missing else 'ranks'} wait for {each}"
        self.fail(lambda text: kind(what + more + text))

    def _refuse(self) -> BaseException:
        """End the run because of a call in a thread that is no rank's own; return the error."""

        def make_error(text: str) -> BaseException:
            self._is_refused = True
            stack = f"{threading.current_thread().name}:\n{stack_of(sys._getframe())}"
            return RingarError(f"{wrong_thread()}\n\n{stack.rstrip()}{text}")

        return copy_of(self.fail(make_error))

    def _note_stranger(self, text: str) -> None:
        self._stranger = text

    def _take_error(self, rank: Rank, error: BaseException) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        rank.error = error
        with self.schedule.lock:
            if self._told is None:
                self._end_all(error, PeerLostError(f"{rank} raised {text_of(error)}"))
                with contextlib.suppress(Exception):  # Python 3.10 has none; others refuse
                    note = (
                        f"raised by {rank} of {len(self.ranks)}, seed={self._seed} repeats this run"
                    )
                    cast("Any", error).add_note(note)

    def _end_all(self, failure: BaseException, told: BaseException) -> None:
        self._failure, self._told = failure, told
        for meeting in self._meetings.values():
            meeting.fail(told)
        self._end_waits(told)

    def _end_waits(self, error: BaseException) -> None:
        with self.schedule.lock:
            for rank in self.ranks:
                if rank.waits_for is not None:
                    rank.waits_for.finish(error)
        self.schedule.look()
