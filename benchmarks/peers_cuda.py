"""Times ranks in processes with tensors on GPUs beside NCCL and torch's symmetric memory.

    python benchmarks/peers_cuda.py --json out.json
    python benchmarks/peers_cuda.py --dry-run          # gloo on the CPU, tiny: tries the script

Each peer has processes of its own, in which it takes turns with ours and with the limit: one that
fails or hangs costs no other row, and is listed with its reason. Times are the slowest rank's, by
CUDA events from a common barrier on; the limit is every rank's writing its own tensor in place.
Where there are fewer GPUs than ranks, ranks share them: NCCL and symmetric memory are told that
they may (NCCL_MULTI_RANK_GPU_ENABLE, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES), or refuse.
None of this has been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

import pyringar as pr
from benchmarks.allreduce import format_size
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.report.text import format_us
from benchmarks.timing import Timing, turns
from benchmarks.timing_cuda import Place
from benchmarks.workers import receive

PEERS = ("torch nccl", "cupy nccl", "torch symmetric memory")
DRY_PEERS = ("gloo",)
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "16",  # a rank takes its share of the multiprocessors
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Options:
    """What is measured, and how long."""

    peers: tuple[str, ...] = PEERS
    sizes: tuple[int, ...] = (2**16, 2**20, 2**24, 2**28)
    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 31
    device: str = "cuda"


@dataclass(frozen=True)
class Row:
    """One candidate at one size, checked and timed."""

    case: str
    size_bytes: int
    world_size: int
    candidate: str
    median_us: float
    min_us: float
    q1_us: float
    q3_us: float
    max_us: float
    ratio_to_peer: float
    limit_share: float
    correct: bool
    rounds: int


# -- in the workers --------------------------------------------------------------------------------


class Worker:
    """One rank with one peer."""

    def __init__(self, rank: int, world_size: int, folder: str, options: Options) -> None:
        self.rank, self.world_size = rank, world_size
        is_cuda = options.device == "cuda"
        self.device = f"cuda:{rank % torch.cuda.device_count()}" if is_cuda else "cpu"
        self.place = Place(self.device)
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

    def peer(self, name: str, numel: int) -> tuple[Tensor, Callable[[], object]]:
        """A peer's tensor, and its call."""
        if name == "torch symmetric memory":
            import torch.distributed._symmetric_memory as symm_mem

            tensor = symm_mem.empty(numel, dtype=torch.float32, device=self.device)
            group = dist.group.WORLD
            symm_mem.rendezvous(tensor, group=group)
            reduce = torch.ops.symm_mem.two_shot_all_reduce_
            return tensor, lambda: reduce(tensor, "sum", group.group_name)
        tensor = torch.zeros(numel, device=self.device)
        if name == "cupy nccl":
            from cupy.cuda import nccl

            unique = [nccl.get_unique_id() if self.rank == 0 else None]
            dist.broadcast_object_list(unique, device=torch.device("cpu"))
            comm = nccl.NcclCommunicator(self.world_size, unique[0], self.rank)
            pointer, kind = tensor.data_ptr(), (nccl.NCCL_FLOAT32, nccl.NCCL_SUM)
            return tensor, lambda: comm.allReduce(
                *(pointer, pointer, numel, *kind, torch.cuda.current_stream().cuda_stream)
            )
        return tensor, lambda: dist.all_reduce(tensor)

    def is_right(self, tensor: Tensor, call: Callable[[], object], is_ours: bool) -> float:
        """Whether one call sums what ranks hold; ours in rank order, bit for bit."""
        parts = [
            torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(7 + rank))
            for rank in range(self.world_size)
        ]
        tensor.copy_(parts[self.rank])
        call()
        want = parts[0].clone()
        for part in parts[1:]:
            want += part
        got = tensor.to("cpu", copy=True)
        tensor.zero_()
        return float(torch.equal(got, want) if is_ours else torch.allclose(got, want, atol=1e-4))

    def slowest(self, values: Sequence[float], reduce: dist.ReduceOp.RedOpType) -> list[float]:
        """Each value's maximum or minimum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, reduce)
        result: list[float] = tensor.tolist()
        return result

    def time_size(self, name: str, size_bytes: int, rounds: int) -> list[Row]:
        """Check and time the peer, ours and the limit in turns."""
        tensor, call = self.peer(name, size_bytes // 4)
        own = torch.zeros(size_bytes // 4, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            name: call,
            f"ringar, beside {name}": lambda: self.comm.all_reduce(own),
            "limit": lambda: own.mul_(1),
        }
        right = [self.is_right(tensor, call, False)]
        right += [self.is_right(own, lambda: self.comm.all_reduce(own, order="rank"), True), 1.0]
        right = self.slowest(right, dist.ReduceOp.MIN)
        repeats = max(1, min(50, 2**24 // size_bytes))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for order in turns(calls, rounds):
            for name in order:
                one = calls[name]
                self.place.device_s(one, 1 + repeats // 4)
                self.place.synchronize()
                dist.barrier() if self.device == "cpu" else self.comm.barrier()
                samples[name].append(self.place.device_s(one, repeats))
        timings = [Timing.of(self.slowest(s, dist.ReduceOp.MAX), repeats) for s in samples.values()]
        return [
            Row(
                case=format_size(size_bytes),
                size_bytes=size_bytes,
                world_size=self.world_size,
                candidate=candidate,
                **timing.spread("us"),
                ratio_to_peer=timings[0].median_s / timing.median_s,
                limit_share=timings[2].median_s / timing.median_s,
                correct=bool(is_right),
                rounds=rounds,
            )
            for candidate, timing, is_right in zip(calls, timings, right, strict=True)
        ]


def work(rank: int, world_size: int, folder: str, peer: str, options: Options, out: Any) -> None:
    """A process: all sizes of one peer. What goes wrong is told to who started it."""
    try:
        torch.set_num_threads(1)
        worker = Worker(rank, world_size, folder, options)
        for size in options.sizes:
            rows = worker.time_size(peer, size, options.rounds)
            if rank == 0:
                out.put(rows)
        worker.comm.close()
    except Exception as error:
        out.put(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        raise SystemExit(0) from None  # told; NCCL's own threads are not waited for


# -- in the parent ---------------------------------------------------------------------------------


def run_peer(peer: str, world_size: int, options: Options) -> tuple[list[Row], str | None]:
    """A peer's rows, and why there are no more."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    rows: list[Row] = []
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, world_size, folder, peer, options, out))
            for rank in range(world_size)
        ]
        try:
            for worker in workers:
                worker.start()
            for size in options.sizes:
                answer = receive(out, workers, DEADLINE_S, format_size(size))
                if isinstance(answer, str):
                    return rows, answer
                rows += answer
            for worker in workers:
                worker.join(timeout=10)
        except RuntimeError as error:
            return rows, str(error)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    return rows, None


