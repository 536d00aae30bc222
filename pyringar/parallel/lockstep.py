"""One thread per rank: side by side, or in turns that meet where every rank needs all others."""

from __future__ import annotations

import contextvars
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from pyringar.comm.exits import drop_failed_backward, empty_backward_at_exit
from pyringar.comm.threads import Latch, starting_thread
from pyringar.errors import ArgumentError, RingarError

__all__ = [
    *("LockStep", "RankThreads", "Running", "are_side_by_side"),
    *("can_leave_thread", "is_in_autocast", "saving_hooks"),
]

Function = Callable[[], Any]


class _AbandonedError(RingarError):
    """Another rank failed, so this one does not go on; the other's error is the one to raise."""


class RankThreads:
    """Runs one function per rank at the same time, each in a thread that only this rank has.

    The thread has the caller's torch settings: whether gradients are recorded, inference mode,
    autocast, the hooks on tensors that autograd saves, whether denormals are flushed, the current
    stream of every GPU, and context variables. Modes of ``torch.overrides``, of which the default
    device is one, and of ``torch.utils._python_dispatch`` stay behind: see `can_leave_thread`.
    Threads start when first used and stay until `close`, or until nobody holds this any more; they
    keep no program from ending. A forked child, where those of its parent are not, starts its own.
    A signal handler may come in between anywhere, and run functions of its own after these.

    Args:
        devices: One device per rank, current in its thread if it is a GPU.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._begin_process()

    def is_own(self) -> bool:
        """Return whether one of these threads calls, for which none of them must wait."""
        return threading.get_ident() in self._idents

    def share(self) -> int:
        """Return how many torch threads each rank has if all share the caller's, at least one."""
        return max(1, torch.get_num_threads() // len(self._devices))

    def run(
        self,
        functions: Mapping[int, Function],
        abandon: Function = lambda: None,
        *,
        num_threads: int | None = None,
    ) -> dict[int, Any]:
        """Run ``functions[rank]()`` for all of them at once, and wait.

        Args:
            functions: By rank.
            abandon: Called when the caller is interrupted: makes the functions end soon. They are
                waited for nevertheless, unless a second interrupt comes.
            num_threads: What ``torch.get_num_threads()`` is for them; as many as the caller has if
                not given. The caller's own stay as they are.

        Returns:
            The results by rank.

        Raises:
            RingarError: The system has no thread left, or another thread has called `close`.
            Exception: The first rank's that failed, in rank order, once all have ended. A note
                names the rank (from Python 3.11 on).

        Cost: some 0.1 ms for two ranks; starting a thread, once, as much again.
        """
        running = Running()
        try:
            self.begin(functions, running, num_threads=num_threads)
            running.wait()
        except BaseException:
            abandon()
            running.stop()
            raise
        return running.results()

    def begin(
        self, functions: Mapping[int, Function], running: Running, *, num_threads: int | None = None
    ) -> None:
        """Begin with what `run` does; the caller waits, and stops them if this is interrupted.

        Args:
            functions: By rank.
            running: A new one, which has what was begun, also if this is interrupted.
            num_threads: As for `run`.

        Raises:
            RingarError: The system has no thread left.
        """
        streams = self._streams()
        for rank, function in functions.items():
            # Own device last: it is the one that stays current.
            order = sorted(streams, key=lambda device: device == self._devices[rank])
            settings = _Settings(
                [streams[device] for device in order],
                num_threads or torch.get_num_threads(),
                running.is_set,
            )
            worker = self._worker(rank)
            function = partial(contextvars.copy_context().run, settings.call, function)
            call = running.add(rank, _Call(worker.thread, function, str(self._devices[rank])))
            worker.calls.put(call)

    def close(self) -> None:
        """End the threads. May be called again; a later run starts new ones."""
        workers = self._workers if self._process == os.getpid() else {}
        self._begin_process()
        for worker in workers.values():
            worker.calls.put(None)
        for worker in workers.values():
            if worker.thread is not threading.current_thread():
                worker.thread.join()

    def __del__(self) -> None:
        for worker in vars(self).get("_workers", {}).values():
            worker.calls.put(None)

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._workers: dict[int, _Worker] = {}  # by rank
        self._idents: set[int] = set()  # of their threads

    def _worker(self, rank: int) -> _Worker:
        if self._process != os.getpid():
            self._begin_process()
        if rank in self._workers:
            return self._workers[rank]
        calls: _Calls = queue.SimpleQueue()
        name = f"pyringar-rank-{rank}"
        thread = threading.Thread(target=_serve, args=(calls, self._idents), name=name, daemon=True)
        try:
            with starting_thread("pyringar-rank"):
                thread.start()
            # A signal handler may have started another one meanwhile.
            worker = self._workers.setdefault(rank, _Worker(thread, calls))
        except BaseException:
            calls.put(None)
            raise
        if worker.thread is not thread:
            calls.put(None)
        return worker

    def _streams(self) -> dict[torch.device, torch.cuda.Stream]:
        gpus = {device for device in self._devices if device.type == "cuda"}
        return {device: torch.cuda.current_stream(device) for device in gpus}


class _Call:
    """A function for one thread to call, once, unless it is cancelled before."""

    def __init__(self, thread: threading.Thread, function: Function, where: str) -> None:
        self._thread, self._where = thread, where
        self._functions = [function]  # whoever takes it, in one step, calls it or cancels it
        self._end = Latch()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call it, in the thread."""
        try:
            function = self._functions.pop()
        except IndexError:
            return
        try:
            self.result = function()
        except BaseException as error:
            self.error = error
        self._end.open()

    def wait(self) -> None:
        """Return when it has ended."""
        while not self._end.wait(1.0):
            self.check()

    def check(self) -> None:
        """Raise `RingarError` if it will never begin."""
        if not self._thread.is_alive() and not self._end.is_open:
            raise RingarError("the ranks' threads were closed, and a call did not begin")

    def cancel(self) -> None:
        """Let it never begin, if it has not."""
        try:
            self._functions.pop()
        except IndexError:
            return
        self._end.open()

    def take_error(self, rank: int) -> BaseException | None:
        """Return the error with which it has ended, which it does not hold any longer."""
        error, self.error = self.error, None
        if error is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"(in the thread of rank {rank}, {self._where})")
        return error


class Running:
    """Hold what ranks' threads do for the thread that has made this; see `RankThreads.begin`.

    Attributes:
        is_set: Its only item is true once a rank's thread has set its number of torch threads,
            which torch gives to later threads, too.
    """

    def __init__(self) -> None:
        self._own_threads = torch.get_num_threads()
        self._calls: dict[int, _Call] = {}
        self.is_set = [False]

    def add(self, rank: int, call: _Call) -> _Call:
        """Note a call that is about to begin, and return it."""
        self._calls[rank] = call
        return call

    def check(self) -> None:
        """Raise `RingarError` if a call will never begin."""
        for call in self._calls.values():
            call.check()

    def wait(self) -> None:
        """Return when all have ended.

        Raises:
            RingarError: As `check`.
        """
        for call in self._calls.values():
            call.wait()
        self._restore()

    def stop(self) -> None:
        """Let none begin any more, and wait for those that have. May be called again."""
        try:
            for call in self._calls.values():
                call.cancel()
                call.wait()
        finally:
            self._restore()

    def results(self) -> dict[int, Any]:
        """Return the results of all, which have ended, or raise the error as `RankThreads.run`."""
        errors = [call.take_error(rank) for rank, call in self._calls.items()]
        failed = [error for error in errors if error is not None]
        del errors
        if failed:
            error = min(failed, key=lambda error: isinstance(error, _AbandonedError))
            try:
                raise error
            finally:
                del error, failed  # or they would hold this frame, and this frame the error
        return {rank: call.result for rank, call in self._calls.items()}

    def _restore(self) -> None:
        if self.is_set[0]:
            torch.set_num_threads(self._own_threads)


_Calls: TypeAlias = "queue.SimpleQueue[_Call | None]"


class _Worker(NamedTuple):
    thread: threading.Thread
    calls: _Calls  # each use is one step, so that a signal handler may come in between


def _serve(calls: _Calls, idents: set[int]) -> None:
    """Run calls until there comes None. Holds nothing that would keep their owner alive."""
    here = threading.get_ident()
    idents.add(here)
    while (call := calls.get()) is not None:
        call.run()
        del call
    idents.discard(here)


def are_side_by_side(devices: Sequence[torch.device], in_turns: bool | None = None) -> bool:
    """Return whether ranks on these devices run in threads of their own, at the same time.

    Args:
        devices: One per rank.
        in_turns: True: they never do. None: where all are on CPUs. False: also on GPUs.

    Raises:
        ArgumentError: ``in_turns`` is False, and two ranks share a GPU; names it.
    """
    gpus = [device for device in devices if device.type != "cpu"]
    shared = next((device for device in gpus if gpus.count(device) > 1), None)
    if in_turns is False and shared is not None:
        raise ArgumentError(
            f"in_turns is False, but {gpus.count(shared)} ranks share {shared}, expected a GPU for "
            "each rank, or None or True"
        )
    return len(devices) > 1 and not in_turns and (not gpus or in_turns is False)


def can_leave_thread() -> bool:
    """Return whether what runs here gives the same in another thread.

    It does not where the caller has entered modes of torch's, which only its own thread has: a
    default device, a `TorchDispatchMode` that counts operations, `torch.func`, forward-mode
    gradients; nor where torch records what this thread does, to compile or to export it; nor under
    hooks on tensors that autograd saves, which may count on their order, as those of a checkpoint,
    or where such hooks are forbidden; nor while a profiler records what this thread does.
    """
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        or saving_hooks() is not None
    )


def saving_hooks() -> tuple[Any, Any] | None:
    """Return the hooks that this thread has on tensors that autograd saves, to pack and unpack."""
    # torch has no public name for it; without this one, hooks are not seen.
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Any, Any] | None = None if top is None else top(True)
    return hooks


class _Settings:
    """The calling thread's settings of torch, for another thread to take over.

    Args:
        streams: Become current, the last one's device too.
        num_threads: Of torch, for the other thread.
        is_set: Its only item becomes true if that had to be set there.
    """

    def __init__(
        self, streams: Sequence[torch.cuda.Stream], num_threads: int, is_set: list[bool]
    ) -> None:
        self._streams = streams
        self._num_threads, self._is_set = num_threads, is_set
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._flushes_denormals = sys.float_info.min / 2 == 0
        self._saving = saving_hooks()
        self._autocast, self._is_nested = _autocast(), is_in_autocast()

    def call(self, function: Function) -> Any:
        try:
            return self._call(function)
        except BaseException:
            drop_failed_backward()
            raise

    def _call(self, function: Function) -> Any:
        if torch.get_num_threads() != self._num_threads:
            self._is_set[0] = True
            torch.set_num_threads(self._num_threads)
        torch.set_flush_denormal(self._flushes_denormals)
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            stack.enter_context(_autocast_as(self._autocast, is_nested=self._is_nested))
            if self._saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            return function()


_Autocast: TypeAlias = "tuple[list[tuple[str, bool, torch.dtype]], bool]"


def _autocast() -> _Autocast:
    kinds = ("cpu", "cuda")
    states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return states, torch.is_autocast_cache_enabled()


def _set_autocast(autocast: _Autocast) -> None:
    states, is_cached = autocast
    for kind, is_enabled, dtype in states:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(is_cached)


def is_in_autocast() -> bool:
    """Return whether this thread has entered ``torch.autocast``, in whatever way."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


@contextmanager
def _autocast_as(autocast: _Autocast, *, is_nested: bool) -> Iterator[None]:
    """Take over a thread's autocast, if ``is_nested`` as a part of it.

    Threads share autocast's cache, and one that leaves its outermost ``torch.autocast`` clears it:
    for a rank that uses a parameter twice, the sum of its gradient would depend on timing. So only
    the caller, who is in ``torch.autocast`` still, does that.
    """
    before = _autocast()
    _set_autocast(autocast)
    if is_nested:
        torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if is_nested:
            torch.autocast_decrement_nesting()
        _set_autocast(before)


class _Run:
    """One run in turns. A thread that an interrupted run has left behind knows no other."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._condition = threading.Condition()
        self._turn = 0
        self._finished = 0
        self._is_abandoned = False
        self._offers: list[tuple[str, Any]] = []
        self._answers: Sequence[Any] = ()

    def abandon(self) -> None:
        """Make all parts end where they meet next."""
        with self._condition:
            self._is_abandoned = True
            self._condition.notify_all()

    def take_part(self, position: int, function: Function) -> Any:
        """Call ``function()`` when it is this position's turn, and pass the turn on."""
        try:
            self._await_turn(position)
            result = function()
            if self._offers:
                raise RingarError(
                    f"the ranks take different ways: one is at '{self._offers[0][0]}', one at its "
                    "end"
                )
            self._finished += 1
        except BaseException:
            self._is_abandoned = True
            raise
        finally:
            self._pass_turn(position)
        return result

    def meet(
        self,
        position: int,
        place: str,
        offer: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Wait until all positions are here; see `LockStep.meet`."""
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")
        if self._finished or any(other != place for other, _ in self._offers):
            there = f"at '{self._offers[0][0]}'" if self._offers else "at its end"
            raise RingarError(f"the ranks take different ways: one is at '{place}', one {there}")
        self._offers.append((place, offer))
        if position == self._num_positions - 1:
            offers = [offer for _, offer in self._offers]
            self._offers = []
            self._answers = combine(offers)
        self._pass_turn(position)
        self._await_turn(position)
        return self._answers[position]

    def _await_turn(self, position: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == position or self._is_abandoned)
        if self._is_abandoned:
            raise _AbandonedError("another rank failed")

    def _pass_turn(self, position: int) -> None:
        with self._condition:
            self._turn = (position + 1) % self._num_positions
            self._condition.notify_all()


class LockStep:
    """Ranks run in turns: rank 0 up to where all must meet, then rank 1, and so on; then on.

    One runs at a time, always in the same order, so random numbers (dropout) are drawn in the same
    order in every run. GPUs work at the same time nevertheless: a turn only queues their work.

    Args:
        threads: Where the ranks run.
    """

    def __init__(self, threads: RankThreads) -> None:
        self._threads = threads
        self._is_running = False
        self._here = threading.local()  # .part: the run of this thread, and its position there
        self._begin_process()

    def run(
        self, functions: Mapping[int, Function], *, num_threads: int | None = None
    ) -> dict[int, Any]:
        """Run ``functions[rank]()`` in turns, each of which may call `meet`.

        Args:
            functions: By rank.
            num_threads: Of torch, for each; see `RankThreads.run`.

        Returns:
            The results by rank.

        Raises:
            RingarError: The ranks did not meet at the same places, or this thread is in a run: a
                signal handler interrupted it.
            Exception: The one with which a rank failed; the others end where they are.
        """
        if self._process != os.getpid():
            self._begin_process()
        with self._lock:
            if self._is_running:
                raise RingarError(
                    "a signal handler cannot call this DataParallel(batchnorm='sync') while the "
                    "call that it interrupted runs: its ranks take turns, and wait for each other"
                )
            self._is_running = True
            try:
                run = _Run(len(functions))
                parts = {
                    rank: partial(self._take_part, run, position, function)
                    for position, (rank, function) in enumerate(functions.items())
                }
                return self._threads.run(parts, run.abandon, num_threads=num_threads)
            finally:
                self._is_running = False

    def meet(self, place: str, offer: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait until all ranks that run are here.

        Args:
            place: Where this is; must be the same for all.
            offer: What this rank brings.
            combine: Called once, by the last rank, with all offers in rank order; gives one answer
                per offer.

        Returns:
            This rank's answer.

        Raises:
            RingarError: Outside of `run`, or another rank is somewhere else.
        """
        part: tuple[_Run, int] | None = getattr(self._here, "part", None)
        if part is None:
            empty_backward_at_exit()
            raise RingarError(
                f"'{place}' needs all ranks, but was called outside of DataParallel's forward "
                "(as activation checkpointing does, which batchnorm='sync' does not go with)"
            )
        run, position = part
        return run.meet(position, place, offer, combine)

    def _begin_process(self) -> None:
        self._process = os.getpid()
        # One run at a time; its thread may come again, in a handler; a fork may copy it locked.
        self._lock = threading.RLock()
        self._is_running = False

    def _take_part(self, run: _Run, position: int, function: Function) -> Any:
        self._here.part = (run, position)
        try:
            return run.take_part(position, function)
        finally:
            del self._here.part
