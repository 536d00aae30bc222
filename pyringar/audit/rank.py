"""One rank of an audited library: ``python rank.py KIND ADDRESS OPTIONS``.

Its process runs this file and the library alone. A rank of MPI needs mpi4py and NumPy only, neither
torch nor pyringar: it may have an environment of its own. Requests and answers are tuples, and
bytes for the numbers, on a Unix socket. A thread ends the process when the socket is closed, also
in the middle of a call that never returns.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Wait = Callable[[], object]


class TorchRank:
    """A rank of a backend of torch.distributed.

    Args:
        options: ``kind``, ``rank``, ``ranks``, ``folder`` for the store, ``timeout_s``.
    """

    ways = ("in place", "async")

    def __init__(self, options: dict[str, Any]) -> None:
        from datetime import timedelta

        import torch

        torch.set_num_threads(1)
        self._torch, self._groups = torch, dict[int, Any]()
        self.rank, self._ranks = options["rank"], options["ranks"]
        self._is_nccl = options["kind"] == "nccl"
        self.version = f"torch {torch.__version__}"
        if self._is_nccl:
            torch.cuda.set_device(self.rank)
            nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            self.version = f"{'.'.join(map(str, nccl))}, {self.version}"
        self._meet(options, timedelta(seconds=options["timeout_s"]))

    def _meet(self, options: dict[str, Any], timeout: Any) -> None:
        self._torch.distributed.init_process_group(
            options["kind"],
            init_method=f"file://{options['folder']}/store",
            rank=self.rank,
            world_size=self._ranks,
            timeout=timeout,
        )

    def prepare(self, k: int) -> None:
        """Make the group of the first ``k`` ranks; all ranks take part."""
        if k not in self._groups:
            self._groups[k] = self._group(k)

    def _group(self, k: int) -> Any:
        return self._torch.distributed.new_group(range(k))

    def run(self, data: bytearray, dtype: str, k: int, way: str, edges: Sequence[int]) -> bytearray:
        """Reduce a message, piece by piece; return what it has become."""
        flat = self._torch.frombuffer(data, dtype=getattr(self._torch, dtype))
        there = flat.to(f"cuda:{self.rank}") if self._is_nccl else flat
        pieces = [there[a:b] for a, b in itertools.pairwise(edges)]
        waits = [self._begin(piece, k, way == "async") for piece in pieces]
        for wait in reversed(waits):
            wait()
        flat.copy_(there)
        return data

    def _begin(self, piece: Any, k: int, is_async: bool) -> Wait:
        reduce: Any = self._torch.distributed.all_reduce
        work = reduce(piece, group=self._groups[k], async_op=is_async)
        return work.wait if is_async else lambda: None


class RingarRank(TorchRank):
    """A rank of `pyringar.ProcessCommunicator`, with ``order`` among the options."""

    def _meet(self, options: dict[str, Any], timeout: Any) -> None:
        version = importlib.metadata.version("pyringar")
        self.version = f"{version}, order={options['order']}, {self.version}"
        self._options = {"order": options["order"], "timeout": options["timeout_s"]}
        self._store = self._torch.distributed.FileStore(f"{options['folder']}/store", self._ranks)
        self.prepare(self._ranks)  # compiles the engine if need be

    def _group(self, k: int) -> Any:
        from pyringar.comm.process_communicator import ProcessCommunicator

        options = {"name": f"{k} ranks", **self._options}
        return ProcessCommunicator(self._store, self.rank, k, **options) if self.rank < k else None

    def _begin(self, piece: Any, k: int, is_async: bool) -> Wait:
        work = self._groups[k].all_reduce(piece, async_op=is_async)
        return work.wait if is_async else lambda: None


class MpiRank:
    """A rank of an MPI library, through mpi4py."""

    ways = ("in place", "async")

    def __init__(self, options: dict[str, Any]) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank = self._world.rank
        self._groups: dict[int, Any] = {}
        library = MPI.Get_library_version().splitlines()[0].partition(", ")[0].rstrip("\0")
        self.version = " ".join(library.replace("Version:", "").split())

    def prepare(self, k: int) -> None:
        """Make the group of the first ``k`` ranks; all ranks take part."""
        if k not in self._groups:
            self._groups[k] = self._world.Split(0 if self.rank < k else 1, self.rank)

    def run(self, data: bytearray, dtype: str, k: int, way: str, edges: Sequence[int]) -> bytearray:
        """Reduce a message, piece by piece; return what it has become."""
        import numpy as np

        if dtype == "bfloat16":
            raise TypeError("mpi4py has no bfloat16")
        flat = np.frombuffer(data, dtype)
        group, given, add, pending = self._groups[k], self._mpi.IN_PLACE, self._mpi.SUM, []
        for a, b in itertools.pairwise(edges):
            if way == "async":
                pending.append(group.Iallreduce(given, flat[a:b], add))
            else:
                group.Allreduce(given, flat[a:b], add)
        for request in reversed(pending):
            request.Wait()
        return data


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gloo": TorchRank,
    "nccl": TorchRank,
    "ringar": RingarRank,
    "mpi": MpiRank,
}


def serve(address: str, options: dict[str, Any]) -> None:
    """Join the other ranks, then answer requests until the auditor is gone."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    watch = threading.Thread(target=_end_with, args=(link.fileno(), address), daemon=True)
    watch.start()
    channel = Connection(os.dup(link.fileno()))
    try:
        rank = KINDS[options["kind"]](options)
    except Exception as error:
        return channel.send(("cannot", _words(error)))
    channel.send(("hello", rank.rank, rank.version, rank.ways))
    while True:
        try:
            dtype, k, way, edges = channel.recv()
            data = bytearray(channel.recv_bytes()) if rank.rank < k else bytearray()
        except (EOFError, OSError):
            return watch.join()
        try:
            rank.prepare(k)
            result = rank.run(data, dtype, k, way, edges) if rank.rank < k else b""
        except Exception as error:
            channel.send(("failed", _words(error)))
            continue
        channel.send(("done",))
        channel.send_bytes(result)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _end_with(descriptor: int, address: str) -> None:
    """End this process when nobody is at the other end of its socket, whose folder goes, too."""
    hung_up = select.poll()
    hung_up.register(descriptor, select.POLLHUP)
    hung_up.poll()
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
