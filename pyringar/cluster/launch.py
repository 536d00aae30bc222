"""`pyringar.launch`: run a function on ranks that are threads or forked processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pyringar.choices import check_count, kind_of
from pyringar.cluster import internals
from pyringar.cluster.cluster import Cluster
from pyringar.cluster.processes import run_processes
from pyringar.cluster.rank_threads import current
from pyringar.comm.arguments import check_timeout, is_list
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError, RingarError

Result = TypeVar("Result")

_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def launch(
    fn: Callable[..., Result],
    ranks: int = 4,
    *,
    devices: Sequence[str | torch.device] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout: float = 30.0,
    processes: bool = False,
) -> list[Result]:
    """Call ``fn`` once per rank of torch.distributed; ranks are threads or forked processes.

    Each rank has torchrun's variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ...) in its
    ``os.environ``, one OpenMP thread, and ``dist.init_process_group()``. Programs on
    torch.distributed run unchanged: DistributedDataParallel, FSDP2, DTensor, ZeRO, checkpoints.
    Random numbers of torch, Python and NumPy differ between ranks and repeat from run to run. Sums
    of the backend ``ringar`` are in rank order, rounded once.

    Threads: one rank runs at a time; when it waits, another rank runs. All groups have the backend
    ``ringar``. Each rank has its own random numbers, default dtype and device, gradient mode,
    autocast, current stream, and settings that torch's contexts change. Ranks share all other state
    of the process. Libraries that keep state per rank, such as accelerate, are refused. Ranks call
    torch.distributed in their own thread, and run uncompiled under torch.compile.

    Processes: all ranks run at once, share nothing, and compute on one OpenMP thread each. A group
    has the backend that the program names, else ``ringar``. Each line of output begins with its
    rank, such as ``[rank 2]``.

    Args:
        fn: The program. Threads share the global variables of its modules.
        ranks: Number of ranks.
        devices: One per rank, such as ``["cuda:0"] * 4``: the rank's current CUDA device.
            None: the CPU. Processes can use GPUs if this process has not initialised CUDA.
        args: Positional arguments of ``fn``. Threads share the objects; processes get copies.
        kwargs: Keyword arguments of ``fn``, likewise.
        seed: Seed of the random order in which threads run. The same seed repeats the run.
        timeout: Seconds that a rank may run without a call while another rank waits in a call. Ten
            times as long while no rank waits in a call (threads). ``inf``: no limit, such as for a
            debugger in processes.
        processes: Fork this process for each rank. Linux only.

    Returns:
        The results of ``fn`` in rank order. Processes pickle them.

    Raises:
        ArgumentError: An argument is wrong, or the calls of ranks differ. With a table of calls.
        CollectiveTimeout: All ranks wait for each other, which threads find at once; a rank ran
            longer than ``timeout`` allows; or a process does not exit. Shows a table and stacks.
        PeerLostError: Ranks wait for a rank that has returned, or a rank's process was killed.
        UnsupportedError: Threads: this torch was not tried, or the program needs processes.
            Processes: this is not Linux, or a GPU cannot be used after the fork.
        RingarError: Another `launch` of threads has not ended, or a result cannot be pickled.
        BaseException: The first exception of ``fn`` on any rank. The other ranks get a
            `PeerLostError` in their next call. The cause shows the tracebacks of all processes.

    Afterwards the process has its previous state. Ctrl-C ends all ranks. A thread that catches
    KeyboardInterrupt, or blocks outside Python, keeps running, with a warning; a process is killed.

    Cost: four threads 7 ms, four processes 0.1 s, and 2 s for imports before the first processes.
    With threads, a collective of small tensors takes some 0.1 ms per rank, to wake its thread.
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {kind_of(fn)}, expected a function")
    if any(is_lazy(fn) for is_lazy in _LAZY):
        raise ArgumentError(
            "fn is a coroutine or generator function, whose call runs none of it; expected a plain "
            "function: call asyncio.run() in it"
        )
    check_count("ranks", ranks, 1)
    chosen = check_devices(["cpu"] * ranks if devices is None else devices)
    if len(chosen) != ranks:
        raise ArgumentError(f"devices has {len(chosen)} entries, expected {ranks}, one per rank")
    if not is_list(args):
        raise ArgumentError(f"args is {kind_of(args)}, expected a list or tuple")
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ArgumentError(f"kwargs is {kind_of(kwargs)}, expected a dict by names")
    program = partial(fn, *args, **kwargs)
    check_count("seed", seed, 0)
    timeout_s = check_timeout(timeout)
    if not isinstance(processes, bool):
        raise ArgumentError(f"processes is {processes!r}, expected True or False")
    if processes and seed:
        raise ArgumentError(f"seed is {seed}, expected 0 with processes, which run all at once")
    if processes and current() is not None:
        raise RingarError("launch: a rank that is a thread cannot fork; use processes for both")
    if processes:
        return run_processes(program, chosen, timeout_s)
    internals.check_torch()
    return Cluster(chosen, seed=seed, timeout_s=timeout_s).run(program)
