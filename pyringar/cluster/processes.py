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
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from torch._C import _distributed_c10d

from pyringar.cluster import internals
from pyringar.cluster.board import Board
from pyringar.cluster.calls import names_of
from pyringar.cluster.process_rank import run_rank
from pyringar.cluster.report import by_text, layout
from pyringar.engine import load
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, UnsupportedError

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
    for name in _LATE:
        importlib.import_module(name)
    internals.run_first_backward()
    load.engine()
    return _Ranks(devices, timeout_s).run(program)


class _RanksError(Exception):
    """Show, as the cause of an error, the tracebacks of the ranks that raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Output:
    """Relay what a rank writes to a stream, line by line, with the rank's number before it."""

    def __init__(self, fd: int, rank: int, stream: Any) -> None:
        self.fd = fd
        self.is_open = True
        self._mark = f"[rank {rank}] "
        self._stream = stream
        self._text = b""
        self._last_s = 0.0

    def relay(self, *, is_over: bool) -> None:
        """Relay the lines that are there, and a line without an end that has stood for a while."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _PIPE_BYTES)
            self.is_open = bool(data)
            self._text += data
            self._last_s = time.monotonic()
        end = max(self._text.rfind(b"\n"), self._text.rfind(b"\r")) + 1
        if self._text[end:] and (is_over or time.monotonic() - self._last_s > _PARTIAL_LINE_S):
            self._text += b"\n"
            end = len(self._text)
        lines = self._text[:end].decode(errors="replace").splitlines(keepends=True)
        self._text = self._text[end:]
        if lines:
            self._stream.write("".join(self._mark + line for line in lines))
            self._stream.flush()


class _Rank:
    """One rank, as `launch` sees it."""

    def __init__(self, index: int, process: Any, channel: Connection, fds: Sequence[int]) -> None:
        self.index = index
        self.process = process
        self.pid = process.pid
        self.end_fd = os.pidfd_open(self.pid)
        self.outputs = [_Output(fds[0], index, sys.stdout), _Output(fds[1], index, sys.stderr)]
        self.channel = channel
        self.is_open = True  # the channel
        self.has_ended = False  # the process
        self.result: bytes | None = None
        self.error: BaseException | None = None
        self.trace = ""
        self.lost = ""  # how the process ended, if without a result
        self.failed_s = 0.0
        self.is_asked = False
        self.waits = False
        self.progress: Any = None
        self.stack = ""

    def read(self, noticed_s: float) -> None:
        """Take the messages and the output that are there, and note the end of the process."""
        self.has_ended = self.process.exitcode is not None
        try:
            while self.is_open and self.channel.poll():
                self._take(*pickle.loads(self.channel.recv_bytes()))
        except (EOFError, OSError):
            self.is_open = False
        for output in self.outputs:
            output.relay(is_over=self.has_ended)
        if self.has_ended and self.error is None:
            self._end(self.process.exitcode, noticed_s)

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "returned":
            (self.result,) = values
        elif kind == "failed":
            data, self.trace, self.failed_s = values
            self.error = pickle.loads(data)
        else:
            self.is_asked = False
            self.waits, self.progress, self.stack = values

    def _end(self, code: int, noticed_s: float) -> None:
        self.failed_s = noticed_s - _DYING_S
        if code > 0:
            self.lost = f"exited with status {code}"
        elif code < 0:
            names = {number.value: number.name for number in signal.Signals}
            self.lost = f"was killed by {names.get(-code, f'signal {-code}')}"
        elif self.result is None:  # the program has called os._exit(0)
            self.result = pickle.dumps(None)

    def ask(self) -> None:
        """Ask what the rank does; the answer comes later, or never if it does not run Python."""
        if not (self.is_asked or self.has_ended):
            with contextlib.suppress(OSError):
                self.channel.send_bytes(b"")
                self.is_asked = True

    def kill(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """End the process, if that has not happened, and free what this one holds of it."""
        self.kill(signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.channel.close()
        for fd in (self.end_fd, *(output.fd for output in self.outputs)):
            os.close(fd)

    @property
    def is_failed(self) -> bool:
        """Return whether the program raised, or the process was lost."""
        return self.error is not None or bool(self.lost)

    @property
    def state(self) -> str:
        """Return the rank's state for the table, at the first failure."""
        if self.lost or self.result is not None:
            return self.lost or "returned"
        if self.error is None:
            return "waits" if self.waits else "runs"
        # The failure of its peer has ended a wait.
        is_peers = isinstance(self.error, PeerLostError)
        return "waits" if is_peers else f"failed: {type(self.error).__name__}"


