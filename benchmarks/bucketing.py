"""Times a training step with gradients reduced in four ways: after backward, or while it runs.

    python benchmarks/bucketing.py                     # LeNet, ResNet-18, 1,000 small tensors
    python benchmarks/bucketing.py --models lenet --ranks 4 --caps 0.1,1,10
    python benchmarks/bucketing.py --json out.json

A step is forward and backward of all ranks and the reduction of their gradients, without the
optimiser. Columns: median and minimum time of a step; comm = time that reductions took, from
launch to done; exposed = the part of it after backward; ratio = the step with one coalesced call
after backward over this step. Ranks take turns on the host's cores, so there is no idle core that
a reduction could use: hiding it cannot make the step shorter than the work in it, and what this
shows on a CPU is that buckets cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyringar as pr
from pyringar.train import lenet, lenet_params
from pyringar.train.model_resnet18 import resnet18

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.allreduce import naive
from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.timing import Timing, torch_threads, turns

Params = list[list[Tensor]]


@dataclass(frozen=True)
class Model:
    """Parameters of every rank, and the loss of one rank's shard."""

    params: Params
    loss: Callable[[int], Tensor]


@dataclass(frozen=True)
class Row:
    """One way to reduce, in one case, checked and timed."""

    case: str
    world_size: int
    candidate: str
    bucket_cap_mb: float | None
    median_ms: float
    min_ms: float
    q1_ms: float
    q3_ms: float
    max_ms: float
    comm_ms: float
    exposed_ms: float
    ratio: float
    correct: bool
    rounds: int


@dataclass
class Candidate:
    """A way to reduce: what runs after backward, and what it measured."""

    model: Model
    reduce: Callable[[], tuple[float, float]]  # seconds of communication, and exposed
    steps_s: list[float] = field(default_factory=list)
    comm_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Run one step, and note its times."""
        for params in self.model.params:
            for param in params:
                param.grad = None
        start = time.perf_counter()
        for rank in range(len(self.model.params)):
            self.model.loss(rank).backward()
        comm_s, exposed_s = self.reduce()
        self.steps_s.append(time.perf_counter() - start)
        self.comm_s.append(comm_s)
        self.exposed_s.append(exposed_s)


# -- models ----------------------------------------------------------------------------------------


def make_lenet(world_size: int, seed: int) -> Model:
    """LeNet with 64 images over all ranks."""
    initial = lenet_params(generator=torch.Generator().manual_seed(0))
    params = [[p.clone().requires_grad_() for p in initial] for _ in range(world_size)]
    shards = _images(world_size, 64, seed)
    return Model(params, lambda rank: lenet(shards[rank], params[rank]).square().sum())


def make_resnet18(world_size: int, seed: int) -> Model:
    """ResNet-18, all 11 million parameters, with 8 images over all ranks."""
    nets = []
    for _ in range(world_size):
        torch.manual_seed(0)
        nets.append(resnet18())
    shards = _images(world_size, 8, seed)
    params = [list(net.parameters()) for net in nets]
    return Model(params, lambda rank: nets[rank](shards[rank]).square().sum())


def make_small(world_size: int, seed: int) -> Model:
    """1,000 vectors of 64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    params = [
        [torch.full((64,), 1e-2 * (i % 7)).requires_grad_() for i in range(1000)]
        for _ in range(world_size)
    ]
    data = [torch.randn(64, generator=generator) for _ in range(world_size)]
    return Model(
        params, lambda rank: sum(nn.functional.tanh(p + data[rank]).sum() for p in params[rank])
    )


