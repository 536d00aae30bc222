"""Run a benchmark's ranks in processes of their own, and wait for none that is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

Answers = Callable[[str, float], Any]


@contextlib.contextmanager
def rank_processes(
    work: Callable[..., None], world_size: int, *arguments: Any
) -> Iterator[Answers]:
    """Start ``work(rank, world_size, folder, out, *arguments)`` in a process per rank.

    ``folder`` is a temporary one for the ranks' stores, ``out`` a queue. Yields the function that
    returns the next answer in the queue, from a description and a deadline in seconds. When the
    block raises, the processes are killed; none outlives it.
    """
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, world_size, folder, out, *arguments))
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            yield lambda what, timeout_s: _receive(out, workers, timeout_s, what)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        finally:
            for worker in workers:
                worker.join(timeout=10)  # all is told; NCCL may keep threads
                worker.kill()
                worker.join()


def _receive(out: Any, workers: Sequence[BaseProcess], timeout_s: float, what: str) -> Any:
    """Return the next answer; RuntimeError when a rank has failed or time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return out.get(timeout=0.5)
        except queue.Empty:
            failed = [(rank, w.exitcode) for rank, w in enumerate(workers) if w.exitcode]
            if failed:
                rank, status = failed[0]
                raise RuntimeError(
                    f"{what}: rank {rank} ended with status {status}; its output says why"
                ) from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: no answer within {timeout_s:g} s") from None
