"""Test harness for ranks in processes.

A `RankProcess` runs functions of test files, one at a time. A `RankGroup` holds ranks 0 to k - 1.
Functions, arguments and results are pickled. A fork takes milliseconds, since the fork server has
imported torch, pyringar and the running test's module; see fork_server.py.

- `RankGroup.run`, `on_ranks`: ``function(state, **arguments)``; the process keeps ``state``
- `RankGroup.check`: ``function(rank, world_size, store, *args)``, with a new store per call
- `run_group`: ``function(rank, world_size, *args)`` in a torch.distributed process group
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import itertools
import os
import pickle
import select
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fork_server import servers

# Limit for a function on a rank: a rank that takes longer hangs.
LONG_S = 60.0
_group_numbers = itertools.count()

Function = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a function on a rank: its value, or the error's classes and text."""

    seconds: float
    at: float  # when the function ended, in time.monotonic()
    value: Any = None
    classes: Sequence[str] = ()
    text: str = ""
    trace: str = ""

    @property
    def error(self) -> str | None:
        return self.classes[0] if self.classes else None


def value_of(outcome: Outcome) -> Any:
    assert not outcome.classes, f"{outcome.text}\n{outcome.trace}"
    return outcome.value


class Failed(str):
    """The traceback of a function on a rank, or another reason for a missing result."""


class Died(int):
    """The exit code of a rank that died without a result."""


@functools.cache
def store() -> Any:
    return new_store()


def begin() -> int:
    """Make the default torch.distributed group of this process or thread; return the rank."""
    from torch import distributed

    distributed.init_process_group()
    return distributed.get_rank()


def new_store() -> Any:
    """Return a TCPStore that this process serves on an IPv4 socket.

    On an IPv6 socket the server looks up each client's host name, which can block it for 5 s.
    """
    from torch.distributed import TCPStore

    listening = socket.create_server(("127.0.0.1", 0))
    _, port = listening.getsockname()
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankProcess:
    def __init__(self) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "oracle.py")
        ours, theirs = socket.socketpair()
        self._server = servers()["ranks"]
        self.pid = self._server.fork(Path(test.split("::")[0]).stem, [theirs.fileno()])
        theirs.close()
        self.exit_code: int | None = None
        self._channel = Connection(ours.detach())

    def start(self, function: Function, /, *args: Any, **arguments: Any) -> None:
        name = function.__module__.split(".")[-1], function.__qualname__
        self._channel.send_bytes(pickle.dumps((name, args, arguments)))

    def outcome(self, within_s: float = LONG_S) -> Outcome:
        assert self._channel.poll(within_s), f"process {self.pid} hangs: {_stack_of(self.pid)}"
        try:
            return Outcome(**pickle.loads(self._channel.recv_bytes()))
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"process {self.pid} died") from None

    def call(self, function: Function, /, *args: Any, **arguments: Any) -> Any:
        self.start(function, *args, **arguments)
        return value_of(self.outcome())

    def result(self, within_s: float) -> Any:
        if not self._channel.poll(within_s):
            failed = Failed(f"no answer in time: {_stack_of(self.pid)}")
            self.send(signal.SIGKILL)  # otherwise the next caller gets this late result
            return failed
        try:
            outcome = self.outcome()
        except AssertionError:
            return Died(self.reap())
        return Failed(outcome.trace) if outcome.error else outcome.value

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> float:
        """Send SIGKILL; return the time, in time.monotonic()."""
        at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        self.reap()
        return at

    def reap(self) -> int:
        if self.exit_code is None:
            self.exit_code = self._server.reap(self.pid)
        return self.exit_code

    def leave(self, within_s: float) -> int | None:
        self._channel.close()
        if self.exit_code is None:
            ended = os.pidfd_open(self.pid)
            is_over = select.select([ended], [], [], max(0.0, within_s))[0]
            os.close(ended)
            if not is_over:
                return None
        return self.reap()

    def close(self) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.reap()
        self._channel.close()


def new_name() -> str:
    return f"group-{os.getpid()}-{next(_group_numbers)}"


def _stack_of(pid: int) -> str:
    texts = []
    for file in ("wchan", "status", "syscall"):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/{file}").read_text()[:200].replace("\n", " "))
    return "; ".join(texts)


