"""Drive the ranks of one library from the benchmark's process, and wait for none that is gone."""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path

START_S = 60.0  # most time until all ranks have said hello
ANSWER_S = 60.0  # most time until all ranks have answered a request
LONG_S = 10e-3  # between two requests, from which on what they cost themselves does not matter
END_S = 5.0  # most time that ranks get to end by themselves
FAST_CALLS, FEW_CALLS = 2000, 2  # most and least calls of a sample
SAMPLE_S = 20e-3  # that a sample should take, barriers and fills and all


class GroupError(RuntimeError):
    """A library's ranks did not start, ended, or did not answer in time; the message names it."""


@dataclass
class _Rank:
    connection: socket.socket
    pid: int
    version: str
    received: bytearray = field(default_factory=bytearray)
    ended_at: tuple[float, int] | None = None  # of the last request: wall seconds, CPU ns


@dataclass(frozen=True)
class Answer:
    """Seconds of each call on the slowest rank, and how many calls gave something else."""

    seconds: list[float]
    wrong: int


class Group:
    """The ranks of one library, in processes of their own that wait for requests.

    Args:
        name: Of the library; errors begin with it.
        commands: Programs to start; together they make the ranks. ``{address}`` is replaced.
        ranks: Number of processes that say hello.
        environment: Variables beside this process's; each command's own follow in ``each``.
        each: Variables of every command, one mapping per command.
        settle_s: That ranks sleep after their calls, within their turn.
        start_s: Deadline of the ranks' hello.
        answer_s: Deadline of a request.

    Raises:
        GroupError: They did not start.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        ranks: int,
        *,
        environment: Mapping[str, str] | None = None,
        each: Sequence[Mapping[str, str]] | None = None,
        settle_s: float = 0.0,
        start_s: float = START_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.name, self._answer_s, self._settle_s = name, answer_s, settle_s
        self._about = f"{name}, {ranks} ranks"
        self._ranks: dict[int, _Rank] = {}
        self._idle_cpu_ns, self._idle_s = 0, 0.0
        self._programs: list[subprocess.Popen[bytes]] = []
        self._pidfds: dict[int, int] = {}
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._errors = folder / "stderr"
        self._stack.callback(self._end)
        address = str(folder / "socket")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(ranks)
                for number, command in enumerate(commands):
                    own = each[number] if each else {}
                    variables = {**os.environ, **(environment or {}), **own}
                    variables["SETTLE_S"] = str(settle_s)
                    self._start([part.replace("{address}", address) for part in command], variables)
                self._meet(listener, ranks, time.monotonic() + start_s)
        except BaseException:
            self._kill()
            self.close()
            raise

    def __enter__(self) -> Group:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    @property
    def version(self) -> str:
        """Return what rank 0 calls its library."""
        return self._ranks[0].version

    @property
    def idle_cpu_s(self) -> float:
        """Processor seconds that all ranks used between requests."""
        return self._idle_cpu_ns * 1e-9

    @property
    def idle_share(self) -> float:
        """The share of a processor that one rank used between requests: should be next to 0."""
        return self.idle_cpu_s / self._idle_s if self._idle_s else 0.0

    def close(self) -> None:
        """Let the ranks end, and end those that do not."""
        self._stack.close()

    # -- requests ----------------------------------------------------------------------------------

    def sampler(
        self, candidate: str, numels: Sequence[int], idle_s: float = 0.0
    ) -> Callable[[], Answer]:
        """Return what takes a sample: as many calls as fit some milliseconds; 1 after a sleep."""
        if idle_s:
            return lambda: self.measure(candidate, numels, 1, 0, idle_s)

        def each_s(calls: int) -> float:
            begin_s = time.perf_counter()
            self.measure(candidate, numels, calls, 1)
            spent_s = time.perf_counter() - begin_s - self._settle_s
            return max(spent_s, 1e-6) / (1 + calls)

        # By a lucky sample there would be too many calls, by a late one too few.
        once_s = each_s(1)
        once_s = once_s if once_s > SAMPLE_S else statistics.median(each_s(3) for _ in range(3))
        calls = max(FEW_CALLS, min(FAST_CALLS, round(SAMPLE_S / once_s)))
        return lambda: self.measure(candidate, numels, calls, 1 + calls // 4)

    def measure(
        self,
        candidate: str,
        numels: Sequence[int],
        calls: int,
        warm_up: int,
        idle_s: float = 0.0,
    ) -> Answer:
        """Make all ranks call, and return what they tell.

        Args:
            candidate: One of those that the library's ranks know.
            numels: Elements of each float32 tensor of a rank.
            calls: That are timed; each after a barrier.
            warm_up: Calls before them, that are checked only.
            idle_s: Seconds that the ranks sleep first.

        Raises:
            GroupError: A rank failed, ended, or was too late.
        """
        sizes = ",".join(map(str, numels))
        line = f"{calls} {warm_up} {idle_s * 1e6:.0f} {sizes} {candidate}\n"
        begin_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # a rank is gone: `_answers` says so
            for rank in self._ranks.values():
                rank.connection.sendall(line.encode())
        tensors = f"{len(numels)} tensors of " if len(numels) > 1 else ""
        what = f"{candidate}, {tensors}{sum(numels)} elements"
        lines = self._answers(what, begin_s + self._answer_s + idle_s)
        wrong, times = 0, []
        for rank, text in lines.items():
            first, cpu_begin_ns, cpu_end_ns, *ns = map(int, text.split())
            wrong = max(wrong, first)
            times.append(ns)
            self._account(self._ranks[rank], begin_s, cpu_begin_ns, cpu_end_ns)
        return Answer([max(same) * 1e-9 for same in zip(*times, strict=True)], wrong)

    def _account(self, rank: _Rank, begin_s: float, cpu_begin_ns: int, cpu_end_ns: int) -> None:
        """Add up what a rank used of its processor since its last answer."""
        ended_s, ended_ns = rank.ended_at or (begin_s, 0)
        if begin_s - ended_s > LONG_S:
            self._idle_cpu_ns += cpu_begin_ns - ended_ns
            self._idle_s += begin_s - ended_s
        rank.ended_at = time.monotonic(), cpu_end_ns

    def _answers(self, what: str, deadline_s: float) -> dict[int, str]:
        """Return every rank's line."""
        lines: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in self._ranks.items():
                selector.register(rank.connection, selectors.EVENT_READ, number)
            while len(lines) < len(self._ranks):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    late = ", ".join(str(r) for r in self._ranks if r not in lines)
                    self._fail(f"{what}: no answer of rank {late} within its deadline")
                for key, _ in ready:
                    line = _line(self._ranks[key.data])
                    if line is None:
                        continue
                    if not line or line.startswith("error "):
                        why = line.removeprefix("error ") or f"ended{self._last_words()}"
                        self._fail(f"{what}: rank {key.data}: {why}")
                    lines[key.data] = line
                    selector.unregister(key.fileobj)
        return lines

    def _fail(self, why: str) -> None:
        """End all ranks and say why."""
        self._kill()
        self.close()
        raise GroupError(f"{self._about}: {why}")

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        with open(self._errors, "ab") as errors:
            try:
                program = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for us to handle
                )
            except OSError as error:
                raise GroupError(f"{self._about}: did not start: {error}") from error
        self._programs.append(program)

    def _meet(self, listener: socket.socket, ranks: int, deadline_s: float) -> None:
        """Wait until all ranks have said hello."""
        listener.settimeout(0.1)
        while len(self._ranks) < ranks:
            ended = [p.returncode for p in self._programs if p.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                why = f"ended with {ended[0]}" if ended else "not all ranks came in time"
                raise GroupError(f"{self._about}: did not start: {why}{self._last_words()}")
            with contextlib.suppress(TimeoutError, ValueError):  # nobody yet; or gone before hello
                connection, _ = listener.accept()
                connection.settimeout(max(0.1, deadline_s - time.monotonic()))
                _, number, pid, version = connection.makefile("r").readline().split(" ", 3)
                connection.settimeout(None)
                self._ranks[int(number)] = _Rank(connection, int(pid), version.strip())
        self._watch()

    def _watch(self) -> None:
        """Hold on to all processes below the programs, so that none is mistaken for another."""
        for pid in descendants([p.pid for p in self._programs]):
            if pid not in self._pidfds:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfds[pid] = os.pidfd_open(pid)

    def _kill(self) -> None:
        """End everything at once."""
        self._watch()
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for program in self._programs:
            program.kill()

    def _end(self) -> None:
        """Wait for the programs, whose ranks see that nobody is there any more; then end them."""
        deadline_s = time.monotonic() + (END_S if self._ranks else 0.0)
        for rank in self._ranks.values():
            rank.connection.close()
        for program in self._programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline_s - time.monotonic()))
        self._kill()
        for program in self._programs:
            program.wait()
        for pidfd in self._pidfds.values():
            select.select([pidfd], [], [], END_S)  # readable once it has ended
            os.close(pidfd)
        self._pidfds.clear()

    def _last_words(self) -> str:
        """Return the last line that the programs wrote."""
        with contextlib.suppress(OSError):
            lines = self._errors.read_text(errors="replace").strip().splitlines()
            return f": {lines[-1].strip()}" if lines else ""
        return ""


def _line(rank: _Rank) -> str | None:
    """Read on: a whole line, the empty one at the end, or None if there is more to come."""
    try:
        data = rank.connection.recv(2**16)
    except ConnectionResetError:
        data = b""
    if not data:
        return ""
    rank.received += data
    if not rank.received.endswith(b"\n"):
        return None
    line = rank.received.decode().strip()
    rank.received.clear()
    return line


def descendants(roots: Sequence[int]) -> list[int]:
    """Return the processes that these have started, and theirs, and these themselves."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            _, _, rest = stat.read_text().rpartition(")")
            children.setdefault(int(rest.split()[1]), []).append(int(stat.parent.name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found
