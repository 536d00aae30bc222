"""Run cases with a process per rank, and wait for none that is gone."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

import pyringar as pr
import pyringar.distributed  # registers the backend
from benchmarks.bench import Case, Effort
from benchmarks.timing import Timing

Answer = tuple[dict[str, Timing], dict[str, bool]]  # of each candidate: its timing, is it right


class Worker:
    """One rank in its process: torch's default group, ours beside it. A subclass has `run_case`.

    Args:
        rank: This process's.
        world_size: Number of ranks.
        folder: Where the stores are.
        device: Of this rank's tensors.
        backend: torch's, of the default group.
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

    def over_ranks(self, values: Sequence[float], reduce: str = "max") -> list[float]:
        """Return each value's maximum or minimum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.device == "cpu":
            self.comm.all_reduce(tensor, reduce)
        else:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, reduce.upper()))
        return tensor.tolist()

    def agree(self, spent_s: float) -> float:
        """Return the most seconds that a rank has spent."""
        return self.over_ranks([spent_s])[0]

    def slowest(self, samples: dict[str, list[float]]) -> dict[str, Timing]:
        """Return timings of the slowest rank in every sample."""
        return {name: Timing.of(self.over_ranks(seconds)) for name, seconds in samples.items()}

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check and time the case's candidates in turns, the same on every rank."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave both groups."""
        self.comm.close()
        dist.destroy_process_group()


def run_cases(
    worker: Callable[..., Worker],
    cases: Sequence[Case],
    effort: Effort,
    *arguments: Any,
    deadline_s: float = 600.0,
) -> Iterator[tuple[Case, dict[str, Timing], dict[str, bool]]]:
    """Yield each case with what its ranks answer within the deadline; all have as many ranks.

    Raises:
        RuntimeError: A rank failed, or none answered in time; the message has its error.
    """
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    world_size = cases[0].world_size
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_work,
                args=(worker, rank, world_size, folder, out, cases, effort, arguments),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            for case in cases:
                yield case, *_receive(out, ranks, f"{case.name}, {world_size} ranks", deadline_s)
            for process in ranks:
                process.join(timeout=10)  # all is told; NCCL may keep threads
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _work(
    worker: Callable[..., Worker],
    rank: int,
    world_size: int,
    folder: str,
    out: Any,
    cases: Sequence[Case],
    effort: Effort,
    arguments: tuple[Any, ...],
) -> None:
    """Run all cases: the process of a rank. It tells the parent what goes wrong."""
    try:
        made = worker(rank, world_size, folder, *arguments)
        for case in cases:
            answer = made.run_case(case, effort)
            if rank == 0:
                out.put(answer)
        made.close()
    except Exception as error:
        traceback.print_exc()
        out.put(f"rank {rank}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        raise SystemExit(0) from None  # told; NCCL's own threads are not waited for


def _receive(out: Any, ranks: Sequence[BaseProcess], what: str, deadline_s: float) -> Answer:
    """Return the next answer; RuntimeError when a rank has failed or time is over."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            answer = out.get(timeout=0.5)
        except queue.Empty:
            ended = [f"rank {r} ended: {p.exitcode}" for r, p in enumerate(ranks) if p.exitcode]
            if ended or time.monotonic() > deadline:
                why = "; ".join(ended) or f"no answer within {deadline_s:g} s"
                raise RuntimeError(f"{what}: {why}") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(f"{what}: {answer}")
        return answer
