"""Time ranks in processes with tensors on GPUs beside gloo and NCCL.

Each peer has processes of its own, in which it takes turns with ours and with the limit: a peer
that fails or hangs costs no other row. Times are the slowest rank's, by CUDA events from a common
barrier on. Where there are fewer GPUs than ranks, ranks share them. NCCL is told that they may;
NCCL 2.28 refuses, and is listed as not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench import Benchmark, Case, Run, format_size
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.rows import by_key
from benchmarks.sums import rank_order
from benchmarks.timing import Call, Clock, Effort, Sampler

PEERS, OURS, LIMIT = ("gloo", "nccl"), "auto", "limit"
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "16",  # a rank takes its share of the multiprocessors
}
DEADLINE_S = 60.0  # of one peer's cases on one number of ranks


class PeerWorker(Worker):
    """One rank with one peer."""

    def __init__(self, rank: int, world_size: int, folder: str, is_cuda: bool) -> None:
        device = f"cuda:{rank % torch.cuda.device_count()}" if is_cuda else "cpu"
        if is_cuda:
            os.environ.update(SETTINGS)
            torch.cuda.set_device(device)
        self.clock = Clock(device)
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        super().__init__(rank, world_size, folder, device, backend)

    def is_right(self, tensor: Tensor, call: Call, is_ours: bool) -> bool:
        """Return whether one call sums what the ranks hold; ours in rank order, bit for bit."""
        parts = [
            torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(7 + rank))
            for rank in range(self.world_size)
        ]
        tensor.copy_(parts[self.rank])
        call()
        want, got = rank_order(parts), tensor.to("cpu", copy=True)
        tensor.zero_()
        return torch.equal(got, want) if is_ours else torch.allclose(got, want, atol=1e-4)

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check and time the peer, ours and the limit in turns."""
        peer = case.candidates[0]
        numel = case.size_bytes // 4
        theirs, ours = (torch.zeros(numel, device=self.device) for _ in range(2))
        group = dist.group.WORLD if peer == "nccl" else dist.new_group(backend="gloo")
        calls: dict[str, Callable[[], object]] = {
            peer: lambda: dist.all_reduce(theirs, group=group),
            OURS: lambda: self.comm.all_reduce(ours),
            LIMIT: lambda: ours.mul_(1),
        }
        right = {
            peer: self.is_right(theirs, calls[peer], is_ours=False),
            OURS: self.is_right(
                ours, lambda: self.comm.all_reduce(ours, order="rank"), is_ours=True
            ),
            LIMIT: True,
        }
        repeats = max(1, min(10, 2**24 // case.size_bytes))

        def sampler(call: Call) -> Sampler:
            def sample() -> Sequence[float]:
                self.clock.device_s(call, 1 + repeats // 4)
                self.clock.synchronize()
                self.comm.barrier()
                return [self.clock.device_s(call, repeats)]

            return sample

        return self.time({name: sampler(call) for name, call in calls.items()}, right, effort)


def measure(run: Run) -> None:
    """Run the cases of each peer; a peer that fails is listed with its reason."""
    groups = by_key(run.cases, lambda case: (case.candidates[0], case.world_size))
    refused: set[str] = set()
    for (peer, world_size), cases in groups.items():
        if peer in refused:
            continue
        is_cuda = run.device != "cpu"
        try:
            answers = run_cases(PeerWorker, cases, run.effort, is_cuda, deadline_s=DEADLINE_S)
            for case, (timings, correct) in zip(cases, answers, strict=True):
                run.add(case, timings, correct, limit_s=timings[LIMIT].median_s)
        except RuntimeError as error:
            refused.add(peer)
            run.skip(f"{peer}, {world_size} ranks and more", str(error))


def cases_of(effort: str) -> list[Case]:
    """Return the cases; gloo stands for the peers in a trial."""
    sizes = {"full": (2**16, 2**20, 2**24, 2**28), "quick": (2**16, 2**24), "trial": (2**16,)}
    return [
        Case(f"{format_size(size)}, beside {peer}", k, (peer, OURS, LIMIT), ((size // 4,),))
        for peer in (PEERS if effort != "trial" else PEERS[:1])
        for k in ((2, 4) if effort == "full" else (2,))
        for size in sizes[effort]
    ]


BENCHMARK = Benchmark(
    section="peers_cuda",
    title="Ranks in processes on GPUs",
    about="One process per rank, tensors on GPUs, times of the slowest rank. Each peer takes turns "
    "with ours in processes of its own. In the limit every rank writes its own tensor in place. "
    "gloo copies through the memory of the host.",
    efforts={"full": Effort(31, 60.0), "quick": Effort(9, 20.0), "trial": Effort(5, 60.0)},
    cases=cases_of,
    measure=measure,
    ours=OURS,
    peers=PEERS,
    limit=LIMIT,
    device="cuda",
)