def num_units(options: Options) -> int:
    """How often `measure` calls ``progress``."""
    return len(options.peers) * len(options.ranks)


def measure(options: Options, progress: Callable[[str, Sequence[Row]], None]) -> dict[str, Any]:
    """Run all peers; ``progress`` is told of each when it is over. What a results file holds."""
    machine = describe_machine()
    if options.device == "cuda":
        from benchmarks.allreduce_cuda import describe_gpu

        machine |= describe_gpu()
    rows: list[Row] = []
    not_run = []
    for peer in options.peers:
        for k in options.ranks:
            found, why = run_peer(peer, k, options)
            rows += found
            if why is not None:
                not_run.append({"what": f"{peer}, {k} ranks", "why": why})
            progress(f"{peer}, {k} ranks", found)
    return results_of("peers_cuda", machine, rows, not_run=not_run)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One peer's lines."""
    for row in rows:
        print(
            f"{row.case:<8} {row.world_size:>2} {row.candidate:<36} {format_us(row.median_us):>9} "
            f"{row.ratio_to_peer:>8.2f} {row.limit_share:>8.2f} {'yes' if row.correct else 'NO'}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all peers; exit status 1 when a result was wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Time NCCL and symmetric memory beside ours.")
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    parser.add_argument("--dry-run", action="store_true", help="gloo on the CPU: tries the script")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--dry-run tries the script itself)")
        return 2
    options = Options(DRY_PEERS, (2**16,), (2,), 5, "cpu") if args.dry_run else Options()
    print(
        f"{'size':<8} {'k':>2} {'candidate':<36} {'median':>9} {'x peer':>8} {'of limit':>8} right"
    )
    results = measure(options, print_rows)
    for missing in results["not_run"]:
        print(f"not run: {missing['what']}: {missing['why']}")
    if args.json:
        write_results(args.json, results)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
