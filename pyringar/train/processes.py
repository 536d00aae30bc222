"""Training with one rank per process: what a run shares with the ranks in other processes.

Every process has all images and draws the same batches; each takes its shard of them. What is
learned has the bits of one process that has all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.call import RankCommunicator
from pyringar.data_parallel import shard_sizes
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError
from pyringar.process_communicator import ALGORITHMS, ProcessCommunicator
from pyringar.rendezvous import default_store
from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData

__all__ = ["TrainGroup", "num_processes"]

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 3600.0  # a download may take that long
_POLL_S = 0.05


def num_processes() -> int:
    """How many processes torchrun has started, of which this is one; 1 without torchrun.

    Raises:
        ArgumentError: ``WORLD_SIZE`` in the environment is no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(
            f"WORLD_SIZE is {text!r} in the environment, expected a number of processes"
        )
    return int(text)


class TrainGroup:
    """This process's rank in a training run of many processes.

    Args:
        config: What will be trained; its ranks are the processes.
        store: As :class:`pyringar.ProcessCommunicator` has it; torchrun's if not given.
        rank: Likewise.
        world_size: Likewise.

    Raises:
        ArgumentError: Options that make no sense with one rank per process.
        CollectiveTimeout, PeerLostError: Other processes did not come.

    Attributes:
        comm: This rank's communicator.
        devices: The device of this rank, as a list of one.
        digest: Of the parameters, when they were last found equal on all ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if store is None:
            store, rank, world_size = default_store()
        _check_config(config, world_size)
        self.devices = (torch.device("cpu"),)
        self.comm: RankCommunicator = ProcessCommunicator(
            store,
            rank,
            world_size,
            name="pyringar train",
            algorithm=config.allreduce,
            order="any" if config.allreduce == "ring" else "rank",
        )
        self.digest = ""
        self._store = store
        if self.is_main and torch.cuda.device_count():
            logger.warning(
                "the GPUs stay idle: ranks in processes of their own reduce on the CPU; one "
                "process drives GPUs, without torchrun"
            )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints, draws and downloads."""
        return self.comm.rank == 0

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """The devices of all ranks."""
        return self.devices * self.comm.world_size

    def load(self, load: Callable[[], ImageData]) -> ImageData:
        """Call ``load`` on rank 0, and when that is done on the others: one downloads, all read.

        Raises:
            RingarError: What ``load`` raised; on the other ranks, that it did.
            CollectiveTimeout: Rank 0 takes more than an hour.
            PeerLostError: The store is gone.
        """
        if self.is_main:
            try:
                data = load()
            except BaseException as error:
                self._store.set("pyringar/train/data", f"{type(error).__name__}: {error}")
                raise
            self._store.set("pyringar/train/data", "")
            return data
        deadline = time.monotonic() + _LOAD_TIMEOUT_S
        try:
            while not self._store.check(["pyringar/train/data"]):
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(
                        f"rank {self.comm.rank} waited {_LOAD_TIMEOUT_S:g} s for rank 0 to load "
                        "the images"
                    )
                time.sleep(_POLL_S)
            failure = self._store.get("pyringar/train/data").decode(errors="replace")
        except RingarError:
            raise
        except RuntimeError as error:
            raise PeerLostError(
                f"the store does not answer rank {self.comm.rank}, so its process is gone: {error}"
            ) from error
        if failure:
            raise RingarError(f"rank 0 could not load the images: {failure}")
        return load()

    def split(
        self,
        X: Tensor,  # noqa: N803
        y: Tensor,
        devices: Sequence[Any],
        weights: Sequence[float] | None = None,
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """This rank's shard of a batch: the one that :func:`split_batch` gives it."""
        sizes = shard_sizes(len(X), self.comm.world_size, weights)
        begin, size = sum(sizes[: self.comm.rank]), sizes[self.comm.rank]
        return (X[begin : begin + size],), (y[begin : begin + size],)

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor, in rank order."""
        total = value.clone()
        self.comm.all_reduce_coalesced([total], "sum", algorithm="direct", order="rank")
        return total

    def share_buffers(self, state: dict[str, Tensor], params: Sequence[Tensor]) -> None:
        """Give all ranks rank 0's running statistics.

        Args:
            state: All that was learned, by name, in its own memory.
            params: Those of it that all ranks have alike.
        """
        known = {param.data_ptr() for param in params}
        for tensor in state.values():
            if tensor.data_ptr() not in known:
                self.comm.broadcast(tensor, 0)

    def check_equal(self, params: Sequence[Tensor]) -> None:
        """Raise unless all ranks hold the same bits.

        Raises:
            RingarError: Names the ranks that differ from rank 0.
        """
        digest = hashlib.blake2b(digest_size=7)  # fits an int64
        for param in params:
            digest.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        own = torch.zeros(self.comm.world_size, dtype=torch.int64)
        own[self.comm.rank] = int.from_bytes(digest.digest(), "big")
        found = self.total(own).tolist()
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            raise RingarError(
                f"the replicas have diverged: the parameters of ranks {odd} differ from rank 0's"
            )
        self.digest = digest.hexdigest()


def _check_config(config: TrainConfig, world_size: int | None) -> None:
    if config.world_size != world_size:
        raise ArgumentError(
            f"ranks is {config.world_size}, but there are {world_size} processes, each one rank: "
            "leave ranks out"
        )
    if config.devices is not None:
        raise ArgumentError(
            f"devices is {config.devices!r}, which names the ranks of one process; with one rank "
            "per process every rank is on the CPU: leave devices out"
        )
    if isinstance(config.weights, str):
        raise ArgumentError(
            f"weights is {config.weights!r}, which one process measures for all its ranks; with "
            "one rank per process give numbers, such as 3,1"
        )
    if config.allreduce not in ALGORITHMS:
        raise ArgumentError(
            f"allreduce is {config.allreduce!r}, which needs all ranks in one process; expected "
            f"one of {', '.join(ALGORITHMS)} with one rank per process"
        )
    if config.batchnorm == "sync":
        raise ArgumentError(
            "batchnorm is 'sync', whose ranks meet inside one process; expected 'local' with one "
            "rank per process"
        )
