"""Lists of tensors as flat memory, and calls in the background: what crosses the wire, and when."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from torch import Tensor

from pyringar.errors import ArgumentError, RingarError, UnsupportedError

__all__ = ["Job", "check_tensor", "describe", "views_of"]

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class Job:
    """A call that runs on another thread; :class:`pyringar.Work` waits for it.

    Args:
        thread: Runs its calls in the order in which they came.
        call: What to call.
        what: The same in words, for messages.

    Raises:
        RingarError: The thread has ended, or cannot start.
    """

    def __init__(self, thread: ThreadPoolExecutor, call: Callable[[], None], what: str) -> None:
        self._finished_ns = 0
        self._what = what
        try:
            self._future: Future[None] = thread.submit(self._run, call)
        except RuntimeError as error:
            raise RingarError(f"this communicator cannot run a call: {error}") from error

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            self._finished_ns = time.perf_counter_ns()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What it ended with."""
        return self._future.exception() if self._future.done() else None

    def finished_ns(self) -> int:
        """When it ended; 0 while it runs."""
        return self._finished_ns if self._future.done() else 0

    def wait(self, seconds: float) -> bool:
        """False if it is not done in time; raises what it ended with."""
        try:
            self._future.result(min(seconds, threading.TIMEOUT_MAX))
        except FutureTimeout:
            if not self._future.done():
                return False
            raise  # its own
        return True

    def describe(self) -> str:
        """Return what it is, and whether it has begun."""
        state = "runs" if self._future.running() else "waits for the calls before it"
        return f"{self._what}, which {state}"

    def result(self) -> None:
        """Wait for it, however long: what it waits for has deadlines."""
        self._future.result()


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where each tensor has its place in flat memory, end to end."""
    views, begin = [], 0
    for tensor in tensors:
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return views


def describe(tensors: Sequence[Tensor]) -> str:
    """Equal for lists of equal shapes and dtypes, else different."""
    numel = sum(tensor.numel() for tensor in tensors)
    kinds = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    digest = hashlib.blake2b(kinds.encode(), digest_size=4).hexdigest()
    dtype = f" {tensors[0].dtype}" if tensors else ""
    return f"{numel}{dtype} elements in {len(tensors)} tensors (shapes {digest})"


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse what cannot be reduced.

    Raises:
        ArgumentError: No tensor, or not on the CPU.
        UnsupportedError: Sparse, or of another dtype.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{name} is on {tensor.device}, expected cpu, this rank's device")
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{name} is {tensor.layout} {tensor.dtype}, expected strided and one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
