"""gloo and NCCL for the calls and devices that the engine does not have."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyringar.comm.exits import close_at_exit, is_inherited, never_destroy
from pyringar.distributed.torch_works import BackgroundCall, Threads
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

# Seconds that close() waits for each thread to end, after it has aborted the thread's call.
_GRACE_S = 1.0


class Fallback:
    """The gloo group of a process group, and its NCCL group if the user asked for NCCL.

    The constructor connects all ranks, so a message never waits for a connection. If that fails,
    the first call that needs gloo raises the error.

    ``backend_of`` returns the backend that the user named for a device type. ``set_timeout`` sets
    the timeout of the process group.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        backend_of: Callable[[str], str | None],
        set_timeout: Callable[[timedelta], None],
    ) -> None:
        self._endpoint = (store, rank, size, timeout)
        self._backend_of = backend_of
        self._gloo: Any = None
        self._nccl: Any = None
        # Running calls. Needs no lock, because each use is atomic in the interpreter.
        self._under_way: set[BackgroundCall] = set()
        self.waiters = Threads("calls of gloo")
        self._is_closed = False
        self._error: Exception | None = None
        try:
            self._gloo = make_gloo(*self._endpoint, on_timeout=set_timeout)
            close_at_exit(self, Fallback.close)
        except Exception as error:  # stored: the first call that needs gloo raises it
            self._error = error

    def for_device(self, device: str, operation: str) -> Any:
        """Return the backend for tensors on a type of device.

        UnsupportedError without a backend; RingarError if the group was destroyed.
        """
        if self._is_closed:
            raise RingarError(f"{operation}: this process group was destroyed")
        wanted = "gloo" if device == "cpu" else self._backend_of(device)
        if wanted == "gloo" and self._gloo is not None:
            return self._gloo
        if wanted == "gloo":
            raise UnsupportedError(
                f"{operation}: backend ringar hands this call to gloo, which could not be made: "
                f"{self._error}"
            ) from self._error
        if wanted == "nccl" and dist.is_nccl_available():
            if self._nccl is None:
                self._nccl = make_nccl(*self._endpoint)
            return self._nccl
        raise UnsupportedError(
            f"{operation}: backend ringar takes CPU tensors, this one is on {device}; for both use "
            f"init_process_group('cpu:ringar,{device}:{'nccl' if device == 'cuda' else 'BACKEND'}')"
        )

    def set_timeout(self, timeout: timedelta) -> None:
        self._endpoint = (*self._endpoint[:3], timeout)
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend.set_timeout(timeout)

    def add(self, *parts: BackgroundCall) -> None:
        self._under_way.update(parts)
        for part in list(self._under_way):
            if part.is_completed():
                self._under_way.discard(part)

    def under_way(self) -> list[BackgroundCall]:
        return [part for part in list(self._under_way) if not part.is_completed()]

    def finish(self) -> None:
        for part in list(self._under_way):
            with contextlib.suppress(RuntimeError):  # the Work raises this error to its caller
                part.wait()

    def abort(self) -> None:
        if not is_inherited(self):
            abort_calls(self._gloo)

    def closed_peers(self) -> list[int]:
        return closed_peers(self._gloo)

    def close(self) -> None:
        """Release gloo and NCCL. Threads of gloo that run at exit would abort the process.

        A gloo with a running call stays in memory: its destructor waits with the GIL held.
        """
        if is_inherited(self):
            return
        self._is_closed = True
        if self.waiters.is_busy():
            self.abort()
        self.waiters.close(_GRACE_S)
        if self.under_way() or self.waiters.is_busy():
            never_destroy(self._gloo)
        self._gloo = None
        self._under_way.clear()
        if self._nccl is not None:
            with contextlib.suppress(RuntimeError):
                self._nccl.shutdown()
            self._nccl = None


def gloo_text(error: Exception) -> str:
    """Return gloo's error text without the path of a source file on torch's build machine."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error))


# Tag of receives that no send matches, and tag of sends that no receive matches.
_NOT_SENT, _NOT_RECEIVED = 2**31 - 1, 2**31 - 2


def make_gloo(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    on_timeout: Callable[[timedelta], None] | None = None,
) -> Any:
    """Make a gloo group, and connect all ranks.

    torch up to 2.13 calls ``on_timeout`` instead of setting the timeout of gloo. ArgumentError if
    there is no network ``GLOO_SOCKET_IFNAME``; RuntimeError if a rank is late.
    """
    if not dist.is_gloo_available():
        raise UnsupportedError("this torch was built without gloo")
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._timeout = timeout
    options._threads = 2
    # Without the variable use the network of this machine's host name, as torch does.
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
    if not dist.is_nccl_available():
        raise UnsupportedError("this torch was built without NCCL")
    from torch._C._distributed_c10d import PrefixStore

    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(PrefixStore("nccl/", store), rank, size, options)


def abort_calls(gloo: Any) -> None:
    """Make all running calls of gloo fail, except receives from any rank.

    A receive that times out makes gloo close its connections.
    """
    for peer in _peers(gloo):
        with contextlib.suppress(RuntimeError):  # timed out, or the connection was closed
            gloo.recv([torch.empty(0)], peer, _NOT_SENT).wait(timedelta(milliseconds=1))


def closed_peers(gloo: Any) -> list[int]:
    """Return the ranks that have closed their connections: dead ranks, and ranks that aborted.

    Does not block: it begins to send a message to each rank, and a closed connection raises.
    """
    closed = []
    for peer in _peers(gloo):
        try:
            gloo.send([torch.zeros(1)], peer, _NOT_RECEIVED)
        except RuntimeError as error:
            if "Application timeout" not in str(error):  # else this rank closed the connection
                closed.append(peer)
    return closed


def _peers(gloo: Any) -> list[int]:
    return [] if gloo is None else [rank for rank in range(gloo.size()) if rank != gloo.rank()]
