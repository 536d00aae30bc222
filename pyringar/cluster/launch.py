"""Run a function on every rank of a cluster that lives in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pyringar.choices import kind_of
from pyringar.cluster import internals
from pyringar.cluster.cluster import Cluster
from pyringar.comm.arguments import check_timeout, is_count, is_list
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError

__all__ = ["launch"]

Result = TypeVar("Result")


def launch(
    fn: Callable[..., Result],
    ranks: int = 4,
    *,
    devices: Sequence[str | torch.device] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout: float = 30.0,
) -> list[Result]:
    """Call ``fn`` once per rank: ranks are threads, and torch.distributed is the real one.

    A rank finds what torchrun gives a process: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and the
    others in its ``os.environ``, one OpenMP thread, and ``dist.init_process_group()``, which makes
    a group of this cluster whatever backend and address it names. Everything that is built on
    torch.distributed runs in it as it is: DistributedDataParallel, FSDP2, DTensor, ZeRO,
    checkpoints. Sums have the bits of backend ``ringar`` under torchrun: rank order, rounded once.

    One rank runs at a time, and another one when it waits. Each has its own random numbers of
    torch, Python and NumPy, which differ between ranks and repeat from run to run, its own default
    dtype and device, gradient mode, autocast and current stream. All other state is the process's.
    Ranks call torch.distributed in their own thread, and run uncompiled under torch.compile.

    Args:
        fn: The program. Its modules are imported once: ranks share their global variables.
        ranks: How many.
        devices: One per rank, such as ``["cuda:0"] * 4``: the rank's current CUDA device.
            None: the CPU.
        args: For ``fn``, the same objects on all ranks.
        kwargs: Likewise.
        seed: Decides which rank goes next where several can. The same seed gives the same run.
        timeout: Seconds that a rank may run without a call while others wait for it, or for a turn.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        ArgumentError: An argument is wrong; or ranks call different things: the message has a table
            of what each calls, and where.
        CollectiveTimeout: All ranks wait for each other, which is found at once; or a rank ran on
            for ``timeout`` while others waited, and was interrupted. With a table and all stacks.
        PeerLostError: Ranks wait for one that has returned.
        UnsupportedError: This torch was not tried.
        RingarError: Another `launch` of this process has not ended.
        BaseException: What ``fn`` raised first on any rank. The others got a `PeerLostError` in
            their next call.

    Afterwards the process is as before: environment, groups, random states, threads. Ctrl-C ends
    all ranks. A program that swallows KeyboardInterrupt, or waits outside Python, is left behind in
    its thread, with a warning.

    Cost: 7 ms for four ranks. A collective of small tensors takes some 0.1 ms per rank, a tenth
    of it the engine's: threads wake each other.
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {kind_of(fn)}, expected a function")
    if not is_count(ranks, 1):
        raise ArgumentError(f"ranks is {ranks!r}, expected a positive int")
    chosen = check_devices(["cpu"] * ranks if devices is None else devices)
    if len(chosen) != ranks:
        raise ArgumentError(f"devices has {len(chosen)} entries, expected {ranks}, one per rank")
    program = partial(fn, *_checked_args(args), **_checked_kwargs(kwargs))
    if not is_count(seed):
        raise ArgumentError(f"seed is {seed!r}, expected an int, 0 or more")
    timeout_s = check_timeout(timeout)
    internals.check_torch()
    return Cluster(chosen, seed=seed, timeout_s=timeout_s).run(program)


def _checked_args(args: Any) -> Sequence[Any]:
    if not is_list(args):
        raise ArgumentError(f"args is {kind_of(args)}, expected a list or tuple")
    return list(args)


def _checked_kwargs(kwargs: Any) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ArgumentError(f"kwargs is {kind_of(kwargs)}, expected a dict by names")
    return kwargs
