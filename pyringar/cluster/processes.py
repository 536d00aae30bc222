"""Fork the ranks of a launch, relay their output, and raise their first failure."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from pyringar.cluster import internals
from pyringar.cluster.process_rank import REPORT_S, RankStatus, SharedValue, run_rank
from pyringar.cluster.rank_calls import names_of
from pyringar.cluster.rank_table import by_text, layout
from pyringar.cluster.state import ProcessState
from pyringar.comm.threads import handlers_wait
from pyringar.engine import load
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)

# Seconds that ranks have to end after the first failure, and again after a signal.
_GRACE_S = 2.0
# Seconds: peers may fail on a dying process's connections this long before its exit is noticed.
_DYING_S = 0.5
_PARTIAL_LINE_S = 0.2
_SILENT_S = 8 * REPORT_S  # seconds without a report after which a rank is silent
_POLL_S = 0.05
_PIPE_BYTES = 1 << 16
# Import before the fork: DistributedDataParallel, FSDP and checkpoints import these at first use.
_LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")


def run_processes(
    program: Callable[[], Any], devices: Sequence[torch.device], timeout_s: float
) -> list[Any]:
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
    return _RankProcesses(timeout_s).run(program, devices)


@dataclass
class _RelayedOutput:
    """Copies a rank's output line by line to this process, each line after a prefix."""

    pipe: Connection
    stream: Any
    mark: bytes
    text: bytes = b""
    last_s: float = 0.0

    def relay(self, *, is_over: bool) -> None:
        """Copy complete lines; copy a partial line only if it is old or long."""
        if not self.pipe.closed and self.pipe.poll():
            data = os.read(self.pipe.fileno(), _PIPE_BYTES)
            if not data:
                self.pipe.close()
            self.text += data
            self.last_s = time.monotonic()
        *lines, self.text = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self.text)
        is_old = is_over or time.monotonic() - self.last_s > _PARTIAL_LINE_S
        if self.text and (is_old or len(self.text) > _PIPE_BYTES):
            lines.append(self.text + b"\n")
            self.text = b""
        if lines and self.stream is not None:  # a daemon process has no stdout
            self.stream.write(b"".join(self.mark + line for line in lines).decode(errors="replace"))
            self.stream.flush()


class _RankProcess:
    """The process of one rank, its pipes and its last status."""

    def __init__(self, index: int, *args: Any) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.pipes, writers = zip(*(context.Pipe(duplex=False) for _ in range(3)), strict=True)
        self.index = index
        outputs = zip(self.pipes[1:], (sys.stdout, sys.stderr), strict=True)
        self.outputs = [
            _RelayedOutput(pipe, stream, b"[rank %d] " % index) for pipe, stream in outputs
        ]
        self.last_call = call = SharedValue(default=(0, 0, (), (), {}))
        self.report = RankStatus(progress=())
        self.silent_s = 0.0  # seconds since the last report
        self.has_ended = False
        state = ProcessState.fresh(index)  # computed here: a forked process is slow at first
        self.process = context.Process(target=run_rank, args=(index, writers, call, state, *args))
        with warnings.catch_warnings():
            # Python 3.12 warns at a fork if threads exist. The threads here are idle pools.
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            self.process.start()
        for writer in writers:
            writer.close()

    def read(self, noticed_s: float) -> Any:
        """Read waiting reports and output; return True if the rank's progress changed."""
        before = self.report.progress
        code = self.process.exitcode
        self.has_ended = code is not None
        with contextlib.suppress(EOFError, OSError):  # the process died and closed the pipe
            while self.pipes[0].poll():
                self.report = self.pipes[0].recv()
                self.silent_s = 0.0
        for output in self.outputs:
            output.relay(is_over=self.has_ended)
        if code == 0 and not self.report.failed_s:  # the program returned or called os._exit(0)
            self.report = self.report._replace(state="returned", stack="")
        elif code and not self.report.failed_s:
            name = {-s.value: s.name for s in signal.Signals}.get(code, f"signal {-code}")
            state = f"exited with status {code}" if code > 0 else f"was killed by {name}"
            error = PeerLostError(f"rank {self.index} (process {self.process.pid}) {state}")
            pickled = (pickle.dumps(error), "")
            self.report = RankStatus(state, failed_s=noticed_s - _DYING_S, pickled=pickled)
        return self.report.progress != before

    @property
    def state(self) -> str:
        """Return the last reported state, or "is silent" if reports stopped."""
        is_silent = self.silent_s > _SILENT_S and self.report.state in ("runs", "waits")
        return "is silent" if is_silent else self.report.state

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        for pipe in self.pipes:
            pipe.close()


