"""Waiting for what ranks in processes have measured, without waiting for one that is gone."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["receive"]


def receive(out: Any, workers: Sequence[BaseProcess], timeout_s: float, what: str) -> Any:
    """The next thing in a queue; RuntimeError when a worker has failed or time is over.

    ``what``: that is waited for, for the message.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return out.get(timeout=0.5)
        except queue.Empty:
            failed = [(rank, w.exitcode) for rank, w in enumerate(workers) if w.exitcode]
            if failed:
                rank, status = failed[0]
                raise RuntimeError(
                    f"{what}: rank {rank} ended with status {status}; its output says why"
                ) from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: no answer within {timeout_s:g} s") from None
