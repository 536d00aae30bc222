"""Audit target whose ranks are processes that call gloo, NCCL or pyringar."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from pyringar.audit.probes import TargetError, dtype_name

Options = dict[str, Any]
_UNALIGNED = 7  # elements before an unaligned tensor in its buffer
_START_S = 120.0  # limit for the start of all ranks, which may compile the engine


class LibraryTarget:
    """An `AuditTarget` with one process per rank; a call after a failure restarts all ranks."""

    ways: tuple[str, ...] = ("in place", "unaligned", "async")

    def __init__(
        self, library: str, ranks: int, timeout_s: float = 30.0, *, order: str = "any"
    ) -> None:
        self.ranks, self.name, self._timeout_s = ranks, library, timeout_s
        self._options = {"library": library, "ranks": ranks, "order": order, "timeout_s": timeout_s}
        self._channels: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> LibraryTarget:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for channel in self._channels:
            channel.close()
        self._channels, self._processes = [], []

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        if not self._channels:
            self._start()
        k, numel, dtype = len(inputs), inputs[0].numel(), inputs[0].dtype
        call = f"{dtype_name(dtype)}, {numel} elements, {k} ranks, {way}"
        request = (dtype_name(dtype), k, way, [0, *cuts, numel])
        data = [memory_of(x.contiguous()) for x in inputs] + [b""] * (self.ranks - k)
        results = self._ask(call, [(*request, mine) for mine in data], self._timeout_s)
        return [torch.frombuffer(bytearray(mine), dtype=dtype) for mine in results[:k]]

    def _ask(self, call: str, requests: Sequence[Any], seconds: float) -> list[Any]:
        """Send each rank a request; return the answers by rank, or raise TargetError."""
        answers: dict[int, tuple[str, Any]] = {}
        late: list[int] = []

        def end() -> None:
            late.extend(rank for rank in range(self.ranks) if rank not in answers)
            for process in self._processes:
                process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # a rank may have exited
                for channel, request in zip(self._channels, requests, strict=False):
                    channel.send(request)
            for rank, channel in enumerate(self._channels):
                with contextlib.suppress(EOFError, OSError):
                    answers[rank] = channel.recv()
        finally:
            timer.cancel()
            timer.join()
        lost = late or [rank for rank in range(self.ranks) if rank not in answers]
        failed = [rank for rank, (kind, _) in answers.items() if kind == "failed"]
        if lost or 0 < len(failed) < self.ranks:  # the remaining ranks may hang in the call
            self.close()
        if late:
            raise TargetError(call, f"no answer of rank {', '.join(map(str, late))} in time")
        if lost:
            raise TargetError(call, f"rank {lost[0]} ended")
        if failed:
            raise TargetError(f"{call}, rank {failed[0]}", answers[failed[0]][1])
        return [answers[rank][1] for rank in range(self.ranks)]

    def _start(self) -> None:
        library = self._options["library"]
        # Fork: a child has imported torch already. NCCL needs spawn: a fork cannot use CUDA.
        context: Any = multiprocessing.get_context("spawn" if library == "nccl" else "fork")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.ranks):
            channel, theirs = context.Pipe()
            options = {**self._options, "rank": rank, "port": self._store.port}
            process = context.Process(target=serve, args=(theirs, options), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of threads at a fork; the child uses no thread of the parent.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._channels.append(channel)
            self._processes.append(process)
        self.name = f"{library} {self._ask(f'the start of {library}', [], _START_S)[0]}"


class LibraryRank:
    """The rank of this process, in a process group or a `pyringar.ProcessCommunicator`."""

    def __init__(self, options: Options) -> None:
        self.rank: int = options["rank"]
        self._options = options
        self._is_ringar = options["library"] == "ringar"
        self._groups: dict[int, Any] = {}
        self._device = torch.device("cpu")
        self._store = TCPStore("127.0.0.1", options["port"])
        self.version = f"torch {torch.__version__}"
        if self._is_ringar:
            version = importlib.metadata.version("pyringar")
            self.version = f"{version}, order={options['order']}, {self.version}"
            self.prepare(options["ranks"])  # may compile the engine
            return
        if options["library"] == "nccl":
            self._device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self._device)
            nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            self.version = f"{'.'.join(map(str, nccl))}, {self.version}"
        dist.init_process_group(
            options["library"],
            store=self._store,
            rank=self.rank,
            world_size=options["ranks"],
            timeout=timedelta(seconds=options["timeout_s"]),
        )

    def prepare(self, k: int) -> None:
        """Make the group of the first ``k`` ranks; all ranks must call this."""
        if k in self._groups:
            return
        if not self._is_ringar:
            self._groups[k] = dist.new_group(range(k))
        elif self.rank < k:
            from pyringar.comm.process_communicator import ProcessCommunicator

            options = {"order": self._options["order"], "timeout": self._options["timeout_s"]}
            self._groups[k] = ProcessCommunicator(
                self._store, self.rank, k, name=f"{k} ranks", **options
            )

    def run(self, data: bytes, dtype: str, k: int, way: str, edges: Sequence[int]) -> Tensor:
        given = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
        start = _UNALIGNED if way == "unaligned" else 0
        flat = given.new_empty(start + len(given), device=self._device)[start:].copy_(given)
        begin = partial(dist.all_reduce, group=self._groups[k])
        if self._is_ringar:
            begin = self._groups[k].all_reduce
        pieces = [flat[a:b] for a, b in itertools.pairwise(edges)]
        works = [begin(piece, async_op=way == "async") for piece in pieces]
        for work in filter(None, reversed(works)):
            work.wait()
        return flat.cpu()


def serve(channel: Connection, options: Options) -> None:
    """Run a rank: join the group, then answer requests until the auditor closes the channel.

    A request is (dtype, number of ranks, way, edges of pieces, this rank's bytes). An answer is
    ``("done", result)`` or ``("failed", error)``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the auditor handles Ctrl-C and ends all ranks
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # errors go through the channel, not to the auditor's terminal
        os.dup2(silent, stream)
    threading.Thread(target=_end_with_auditor, daemon=True).start()
    torch.set_num_threads(1)  # the threads of torch's pool do not exist in a forked process
    try:
        rank = LibraryRank(options)
        channel.send(("done", rank.version))
        while True:
            channel.send(_answer(rank, *channel.recv()))
    except (EOFError, OSError):
        pass
    except Exception as error:
        channel.send(("failed", _words(error)))
    os._exit(0)


def _answer(
    rank: LibraryRank, dtype: str, k: int, way: str, edges: Sequence[int], data: bytes
) -> tuple[str, Any]:
    try:
        rank.prepare(k)
        if rank.rank >= k:
            return "done", b""
        return "done", memory_of(rank.run(data, dtype, k, way, edges))
    except Exception as error:
        return "failed", _words(error)


def memory_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _end_with_auditor() -> None:
    """End this process when the auditor ends, even during a call that hangs."""
    auditor = parent_process()
    assert auditor is not None
    wait([auditor.sentinel])
    os._exit(1)
