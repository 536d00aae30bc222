"""Ranks in processes of their own, for tests: started once, given one function after another."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankPool:
    """``world_size`` processes that each call what they are given, with their rank.

    A function is called as ``function(rank, world_size, store, *args)``, with a store of that call.
    It must be importable, and so must what it returns or raises.
    """

    def __init__(self, world_size: int, environment: Callable[[int], dict] | None = None) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        self._num_calls = 0
        context = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            extra = environment(rank) if environment else {}
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, extra), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable, *args: Any, timeout_s: float = 60) -> list[Any]:
        """What every rank returned, or the exception that ended it, in rank order."""
        self._num_calls += 1
        path = str(self._folder / f"store{self._num_calls}")
        for pipe in self._pipes:
            pipe.send((function, path, args))
        results, deadline = [], time.monotonic() + timeout_s
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise AssertionError(f"rank {rank} hangs in {function.__name__}")
                results.append(pipe.recv())
            except EOFError:
                results.append(EOFError(f"rank {rank} has died"))
        return results

    def check(self, function: Callable, *args: Any, timeout_s: float = 60) -> list[Any]:
        """What every rank returned; raises what the first that failed raised."""
        results = self.run(function, *args, timeout_s=timeout_s)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(pipe: Any, rank: int, world_size: int, environment: dict) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, path, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = function(rank, world_size, dist.FileStore(path, -1), *args)
        except BaseException as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            answer = error
        pipe.send(answer)
