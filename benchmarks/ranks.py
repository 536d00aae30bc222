"""Run cases with one process per rank, where torch's groups and ours are in the same processes."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pyringar as pr
import pyringar.distributed  # registers the backend
from benchmarks.bench import Case
from benchmarks.timing import Effort, Sampler, Timing, in_turns

Answer = tuple[dict[str, Timing], dict[str, bool]]  # by candidate: the timing, and is it right


class Worker:
    """One rank in its process: torch's default group, and ours. A subclass has ``run_case``.

    Args:
        rank: The number of this rank.
        world_size: Number of ranks.
        folder: Holds the stores.
        device: Device of this rank's tensors.
        backend: Backend of torch's default group.
    """

    def __init__(
        self, rank: int, world_size: int, folder: str, device: str = "cpu", backend: str = "gloo"
    ) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size, self.device = rank, world_size, device
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/torch", world_size),
            rank=rank,
            world_size=world_size,
        )
        store = dist.FileStore(f"{folder}/ours", world_size)
        self.comm = pr.ProcessCommunicator(store, rank, world_size, device=device)
        self.group = dist.new_group(backend="ringar") if device == "cpu" else None
        self._host = dist.new_group(backend="gloo")  # for numbers, whatever the device

    def over_ranks(self, values: Sequence[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
        """Return each value's maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op, group=self._host)
        return tensor.tolist()

    def time(self, samplers: dict[str, Sampler], right: dict[str, bool], effort: Effort) -> Answer:
        """Time candidates in turns; return the slowest rank's times, and what all ranks found."""
        timings = in_turns(
            samplers,
            effort,
            agree=lambda spent_s: self.over_ranks([spent_s])[0],
            reduce=self.over_ranks,
        )
        everywhere = self.over_ranks(list(map(float, right.values())), dist.ReduceOp.MIN)
        return timings, dict(zip(right, map(bool, everywhere), strict=True))

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check and time the candidates of a case, the same on every rank."""
        raise NotImplementedError

    def close(self) -> None:
        """Close our group, and torch's."""
        self.comm.close()
        dist.destroy_process_group()


def run_cases(
    worker: Callable[..., Worker],
    cases: Sequence[Case],
    effort: Effort,
    *arguments: Any,
    deadline_s: float,
) -> list[Answer]:
    """Return the answers to all cases, which have the same number of ranks.

    Raises:
        RuntimeError: A rank failed, or the deadline passed; the message names the rank.
    """
    world_size = cases[0].world_size
    with tempfile.TemporaryDirectory() as folder:
        given = (worker, world_size, folder, cases, effort, arguments)
        ranks = mp.spawn(_work, given, nprocs=world_size, join=False)
        deadline = time.monotonic() + deadline_s
        try:
            while not ranks.join(timeout=0.5):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{world_size} ranks: no answer within {deadline_s:g} s")
        except mp.ProcessRaisedException as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"rank {error.error_index}: {last_line}") from error
        except mp.ProcessExitedException as error:
            raise RuntimeError(f"rank {error.error_index}: {error}") from error
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return pickle.loads(Path(folder, "answers").read_bytes())


def _work(
    rank: int,
    worker: Callable[..., Worker],
    world_size: int,
    folder: str,
    cases: Sequence[Case],
    effort: Effort,
    arguments: tuple[Any, ...],
) -> None:
    """Run all cases in the process of a rank."""
    made = worker(rank, world_size, folder, *arguments)
    answers = [made.run_case(case, effort) for case in cases]
    if rank == 0:
        Path(folder, "answers").write_bytes(pickle.dumps(answers))
    made.close()
