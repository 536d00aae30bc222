"""Handles of communicators in torch.compile graphs, and detection of tracing."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import _len_torch_dispatch_stack as num_modes
from torch.compiler import is_dynamo_compiling

from pyringar.errors import RingarError

# A graph cannot hold Python objects: it holds the handle of its communicator.
_by_handle: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()
_MAKING_GRAPHS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def handle_of(communicator: Any, settings: str) -> str:
    """Register a communicator and return its handle for `communicator_of`.

    Args:
        communicator: Held weakly.
        settings: Text of all settings that change results. A graph from another process, or from
            torch's cache, finds the communicator with the same number and settings.
    """
    handle = f"communicator {next(_numbers)} ({settings})"
    _by_handle[handle] = communicator
    return handle


def communicator_of(handle: str) -> Any:
    """Return this process's communicator with the handle.

    Raises:
        RingarError: The communicator was deleted.
    """
    found = _by_handle.get(handle)
    if found is None:
        raise RingarError(
            f"{handle} is not there: keep a communicator as long as the graphs and the results "
            "that were made with it"
        )
    return found


def is_traced() -> bool:
    """Return whether torch.compile, torch.export or make_fx traces the calling code."""
    return is_dynamo_compiling() or (
        num_modes() > 0
        and any(torch._C._get_dispatch_mode(key) is not None for key in _MAKING_GRAPHS)
    )
