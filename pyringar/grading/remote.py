"""GradedCall a function in its own process, and judge the results in this one.

The process is forked from this one, which has imported torch: it is ready within milliseconds. It
prints into a pipe, and writes results into shared memory, which is copied before it is judged. So a
solution cannot print, patch or exit its way to a verdict. Its process is trusted only for the order
of tensors in the list (``list``), and the type of the result (``returns``).
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
from typing import Any

import torch
from torch import Tensor

from pyringar.errors import ArgumentError
from pyringar.grading import worker
from pyringar.grading.graded_calls import GradedCall, CallCase, Failure, OddResult
from pyringar.grading.checks import Raised, Subject
from pyringar.grading.grader import GradeReport, judge_all
from pyringar.grading.solution import CannotLoadError, Solution, printable
from pyringar.parallel.sharded_step import torch_threads

_TICK_S = 0.05  # how often a silent process is looked at
_LAST_WORDS_S = 1.0
_MAX_WORDS = 1000
Show = Callable[[bytes], object]  # gets the output of a solution


class EndedError(Exception):
    """The process ended before it answered."""


def grade(
    target: Solution, devices: list[str], timeout_s: float, show: Show = lambda text: None
) -> GradeReport:
    """Return the verdicts on a solution; ``show`` gets its output.

    ``timeout_s`` is for its import, and for all calls of one property. ArgumentError if a device is
    missing, CannotLoadError if the import fails or hangs, or there is no such function.
    """
    with graded(target, devices, timeout_s, show) as remote:
        verdicts = judge_all(lambda check, _: check.look(remote), remote.rested, timeout_s)
        stem = os.path.basename(target.where).removesuffix(".py")
        return GradeReport(f"{stem}.{target.function}", remote.device_names, verdicts)


@contextlib.contextmanager
def graded(target: Solution, devices: list[str], timeout_s: float, show: Show) -> Iterator[Remote]:
    remote = Remote(target, devices, timeout_s, show)
    # A forked process has torch's pool, but not its threads.
    with contextlib.closing(remote), torch_threads(1):
        remote.load()
        yield remote


class Remote(Subject):
    """A function in another process, which is started again after it ended."""

    def __init__(self, target: Solution, devices: list[str], timeout_s: float, show: Show) -> None:
        super().__init__(lambda data: None, (torch.device("cpu"),) * len(devices))
        arena = self._arena = worker.Arena(len(devices))
        self._start = partial(_Process, target, devices, arena, timeout_s, show)
        self._timeout_s = timeout_s
        self._turn = 0
        self._left_s = timeout_s
        self._process = self._start()
        self.device_names: tuple[str, ...] = ()

    def load(self) -> None:
        self.device_names = self._process.load()

    def rested(self) -> Remote:
        self.last_case = None
        self._left_s = self._timeout_s
        return self

    def close(self) -> None:
        self._process.end()

    def run(self, case: CallCase, inputs: Sequence[Tensor] | None = None) -> GradedCall:
        """GradedCall the function in its process. Failure if it raised or ended; TimeoutError if late."""
        self.last_case = case
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
            raise Failure(case, "the process answered what makes no sense") from error
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
        def thing(words: dict[str, Any]) -> Any:
            if "rank" in words:
                return given[words["rank"]]
            if "at" in words:
                return self._arena.tensor(words["at"], call.case.shape, call.case.dtype).clone()
            return OddResult(_clean(words["other"]))

        given = call.given
        call.data = [thing(words) for words in answer["data"]]
        for rank, words in enumerate(answer["given"]):
            if words is not None:
                moved = thing(words)
                call.data = [moved if found is given[rank] else found for found in call.data]
                given[rank] = moved
        call.returned = answer["returned"] and _clean(answer["returned"])


def _clean(words: Any) -> str:
    return printable(str(words)[:_MAX_WORDS])


class _Process:
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
        self._channel, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would print it again
        with warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork: idle pools, which the child does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            worker.serve(target, devices, theirs, their_output, arena)
        theirs.close()
        os.close(their_output)
        os.set_blocking(self._output, False)
        self._channel.setblocking(False)
        self._status: int | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def load(self) -> tuple[str, ...]:
        """Wait until the solution is imported; return the devices of the ranks. See `grade`."""
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
        return tuple(map(_clean, message.get("loaded", ())))

    def ask(self, request: dict[str, Any], ends: float) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` tells
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        return self._receive(ends)

    def end(self) -> None:
        """Kill the process and its group; show the rest of what it printed."""
        if self.is_ended:
            return
        self.is_ended = True
        for kill in (os.killpg, os.kill):  # it leads its group as soon as it runs
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: of a zombie
                kill(self._pid, signal.SIGKILL)
        if self._status is None:
            os.waitpid(self._pid, 0)
        with self._selector, self._channel, os.fdopen(self._output):
            self._drain()

    def _wait(self, seconds: float) -> int | None:
        ends = time.monotonic() + seconds
        while self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() >= ends:
                break
            else:
                time.sleep(0.001)
        return self._status

    def _receive(self, ends: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {key.fileobj for key, _ in self._selector.select(min(left, _TICK_S))}
            if self._output in ready:
                self._drain()
            if self._channel in ready:
                received = b""
                with contextlib.suppress(ConnectionResetError):
                    received = self._channel.recv(1 << 16)
                if not received:
                    raise EndedError(_exit_words(self._wait(_LAST_WORDS_S)))
                self._buffer += received
            elif not ready and self._wait(0) is not None:  # its children may hold the channel
                raise EndedError(_exit_words(self._status))
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EndedError("the process answered what makes no sense")
        return message

    def _drain(self) -> None:
        """Show a part of the output: an endless output must not delay the deadline."""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._output, 1 << 20)
            if text:
                self._show(text)
            elif self._output in self._selector.get_map():
                self._selector.unregister(self._output)


def _exit_words(status: int | None) -> str:
    """Describe the end of a process; None: it still runs."""
    if status is None:
        return "the process closed the grader's files"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the process ended with status {code} instead of answering"
    return f"the process was ended by {signal.Signals(-code).name}"