class RankGroup:
    def __init__(self, world_size: int) -> None:
        self.ranks = [RankProcess() for _ in range(world_size)]
        self.world_size = world_size
        self.port = store().port
        self.is_whole = True  # False after a failure: remaining ranks may wait in a call
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")

    def __getitem__(self, rank: int) -> RankProcess:
        return self.ranks[rank]

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._folder.cleanup()

    def _chosen(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.world_size) if ranks is None else ranks

    def start(
        self, function: Function, ranks: Sequence[int] | None = None, **arguments: Any
    ) -> None:
        for rank in self._chosen(ranks):
            self.ranks[rank].start(function, **arguments)

    def outcomes(
        self, ranks: Sequence[int] | None = None, within_s: float = LONG_S
    ) -> list[Outcome]:
        return [self.ranks[rank].outcome(within_s) for rank in self._chosen(ranks)]

    def values(self, ranks: Sequence[int] | None = None) -> list[Any]:
        return [value_of(outcome) for outcome in self.outcomes(ranks)]

    def run(
        self, function: Function, ranks: Sequence[int] | None = None, **arguments: Any
    ) -> list[Any]:
        self.is_whole = False
        self.start(function, ranks, **arguments)
        values = self.values(ranks)
        self.is_whole = True
        return values

    def agree(self, function: Function, **arguments: Any) -> Any:
        values = self.run(function, **arguments)
        assert all(value == values[0] for value in values), values
        return values[0]

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self.ranks[rank].pid} on {os.uname().nodename})"

    def start_group(
        self,
        ranks: Sequence[int] | Mapping[int, int] | None = None,
        function: Function | None = None,
        *,
        world_size: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> str:
        """Start `join` or ``function`` on these ranks; return the name of the group.

        ``ranks`` may map processes to ranks: ``{process: rank}``. ``world_size`` may exceed the
        number of ranks that this call starts.
        """
        chosen = ranks if isinstance(ranks, Mapping) else {r: r for r in self._chosen(ranks)}
        name = name or new_name()
        options |= {"port": self.port, "world_size": world_size or len(chosen), "name": name}
        for process, rank in chosen.items():
            self.ranks[process].start(function or join, rank=rank, **options)
        return name

    def join(self, ranks: Sequence[int] | None = None, **options: Any) -> str:
        """Make ``state.comm``, a communicator of these ranks in this order; return its name."""
        chosen = {process: rank for rank, process in enumerate(self._chosen(ranks))}
        name = self.start_group(chosen, **options)
        self.values(list(chosen))
        return name

    def results(
        self, function: Function, *args: Any, timeout_s: float = LONG_S, ends: bool = False
    ) -> list[Any]:
        """Return each rank's result of ``function(rank, world_size, store, *args)``.

        `Failed` or `Died` replaces a missing result. ``ends``: each process exits after its call.
        """
        path = f"{self._folder.name}/{new_name()}"
        for rank, process in enumerate(self.ranks):
            process.start(_with_store, function, rank, self.world_size, path, args, ends)
        deadline = time.monotonic() + timeout_s
        return [rank.result(deadline - time.monotonic()) for rank in self.ranks]

    def check(self, function: Function, *args: Any, timeout_s: float = LONG_S) -> list[Any]:
        self.is_whole = False
        results = self.results(function, *args, timeout_s=timeout_s)
        for rank, result in enumerate(results):
            assert not isinstance(result, (Failed, Died)), f"rank {rank}: {result!s}"
        self.is_whole = True
        return results


@contextlib.contextmanager
def rank_groups(**options: Any) -> Iterator[Callable[[int], RankGroup]]:
    """Yield ``get(k)``, which returns a joined group of k ranks and replaces a failed group."""
    made: dict[int, RankGroup] = {}

    def get(world_size: int) -> RankGroup:
        if world_size in made and not made[world_size].is_whole:
            made.pop(world_size).close()
        if world_size not in made:
            made[world_size] = RankGroup(world_size)
            made[world_size].join(**options)
        return made[world_size]

    try:
        yield get
    finally:
        for group in made.values():
            group.close()


def on_ranks(*world_sizes: int) -> Callable[[Function], Function]:
    """Decorate ``body(state, ...)``: a test runs it on all ranks and compares the results.

    Parameters after ``state`` are parameters of the test.
    """

    def decorate(body: Function) -> Function:
        @functools.wraps(body)
        def test(rank_group_of: Any, world_size: int, **arguments: Any) -> None:
            rank_group_of(world_size).agree(body, **arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind) for name in ("rank_group_of", "world_size")]
        given = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature(own + given)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def run_group(
    function: Function,
    size: int,
    *args: Any,
    backend: str = "ringar",
    timeout_s: float = 30.0,
    limit_s: float = 90.0,
    env: dict[str, str] | None = None,
    machines: str = "",
) -> list[Any]:
    """Return the results of ``function(rank, size, *args)`` in a process group.

    `Failed` or `Died` replaces a missing result. ``machines``: one letter per rank, the name of its
    simulated machine.
    """
    options = (backend, timeout_s, limit_s, env or {}, machines)
    deadline = time.monotonic() + limit_s
    with RankGroup(size) as group:
        results = group.results(_in_group, options, function, args, timeout_s=limit_s, ends=True)
        for i, rank in enumerate(group.ranks):
            if not isinstance(results[i], (Failed, Died)):
                code = rank.leave(deadline - time.monotonic())
                if code != 0:
                    results[i] = Failed(f"answered, then exit code {code}")
    return results


