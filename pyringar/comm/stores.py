"""Choice of the torch store for the rendezvous, and store calls with a deadline."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pyringar.comm.jobs import Jobs
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, UnsupportedError

_LEAST_S = 0.25  # minimum seconds per store call, so that a rank can report its timeout


def checked_store(store: Any, rank: Any, world_size: Any) -> tuple[Any, int, int]:
    """Check store, rank and world size; without them return the values of this job.

    Raises ArgumentError for a wrong value, an incomplete set of values, or a job without a store.
    """
    if not dist.is_available():
        raise UnsupportedError(
            "this torch has no torch.distributed; one process can drive all ranks"
        )
    if store is None:
        if rank is not None or world_size is not None:
            raise ArgumentError(
                f"rank is {rank!r} and world_size {world_size!r} without a store; pass all three "
                "or none"
            )
        if dist.is_initialized():
            default = dist.distributed_c10d._get_default_store()
            return default, dist.get_rank(), dist.get_world_size()
        return _environment_store()
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"{name} is {value!r}, expected an integer beside store")
    if not 0 <= rank < world_size:
        raise ArgumentError(
            f"rank is {rank} and world_size {world_size}, expected 0 <= rank < world_size"
        )
    if not isinstance(store, dist.distributed_c10d.Store):
        raise ArgumentError(f"store is {store!r}, expected a torch.distributed.Store")
    return store, rank, world_size


@functools.cache  # once per process: rank 0's store listens on MASTER_PORT
def _environment_store() -> tuple[Any, int, int]:
    from torch.distributed.rendezvous import rendezvous

    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"no store is given, torch.distributed is not initialised, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not in the environment: start the processes "
            "with torchrun, or pass store, rank and world_size"
        )
    store, rank, world_size = next(iter(rendezvous("env://")))
    return store, rank, world_size


class PatientStore:
    """A torch store that ends its calls at a deadline, even if the store's process is stopped.

    A thread makes the calls until `close`. ``group`` and ``rank`` are for messages, ``deadline`` is
    a time of ``time.monotonic()``. Every method raises CollectiveTimeout at the deadline, and
    PeerLostError if the store's process ended.
    """

    def __init__(self, store: Any, group: str, rank: int, deadline: float) -> None:
        self.store = store
        self._group = group
        self._rank = rank
        self._deadline = deadline
        self._questions: Jobs | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.store.set(key, value))

    def look_up(self, keys: Sequence[str]) -> list[Any]:
        store = self.store
        found: list[Any] = self._ask(
            lambda: [store.get(k) if store.check([k]) else None for k in keys]
        )
        return found

    def close(self) -> None:
        if self._questions is not None:
            self._questions.end()

    def _ask(self, question: Callable[[], object]) -> Any:
        name = f"store of rank {self._rank} of group {self._group}"
        if self._questions is None:
            self._questions = Jobs(name)
        job = self._questions.submit(question, name)
        try:
            is_answered = job.wait(max(_LEAST_S, self._deadline - time.monotonic()))
        except (RuntimeError, OSError) as error:
            raise PeerLostError(
                f"the store of group {self._group} does not answer rank {self._rank}, so its "
                f"process is gone: {error}"
            ) from error
        if not is_answered:
            raise CollectiveTimeout(
                f"the store of group {self._group} did not answer rank {self._rank} in time"
            )
        return job.result
