"""Two ranks in this process, of any transport on the CPU, called as a list communicator is.

Ranks "in processes" are two threads here. This suits tests of arguments, memory and autograd, which
look at the tensors of both ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

import pyringar as pr

K = 2


class RankPair:
    """Two `ProcessCommunicator`s; a call takes one argument per rank, as `Communicator`'s does."""

    def __init__(self, **options: Any) -> None:
        store = dist.HashStore()
        self._threads = ThreadPoolExecutor(K)
        self.comms = self.on_ranks(
            lambda rank: pr.ProcessCommunicator(store, rank, K, **{"timeout": 20, **options})
        )

    def on_ranks(self, call: Callable[[int], Any]) -> list[Any]:
        """Return ``call(rank)`` of both ranks, run at once; raise what rank 0 raises, or rank 1."""
        has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run(rank: int) -> Any:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return call(rank)

        futures = [self._threads.submit(run, rank) for rank in range(K)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def _call(self, name: str, *by_rank: Sequence[Any], **options: Any) -> list[Any]:
        return self.on_ranks(
            lambda rank: getattr(self.comms[rank], name)(*[arg[rank] for arg in by_rank], **options)
        )

    def all_reduce(self, tensors: Sequence[Any], op: Any = "sum", **options: Any) -> list[Any]:
        return self._call("all_reduce", tensors, [op] * K, **options)

    def all_reduce_coalesced(self, lists: Sequence[Any], op: Any = "sum", **options: Any) -> None:
        self._call("all_reduce_coalesced", lists, [op] * K, **options)

    def reduce_scatter(self, outputs: Any, inputs: Any, op: Any = "sum") -> None:
        self._call("reduce_scatter", outputs, inputs, [op] * K)

    def all_gather(self, outputs: Any, inputs: Any) -> None:
        self._call("all_gather", outputs, inputs)

    def broadcast(self, tensors: Any, root: Any = 0) -> None:
        self._call("broadcast", tensors, [root] * K)

    def bind(self, tensors: Any, op: Any = "sum", **options: Any) -> Callable[[], None]:
        return self._bound("bind", tensors, op, **options)

    def bind_coalesced(self, lists: Any, op: Any = "sum", **options: Any) -> Callable[[], None]:
        return self._bound("bind_coalesced", lists, op, **options)

    def _bound(self, name: str, given: Any, op: Any, **options: Any) -> Callable[[], None]:
        bound = [
            getattr(comm, name)(mine, op, **options)
            for comm, mine in zip(self.comms, given, strict=True)
        ]

        def call() -> None:
            self.on_ranks(lambda rank: bound[rank]())

        return call

    def plan(self, *arguments: Any) -> Any:
        return self.comms[0].plan(*arguments)

    def stats(self) -> Any:
        return self.comms[0].stats()

    @property
    def guarantee(self) -> Any:
        return self.comms[0].guarantee

    def check(self) -> None:
        for comm in self.comms:
            comm.check()

    def close(self) -> None:
        self.on_ranks(lambda rank: self.comms[rank].close())

    def __enter__(self) -> RankPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._threads.shutdown()


def make_pair(transport: str, **options: Any) -> pr.Communicator | RankPair:
    """Return two ranks of "threads", "processes" or "gpu"."""
    if transport == "processes":
        return RankPair(**options)
    return pr.Communicator(["cuda:0" if transport == "gpu" else "cpu"] * K, **options)
