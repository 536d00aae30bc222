"""One rank of an audited library, in a process of its own."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import os
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

Options = dict[str, Any]
_UNALIGNED = 7  # elements, before a tensor that begins inside a buffer


class TorchRank:
    """A rank of a backend of torch.distributed."""

    def __init__(self, options: Options) -> None:
        self.rank: int = options["rank"]
        self._groups: dict[int, Any] = {}
        self._device = torch.device("cpu")
        self.version = f"torch {torch.__version__}"
        if options["library"] == "nccl":
            self._device = torch.device("cuda", self.rank)
            torch.cuda.set_device(self._device)
            nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            self.version = f"{'.'.join(map(str, nccl))}, {self.version}"
        self._meet(options, _distributed_c10d.TCPStore("127.0.0.1", options["port"]))

    def _meet(self, options: Options, store: Any) -> None:
        dist.init_process_group(
            options["library"],
            store=store,
            rank=self.rank,
            world_size=options["ranks"],
            timeout=timedelta(seconds=options["timeout_s"]),
        )

    def prepare(self, k: int) -> None:
        """Make the group of the first ``k`` ranks; all ranks take part."""
        if k not in self._groups:
            self._groups[k] = self._group(k)

    def _group(self, k: int) -> Any:
        return dist.new_group(range(k))

    def run(self, data: bytes, dtype: str, k: int, way: str, edges: Sequence[int]) -> Tensor:
        """Reduce a message, piece by piece; return the result."""
        given = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
        start = _UNALIGNED if way == "unaligned" else 0
        flat = given.new_empty(start + len(given), device=self._device)[start:].copy_(given)
        pieces = [flat[a:b] for a, b in itertools.pairwise(edges)]
        works = [self._begin(piece, k, way == "async") for piece in pieces]
        for work in reversed(works):
            if way == "async":
                work.wait()
        return flat.cpu()

    def _begin(self, piece: Tensor, k: int, is_async: bool) -> Any:
        return dist.all_reduce(piece, group=self._groups[k], async_op=is_async)


class RingarRank(TorchRank):
    """A rank of `pyringar.ProcessCommunicator`, with ``order`` among the options."""

    def _meet(self, options: Options, store: Any) -> None:
        version = importlib.metadata.version("pyringar")
        self.version = f"{version}, order={options['order']}, {self.version}"
        self._options = {"order": options["order"], "timeout": options["timeout_s"]}
        self._store = store
        self.prepare(options["ranks"])  # compiles the engine if need be

    def _group(self, k: int) -> Any:
        from pyringar.comm.process_communicator import ProcessCommunicator

        options = {"name": f"{k} ranks", **self._options}
        return ProcessCommunicator(self._store, self.rank, k, **options) if self.rank < k else None

    def _begin(self, piece: Tensor, k: int, is_async: bool) -> Any:
        return self._groups[k].all_reduce(piece, async_op=is_async)


def serve(channel: Connection, options: Options) -> None:
    """Join the other ranks, then answer requests until the auditor hangs up.

    A request is a dtype, a number of ranks, a way, edges of pieces, and this rank's bytes. Answers
    begin with ``"done"`` or ``"failed"``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the auditor's
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the terminal is the auditor's, too: errors go through the channel
        os.dup2(silent, stream)
    threading.Thread(target=_end_with_auditor, daemon=True).start()
    torch.set_num_threads(1)  # a forked process has torch's pool, but not its threads
    try:
        rank = RingarRank(options) if options["library"] == "ringar" else TorchRank(options)
        channel.send(("done", rank.version))
        while True:
            channel.send(_answer(rank, *channel.recv()))
    except (EOFError, OSError):
        pass
    except Exception as error:
        channel.send(("failed", _words(error)))
    os._exit(0)


def _answer(
    rank: TorchRank, dtype: str, k: int, way: str, edges: Sequence[int], data: bytes
) -> tuple[str, Any]:
    try:
        rank.prepare(k)
        if rank.rank >= k:
            return "done", b""
        return "done", memory_of(rank.run(data, dtype, k, way, edges))
    except Exception as error:
        return "failed", _words(error)


def memory_of(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _end_with_auditor() -> None:
    """End this process when the auditor is gone, even in a call that never returns."""
    auditor = parent_process()
    assert auditor is not None
    wait([auditor.sentinel])
    os._exit(1)
