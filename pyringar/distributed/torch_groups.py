"""Make groups of gloo and NCCL from a store, without a default group of torch.distributed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyringar.errors import ArgumentError, UnsupportedError

# Of messages that no rank sends, and of messages that no rank receives. They must not meet.
_NOT_SENT, _NOT_RECEIVED = 2**31 - 1, 2**31 - 2


def make_gloo(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    on_timeout: Callable[[timedelta], None] | None = None,
) -> Any:
    """Return a gloo group in which all ranks are connected.

    torch calls ``on_timeout`` instead of setting this gloo's timeout: up to torch 2.13 that is how
    a process group learns of a new timeout.

    Raises:
        RuntimeError: gloo's own: a rank did not come in time.
        ArgumentError: There is no network as ``GLOO_SOCKET_IFNAME`` says.
    """
    if not dist.is_gloo_available():
        raise UnsupportedError("this torch was built without gloo")
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._threads = 2
    # As torch's own: without names, the network on which this machine's name is found.
    networks = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    try:
        devices = [kind.create_device(interface=network, lazy_init=False) for network in networks]
        options._devices = devices or [kind.create_default_device(lazy_init=False)]
    except RuntimeError as error:
        raise ArgumentError(
            f"GLOO_SOCKET_IFNAME is {','.join(networks)!r}, expected network devices with an "
            f"address: {error}"
        ) from error

    class Gloo(kind):  # type: ignore[misc]
        def _set_default_timeout(self, timeout: timedelta) -> None:
            if on_timeout is not None:
                on_timeout(timeout)

    return Gloo(PrefixStore("gloo/", store), rank, size, options)


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return an NCCL group; its ranks meet in their first call."""
    if not dist.is_nccl_available():
        raise UnsupportedError("this torch was built without NCCL")
    from torch._C._distributed_c10d import PrefixStore

    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(PrefixStore("nccl/", store), rank, size, options)


def break_off(gloo: Any) -> None:
    """Make a gloo's calls and messages fail: when one times out, it closes all connections.

    A receive from any rank is not told.
    """
    for peer in _peers(gloo):
        with contextlib.suppress(RuntimeError):  # also if this connection is closed already
            gloo.recv([torch.empty(0)], peer, _NOT_SENT).wait(timedelta(milliseconds=1))


def closed_peers(gloo: Any) -> list[int]:
    """Return the ranks that have closed their connections. Never waits; announces a message.

    The list also holds ranks that live and have given up: after a failure they break off.
    """
    closed = []
    for peer in _peers(gloo):
        try:
            gloo.send([torch.zeros(1)], peer, _NOT_RECEIVED)
        except RuntimeError as error:
            if "Application timeout" not in str(error):  # else this rank has closed it
                closed.append(peer)
    return closed


def _peers(gloo: Any) -> list[int]:
    return [rank for rank in range(gloo.size()) if rank != gloo.rank()]