@functools.cache  # one connection per process and store
def connect(port: int, timeout_s: float = 30.0) -> Any:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_s)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)


def join(
    state: SimpleNamespace,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    env: dict[str, str] | None = None,
    **options: Any,
) -> None:
    import pyringar as pr

    state.store = connect(port)
    with mock.patch.dict(os.environ, env or {}):
        state.comm = pr.ProcessCommunicator(state.store, rank, world_size, name=name, **options)
    state.rank, state.world_size, state.name = rank, world_size, name


def next_name(state: SimpleNamespace) -> str:
    state.num_names = getattr(state, "num_names", 0) + 1
    return f"{state.name}-{state.num_names}"


def another(state: SimpleNamespace, **options: Any) -> Any:
    options = {"name": next_name(state), **options}
    return type(state.comm)(state.store, state.rank, state.world_size, **options)


def _with_store(
    state: SimpleNamespace,
    function: Function,
    rank: int,
    world_size: int,
    path: str,
    args: Sequence,
    ends: bool,
) -> Any:
    from torch.distributed import FileStore

    state.ends = ends
    return function(rank, world_size, FileStore(path, -1), *args)


def _in_group(
    rank: int, size: int, store: Any, options: tuple[Any, ...], function: Function, args: Sequence
) -> Any:
    import torch.distributed as dist

    import pyringar.distributed  # noqa: F401

    backend, timeout_s, limit_s, env, machines = options
    faulthandler.dump_traceback_later(0.9 * limit_s)  # prints the stack before the rank is killed
    os.environ.update(env)
    if machines:
        os.environ["PYRINGAR_NODE_ID"] = machines[rank]
        importlib.import_module("oracle").machines = machines
    if "TORCH_DISTRIBUTED_DEBUG" in env:
        dist.set_debug_level_from_env()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    result = function(rank, size, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def run_cases(rank: int, size: int, cases: Sequence[tuple[str, Callable[..., None]]]) -> Any:
    """Call ``case(rank, size)`` for each case until a case fails, inside `run_group`.

    Returns the failure of each case, or None for a passed case.
    """
    verdicts: dict[str, str | None] = {name: "not run: an earlier case failed" for name, _ in cases}
    for name, case in cases:
        try:
            case(rank, size)
            verdicts[name] = None
        except BaseException:
            verdicts[name] = f"rank {rank}: {traceback.format_exc()}"
            break
    return verdicts


def _outcome_of(state: SimpleNamespace, task: bytes) -> bytes:
    start = time.monotonic()

    def outcome(**fields: Any) -> bytes:
        at = time.monotonic()
        return pickle.dumps({"seconds": at - start, "at": at, **fields})

    try:
        (module, function), args, arguments = pickle.loads(task)
        body = inspect.unwrap(getattr(importlib.import_module(module), function))
        return outcome(value=body(state, *args, **arguments))
    except BaseException as error:
        classes = [c.__name__ for c in type(error).__mro__]
        return outcome(classes=classes, text=str(error), trace=traceback.format_exc())


def work(channel: Connection) -> None:
    # Tests in the background of a shell script inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = SimpleNamespace(ends=False)
    while not state.ends:
        try:
            task = channel.recv_bytes()
        except EOFError:
            return
        channel.send_bytes(_outcome_of(state, task))
