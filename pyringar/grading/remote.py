"""Call a function in a worker process, and judge the results in this process.

The worker is forked from this process, which has imported torch, so it starts within milliseconds.
It prints into a pipe, and writes results into shared memory, which is copied before it is judged.
So a solution gets no verdict by printing, patching torch or exiting. The worker is trusted only for
the order of tensors in the list (``list``), and the type of the result (``returns``).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.errors import ArgumentError, RingarError
from pyringar.grading import worker
from pyringar.grading.checks import Raised, Subject
from pyringar.grading.graded_calls import CallCase, Failure, GradedCall, OddResult
from pyringar.grading.grader import GradeReport, judge_all
from pyringar.grading.solution import CannotLoadError, Solution, printable
from pyringar.parallel.sharded_step import torch_threads

_END_S = 1.0  # timeout of the supervisor's report that the worker ended
_MIN_START_S = 60.0
_POLL_S = 0.05
_MAX_WORDS = 1000
_NONSENSE = "the process sent an answer that is not the grader's"
Show = Callable[[bytes], object]  # receives the output of a solution


class EndedError(Exception):
    """The worker process ended before it answered a request."""


def grade(
    target: Solution, devices: list[str], timeout_s: float, show: Show = lambda text: None
) -> GradeReport:
    """Return the verdicts on a solution. ``show`` receives its output.

    ``timeout_s`` limits the import, and all calls of one property. ArgumentError if a device is
    missing. CannotLoadError if the import defines no such function.
    """
    with graded(target, devices, timeout_s, show) as remote:
        verdicts = judge_all(lambda work, rested: work(rested), remote.rested, timeout_s)
        stem = os.path.basename(target.where)
        stem = os.path.splitext(stem)[0] if target.is_file else stem
        name = f"{stem}.{target.function}"
        return GradeReport(name, remote.device_names, verdicts, remote.remark)


def check_worker_devices(devices: list[str], timeout_s: float) -> None:
    """Raise ArgumentError if a device is missing.

    A worker checks, since CUDA cannot be used in a process forked after its initialization.
    """
    harmless = Solution("harmless.py", "allreduce", b"def allreduce(data): ...")
    with contextlib.suppress(CannotLoadError), graded(harmless, devices, timeout_s, lambda _: None):
        pass


@contextlib.contextmanager
def graded(target: Solution, devices: list[str], timeout_s: float, show: Show) -> Iterator[Remote]:
    remote = Remote(target, devices, timeout_s, show)
    # One torch thread: a forked process inherits torch's thread pool without its threads.
    with contextlib.closing(remote), torch_threads(1):
        remote.load()
        yield remote


class Remote(Subject):
    """The graded function in a worker process, which is restarted after it ends."""

    def __init__(self, target: Solution, devices: list[str], timeout_s: float, show: Show) -> None:
        super().__init__(lambda data: None, (torch.device("cpu"),) * len(devices))
        arena = self._arena = worker.Arena(len(devices))
        self._start = partial(_Process, target, devices, arena, timeout_s, show)
        self._timeout_s = timeout_s
        self._turn = 0
        self._left_s = timeout_s
        self._process = self._start()
        self.device_names: tuple[str, ...] = ()
        self.remark = ""

    def load(self) -> None:
        self.device_names, self.remark = self._process.load()

    def rested(self) -> Remote:
        self.last_case = None
        self._left_s = self._timeout_s
        return self

    def close(self) -> None:
        self._process.end()

    def run(self, case: CallCase, inputs: Sequence[Tensor] | None = None) -> GradedCall:
        """Call the function in its worker; Failure if it raised or exited, TimeoutError if late."""
        self.note(case)
        call = GradedCall(case, self.devices, inputs)
        try:
            answer = self._ask(call)
        except (EndedError, CannotLoadError, TimeoutError) as error:
            self._process.end()
            if isinstance(error, TimeoutError):
                raise
            raise Failure(case, str(error)) from error
        if "raised" in answer:
            raise Raised(case, _clean(answer["raised"]))
        try:
            self._take_over(call, answer)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise Failure(case, _NONSENSE) from error
        return call

    def _ask(self, call: GradedCall) -> dict[str, Any]:
        if self._process.is_ended:
            self._process = self._start()
            self.load()
        self._turn += 1
        places = self._arena.places(call.case, self._turn)
        for rank, base in enumerate(call.bases):
            self._arena.tensor(places[rank], base.shape, base.dtype).copy_(base)
        began = time.monotonic()
        try:
            request = {"case": call.case.as_dict(), "places": places}
            answer = self._process.ask(request, began + self._left_s)
        finally:
            self._left_s -= time.monotonic() - began
        for rank, base in enumerate(call.bases):
            base.copy_(self._arena.tensor(places[rank], base.shape, base.dtype))
        return answer

    def _take_over(self, call: GradedCall, answer: dict[str, Any]) -> None:
        def item(words: dict[str, Any]) -> Any:
            if "rank" in words:
                return given[words["rank"]]
            if "at" in words:
                return self._arena.tensor(words["at"], call.case.shape, call.case.dtype).clone()
            return OddResult(_clean(words["other"]))

        given = call.given
        call.data = [item(words) for words in answer["data"]]
        for rank, words in enumerate(answer["given"]):
            if words is not None:
                moved = item(words)
                call.data = [moved if found is given[rank] else found for found in call.data]
                given[rank] = moved
        call.returned = answer["returned"] and _clean(answer["returned"])


def _clean(words: Any) -> str:
    return printable(str(words)[:_MAX_WORDS])


class _Process:
    """The worker process of a solution, and its supervisor process."""

    def __init__(
        self,
        target: Solution,
        devices: list[str],
        arena: worker.Arena,
        timeout_s: float,
        show: Show,
    ) -> None:
        self._timeout_s = timeout_s
        self._show = show
        self._buffer = b""
        self.is_ended = False
        self._channel, worker_channel = socket.socketpair()
        self._control, supervisor_control = socket.socketpair()
        self._output, worker_output = os.pipe()
        serve = partial(
            worker.serve, target, devices, worker_channel, worker_output, arena, timeout_s
        )
        _fork_orphan(partial(worker.supervise, supervisor_control, serve))
        worker_channel.close()
        supervisor_control.close()
        os.close(worker_output)
        os.set_blocking(self._output, False)
        self._channel.setblocking(False)
        self._control.settimeout(max(timeout_s, _MIN_START_S))
        self._reports = b""
        try:
            while b"\n" not in self._reports:
                self._read_report()
        except (EndedError, TimeoutError) as error:
            raise RingarError("the process for a solution did not start") from error
        ids, _, self._reports = self._reports.partition(b"\n")
        self._supervisor_id, self._worker_id = map(int, ids.split())
        self._selector = selectors.DefaultSelector()
        for file in (self._channel, self._control, self._output):
            self._selector.register(file, selectors.EVENT_READ)

    def load(self) -> tuple[tuple[str, ...], str]:
        """Wait until the solution is imported; return devices and a remark. See `grade`."""
        try:
            message = self._receive(time.monotonic() + self._timeout_s)
        except TimeoutError:
            words = f"the import did not end within {self._timeout_s:g} s"
            raise CannotLoadError(words) from None
        except EndedError as error:
            raise CannotLoadError(f"in the import {error}") from None
        if "no_device" in message:
            raise ArgumentError(message["no_device"])
        if "cannot_load" in message:
            raise CannotLoadError(_clean(message["cannot_load"]))
        return tuple(map(_clean, message.get("loaded", ()))), _clean(message.get("remark", ""))

    def ask(self, request: dict[str, Any], ends: float) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` raises
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        return self._receive(ends)

    def end(self) -> None:
        """Kill the worker and its group; show the rest of its output."""
        if self.is_ended:
            return
        self.is_ended = True
        with contextlib.suppress(OSError):  # shutdown() makes the supervisor kill the worker
            self._control.shutdown(socket.SHUT_WR)
        self._control.settimeout(_END_S)
        with contextlib.suppress(TimeoutError, EndedError):
            while b"\n" not in self._reports:
                self._read_report()
        if b"\n" not in self._reports:  # the solution has killed or stopped the supervisor
            worker.kill_group(self._supervisor_id)
            worker.kill_group(self._worker_id)
        with self._selector, self._channel, self._control, os.fdopen(self._output):
            self._drain()
        with contextlib.suppress(ChildProcessError):
            while os.getpid() == 1 and os.waitpid(-1, os.WNOHANG)[0]:
                pass  # in a container, process 1 must reap orphans

    def _read_report(self) -> None:
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = self._control.recv(64)
        if not received:
            raise EndedError("the process killed its parent process")
        self._reports += received

    def _raise_end(self) -> NoReturn:
        self._control.settimeout(_END_S)
        try:
            while b"\n" not in self._reports:
                self._read_report()
        except TimeoutError:
            raise EndedError("the process closed the grader's files") from None
        code = os.waitstatus_to_exitcode(int(self._reports))
        if code >= 0:
            raise EndedError(f"the process ended with status {code} instead of answering")
        raise EndedError(f"the process was ended by {signal.Signals(-code).name}")

    def _receive(self, ends: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {key.fileobj for key, _ in self._selector.select(left)}
            if self._output in ready:
                self._drain()
            if self._channel in ready:
                received = b""
                with contextlib.suppress(ConnectionResetError):
                    received = self._channel.recv(1 << 16)
                if not received:
                    self._raise_end()
                self._buffer += received
            elif self._control in ready:  # the worker ended, but its children keep the channel open
                self._raise_end()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EndedError(_NONSENSE)
        self._check_supervisor(ends)
        return message

    def _check_supervisor(self, ends: float) -> None:
        """Raise EndedError if the solution killed the supervisor, even if the worker still runs."""
        with contextlib.suppress(OSError):
            self._control.sendall(b"?")
        self._control.settimeout(max(ends - time.monotonic(), _POLL_S))
        while b"\n" not in self._reports:
            self._read_report()
        self._reports = self._reports.removeprefix(b"alive\n")

    def _drain(self) -> None:
        """Show at most 1 MiB of output, so that endless output does not delay the deadline."""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._output, 1 << 20)
            if text:
                self._show(text)
            elif self._output in self._selector.get_map():
                self._selector.unregister(self._output)


def _fork_orphan(work: Callable[[], NoReturn]) -> None:
    """Fork twice, so that ``work`` runs in an orphan process with Ctrl-C blocked."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the fork prints the buffered text again
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns that threads exist: they are idle pools, which the child never uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                try:
                    if os.fork() == 0:
                        work()
                finally:
                    os._exit(0)
        os.waitpid(pid, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