def _images(world_size: int, total: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (max(1, total // world_size), 1, 28, 28)
    return [torch.randn(shape, generator=generator) for _ in range(world_size)]


MODELS = {"lenet": make_lenet, "resnet18": make_resnet18, "small": make_small}


# -- candidates ------------------------------------------------------------------------------------


def after_backward(model: Model, call: Callable[[list[list[Tensor]]], object]) -> Candidate:
    """One that begins when backward is over: all of it is exposed."""

    def reduce() -> tuple[float, float]:
        start = time.perf_counter()
        call([[param.grad for param in params] for params in model.params])
        spent = time.perf_counter() - start
        return spent, spent

    return Candidate(model, reduce)


def bucketed(model: Model, bucketer: pr.GradientBucketer) -> Candidate:
    """One that reduces while backward runs."""

    def reduce() -> tuple[float, float]:
        bucketer.wait()
        stats = bucketer.stats()
        return stats.communication_s, stats.exposed_s

    return Candidate(model, reduce)


def run_case(name: str, k: int, caps: Sequence[float], rounds: int, budget_s: float) -> list[Row]:
    """Check and time all candidates in turns."""
    make = MODELS[name]
    with pr.Communicator(["cpu"] * k, order="rank") as comm:

        def per_tensor(lists: list[list[Tensor]]) -> None:
            for tensors in zip(*lists, strict=True):
                comm.all_reduce(tensors)

        candidates = {
            ("naive per tensor", None): after_backward(make(k, 1), naive),
            ("fused per tensor", None): after_backward(make(k, 1), per_tensor),
            ("coalesced", None): after_backward(make(k, 1), comm.all_reduce_coalesced),
        }
        for cap in caps:
            model = make(k, 1)
            bucketer = pr.GradientBucketer(model.params, comm=comm, bucket_cap_mb=cap)
            candidates["bucketed", cap] = bucketed(model, bucketer)
        correct = check(candidates)
        run_in_turns(list(candidates.values()), rounds, budget_s)
    base = statistics.median(candidates["coalesced", None].steps_s)
    return [
        Row(
            case=name,
            world_size=k,
            candidate=candidate,
            bucket_cap_mb=cap,
            **Timing.of(c.steps_s).spread("ms"),
            comm_ms=statistics.median(c.comm_s) * 1e3,
            exposed_ms=statistics.median(c.exposed_s) * 1e3,
            ratio=base / statistics.median(c.steps_s),
            correct=correct[candidate, cap],
            rounds=len(c.steps_s),
        )
        for (candidate, cap), c in candidates.items()
    ]


def check(candidates: dict[tuple[str, float | None], Candidate]) -> dict[object, bool]:
    """Whether each leaves the naive sum, bit for bit, in every rank's gradients."""
    for candidate in candidates.values():
        candidate.step()
    want = [p.grad for p in candidates["naive per tensor", None].model.params[0]]
    return {
        name: all(
            torch.equal(param.grad, grad)
            for params in candidate.model.params
            for param, grad in zip(params, want, strict=True)
        )
        for name, candidate in candidates.items()
    }


def run_in_turns(candidates: list[Candidate], rounds: int, budget_s: float) -> None:
    """Every round runs each candidate once."""
    for candidate in candidates:
        candidate.step()
        for times in (candidate.steps_s, candidate.comm_s, candidate.exposed_s):
            times.clear()
    start = time.perf_counter()
    for number, order in enumerate(turns(candidates, rounds)):
        if number >= 5 and time.perf_counter() - start > budget_s:
            return
        for candidate in order:
            candidate.step()


def hook_cost_us(num_params: int = 2000, rounds: int = 31) -> float:
    """What counting costs: a parameter with a hook against one without, by minima."""
    hooked, other, bare = (
        [torch.zeros(1, requires_grad=True) for _ in range(num_params)] for _ in range(3)
    )

    def backward_s(params: list[Tensor]) -> float:
        for param in params:
            param.grad = None
        loss = sum(param * 2.0 for param in params)
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start

    with_hook, without = [], []
    # Two ranks, of which one has gradients: nothing is complete, and hooks do nothing but count.
    with pr.GradientBucketer([hooked, other], overlap=False) as bucketer:
        for _ in range(rounds):
            with_hook.append(backward_s(hooked))
            bucketer.wait()
            without.append(backward_s(bare))
    return (min(with_hook) - min(without)) / num_params * 1e6


# -- output ----------------------------------------------------------------------------------------

HEADER = (
    f"{'case':<9} {'k':>2} {'candidate':<17} {'cap MB':>7} {'median ms':>10} {'min ms':>9} "
    f"{'comm ms':>8} {'exposed':>8} {'ratio':>6} correct"
)


def format_row(row: Row) -> str:
    """One line under HEADER."""
    cap = "-" if row.bucket_cap_mb is None else f"{row.bucket_cap_mb:g}"
    return (
        f"{row.case:<9} {row.world_size:>2} {row.candidate:<17} {cap:>7} {row.median_ms:>10.2f} "
        f"{row.min_ms:>9.2f} {row.comm_ms:>8.3f} {row.exposed_ms:>8.3f} {row.ratio:>6.2f} "
        f"{'yes' if row.correct else 'NO'}"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time training steps, bucketed and not.")
    parser.add_argument("--models", default="lenet,small,resnet18", help="(default: %(default)s)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--caps", default="0.1,1,10", help="bucket caps in MB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=61, help="most rounds (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=12.0, help="seconds a case (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch's own (%(default)s)")
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.models.split(",")) - set(MODELS))
    if unknown:
        parser.error(f"--models: {unknown[0]!r} is none of {', '.join(MODELS)}")
    return args


@dataclass(frozen=True)
class Options:
    """What is measured, and how long."""

    models: tuple[str, ...] = ("lenet", "small", "resnet18")
    ranks: tuple[int, ...] = (2, 4)
    caps: tuple[float, ...] = (0.1, 1.0, 10.0)
    rounds: int = 61
    budget_s: float = 12.0
    hook_rounds: int = 31
    threads: int = 1


def measure(options: Options, progress: Callable[[str, Sequence[Row]], None]) -> dict[str, Any]:
    """Run the cases; ``progress`` is told of each when it is over. What a results file holds."""
    rows: list[Row] = []
    with torch_threads(options.threads):
        machine, cost_us = describe_machine(), hook_cost_us(rounds=options.hook_rounds)
        for name in options.models:
            for k in options.ranks:
                found = run_case(name, k, options.caps, options.rounds, options.budget_s)
                rows += found
                progress(f"{name}, {k} ranks", found)
    return results_of("bucketing", machine, rows, hook_us=cost_us)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One case's lines of the table."""
    for row in rows:
        print(format_row(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a gradient was wrong."""
    args = parse_arguments(argv)
    options = Options(
        models=tuple(args.models.split(",")),
        ranks=tuple(int(k) for k in args.ranks.split(",")),
        caps=tuple(float(cap) for cap in args.caps.split(",")),
        rounds=args.rounds,
        budget_s=args.budget_s,
        threads=args.threads,
    )
    machine = describe_machine()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{options.threads} torch threads, {machine['date']}"
    )
    print(HEADER)
    results = measure(options, print_rows)
    print(f"a hook costs {results['hook_us']:.2f} us per parameter")
    if args.json:
        write_results(args.json, results)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
