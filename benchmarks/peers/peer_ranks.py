"""Start the ranks of one library, send them requests, and detect lost ranks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

START_S = 60.0  # timeout for the first message of all ranks
ANSWER_S = 60.0  # timeout for the answers to a request
END_S = 5.0  # timeout for ranks to exit before they are killed
FAST_CALLS, FEW_CALLS = 2000, 2  # maximum and minimum calls of a sample
SAMPLE_S = 20e-3  # duration of a sample, with barriers and checks


class LibraryRanksError(RuntimeError):
    """The ranks of a library did not start, exited, or did not answer in time."""


@dataclass(frozen=True)
class _RankConnection:
    connection: socket.socket
    answers: TextIO
    pidfd: int  # file descriptor of the process: its id may be reused
    version: str


@dataclass(frozen=True)
class Answer:
    """Seconds of each call on the slowest rank, and the number of wrong sums."""

    seconds: list[float]
    wrong: int


class LibraryRanks:
    """The ranks of one library, in processes that wait for requests.

    Args:
        name: Name of the library, used in errors.
        commands: Commands that start the ranks, with ``{address}`` for the address of the socket.
        ranks: Number of ranks that connect.
        environment: Environment variables to add for all commands.
        each: Environment variables to add for each command.
        start_s: Timeout in seconds for the first message of all ranks.
        answer_s: Timeout in seconds for the answers to a request.

    Raises:
        LibraryRanksError: The ranks did not start.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        ranks: int,
        *,
        environment: Mapping[str, str],
        each: Sequence[Mapping[str, str]],
        start_s: float = START_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.name, self._answer_s = name, answer_s
        self._about = f"{name}, {ranks} ranks"
        self._ranks: dict[int, _RankConnection] = {}
        self._programs: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._errors = folder / "stderr"
        self._stack.callback(self._end)
        address = str(folder / "socket")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(ranks)
                for command, own in zip(commands, each, strict=True):
                    words = [word.replace("{address}", address) for word in command]
                    self._start(words, {**os.environ, **environment, **own})
                self._meet(listener, ranks, time.monotonic() + start_s)
        except BaseException:
            self._kill()
            self.close()
            raise

    def __enter__(self) -> LibraryRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def version(self) -> str:
        """The name and version of the library, reported by rank 0."""
        return self._ranks[0].version

    def close(self) -> None:
        """Let the ranks exit; kill the remaining ranks after 5 seconds."""
        self._stack.close()

    def sampler(self, candidate: str, what: int | str) -> Callable[[], Answer]:
        """Return a function that times calls for about 20 ms in total."""

        def each_s(calls: int) -> float:
            begin_s = time.perf_counter()
            self.measure(candidate, what, calls, 1)
            return max(time.perf_counter() - begin_s, 1e-6) / (1 + calls)

        # The median of three estimates ignores one unusually short or long estimate.
        once_s = each_s(1)
        once_s = once_s if once_s > SAMPLE_S else statistics.median(each_s(3) for _ in range(3))
        calls = max(FEW_CALLS, min(FAST_CALLS, round(SAMPLE_S / once_s)))
        return lambda: self.measure(candidate, what, calls, 1 + calls // 4)

    def measure(self, candidate: str, what: int | str, calls: int, warm_up: int) -> Answer:
        """Run calls on all ranks; return their times and the number of wrong sums.

        Args:
            candidate: Name of a candidate that these ranks implement.
            what: Number of elements of each rank's float32 tensor, or the name of a model.
            calls: Number of timed calls, each after a barrier.
            warm_up: Number of untimed calls before the timed calls; their sums are checked.

        Raises:
            LibraryRanksError: A rank raised an error, exited, or did not answer in time.
        """
        request = {"candidate": candidate, "what": what, "calls": calls, "warm_up": warm_up}
        line = f"{json.dumps(request)}\n"
        deadline_s = time.monotonic() + self._answer_s
        with contextlib.suppress(BrokenPipeError):  # a rank exited: `_answers` raises its error
            for rank in self._ranks.values():
                rank.connection.sendall(line.encode())
        answers = self._answers(f"{candidate}, {what}", deadline_s)
        calls_ns = zip(*(answer["ns"] for answer in answers), strict=True)
        wrong = max(answer["wrong"] for answer in answers)
        return Answer([max(same) * 1e-9 for same in calls_ns], wrong)

    def _answers(self, what: str, deadline_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in self._ranks.items():
                selector.register(rank.connection, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    late = ", ".join(str(r) for r in self._ranks if r not in answers)
                    self._fail(f"{what}: no answer of rank {late} within {self._answer_s:g} s")
                for key, _ in ready:
                    line = self._ranks[key.data].answers.readline()
                    if not line:
                        self._fail(f"{what}: rank {key.data}: exited{self._last_words()}")
                    answers[key.data] = answer = json.loads(line)
                    if "error" in answer:
                        self._fail(f"{what}: rank {key.data}: {answer['error']}")
                    selector.unregister(key.fileobj)
        return list(answers.values())

    def _fail(self, why: str) -> None:
        self._kill()
        self.close()
        raise LibraryRanksError(f"{self._about}: {why}")

    def _start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        with open(self._errors, "ab") as errors:
            try:
                program = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # only the benchmark handles Ctrl-C
                )
            except OSError as error:
                raise LibraryRanksError(f"{self._about}: did not start: {error}") from error
        self._programs.append(program)

    def _meet(self, listener: socket.socket, ranks: int, deadline_s: float) -> None:
        listener.settimeout(0.1)
        while len(self._ranks) < ranks:
            ended = [p.returncode for p in self._programs if p.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                why = f"exited with {ended[0]}" if ended else "not all ranks connected in time"
                raise LibraryRanksError(f"{self._about}: did not start: {why}{self._last_words()}")
            # Suppressed: no rank has connected yet, or a rank exited before its first message.
            with contextlib.suppress(TimeoutError, ValueError):
                connection, _ = listener.accept()
                connection.settimeout(max(0.1, deadline_s - time.monotonic()))
                answers = connection.makefile("r")
                hello = json.loads(answers.readline())
                connection.settimeout(None)
                pidfd, version = os.pidfd_open(hello["pid"]), hello["version"]
                self._ranks[hello["rank"]] = _RankConnection(connection, answers, pidfd, version)

    def _kill(self) -> None:
        for rank in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        for program in self._programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Close the connections, which makes ranks exit; kill the remaining processes."""
        deadline_s = time.monotonic() + (END_S if self._ranks else 0.0)
        for rank in self._ranks.values():
            rank.answers.close()
            rank.connection.close()
        for program in self._programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        for program in self._programs:
            program.wait()
        for rank in self._ranks.values():
            select.select([rank.pidfd], [], [], END_S)  # readable once the process has exited
            os.close(rank.pidfd)
        self._ranks.clear()

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""