class _Ranks:
    """All ranks of one launch, from the fork to their end."""

    def __init__(self, devices: Sequence[torch.device], timeout_s: float) -> None:
        self._devices = devices
        self._timeout_s = timeout_s
        self._board = Board(len(devices))
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._stuck = ""
        self._signals = [signal.SIGTERM, signal.SIGKILL]  # the next one is sent at _ends_s
        self._ends_s = float("inf")
        self._woke_s = self._moved_s = self._asked_s = time.monotonic()

    def run(self, program: Callable[[], Any]) -> list[Any]:
        """Run the program on every rank; return the results by rank, or raise."""
        try:
            self._start(program)
            self._wait_for_end()
        except BaseException as error:
            is_ctrl_c = isinstance(error, KeyboardInterrupt)
            self._signals = [signal.SIGINT if is_ctrl_c else signal.SIGTERM, signal.SIGKILL]
            self._ends_s = time.monotonic() + (_TERMINAL_S if is_ctrl_c else 0.0)
            self._wait_for_end()
            raise
        finally:
            for rank in self._ranks:
                rank.close()
            self._store = None
        return self._results()

    def _start(self, program: Callable[[], Any]) -> None:
        """Fork the ranks, then serve their store, whose threads no fork would have."""
        listening = socket.create_server(("127.0.0.1", 0))
        _, port = listening.getsockname()
        gc.freeze()  # or each rank's collector would copy the pages of all objects
        try:
            for index in range(len(self._devices)):
                self._fork(index, program, port)
        finally:
            gc.unfreeze()
        self._store = _distributed_c10d.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def _fork(self, index: int, program: Callable[[], Any], port: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        channel, theirs = context.Pipe()
        pipes = [os.pipe(), os.pipe()]
        outputs = [writer for _, writer in pipes]
        args = (program, index, self._devices, port, self._board, theirs, outputs, os.getpid())
        process = context.Process(target=run_rank, args=args)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork: idle pools, which the rank does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        for reader, writer in pipes:
            os.close(writer)
            os.set_blocking(reader, False)
        self._ranks.append(_Rank(index, process, channel, [reader for reader, _ in pipes]))

    # -- while they run ----------------------------------------------------------------------------

    def _wait_for_end(self) -> None:
        while self._serve():
            self._look(time.monotonic())

    def _serve(self) -> bool:
        """Handle what ranks send and write, or wait a moment for it; return whether one runs."""
        alive = [rank for rank in self._ranks if not rank.has_ended]
        sources: list[Any] = [rank.end_fd for rank in alive]
        sources += [rank.channel for rank in alive if rank.is_open]
        sources += [output.fd for rank in alive for output in rank.outputs if output.is_open]
        wait(sources, _POLL_S)
        for rank in alive:
            rank.read(self._woke_s)
        self._woke_s = time.monotonic()
        return any(not rank.has_ended for rank in alive)

    def _look(self, now_s: float) -> None:
        """End the ranks after a failure, or if ranks wait and no rank moves for the timeout."""
        if now_s > self._ends_s:
            for rank in self._ranks:
                rank.kill(self._signals[0])
            self._signals = self._signals[1:] or self._signals
            self._ends_s = now_s + _GRACE_S
        elif self._ends_s < float("inf"):
            return
        elif any(rank.is_failed for rank in self._ranks):
            self._ask()
            self._ends_s = now_s + _GRACE_S
        elif now_s - self._asked_s > min(1.0, self._timeout_s / 8):
            before = [rank.progress for rank in self._ranks]
            self._ask()
            if before != [rank.progress for rank in self._ranks]:
                self._moved_s = now_s
            elif now_s - self._moved_s > self._timeout_s:
                self._look_at_waits()

    def _ask(self) -> None:
        """Ask all ranks what they do, and give them a moment to answer."""
        self._asked_s = time.monotonic()
        for rank in self._ranks:
            rank.ask()
        while any(rank.is_asked and not rank.has_ended for rank in self._ranks):
            if not self._serve() or self._woke_s > self._asked_s + _ANSWER_S:
                break

    def _look_at_waits(self) -> None:
        """End the ranks if one of them waits for others: no rank has moved for the timeout."""
        alive = [rank for rank in self._ranks if not rank.has_ended]
        running = [rank.index for rank in alive if not rank.waits]
        if len(running) == len(alive):
            return
        what = f"all ranks wait for each other, for {self._timeout_s:g} s"
        if running:
            what = (
                f"{names_of(running)} ran for {self._timeout_s:g} s without a call in which others "
                "go on, and these waited"
            )
        self._stuck = f"{what}{self._table()}"
        self._ends_s = 0.0

    # -- what came of it ---------------------------------------------------------------------------

    def _results(self) -> list[Any]:
        """Return the results by rank, or raise the first failure."""
        failed = [rank for rank in self._ranks if rank.is_failed]
        if self._stuck:
            raise CollectiveTimeout(self._stuck)
        if not failed:
            return [pickle.loads(cast("bytes", rank.result)) for rank in self._ranks]
        # A rank that lost its peer has failed because of the peer.
        first = min(failed, key=lambda r: (isinstance(r.error, PeerLostError), r.failed_s))
        error = first.error
        if error is None:
            what = f"rank {first.index} (process {first.pid}) {first.lost}"
            error = PeerLostError(f"{what}{self._table()}")
        elif type(error) in (ArgumentError, CollectiveTimeout, PeerLostError):
            error = type(error)(f"{error}{self._table()}")
        traces = {rank.index: rank.trace for rank in [first, *failed] if rank.trace}
        raise error from (_RanksError(by_text(traces)) if traces else None)

    def _table(self) -> str:
        stacks = {r.index: r.stack for r in self._ranks if r.state in ("waits", "runs")}
        return layout([self._row(rank) for rank in self._ranks], stacks).rstrip()

    def _row(self, rank: _Rank) -> tuple[str, ...]:
        call, state = self._board.read(rank.index), rank.state
        if not call or state in ("returned", "runs"):
            return (str(rank.index), state, f"after {call.get('calls', 0)} calls", *[""] * 6)
        number = call["number"]
        missing = call["ranks"] if state == "waits" else []
        if number:
            numbers = {r: self._board.read(r).get("numbers", {}) for r in missing}
            missing = [r for r in missing if numbers[r].get(call["in"], 0) < number]
        shown = [call[name] for name in ("shape", "dtype")]
        where = ", ".join(map(str, missing))
        return (
            str(rank.index),
            state,
            call["call"],
            str(number or ""),
            call["in"],
            *shown,
            where,
            call["line"],
        )
