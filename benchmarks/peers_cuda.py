"""Time ranks in processes with tensors on GPUs beside NCCL and torch's symmetric memory.

    python benchmarks/peers_cuda.py --json out.jsonl
    python benchmarks/peers_cuda.py --dry-run          # gloo on the CPU, tiny: tries the script

Each peer has processes of its own, in which it takes turns with ours and with the limit: one that
fails or hangs costs no other row, and is listed with its reason. Times are the slowest rank's, by
CUDA events from a common barrier on. Where there are fewer GPUs than ranks, ranks share them: NCCL
and symmetric memory are told that they may, or refuse. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.bench import Benchmark, Case, Effort, Run, format_size, in_order, run_as_script
from benchmarks.candidates import CANDIDATES, names_in, torch_collective
from benchmarks.ranks import rank_processes
from benchmarks.rows import by_key
from benchmarks.timing import Clock, Timing, in_turns

SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "16",  # a rank takes its share of the multiprocessors
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
DEADLINE_S = 90.0


# -- in the ranks' processes -----------------------------------------------------------------------


class Worker:
    """One rank with one peer."""

    def __init__(self, rank: int, world_size: int, folder: str, is_cuda: bool) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = f"cuda:{rank % torch.cuda.device_count()}" if is_cuda else "cpu"
        self.clock = Clock(self.device)
        if is_cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=dist.FileStore(f"{folder}/peer", world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=DEADLINE_S),
        )
        store = dist.FileStore(f"{folder}/ours", world_size)
        self.comm = pr.ProcessCommunicator(store, rank, world_size, device=self.device)

    def is_right(self, tensor: Tensor, call: Callable[[], object], is_ours: bool) -> float:
        """Return 1 if one call sums what ranks hold; ours in rank order, bit for bit."""
        parts = [
            torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(7 + rank))
            for rank in range(self.world_size)
        ]
        tensor.copy_(parts[self.rank])
        call()
        want, got = in_order(parts), tensor.to("cpu", copy=True)
        tensor.zero_()
        return float(torch.equal(got, want) if is_ours else torch.allclose(got, want, atol=1e-4))

    def over_ranks(self, values: Sequence[float], reduce: dist.ReduceOp.RedOpType) -> list[float]:
        """Return each value's maximum or minimum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, reduce)
        return tensor.tolist()

    def run_case(self, case: Case, effort: Effort) -> tuple[dict[str, Timing], dict[str, bool]]:
        """Check and time the peer, ours and the limit in turns."""
        peer, beside, limit = case.candidates
        make = CANDIDATES[peer].calls.get("peers_cuda", torch_collective)
        tensor, call = make(self, case.size_bytes // 4)
        own = torch.zeros(case.size_bytes // 4, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            peer: call,
            beside: lambda: self.comm.all_reduce(own),
            limit: lambda: own.mul_(1),
        }
        right = [self.is_right(tensor, call, False)]
        right += [self.is_right(own, lambda: self.comm.all_reduce(own, order="rank"), True), 1.0]
        right = self.over_ranks(right, dist.ReduceOp.MIN)
        repeats = max(1, min(50, 2**24 // case.size_bytes))

        def sampler(function: Callable[[], object]) -> Callable[[], float]:
            def sample() -> float:
                self.clock.device_s(function, 1 + repeats // 4)
                self.clock.synchronize()
                dist.barrier() if self.device == "cpu" else self.comm.barrier()
                return self.clock.device_s(function, repeats)

            return sample

        samplers = {name: sampler(function) for name, function in calls.items()}
        samples = in_turns(samplers, rounds=effort.rounds, budget_s=effort.budget_s)
        timings = {n: Timing.of(self.over_ranks(s, dist.ReduceOp.MAX)) for n, s in samples.items()}
        return timings, {name: bool(r) for name, r in zip(calls, right, strict=True)}


def work(
    rank: int,
    world_size: int,
    folder: str,
    out: Any,
    cases: list[Case],
    effort: Effort,
    is_cuda: bool,
) -> None:
    """Run all sizes of one peer: the process of a rank. It tells the parent what goes wrong."""
    try:
        torch.set_num_threads(1)
        worker = Worker(rank, world_size, folder, is_cuda)
        for case in cases:
            answer = worker.run_case(case, effort)
            if rank == 0:
                out.put(answer)
        worker.comm.close()
        dist.destroy_process_group()
    except Exception as error:
        out.put(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        raise SystemExit(0) from None  # told; NCCL's own threads are not waited for


# -- in the parent ---------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that the block starts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class PeerError(Exception):
    """The failure that a rank's process told."""


def run_peer(run: Run, cases: list[Case]) -> None:
    """Add the rows of one peer on one number of ranks."""
    arguments = (cases, run.effort, run.device != "cpu")
    with (
        environment(SETTINGS),
        rank_processes(work, cases[0].world_size, *arguments) as next_answer,
    ):
        for case in cases:
            answer = next_answer(case.name, DEADLINE_S)
            if isinstance(answer, str):
                raise PeerError(answer)
            timings, correct = answer
            peer, _, limit = (timings[name].median_s for name in case.candidates)
            run.add(run.rows(case, timings, correct, limit_s=limit, baseline_s=peer))


def measure(run: Run) -> None:
    """Run each peer; one that fails is listed with its reason."""
    groups = by_key(run.cases, lambda case: (case.candidates[0], case.world_size))
    for (peer, world_size), cases in groups.items():
        try:
            run_peer(run, cases)
        except (PeerError, RuntimeError) as error:
            run.skip(f"{peer}, {world_size} ranks", str(error))


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort; gloo stands for the peers in a trial."""
    peers, ranks = names_in("peers_cuda"), (2, 4)
    sizes = {"full": (2**16, 2**20, 2**24, 2**28), "quick": (2**16, 2**24), "smoke": (2**16,)}
    if effort == "smoke":
        peers, ranks = ("gloo",), (2,)
    return [
        Case(format_size(size), k, (peer, f"ringar, beside {peer}", "limit"), ((size // 4,),))
        for peer in peers
        for k in ranks
        for size in sizes[effort]
    ]


ALWAYS_S = 1e9  # all rounds: ranks do not agree here on when to stop

BENCHMARK = Benchmark(
    section="peers_cuda",
    title="NCCL and symmetric memory",
    about="One process per rank, tensors on GPUs, times of the slowest rank. Each peer took turns "
    "with ours in processes of their own. In the limit every rank writes its own tensor in place.",
    efforts={
        "full": Effort(31, ALWAYS_S),
        "quick": Effort(9, ALWAYS_S),
        "smoke": Effort(5, ALWAYS_S),
    },
    cases=cases_of,
    measure=measure,
    device="cuda",
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
