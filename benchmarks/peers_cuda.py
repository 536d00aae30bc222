"""Time ranks in processes with tensors on GPUs beside gloo, NCCL and torch's symmetric memory.

    python benchmarks/peers_cuda.py --json out.jsonl
    python benchmarks/peers_cuda.py --dry-run          # gloo on the CPU, tiny: tries the script

Each peer has processes of its own, in which it takes turns with ours and with the limit: one that
fails or hangs costs no other row, and is listed with its reason. Times are the slowest rank's, by
CUDA events from a common barrier on. Where there are fewer GPUs than ranks, ranks share them: NCCL
and symmetric memory are told that they may; NCCL 2.28 refuses, and is listed as not run.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import Benchmark, Case, Effort, Run, format_size, in_order, run_as_script
from benchmarks.candidates import CANDIDATES, names_in
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.rows import by_key
from benchmarks.timing import Clock, in_turns

SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "16",  # a rank takes its share of the multiprocessors
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
DEADLINE_S = 45.0


# -- in the ranks' processes -----------------------------------------------------------------------


class PeerWorker(Worker):
    """One rank with one peer."""

    def __init__(self, rank: int, world_size: int, folder: str, is_cuda: bool) -> None:
        device = f"cuda:{rank % torch.cuda.device_count()}" if is_cuda else "cpu"
        if is_cuda:
            torch.cuda.set_device(device)
        self.clock = Clock(device)
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        super().__init__(rank, world_size, folder, device, backend)

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

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check and time the peer, ours and the limit in turns."""
        peer, beside, limit = case.candidates
        tensor, call = CANDIDATES[peer].calls["peers_cuda"](self, case.size_bytes // 4)
        own = torch.zeros(case.size_bytes // 4, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            peer: call,
            beside: lambda: self.comm.all_reduce(own),
            limit: lambda: own.mul_(1),
        }
        right = [self.is_right(tensor, call, False)]
        right += [self.is_right(own, lambda: self.comm.all_reduce(own, order="rank"), True), 1.0]
        right = self.over_ranks(right, "min")
        repeats = max(1, min(10, 2**24 // case.size_bytes))  # one of symmetric memory takes 18 ms

        def sampler(function: Callable[[], object]) -> Callable[[], float]:
            def sample() -> float:
                self.clock.device_s(function, 1 + repeats // 4)
                self.clock.synchronize()
                self.comm.barrier()
                return self.clock.device_s(function, repeats)

            return sample

        samplers = {name: sampler(function) for name, function in calls.items()}
        samples = in_turns(
            samplers, rounds=effort.rounds, budget_s=effort.budget_s, agree=self.agree
        )
        correct = {name: bool(r) for name, r in zip(calls, right, strict=True)}
        return self.slowest(samples), correct


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


def measure(run: Run) -> None:
    """Run each peer; one that fails is listed with its reason."""
    groups = by_key(run.cases, lambda case: (case.candidates[0], case.world_size))
    refused: dict[str, str] = {}
    for (peer, world_size), cases in groups.items():
        if peer in refused:
            run.skip(f"{peer}, {world_size} ranks", refused[peer])
            continue
        is_cuda = run.device != "cpu"
        found = run_cases(PeerWorker, cases, run.effort, is_cuda, deadline_s=DEADLINE_S)
        try:
            with environment(SETTINGS):
                for case, timings, correct in found:
                    peer_s, _, limit_s = (timings[name].median_s for name in case.candidates)
                    rows = run.rows(case, timings, correct, limit_s=limit_s, baseline_s=peer_s)
                    run.add(rows)
        except RuntimeError as error:
            refused[peer] = f"as with fewer ranks: {error}"
            run.skip(f"{peer}, {world_size} ranks", str(error))


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort; gloo stands for the peers in a trial."""
    peers, ranks = names_in("peers_cuda"), (2, 4) if effort == "full" else (2,)
    sizes = {"full": (2**16, 2**20, 2**24, 2**28), "quick": (2**16, 2**24), "smoke": (2**16,)}
    if effort == "smoke":
        peers = ("gloo",)
    return [
        Case(format_size(size), k, (peer, f"ringar, beside {peer}", "limit"), ((size // 4,),))
        for peer in peers
        for k in ranks
        for size in sizes[effort]
    ]


BENCHMARK = Benchmark(
    section="peers_cuda",
    title="gloo, NCCL and symmetric memory",
    about="One process per rank, tensors on GPUs, times of the slowest rank. Each peer took turns "
    "with ours in processes of their own. In the limit every rank writes its own tensor in place.",
    efforts={"full": Effort(31, 60.0), "quick": Effort(9, 60.0), "smoke": Effort(5, 60.0)},
    cases=cases_of,
    measure=measure,
    device="cuda",
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
