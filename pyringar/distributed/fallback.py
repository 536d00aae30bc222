"""The backends of torch that do what the engine does not: gloo, and NCCL for CUDA tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyringar.comm.exits import close_at_exit, is_inherited, never_destroy
from pyringar.distributed.torch_works import BackgroundCall, Threads
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

# How long close() waits for each thread whose wait was ended.
_GRACE_S = 1.0


class Fallback:
    """A group's gloo, and its NCCL where the user asked for one.

    Gloo connects all ranks when the group is made, so that a message never waits for a rank that is
    elsewhere in its program. If that fails, the first call that needs gloo raises the error.

    ``backend_of`` returns the user's backend for a device type. ``set_timeout`` is the group's.
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
        # Without a lock, as the works of an EngineCommunicator: each use is one step.
        self._under_way: set[BackgroundCall] = set()
        self.waiters = Threads("calls of gloo")
        self._is_closed = False
        self._error: Exception | None = None
        try:
            self._gloo = make_gloo(*self._endpoint, on_timeout=set_timeout)
            close_at_exit(self, Fallback.close)
        except Exception as error:  # raised when it is needed: many programs never do
            self._error = error

    def for_device(self, device: str, operation: str) -> Any:
        """Return the backend for tensors on a type of device.

        UnsupportedError if there is none, RingarError if the group was destroyed.
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
            with contextlib.suppress(RuntimeError):  # its work has it
                part.wait()

    def abort(self) -> None:
        if not is_inherited(self):
            break_off(self._gloo)

    def closed_peers(self) -> list[int]:
        return closed_peers(self._gloo)

    def close(self) -> None:
        """Release both: at exit, gloo's threads would abort the process.

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

    torch up to 2.13 calls ``on_timeout`` instead of setting this gloo's timeout. ArgumentError if
    there is no network as ``GLOO_SOCKET_IFNAME`` says; RuntimeError if a rank is late.
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
    if not dist.is_nccl_available():
        raise UnsupportedError("this torch was built without NCCL")
    from torch._C._distributed_c10d import PrefixStore

    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    return kind(PrefixStore("nccl/", store), rank, size, options)


def break_off(gloo: Any) -> None:
    """Make gloo's calls and messages fail, except receives from any rank.

    When a message times out, gloo closes all connections.
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
    return [] if gloo is None else [rank for rank in range(gloo.size()) if rank != gloo.rank()]
