"""Processes for tests of one rank per process: quick to make, told by name what to run.

A nursery is a process that has imported torch, pyringar and the tests, and has started no thread;
ranks are forked from it in milliseconds and die with it, as it does with the tests. A rank runs
functions of test files, one at a time: ``function(state, **arguments)`` with arguments and results
that JSON can hold; ``state`` lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
_PRELOADED = ("test_processes", "test_process_faults")
_PR_SET_PDEATHSIG = 1
# Longer than anything a test lets a rank do; a rank that takes longer hangs.
LONG_S = 60.0
_group_numbers = itertools.count()

Function = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a function: its value, or the error's classes and text. ``at``: monotonic."""

    value: Any
    classes: list[str]
    text: str
    trace: str
    seconds: float
    at: float

    @property
    def error(self) -> str | None:
        return self.classes[0] if self.classes else None


class Rank:
    """One worker process, seen from the tests."""

    def __init__(self, nursery: Nursery, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._nursery = nursery
        self._channel = channel
        self._lines = channel.makefile("r")
        self._reaped = False

    def start(self, function: Function, **arguments: Any) -> None:
        """Have it begin; `outcome` waits for the end."""
        task = [function.__module__.split(".")[-1], function.__qualname__, arguments]
        self._channel.sendall((json.dumps(task) + "\n").encode())

    def outcome(self, within_s: float = LONG_S) -> Outcome:
        self._channel.settimeout(within_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise AssertionError(f"process {self.pid} hangs: {_stack_of(self.pid)}") from None
        assert line, f"process {self.pid} died"
        return Outcome(**json.loads(line))

    def call(self, function: Function, **arguments: Any) -> Any:
        """Run to the end; the value."""
        self.start(function, **arguments)
        return value_of(self.outcome())

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self, *, reaped: bool = True) -> float:
        """SIGKILL; when, on the monotonic clock. Without ``reaped`` it stays as a zombie."""
        at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        if reaped:
            self.reap()
        return at

    def reap(self) -> None:
        if not self._reaped:
            self._reaped = True
            self._nursery.reap(self.pid)

    def end(self) -> None:
        """However it fares, it is gone afterwards."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reap()
        self._lines.close()
        self._channel.close()


def value_of(outcome: Outcome) -> Any:
    assert not outcome.classes, f"{outcome.text}\n{outcome.trace}"
    return outcome.value


class Nursery:
    """Where ranks come from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=HERE,
        )
        theirs.close()
        self._control.settimeout(LONG_S)
        self._replies = self._control.makefile("r")
        assert self._replies.readline() == "ready\n", "the nursery did not start"

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, count: int) -> list[Rank]:
        return [self._spawn_one() for _ in range(count)]

    def _spawn_one(self) -> Rank:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"spawn\n"], [theirs.fileno()])
        theirs.close()
        return Rank(self, int(self._replies.readline()), ours)

    def reap(self, pid: int) -> None:
        self._control.sendall(f"reap {pid}\n".encode())
        assert self._replies.readline() == f"{pid}\n", f"process {pid} does not end"

    def children(self) -> set[int]:
        """Its ranks, and whatever they left behind; zombies included."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return {int(pid) for pid in listed.split()}

    def close(self) -> None:
        self._control.close()
        self._replies.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Crew:
    """Ranks 0 to k - 1 of one group after another, in one process each."""

    def __init__(self, nursery: Nursery, world_size: int, port: int) -> None:
        self.ranks = nursery.spawn(world_size)
        self.world_size = world_size
        self.port = port
        self.is_whole = True  # false once a function failed: who knows what the others wait for

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def start(
        self, function: Function, ranks: Sequence[int] | None = None, **arguments: Any
    ) -> None:
        for rank in range(self.world_size) if ranks is None else ranks:
            self.ranks[rank].start(function, **arguments)

    def outcomes(
        self, ranks: Sequence[int] | None = None, within_s: float = LONG_S
    ) -> list[Outcome]:
        chosen = range(self.world_size) if ranks is None else ranks
        return [self.ranks[rank].outcome(within_s) for rank in chosen]

    def run(
        self,
        function: Function,
        ranks: Sequence[int] | None = None,
        within_s: float = LONG_S,
        **arguments: Any,
    ) -> list[Any]:
        """On all ranks, or these, at once; their values."""
        self.is_whole = False
        self.start(function, ranks, **arguments)
        values = [value_of(outcome) for outcome in self.outcomes(ranks, within_s)]
        self.is_whole = True
        return values

    def join(self, ranks: Sequence[int] | None = None, **options: Any) -> str:
        """A communicator of these ranks, in this order, as ``state.comm``; its name."""
        chosen = list(range(self.world_size) if ranks is None else ranks)
        name = options.pop("name", None) or new_name()
        for new_rank, rank in enumerate(chosen):
            self.ranks[rank].start(
                join, port=self.port, rank=new_rank, world_size=len(chosen), name=name, **options
            )
        for outcome in self.outcomes(chosen):
            value_of(outcome)
        return name

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


def new_name() -> str:
    return f"group-{os.getpid()}-{next(_group_numbers)}"


def _stack_of(pid: int) -> str:
    texts = []
    for file in ("wchan", "status", "syscall"):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/{file}").read_text()[:200].replace("\n", " "))
    return "; ".join(texts)


# -- in the ranks ----------------------------------------------------------------------------------


@functools.cache  # one connection per process and store
def connect(port: int, timeout_s: float = 30.0) -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join(
    state: SimpleNamespace,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    env: dict[str, str] | None = None,
    **options: Any,
) -> None:
    """Make ``state.comm``."""
    import pyringar as pr

    if getattr(state, "port", None) != port:
        state.store, state.port = connect(port), port
    with changed_environment(env or {}):
        state.comm = pr.ProcessCommunicator(state.store, rank, world_size, name=name, **options)
    state.rank, state.world_size, state.name = rank, world_size, name


@contextlib.contextmanager
def changed_environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _work(channel: socket.socket) -> None:
    """Run what comes through the channel until it is closed."""
    _die_with_parent()
    # Where the tests run in the background of a script, SIGINT came to them as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = SimpleNamespace()
    with channel.makefile("r") as lines:
        for line in lines:
            module, function, arguments = json.loads(line)
            channel.sendall(
                (json.dumps(_result(state, module, function, arguments)) + "\n").encode()
            )


def _result(
    state: SimpleNamespace, module: str, function: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    value, classes, text, trace = None, [], "", ""
    start = time.monotonic()
    try:
        value = getattr(importlib.import_module(module), function)(state, **arguments)
    except BaseException as error:
        classes = [c.__name__ for c in type(error).__mro__]
        text, trace = str(error), "".join(traceback.format_exception(error))
    at = time.monotonic()
    fields = (value, classes, text, trace, at - start, at)
    return dict(zip(Outcome.__dataclass_fields__, fields, strict=True))


def _nursery(control: socket.socket) -> None:
    _die_with_parent()
    import torch

    torch.set_num_threads(1)
    from pyringar.engine import load

    load.engine()
    for module in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            getattr(importlib.import_module(module), "warm_up", lambda: None)()
    gc.freeze()  # what was imported: ranks need not look at it again
    control.sendall(b"ready\n")
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        if message == b"spawn\n":
            pid = os.fork()
            if pid == 0:
                control.close()
                try:
                    _work(socket.socket(fileno=descriptors[0]))
                finally:
                    os._exit(0)
            os.close(descriptors[0])
        else:
            pid = int(message.split()[1])
            os.waitpid(pid, 0)
        control.sendall(f"{pid}\n".encode())


if __name__ == "__main__":
    # By its own name, so that ranks find the functions that tests name.
    sys.modules["ranks"] = sys.modules["__main__"]
    _nursery(socket.socket(fileno=int(sys.argv[1])))
