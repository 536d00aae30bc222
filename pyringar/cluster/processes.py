"""Ranks that are forked processes: start them, relay their output, raise their first failure."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any, cast

import torch
from torch._C import _distributed_c10d

from pyringar.cluster import internals
from pyringar.cluster.calls import names_of
from pyringar.cluster.process_rank import Board, run_rank
from pyringar.cluster.report import by_text, layout
from pyringar.engine import load
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)

__all__ = ["run_processes"]

# How long ranks may go on after the first failure, and after each signal that ends them.
_GRACE_S = 2.0
# After Ctrl-C: a terminal has interrupted the ranks, too, and a notebook has not.
_TERMINAL_S = 0.05
_ANSWER_S = 1.0
# A process that dies closes its connections, so that its peers fail, before its end can be noticed.
_DYING_S = 0.5
_PARTIAL_LINE_S = 0.2
_POLL_S = 0.05
_PIPE_BYTES = 1 << 16
# Modules that DistributedDataParallel, FSDP and checkpoints import when they are first used.
_LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")


def run_processes(
    program: Callable[[], Any], devices: Sequence[torch.device], timeout_s: float
) -> list[Any]:
    """Run a program on ranks that are forked processes; see `pyringar.launch`."""
    if sys.platform != "linux":
        raise UnsupportedError("launch: processes=True needs Linux; leave it out for threads")
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            f"launch: devices has {str(gpu)!r} with processes=True, and this process has "
            "initialised CUDA, which a forked process cannot use; launch before the first use of "
            "CUDA, or take threads or torchrun"
        )
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise UnsupportedError("launch: SIGCHLD is ignored, so that no process can be waited for")
    for name in _LATE:
        importlib.import_module(name)
    internals.run_first_backward()
    load.engine()
    return _Ranks(devices, timeout_s).run(program)


@contextlib.contextmanager
def _handlers_wait() -> Iterator[None]:
    """Call handlers of signals at the end: what they raise would lose a process that was forked."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in signal.valid_signals() if is_main and callable(signal.getsignal(n))]
    came: list[int] = []
    handlers = [signal.signal(number, lambda n, _: came.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _loaded(data: bytes, text: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # of a class that this process does not have, for instance
        raise RingarError(text) from error


@dataclass
class _Output:
    """Relay what a rank writes to a stream, line by line, with a mark before each line."""

    pipe: Connection
    mark: bytes
    stream: Any
    text: bytes = b""
    last_s: float = 0.0

    def relay(self, *, is_over: bool) -> None:
        """Relay the lines that are there, and a line without an end that is old or long."""
        with contextlib.suppress(OSError):  # there is nothing, or the pipe is closed
            data = os.read(self.pipe.fileno(), _PIPE_BYTES)
            if not data:
                self.pipe.close()
            self.text += data
            self.last_s = time.monotonic()
        end = max(self.text.rfind(b"\n"), self.text.rfind(b"\r")) + 1
        is_old = is_over or time.monotonic() - self.last_s > _PARTIAL_LINE_S
        if self.text[end:] and (is_old or len(self.text) > _PIPE_BYTES):
            self.text += b"\n"
            end = len(self.text)
        lines = self.text[:end].splitlines(keepends=True)
        self.text = self.text[end:]
        if lines:
            marked = b"".join(self.mark + line for line in lines)
            self.stream.write(marked.decode(errors="replace"))
            self.stream.flush()


class _Rank:
    """One rank, as `launch` sees it."""

    def __init__(self, index: int, *shared: Any) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.index = index
        self.channel, theirs = context.Pipe()
        self.outputs, writers = [], [theirs]
        for stream in (sys.stdout, sys.stderr):
            reader, writer = context.Pipe(duplex=False)
            os.set_blocking(reader.fileno(), False)
            self.outputs.append(_Output(reader, b"[rank %d] " % index, stream))
            writers.append(writer)
        self.has_ended = False
        # The rank's messages set what follows.
        self.outcome = ""  # for tables, as the state before
        self.result = (pickle.dumps(None), "")  # if it calls os._exit(0)
        self.error: tuple[bytes, str] | None = None
        self.failed_s = 0.0
        self.trace = ""
        self.is_asked = False
        self.state = "runs"
        self.progress: Any = None
        self.stack = ""
        self.process = context.Process(target=run_rank, args=(index, *writers, *shared))
        with warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork: idle pools, which the rank does not use.
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            self.process.start()
        for writer in writers:
            writer.close()

    @property
    def open_pipes(self) -> list[Connection]:
        pipes = [self.channel, *(output.pipe for output in self.outputs)]
        return [pipe for pipe in pipes if not pipe.closed]

    def read(self, noticed_s: float) -> None:
        """Take the messages and the output that are there, and note the end of the process."""
        code = self.process.exitcode
        self.has_ended = code is not None
        try:
            while not self.channel.closed and self.channel.poll():
                vars(self).update(self.channel.recv())
        except (EOFError, OSError):
            self.channel.close()
        for output in self.outputs:
            output.relay(is_over=self.has_ended)
        if code is None or self.error is not None:
            return
        self.outcome = "returned"
        if code != 0:
            names = {-number.value: number.name for number in signal.Signals}
            killed = f"was killed by {names.get(code, f'signal {-code}')}"
            self.outcome = f"exited with status {code}" if code > 0 else killed
            self.failed_s = noticed_s - _DYING_S

    def failure(self) -> BaseException:
        if self.error is None:
            return PeerLostError(f"rank {self.index} (process {self.process.pid}) {self.outcome}")
        try:
            return cast("BaseException", _loaded(*self.error))
        except RingarError as error:  # with the text of the other
            return error

    def kill(self, number: int) -> None:
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """End the process, if that has not happened, and free what this one holds of it."""
        self.kill(signal.SIGKILL)
        self.process.join()
        self.process.close()
        for pipe in self.open_pipes:
            pipe.close()


class _Ranks:
    """All ranks of one launch, from the fork to their end."""

    def __init__(self, devices: Sequence[torch.device], timeout_s: float) -> None:
        self._devices = devices
        self._timeout_s = timeout_s
        self._board = Board(len(devices))
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._stuck = ""
        self._still_s = 0.0  # for how long no rank has moved
        self._woke_s = self._asked_s = time.monotonic()

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Run the program on every rank; return the results by rank, or raise."""
        try:
            with _handlers_wait():
                self._start(program)
            self._serve(float("inf"), self._is_over)
            self._serve(0 if self._stuck else _GRACE_S)
            failure = self._failure()
            self._end(signal.SIGTERM)
        except BaseException as error:
            is_ctrl_c = isinstance(error, KeyboardInterrupt)
            self._serve(_TERMINAL_S if is_ctrl_c else 0)
            self._end(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
            raise
        finally:
            for rank in self._ranks:
                rank.close()
            self._store = None
        if failure is not None:
            raise failure
        return [_loaded(*rank.result) for rank in self._ranks]

    def _start(self, program: Callable[[], Any]) -> None:
        """Fork the ranks, then serve their store, whose threads no fork would have."""
        listening = socket.create_server(("127.0.0.1", 0))
        _, port = listening.getsockname()
        gc.freeze()  # or each rank's collector would copy the pages of all objects
        try:
            for index in range(len(self._devices)):
                self._ranks.append(_Rank(index, program, self._devices, port, self._board))
        finally:
            gc.unfreeze()
        self._store = _distributed_c10d.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    # -- while they run ----------------------------------------------------------------------------

    def _serve(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Handle what ranks send and write, until all have ended or the time or need is over."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and not is_over():
            alive = [rank for rank in self._ranks if not rank.has_ended]
            if not alive:
                return
            sources = [rank.process.sentinel for rank in alive]
            sources += [pipe for rank in alive for pipe in rank.open_pipes]
            wait(sources, _POLL_S)
            for rank in alive:
                rank.read(self._woke_s)
            self._woke_s = time.monotonic()

    def _end(self, number: signal.Signals) -> None:
        """End the ranks that have not ended by a signal, and if they swallow it by SIGKILL."""
        for signal_number in (number, signal.SIGKILL):
            for rank in self._ranks:
                rank.kill(signal_number)
            self._serve(_GRACE_S)

    def _is_over(self) -> bool:
        """Return whether a rank has failed, or ranks wait and no rank moves for the timeout."""
        if any(rank.outcome not in ("", "returned") for rank in self._ranks):
            self._ask()
            return True
        passed_s = time.monotonic() - self._asked_s
        interval_s = min(1.0, self._timeout_s / 8)
        if passed_s > interval_s:
            before = [rank.progress for rank in self._ranks]
            self._ask()
            has_moved = before != [rank.progress for rank in self._ranks]
            # The time during which all processes are stopped does not count.
            self._still_s = 0 if has_moved else self._still_s + min(passed_s, 2 * interval_s)
            if self._still_s > self._timeout_s:
                self._stuck = self._standstill()
        return bool(self._stuck)

    def _ask(self) -> None:
        """Ask all ranks what they do; a rank that does not run Python does not answer."""
        self._asked_s = time.monotonic()
        alive = [rank for rank in self._ranks if not rank.outcome]
        for rank in alive:
            if not rank.is_asked:
                with contextlib.suppress(OSError):
                    rank.channel.send_bytes(b"")
                    rank.is_asked = True
        self._serve(_ANSWER_S, lambda: not any(rank.is_asked for rank in alive if not rank.outcome))

    def _standstill(self) -> str:
        """Return that ranks wait, or "" if none does: no rank has moved for the timeout."""
        alive = [rank for rank in self._ranks if not rank.has_ended]
        running = [rank.index for rank in alive if rank.state == "runs"]
        if len(running) == len(alive):
            return ""
        if not running:
            return f"all ranks wait for each other, for {self._timeout_s:g} s"
        what = "without a call in which others go on, and these waited"
        return f"{names_of(running)} ran for {self._timeout_s:g} s {what}"

    # -- what came of it ---------------------------------------------------------------------------

    def _failure(self) -> BaseException | None:
        """Return the first failure, whose cause has the tracebacks of all ranks that raised."""
        failed = [rank for rank in self._ranks if rank.outcome not in ("", "returned")]
        error: BaseException
        if self._stuck:
            error = CollectiveTimeout(self._stuck)
        elif not failed:
            return None
        else:
            # A rank that waits has lost its peer, and failed because of the peer.
            failed.sort(key=lambda rank: (rank.outcome == "waits", rank.failed_s))
            error = failed[0].failure()
        if type(error) in (ArgumentError, CollectiveTimeout, PeerLostError):
            error = type(error)(f"{error}{self._table()}")
        traces = {rank.index: rank.trace for rank in failed if rank.trace}
        error.__cause__ = RemoteTraceback(f"\n{by_text(traces)}") if traces else None
        return error

    def _table(self) -> str:
        stacks = {rank.index: rank.stack for rank in self._ranks if not rank.outcome}
        return layout([self._row(rank) for rank in self._ranks], stacks).rstrip()

    def _row(self, rank: _Rank) -> tuple[str, ...]:
        call, state = self._board.read(rank.index), rank.outcome or rank.state
        if not call or state in ("returned", "runs", "waits in the store"):
            return (str(rank.index), state, f"after {call.get('calls', 0)} calls", *[""] * 6)
        missing = call["ranks"] if state == "waits" else []
        if call["number"]:
            numbers = {r: self._board.read(r).get("numbers", {}) for r in missing}
            missing = [r for r in missing if numbers[r].get(call["in"], 0) < call["number"]]
        where = ", ".join(map(str, missing))
        return (str(rank.index), state, *call["columns"], where, call["line"])
