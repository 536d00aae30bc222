"""Run cases with one process per rank, where torch's groups and ours are in the same processes."""

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
    deadline_s: float = 600.0,
) -> Iterator[tuple[Case, dict[str, Timing], dict[str, bool]]]:
    """Yield each case with the answer of its ranks. All cases have the same number of ranks.

    Raises:
        RuntimeError: A rank failed, or no answer came in time; the message has the rank's error.
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
                process.join(timeout=10)  # NCCL may keep threads
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
    """Run all cases in the process of a rank; tell the parent about an error."""
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
        raise SystemExit(0) from None  # the parent is told; NCCL's threads are not waited for


def _receive(out: Any, ranks: Sequence[BaseProcess], what: str, deadline_s: float) -> Answer:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            answer = out.get(timeout=0.5)
        except queue.Empty:
            ended = [f"rank {r} exited: {p.exitcode}" for r, p in enumerate(ranks) if p.exitcode]
            if ended or time.monotonic() > deadline:
                why = "; ".join(ended) or f"no answer within {deadline_s:g} s"
                raise RuntimeError(f"{what}: {why}") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(f"{what}: {answer}")
        return answer