class _RankProcesses:
    """All rank processes of one launch, from the fork to the end."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ranks: list[_RankProcess] = []
        self._still_s = 0.0  # seconds without progress of any rank

    def run(self, program: Callable[[], Any], devices: Sequence[torch.device]) -> list[Any]:
        number, is_frozen = signal.SIGTERM, gc.get_freeze_count() > 0
        server: Any = socket.create_server(("127.0.0.1", 0))  # avoids TCPStore's name lookup
        _, port = server.getsockname()
        try:
            with handlers_wait():
                if not is_frozen:
                    gc.freeze()  # else each rank's garbage collector copies all inherited pages
                for index in range(len(devices)):
                    self._ranks.append(_RankProcess(index, program, devices, self._timeout_s, port))
                # Create the store after the forks: a fork could copy its locks in a locked state.
                options: Any = {"is_master": True, "wait_for_workers": False}
                server = TCPStore("127.0.0.1", port, master_listen_fd=server.detach(), **options)
            self._serve(float("inf"), self._failure)
            self._serve(_GRACE_S if any(rank.report.failed_s for rank in self._ranks) else 0)
            failure = self._failure()
        except KeyboardInterrupt:
            # Ctrl-C in a terminal also interrupts the ranks: read their last output.
            self._serve(_POLL_S)
            number = signal.SIGINT
            raise
        finally:
            if not is_frozen:
                gc.unfreeze()
            self._end(number)
            del server
        if failure is not None:
            raise failure
        return [rank.report.value() for rank in self._ranks]

    def _serve(self, seconds: float, is_over: Callable[[], Any] = lambda: None) -> None:
        """Read reports and output until all ranks end, ``is_over()`` is true or time runs out."""
        woke_s = time.monotonic()
        ends_s = woke_s + seconds
        while alive := [rank for rank in self._ranks if not rank.has_ended]:
            if woke_s >= ends_s or is_over():
                return
            pipes = [pipe for rank in alive for pipe in rank.pipes if not pipe.closed]
            wait([rank.process.sentinel for rank in alive] + pipes, _POLL_S)
            passed_s = time.monotonic() - woke_s
            # Count at most REPORT_S: after a long pause, this process and the ranks were stopped.
            step_s = min(passed_s, REPORT_S)
            for rank in alive:
                rank.silent_s += step_s
            num_moved = sum(rank.read(woke_s) for rank in alive)
            woke_s += passed_s
            self._still_s = 0.0 if num_moved else self._still_s + step_s

    def _end(self, number: signal.Signals) -> None:
        try:
            for rank in self._ranks:
                if not rank.has_ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank.process.pid, number)
            self._serve(_GRACE_S)
        finally:
            with handlers_wait():
                for rank in self._ranks:
                    rank.close()

    def _standstill(self) -> RingarError | None:
        """Return an error after ``timeout_s`` without progress if a rank waits or hangs at exit."""
        alive = {rank.index: rank.state for rank in self._ranks if not rank.has_ended}
        silent = [index for index, state in alive.items() if state == "is silent"]
        running = [index for index, state in alive.items() if state == "runs"]
        # Add REPORT_S, the possible age of the last reports.
        is_late = self._still_s > self._timeout_s + REPORT_S
        have_returned = set(alive.values()) == {"returned"}
        one_waits = any(state.startswith("waits") for state in alive.values())
        if not is_late or not (one_waits or have_returned):
            return None
        limit = f"for {self._timeout_s:g} s"
        gone = [rank.index for rank in self._ranks if rank.has_ended]
        if have_returned:
            what = f"{names_of([*alive])} returned, and did not exit {limit}: see its threads"
        elif silent:
            what = (
                f"{names_of(silent)} gave no sign {limit}, while others waited: stopped, or in "
                "code that keeps Python's global lock"
            )
        elif running:
            call = "a call of torch.distributed (which other ranks waited for)"
            what = f"{names_of(running)} ran {limit} without {call}"
        elif gone and "waits in the store" in alive.values():
            has = "have" if gone[1:] else "has"
            return PeerLostError(f"ranks wait for {names_of(gone)}, which {has} ended, {limit}")
        else:
            what = f"all ranks wait for each other, {limit}"
        return CollectiveTimeout(what)

    def _failure(self) -> BaseException | None:
        """Return the first failure, if any; its cause has the tracebacks of all failed ranks."""
        failed = [rank for rank in self._ranks if rank.report.failed_s]
        # Sort ranks in state "waits" last: they failed because another rank failed.
        failed.sort(key=lambda rank: (rank.report.state == "waits", rank.report.failed_s))
        error: BaseException | None = self._standstill()
        if failed:
            try:
                error = failed[0].report.value()
            except Exception as unknown:
                error = unknown
        if error is None:
            return None
        if type(error) in (ArgumentError, CollectiveTimeout, PeerLostError):
            stacks = {r.index: r.report.stack for r in self._ranks if not r.report.failed_s}
            table = layout([self._row(rank) for rank in self._ranks], stacks).rstrip()
            error = type(error)(f"{error}{table}")
        elif hasattr(error, "add_note"):  # Python 3.10 has no notes
            error.add_note(f"raised by rank {failed[0].index} of {len(self._ranks)}")
        traces = by_text({rank.index: rank.report.stack for rank in failed})
        error.__cause__ = RemoteTraceback(f"\n{traces}") if traces else None
        return error

    def _row(self, rank: _RankProcess) -> tuple[str, ...]:
        state = rank.state
        num_calls, number, columns, ranks, _ = rank.last_call.get()
        if not num_calls or state in ("returned", "runs", "waits in the store"):
            calls = f"after {num_calls} call{'s' * (num_calls != 1)}"
            return (str(rank.index), state, calls, *[""] * 6)
        *columns, line = columns
        numbers = [other.last_call.get()[-1].get(columns[2], 0) for other in self._ranks]
        missing = [str(r) for r in ranks if state == "waits" and not 0 < number <= numbers[r]]
        return (str(rank.index), state, *columns, ", ".join(missing), line)
