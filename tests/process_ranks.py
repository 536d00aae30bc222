"""Runs a function on several ranks, each a process of its own, for tests of torch.distributed.

Processes come from a fork server that has torch imported already. None outlives its test: they are
killed when their time is up, whatever they do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed", "pyringar.distributed"])


def run(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    backend: str = "ringar",
    timeout_s: float = 30.0,
    limit_s: float = 40.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """What ``function(rank, size, *args)`` returns on every rank, inside a process group.

    A rank that raised gives its traceback, as a :class:`Failed`; one that died its exit code, as a
    :class:`Died`.
    """
    from pyringar.engine import load

    load.engine()  # compiled once, here
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        task = (function, size, args, backend, timeout_s, limit_s, env or {}, path)
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, sender, *task), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


class Failed(str):
    """A traceback."""


class Died(int):
    """An exit code."""


def _collect(pipes: Sequence[Connection], processes: Sequence[Any], deadline: float) -> list[Any]:
    results: list[Any] = [Failed("no answer in time")] * len(pipes)
    waiting = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    while waiting:
        open_pipes = [p for p in pipes if id(p) in waiting]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            return results
        for pipe in ready:
            rank = waiting.pop(id(pipe))
            try:
                results[rank] = pipe.recv()
            except EOFError:
                processes[rank].join(10)
                results[rank] = Died(processes[rank].exitcode or 0)
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0 and not isinstance(results[rank], (Failed, Died)):
            results[rank] = Failed(f"answered, then exit code {process.exitcode}")
    return results


def _rank_main(
    rank: int,
    pipe: Connection,
    function: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    backend: str,
    timeout_s: float,
    limit_s: float,
    env: dict[str, str],
    path: str,
) -> None:
    import pyringar.distributed  # noqa: F401

    faulthandler.dump_traceback_later(0.9 * limit_s)  # says where it hangs before it is killed

    torch.set_num_threads(1)
    os.environ.update(env)
    if "TORCH_DISTRIBUTED_DEBUG" in env:
        dist.set_debug_level_from_env()
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(path, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank, size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        result = Failed(f"rank {rank}: {traceback.format_exc()}")
    pipe.send(result)
    pipe.close()
    if isinstance(result, Failed):
        os._exit(0)  # others may be stuck, and this one's threads too


def run_cases(rank: int, size: int, cases: Sequence[tuple[str, Callable[..., None]]]) -> Any:
    """For :func:`run`: ``case(rank, size)`` one after the other, until one fails.

    Returns the failure of each, None where there was none; later ones did not run.
    """
    verdicts: dict[str, str | None] = {name: "not run: one before it failed" for name, _ in cases}
    for name, case in cases:
        try:
            case(rank, size)
            verdicts[name] = None
        except BaseException:
            verdicts[name] = f"rank {rank}: {traceback.format_exc()}"
            break
    return verdicts
