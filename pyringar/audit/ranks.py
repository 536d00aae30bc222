"""Start the ranks of a library, a process each, and have them reduce what they are given."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from pyringar.audit.probes import TargetError, dtype_name
from pyringar.audit.rank import memory_of, serve

_START_S = 120.0  # most time until all ranks have met: an engine may have to be compiled


class Ranks:
    """The ranks of a library, which are started when they are needed, and again when they fail.

    See `pyringar.audit.probes.Target`.
    """

    ways: tuple[str, ...] = ("in place", "unaligned", "async")

    def __init__(
        self, library: str, ranks: int, timeout_s: float = 30.0, *, order: str = "any"
    ) -> None:
        self.ranks, self.name, self._library = ranks, library, library
        self._timeout_s = timeout_s
        self._options = {"library": library, "ranks": ranks, "order": order, "timeout_s": timeout_s}
        self._channels: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Ranks:
        """Start the ranks. TargetError if they do not start."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks; a call starts new ones."""
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
        """See `pyringar.audit.probes.Target.reduce`."""
        if not self._channels:
            self._start()
        k, numel, dtype = len(inputs), inputs[0].numel(), inputs[0].dtype
        what = f"{dtype_name(dtype)}, {numel} elements, {k} ranks, {way}"
        request = (dtype_name(dtype), k, way, [0, *cuts, numel])
        data = [memory_of(x.contiguous()) for x in inputs] + [b""] * (self.ranks - k)
        results = self._ask(what, [(*request, mine) for mine in data], self._timeout_s)
        return [torch.frombuffer(bytearray(mine), dtype=dtype) for mine in results[:k]]

    def _ask(self, what: str, requests: Sequence[Any], seconds: float) -> list[Any]:
        """Send each rank its request, if there are any; return the answers, by rank.

        Raises:
            TargetError: A rank failed, ended, or did not answer in time.
        """
        answers: dict[int, tuple[str, Any]] = {}
        late: list[int] = []

        def end() -> None:
            late.extend(rank for rank in range(self.ranks) if rank not in answers)
            for process in self._processes:
                process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # a rank is gone: it has no answer
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
        if lost or 0 < len(failed) < self.ranks:  # the others may wait for these
            self.close()
        if late:
            raise TargetError(what, f"no answer of rank {', '.join(map(str, late))} in time")
        if lost:
            raise TargetError(what, f"rank {lost[0]} ended")
        if failed:
            raise TargetError(f"{what}, rank {failed[0]}", answers[failed[0]][1])
        return [answers[rank][1] for rank in range(self.ranks)]

    def _start(self) -> None:
        # A fork has torch already, but could not use CUDA.
        context: Any = multiprocessing.get_context("spawn" if self._library == "nccl" else "fork")
        self._store = _distributed_c10d.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(self.ranks):
            channel, theirs = context.Pipe()
            options = {**self._options, "rank": rank, "port": self._store.port}
            process = context.Process(target=serve, args=(theirs, options), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of threads at a fork: idle pools, which the child does not use.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._channels.append(channel)
            self._processes.append(process)
        version = self._ask(f"the start of {self._options['library']}", [], _START_S)[0]
        self.name = f"{self._options['library']} {version}"
