"""Time ranks that are threads of one process beside processes: start, small tests, training.

    python benchmarks/cluster.py                  # 15 minutes, most of them 100 tests in processes
    python benchmarks/cluster.py --only training

    start       four ranks from nothing to the end of a first barrier, torch imported
                (torchrun's processes import it themselves: all from the command to its end)
    tests       a hundred small tests of four ranks, one after the other: each launches threads, or
                spawns processes of torch.multiprocessing with backend gloo
    training    steps of LeNet under DistributedDataParallel, batch 64 a rank, after five others:
                threads in turn, threads at once, and torchrun's processes with ringar and gloo

Every run checks its sums. Not a section of the report: what it says is in docs/cluster.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from benchmarks.busy import Watch, others_now, refusal
from benchmarks.machine import describe_host, machine_in_words
from benchmarks.script import exit_with

RANKS, TESTS, STEPS, WARM_UP = 4, 100, 20, 5
PARTS = ("start", "tests", "training")


def main() -> int:
    """Measure what was asked for; 1 if the machine was busy, or became so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--allow-busy", action="store_true", help="measure all the same")
    parser.add_argument("--rank", choices=("barrier", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="ringar", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return run_as_rank(args.rank, args.backend)
    why = refusal(others_now())
    if why and not args.allow_busy:
        print(why, file=sys.stderr)
        return 1
    print(machine_in_words(describe_host()))
    os.environ["OMP_NUM_THREADS"] = "1"  # of every rank, also of one that is alone
    watch = Watch()
    for part in [args.only] if args.only else PARTS:
        globals()[f"measure_{part}"]()
    others = watch.others()
    print(f"others used {others}")
    return int(others.are_many)


# -- start -----------------------------------------------------------------------------------------


def barrier() -> None:
    """Join the group, and meet once."""
    dist.init_process_group("ringar")
    dist.barrier()
    dist.destroy_process_group()


def measure_start() -> None:
    """Print how long four ranks take to start."""
    pr.launch(barrier, RANKS)  # builds and loads the engine
    threads = [seconds(lambda: pr.launch(barrier, RANKS)) for _ in range(20)]
    processes = [seconds(lambda: torchrun(RANKS, "barrier", "ringar")) for _ in range(3)]
    print(f"\nstart of {RANKS} ranks\n  threads   {in_ms(threads)}\n  torchrun  {in_ms(processes)}")


# -- tests -----------------------------------------------------------------------------------------


def small_test(number: int) -> None:
    """Do what a small test of distributed code does: one of five kinds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((100,), rank + 1.0)
    kind = number % 5
    if kind == 0:
        dist.all_reduce(mine)
        assert mine[0] == size * (size + 1) / 2
    elif kind == 1:
        parts = [torch.empty(100) for _ in range(size)]
        dist.all_gather(parts, mine)
        assert [int(part[0]) for part in parts] == list(range(1, size + 1))
    elif kind == 2:
        dist.broadcast(mine, number % size)
        assert mine[0] == number % size + 1
    elif kind == 3:
        work = dist.isend(mine, (rank + 1) % size)
        dist.recv(theirs := torch.empty(100), (rank - 1) % size)
        work.wait()
        assert theirs[0] == (rank - 1) % size + 1
    else:
        model = DistributedDataParallel(nn.Linear(10, 10))
        model(torch.ones(4, 10)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def in_thread(number: int) -> None:
    """Run a test as a rank of a cluster."""
    dist.init_process_group()
    small_test(number)


def in_process(rank: int, number: int, file: str) -> None:
    """Run a test as a process of torch.multiprocessing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    small_test(number)
    dist.destroy_process_group()


def measure_tests() -> None:
    """Print how long a hundred small tests take."""
    threads_s = seconds(lambda: [pr.launch(in_thread, RANKS, args=(n,)) for n in range(TESTS)])

    def spawn_all() -> None:
        for number in range(TESTS):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(in_process, (number, f"{folder}/store"), nprocs=RANKS)

    processes_s = seconds(spawn_all)
    print(
        f"\n{TESTS} tests of {RANKS} ranks\n  threads    {threads_s:8.2f} s\n"
        f"  processes  {processes_s:8.2f} s"
    )


# -- training --------------------------------------------------------------------------------------


def train() -> tuple[float, float]:
    """Train LeNet; return the median of a step's milliseconds, and the parameters' sum."""
    rank = dist.get_rank()
    net = nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
    ours = torch.Generator().manual_seed(0)  # the process's is shared by ranks that run at once
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=ours)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    took_ms = []
    for _ in range(WARM_UP + STEPS):
        x = torch.randn(64, 1, 28, 28, generator=generator)
        y = torch.randint(10, (64,), generator=generator)
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        took_ms.append((time.perf_counter() - begin) * 1e3)
    total = sum(float(p.detach().double().sum()) for p in net.parameters())
    return statistics.median(took_ms[WARM_UP:]), total


def train_in_thread() -> tuple[float, float]:
    """Train as a rank of a cluster."""
    dist.init_process_group()
    return train()


def measure_training() -> None:
    """Print the milliseconds of a step, ranks as threads and as processes."""
    print(f"\nLeNet under DDP, batch 64 a rank: ms a step, median of {STEPS}, of the slowest rank")
    for size in (1, 2, 4):
        found = {
            "in turn": pr.launch(train_in_thread, size),
            "at once": pr.launch(train_in_thread, size, parallel=True),
            "ringar": torchrun(size, "train", "ringar"),
            "gloo": torchrun(size, "train", "gloo"),
        }
        totals = {total for name in ("in turn", "at once", "ringar") for _, total in found[name]}
        assert len(totals) == 1, f"parameters differ: {totals}"
        cells = "  ".join(
            f"{name} {max(ms for ms, _ in results):7.2f}" for name, results in found.items()
        )
        print(f"  {size} ranks  {cells}")


# -- helpers ---------------------------------------------------------------------------------------


def run_as_rank(what: str, backend: str) -> int:
    """Be one of torchrun's processes; rank 0 prints what all found."""
    import pyringar.distributed  # noqa: F401  # torch before 2.14 does not find the backend itself

    if what == "barrier":
        barrier()
        return 0
    dist.init_process_group(backend)
    mine = train()
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        print("RESULTS", json.dumps(every))
    dist.destroy_process_group()
    return 0


def torchrun(size: int, what: str, backend: str) -> list[tuple[float, float]]:
    """Run this script's ranks under torchrun; return what they found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), __file__, "--rank", what, "--backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return [tuple(pair) for pair in json.loads(lines[0].partition(" ")[2])] if lines else []


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_ms(samples: list[float]) -> str:
    """Return the median and the minimum in words."""
    return f"{statistics.median(samples) * 1e3:8.1f} ms (least {min(samples) * 1e3:.1f})"


if __name__ == "__main__":
    exit_with(main)
