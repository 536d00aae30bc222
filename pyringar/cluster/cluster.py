"""A cluster of ranks that are threads: runs a program, and reports failures."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from pyringar.cluster import internals
from pyringar.cluster.rank_calls import (
    GroupCalls,
    RankCall,
    Wait,
    copy_of,
    is_good_exit,
    names_of,
    some,
    text_of,
)
from pyringar.cluster.rank_table import is_at_prompt, report, stack_of
from pyringar.cluster.rank_threads import RankThread, Schedule, current, this_rank, wrong_thread
from pyringar.cluster.state import ProcessState, environment_of
from pyringar.cluster.store import ThreadStore
from pyringar.cluster.transport import ThreadGroup
from pyringar.comm.communicator import Communicator
from pyringar.comm.threads import Latch, handlers_wait, start_thread
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

logger = logging.getLogger(__name__)

# Seconds that interrupted ranks have to end.
_GRACE_S = 5.0
# While no other rank waits in a call, a rank may run this many times the timeout: the other ranks
# may also have long computations, and only one thread computes at a time.
_PATIENCE = 10
# The running cluster holds this lock, because a process has one torch.distributed.
_running = threading.Lock()


class Cluster:
    """All ranks of one `pyringar.launch` on threads."""

    def __init__(self, devices: Sequence[torch.device], *, seed: int, timeout_s: float) -> None:
        self.ranks = [
            RankThread(index, device, environment_of(index, len(devices), device), self._refuse)
            for index, device in enumerate(devices)
        ]
        self.schedule = Schedule(self.ranks, seed=seed, stuck=self._all_wait)
        self._note = f"seed={seed} repeats this run"
        self._timeout_s = timeout_s
        self._store = ThreadStore(self.wait, self._ask, self._store_has_changed)
        self._meetings: dict[Any, GroupCalls] = {}
        self._engines: dict[tuple[torch.device, ...], Communicator] = {}
        self._strangers: list[str] = []  # errors in threads that no rank started
        self._failure: BaseException | None = None  # the first failure
        self._told: BaseException | None = None  # raised by all calls after the first failure
        self._interrupted_by: BaseException | None = None  # the reason to interrupt all ranks
        self._over = Latch()

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Run a program on every rank; return the results by rank, or raise the first failure."""
        # Control the ranks in a second thread: in this thread a signal handler may raise anywhere.
        outcome: list[Any] = []
        thread: threading.Thread | None = None
        run = contextvars.copy_context().run
        try:
            internals.set_device_guard()
            # Compile the engine now: in a rank it would count as a long run without a call.
            self.engine([torch.device("cpu")] * len(self.ranks))
            self.engine([rank.device for rank in self.ranks])
            with handlers_wait():
                thread = start_thread("launch", run, self._control, program, outcome)
            while not self._over.wait(0.1):  # short waits let this thread run signal handlers
                pass
        except BaseException as error:
            self._interrupted_by = error
            raise
        finally:
            late: BaseException | None = None
            while thread is not None and thread.is_alive():
                try:
                    while not self._over.wait(0.1):
                        pass
                    thread.join()  # up to Python 3.12 an interrupted join() looks complete
                except BaseException as error:  # a second signal arrived while the ranks end
                    late = error
            self._let_go()
        if late is not None:
            raise late
        failure, results = outcome
        if failure is None:
            return cast("list[Any]", results)
        try:
            raise failure
        finally:
            del failure, outcome

    def _control(self, program: Callable[[], Any], outcome: list[Any]) -> None:
        try:
            outcome[:] = self._run_ranks(program)
        except BaseException as error:
            outcome[:] = error, []
        finally:
            self._over.open()

    def _run_ranks(self, program: Callable[[], Any]) -> tuple[BaseException | None, list[Any]]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go)
            if self._interrupted_by is not None or not _running.acquire(blocking=False):
                raise RingarError(
                    "launch: another one has not ended, and a process can have one at a time"
                )
            undo.callback(_running.release)
            undo.callback(ProcessState().restore)
            note = self._strangers.append
            enter = internals.entered(self._make_group, self._store, len(self.ranks), note)
            undo.enter_context(enter)
            for rank in self.ranks:
                state = ProcessState.fresh(rank.index)
                run = contextvars.copy_context().run  # a copied context, as in a forked process
                rank.thread = start_thread(str(rank), run, self._run_rank, rank, program, state)
            self._wait_for_end()
            errors = [rank.error for rank in self.ranks if rank.error is not None]
            failure = (self._failure or errors[0]) if errors else None
            return failure, [rank.result for rank in self.ranks]

    def _run_rank(self, rank: RankThread, program: Callable[[], Any], state: ProcessState) -> None:
        with contextlib.suppress(BaseException):  # if interrupted, `_live_ranks` ends the rank
            try:
                rank.await_choice()
                self.check_told()
                state.restore()
                internals.run_in_thread_of(rank, program)
            except BaseException as error:
                self._take_error(rank, error)
            finally:
                self.schedule.end(rank)

    def _live_ranks(self) -> list[RankThread]:
        for rank in self.ranks:
            if not (rank.has_ended or rank.thread.is_alive()):
                self.schedule.end(rank)
        return [rank for rank in self.ranks if not rank.has_ended]

    def _wait_for_end(self) -> None:
        """Wait for all ranks; after a failure interrupt them, and abandon ranks that do not end."""
        with self.schedule.lock:
            while (live := self._live_ranks()) and self._interrupted_by is None:
                self._check_time(live)
                self.schedule.ended.wait(0.1)
            if live:
                self._end(self._interrupted_by, KeyboardInterrupt())
                self.schedule.most_running = len(self.ranks)
            ends_s = time.monotonic() + _GRACE_S
            while (live := self._live_ranks()) and time.monotonic() < ends_s:
                self.schedule.look()
                for rank in live:
                    internals.interrupt(rank)
                self.schedule.ended.wait(0.1)
        if live:
            names, text = names_of([rank.index for rank in live]), report(self.ranks, {})
            logger.warning("ranks do not end, and run on in the background: %s%s", names, text)
        for rank in self.ranks:
            if rank in live:
                rank.error = self._failure
            else:
                rank.thread.join()

    def _check_time(self, live: Sequence[RankThread]) -> None:
        """Fail if a rank runs too long, or if all ranks wait or poll without progress."""
        schedule, now_s = self.schedule, time.monotonic()
        running = [rank for rank in live if rank.is_running]
        quiet_s = now_s - min(schedule.last_choice_s, schedule.last_event_s)
        # Wait half the limit: Python 3.11 may crash when it reads frames of a running thread.
        if quiet_s > self._timeout_s / 2 and any(map(is_at_prompt, running)):
            schedule.last_choice_s = schedule.last_event_s = now_s
        waits = [r.waits_for for r in live if r.waits_for is not None and not r.waits_for.is_done]
        if len(waits) + sum(rank.polls for rank in live) == len(live):
            idle_s = now_s - schedule.last_event_s
            first = min(waits, key=lambda wait: wait.ends_s, default=None)
            if first is not None and idle_s > (first.limit_s or math.inf):
                first.give_up()
                schedule.last_event_s = now_s
            elif idle_s > self._timeout_s:
                self._all_wait()
        elif running and (len(live) > len(running) or self._told is not None):
            is_awaited = bool(waits) or self._told is not None
            limit_s = self._timeout_s * (1 if is_awaited else _PATIENCE)
            if now_s - schedule.last_choice_s > limit_s:
                why = "which other ranks waited for"
                if not is_awaited:
                    why = (
                        f"{_PATIENCE} times timeout={self._timeout_s:g}: no other rank waited in a "
                        "call: the other ranks were ready to run"
                    )
                names = names_of([rank.index for rank in running])
                what = f"{names} ran for {limit_s:g} s without a call of torch.distributed ({why})"
                self.fail(CollectiveTimeout, what)
                self._interrupted_by = self._failure
        schedule.look()

    def _let_go(self) -> None:
        """Release the objects of all ranks: torch's caches may keep process groups alive."""
        self.schedule.most_running = len(self.ranks)
        self._end(None, RingarError("launch has returned, and the ranks of this group are gone"))
        for engine in self._engines.values():
            engine.close()
        for rank in self.ranks:
            rank.let_go()
        self._meetings, self._engines = {}, {}
        self._store.let_go()

    def _make_group(self, options: Any) -> ThreadGroup:
        """Make a rank's process group; wait until all ranks of the group have made it."""
        rank, ranks, operation = this_rank(), tuple(options.global_ranks_in_group), "new_group"
        if not ranks:
            operation = "init_process_group"
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
            made = GroupCalls(self, ranks, self._new_name(ranks))
            meeting = self._meetings.setdefault((name, number), made)
        group = ThreadGroup(meeting, rank, options)
        group.meet(operation)
        return group

    def _new_name(self, ranks: Sequence[int]) -> str:
        """Return a readable name of a group for tables; torch names groups by numbers or hashes."""
        is_world = len(ranks) == len(self.ranks)
        name = "the world" if is_world else f"group {', '.join(map(str, ranks))}"
        number = 1 + sum(meeting.ranks == ranks for meeting in self._meetings.values())
        return f"{name} #{number}" if number > 1 else name

    def engine(self, devices: Sequence[torch.device]) -> Communicator:
        key = tuple(devices)
        with self.schedule.lock:
            if key not in self._engines:
                self._engines[key] = Communicator(key, order="rank", timeout=self._timeout_s)
            return self._engines[key]

    def begin(self, call: RankCall, post: Callable[[], None]) -> None:
        call.rank.check_thread()
        self.check_told()
        self.schedule.check_stack()
        call.rank.num_calls += 1
        call.rank.num_polls, call.rank.waits_for = 0, None
        self.schedule.last_event_s = time.monotonic()
        post()

    def wait(self, what: Wait) -> None:
        if not what.rank.is_gone:
            what.rank.check_thread()
            if not what.is_done:
                self.check_told()
            self.schedule.wait(what)
        what.raise_error()

    def _ask(self, what: str) -> None:
        """Let other ranks run before a rank polls the store."""
        wait = Wait(this_rank(), what, is_pause=True)
        self.check_told()
        self.wait(wait)
        self.check_told()

    def _store_has_changed(self) -> None:
        if current() is not None:
            this_rank()
        self.schedule.last_event_s = time.monotonic()
        self.schedule.look()

    def check_told(self) -> None:
        if self._told is not None:
            raise copy_of(self._told)

    def fail(
        self, kind: type[BaseException], text: str, calls: Iterable[RankCall] = ()
    ) -> BaseException:
        """End all waits with a new error and return it; return the earlier error if one exists.

        The text of the new error ends with a table of all ranks, which shows ``calls``.
        """
        with self.schedule.lock:
            if self._told is None:
                table = report(self.ranks, {call.rank.index: call for call in calls})
                error = kind(f"{text}{table}\n{self._note}")
                self._end(error, error)
                return error
            return self._told

    def _end(self, failure: BaseException | None, told: BaseException) -> None:
        with self.schedule.lock:
            self._failure, self._told = failure, told
            for meeting in self._meetings.values():
                meeting.fail(told)
            for rank in self.ranks:
                if rank.waits_for is not None:
                    rank.waits_for.finish(told)
            self.schedule.look()

    def _all_wait(self) -> None:
        if self._told is not None:  # this rank began its wait after the failure
            self._end(self._failure, self._told)
            return
        with contextlib.suppress(ArgumentError):
            for meeting in self._meetings.values():
                meeting.compare()
        waits = [rank.waits_for for rank in self.ranks if rank.waits_for is not None]
        missing = sorted({index for wait in waits for index in wait.missing()})
        gone = [index for index in missing if self.ranks[index].has_ended]
        kind: type[RingarError] = PeerLostError if gone else CollectiveTimeout
        if gone:
            what = f"ranks wait for {names_of(gone)}, which {'have' if gone[1:] else 'has'} ended"
        elif missing:
            what = "all ranks wait for each other"
        else:
            what = "all ranks wait, and none can go on"
        asked = [wait.rank.index for wait in waits if wait.what == "get_future"]
        if asked:
            what += f"; get_future of {names_of(asked)} waits for its call, since ranks are threads"
        what += "".join(f"; {text}" for text in self._strangers[-1:])
        threads = [thread.name for rank in self.ranks for thread in rank.live_threads()]
        if threads:
            what += (
                f"; threads that ranks started still run, {some(threads)}: if these are to call "
                "torch.distributed, use pr.launch(..., processes=True)"
            )
        self.fail(kind, what)

    def _refuse(self, rank: RankThread) -> BaseException:
        stack = f"{threading.current_thread().name}:\n{stack_of(sys._getframe())}".rstrip()
        told = self.fail(RingarError, f"{wrong_thread()}\n\n{stack}")
        rank.error = told  # launch raises it even if the program catches it
        return copy_of(told)

    def _take_error(self, rank: RankThread, error: BaseException) -> None:
        if is_good_exit(error):
            return
        rank.error = error  # set first: the exception's own methods may raise
        with self.schedule.lock:
            if self._told is None:
                self._end(error, PeerLostError(f"{rank} raised {text_of(error)}"))
                with contextlib.suppress(Exception):  # Python 3.10 has no add_note
                    note = f"raised by {rank} of {len(self.ranks)}, {self._note}"
                    cast("Any", error).add_note(note)
