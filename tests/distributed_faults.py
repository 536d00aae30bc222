"""What goes wrong on ranks in ``test_distributed.py``: each gives the error it met, and when."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar.distributed


def error_of(call: Callable[[], object]) -> tuple[str, list[str], str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        return names[0], names, str(error), time.monotonic() - began
    return "none", [], "", time.monotonic() - began


def reduced_by_future() -> Any:
    return dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()


def peer_lost(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(reduced_by_future)


def peer_late(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(4.5)
        return None
    return error_of(reduced_by_future)


def data_parallel_peer(rank: int, size: int, what: str) -> Any:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)))
    if dist.get_backend() == "gloo":
        state = pyringar.distributed.HookState(timeout=2.0)
        ddp.register_comm_hook(state, pyringar.distributed.ddp_hook)
    for step in range(3):
        loss = ddp(torch.randn(4, 100)).sum()
        if rank == 1 and step == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(4.5)
            return None
        error = error_of(loss.backward)
        if error[0] != "none":
            return error
    return "no error"
