"""Group the ranks of a training run, in one process or with one process per rank.

Every process holds all images, draws the same batches and takes the shard of its rank. The result
has the bits of a run with all ranks in one process.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.communicator import Communicator
from pyringar.comm.process_communicator import ALGORITHMS
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.stores import checked_store
from pyringar.errors import ArgumentError, CollectiveTimeout, RingarError
from pyringar.parallel.bucket_params import Comm
from pyringar.parallel.shards import Devices, Split, digest_of, split_batch
from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData
from pyringar.train.devices import choose_devices

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 3600.0  # long enough for rank 0 to download the images
_POLL_S = 0.05


def num_processes() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(
            f"WORLD_SIZE is {text!r} in the environment, expected a number of processes"
        )
    return int(text)


def writes_files() -> bool:
    return num_processes() == 1 or os.environ.get("RANK") == "0"


class TrainGroup:
    """The ranks of a run, all in this process.

    ``devices`` holds one device per rank of this process, ``all_devices`` one per rank of the run.
    ``is_main``: this process has rank 0, the only rank that prints and downloads. ``digest`` is
    the digest of the parameters at the last `check_equal`; empty for one process.
    """

    is_main = True
    digest = ""

    def __init__(self, config: TrainConfig) -> None:
        self.devices = self.all_devices = choose_devices(config.world_size, config.devices)
        self._config = config

    @functools.cached_property
    def comm(self) -> Comm:
        """The communicator, created at first use since it may compile the CUDA engine."""
        config = self._config
        return Communicator(self.devices, algorithm=config.allreduce, order=config.order)

    def load(self, load: Callable[[], ImageData]) -> ImageData:
        """Call ``load`` in every process; the other processes wait for rank 0."""
        return load()

    def split(self, X: Tensor, y: Tensor, *options: Any, **more: Any) -> Split:
        """Return the shards of the ranks in this process; takes the arguments of `split_batch`."""
        return split_batch(X, y, *options, **more)

    def total(self, value: float) -> Any:
        """Return the sum of a number over all processes, added in rank order."""
        return value

    def share(self, read: Callable[[], bytes]) -> bytes:
        """Call ``read`` in the process of rank 0, and return its result in every process."""
        return read()

    def share_buffers(self, state: dict[str, Tensor], params: Sequence[Tensor]) -> None:
        """Copy the buffers of rank 0 to all processes."""

    def check_equal(self, params: Sequence[Tensor]) -> None:
        """Raise RingarError unless all processes hold the same bits."""

    def close(self) -> None:
        if "comm" in vars(self):
            self.comm.close()


class ProcessTrainGroup(TrainGroup):
    """A run with one rank per process; by default the processes of torchrun."""

    comm: RankCommunicator

    def __init__(
        self,
        config: TrainConfig,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        from pyringar.distributed.hierarchical import communicator_for  # needs torch.distributed

        store, rank, world_size = checked_store(store, rank, world_size)
        _check_config(config, world_size)
        self.devices = (torch.device("cpu"),)
        self.all_devices = self.devices * world_size
        self.is_main = rank == 0
        self.comm = communicator_for(
            store,
            rank,
            world_size,
            name="pyringar train",
            algorithm=config.allreduce,
            order="any" if config.shards is None else config.order,
        )
        if self.is_main and torch.cuda.device_count():
            logger.warning(
                "the GPUs stay idle: with torchrun, ranks train on the CPU; to use the GPUs, start "
                "one process without torchrun"
            )

    def load(self, load: Callable[[], ImageData]) -> ImageData:
        store, key = self.comm.store, "pyringar train/data"
        if not self.is_main:
            deadline = time.monotonic() + _LOAD_TIMEOUT_S
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(
                        f"rank {self.comm.rank} waited {_LOAD_TIMEOUT_S:g} s for rank 0 to load "
                        "images"
                    )
                time.sleep(_POLL_S)
            if failure := store.get(key):
                raise RingarError(f"rank 0 could not load the images: {failure.decode()}")
            return load()
        try:
            data = load()
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return data

    def split(
        self, X: Tensor, y: Tensor, devices: Devices, weights: Sequence[float] | None = None
    ) -> Split:
        rank = self.comm.rank
        images, labels = split_batch(X, y, self.all_devices, weights)
        return (images[rank],), (labels[rank],)

    def total(self, value: float) -> Any:
        """Gather the values and add them in rank order; an all-reduce may use another order."""
        return sum(self._gather(value))

    def share(self, read: Callable[[], bytes]) -> bytes:
        """Broadcast the result of ``read``; if it fails, close: else other ranks would wait."""
        try:
            content = read() if self.is_main else b""
        except BaseException:
            self.close()
            raise
        size = sum(self._gather(len(content)))
        if size == 0:
            return b""
        tensor = torch.frombuffer(bytearray(content or size), dtype=torch.uint8)
        self.comm.broadcast(tensor, 0)
        return tensor.numpy().tobytes()

    def share_buffers(self, state: dict[str, Tensor], params: Sequence[Tensor]) -> None:
        known = {param.data_ptr() for param in params}
        for tensor in state.values():
            if tensor.data_ptr() not in known:
                self.comm.broadcast(tensor, 0)

    def check_equal(self, params: Sequence[Tensor]) -> None:
        digest = digest_of(params)
        found = self._gather(int(digest, 16))
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise RingarError(
                f"the replicas have diverged: the parameters of ranks {odd} differ from rank 0's"
            )
        self.digest = digest

    def _gather(self, value: float) -> list[Any]:
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        row = torch.zeros(self.comm.world_size, dtype=dtype)
        row[self.comm.rank] = value
        self.comm.all_reduce_coalesced([row])
        found: list[Any] = row.tolist()
        return found


def _check_config(config: TrainConfig, world_size: int) -> None:
    if config.world_size != world_size:
        raise ArgumentError(
            f"ranks is {config.world_size}, but there are {world_size} processes, each one rank: "
            "leave ranks out"
        )
    if config.devices is not None:
        raise ArgumentError(
            f"devices is {config.devices!r}, which is for ranks in one process; with one rank "
            "per process every rank is on the CPU: leave devices out"
        )
    if config.allreduce not in ALGORITHMS:
        raise ArgumentError(
            f"allreduce is {config.allreduce!r}, which needs all ranks in one process; expected "
            f"one of {', '.join(ALGORITHMS)} with one rank per process"
        )
    if config.batchnorm == "sync":
        raise ArgumentError(
            "batchnorm is 'sync', which needs all ranks in one process; expected 'local' with one "
            "rank per process"
        )
