"""Times all_reduce over CPU ranks against the book's way, and against what memory allows.

    python benchmarks/allreduce.py                      # the cases of the README's table
    python benchmarks/allreduce.py --sizes 4KiB,1MiB --ranks 2,4 --algorithms fused,ring
    python benchmarks/allreduce.py --json out.json --plot out.png

Columns: size of one rank's data; k ranks; median and minimum time of a call; algbw = size / time;
busbw = algbw * 2 (k - 1) / k; limit = time that reading and writing the same k buffers once takes
(an in-place multiplication of each, torch's own threads), as a share of the call's time; ratio =
naive's median over ours. naive adds every rank's tensor to rank 0's and copies the result back,
with torch's own threads and nothing else between. stack is torch.stack(tensors).sum(0), copied back
to every rank. auto is what all_reduce takes when nobody names an algorithm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pyringar as pr
from pyringar.comm import reference
from pyringar.comm.auto import choose

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe_machine
from benchmarks.report.document import results_of, write_results
from benchmarks.timing import SETTLE_S, interleaved

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
PEERS = ("naive", "stack")  # not ours: plain torch
UNNAMED = ("auto", "coalesced", "bound")
LENET = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


@dataclass(frozen=True)
class Case:
    """One line-up: tensors of these shapes on k ranks, and who reduces them."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    world_size: int
    dtype: str
    candidates: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of one rank's tensors."""
        item = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return item * sum(torch.Size(shape).numel() for shape in self.shapes)


@dataclass(frozen=True)
class Row:
    """One candidate in one case, checked and timed."""

    case: str
    size_bytes: int
    world_size: int
    dtype: str
    algorithm: str
    median_us: float
    min_us: float
    q1_us: float
    q3_us: float
    max_us: float
    limit_us: float
    algbw_gbps: float
    busbw_gbps: float
    limit_share: float
    ratio_to_naive: float
    ratio_of_minima: float
    correct: bool
    rounds: int
    takes: str | None  # the algorithm, where none was named


def resnet18_shapes() -> list[tuple[int, ...]]:
    """The 76 parameters of the book's ResNet-18, in the order of registration."""
    shapes: list[tuple[int, ...]] = [(64, 1, 3, 3), (64,), (64,), (64,)]
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            narrow = channels if block == 0 else width
            shapes += [(width, narrow, 3, 3), (width,), (width, width, 3, 3), (width,)]
            if stage > 0 and block == 0:
                shapes += [(width, narrow, 1, 1), (width,)]
            shapes += [(width,)] * 4
        channels = width
    return [*shapes, (10, 512), (10,)]


def naive(lists: Sequence[Sequence[Tensor]]) -> None:
    """The book's allreduce with its bug mended, tensor by tensor, and as lean as Python gets."""
    for data in zip(*lists, strict=True):
        first = data[0]
        for other in data[1:]:
            first.add_(other)
        for other in data[1:]:
            other.copy_(first)


def stack_and_sum(lists: Sequence[Sequence[Tensor]]) -> None:
    """What one line of torch does instead of a loop; the sum is copied back to every rank."""
    for data in zip(*lists, strict=True):
        total = torch.stack(data).sum(0)
        for tensor in data:
            tensor.copy_(total)


def touch_once(lists: Sequence[Sequence[Tensor]]) -> None:
    """The least traffic an all_reduce can have: every buffer read and written once."""
    for tensors in lists:
        for tensor in tensors:
            tensor.mul_(1)


def reducer(name: str, comm: pr.Communicator, lists: list[list[Tensor]]) -> Callable[[], object]:
    """The call that a candidate's name stands for."""
    column = [tensors[0] for tensors in lists]
    if name == "naive":
        return lambda: naive(lists)
    if name == "stack":
        return lambda: stack_and_sum(lists)
    if name == "allreduce":
        return lambda: pr.allreduce(column)
    if name == "bound":
        return comm.bind(column)
    if name == "coalesced":
        return lambda: comm.all_reduce_coalesced(lists)
    if len(lists[0]) > 1:
        return lambda: comm.all_reduce_coalesced(lists, algorithm=name)
    return lambda: comm.all_reduce(column, algorithm=name)


def random_lists(case: Case) -> list[list[Tensor]]:
    """Random numbers, another seed on every rank."""
    lists = []
    for rank in range(case.world_size):
        generator = torch.Generator().manual_seed(1000 + rank)
        lists.append(
            [torch.randn(s, generator=generator).to(DTYPES[case.dtype]) for s in case.shapes]
        )
    return lists


def expected(inputs: list[list[Tensor]], in_ring_order: bool) -> list[Tensor]:
    """The sum in the promised order: of ranks, or the ring's, chunk by chunk."""
    sums = []
    k = len(inputs)
    for tensors in zip(*inputs, strict=True):
        flat = [t.clone().view(-1) for t in tensors]
        if in_ring_order:
            for chunk, parts in enumerate(zip(*(t.tensor_split(k) for t in flat), strict=True)):
                order = [parts[(chunk + 1 + i) % k] for i in range(k)]
                reference.naive_all_reduce(order)
        else:
            reference.naive_all_reduce(flat)
        sums.append(flat[0])
    return sums


def is_correct(name: str, comm: pr.Communicator, case: Case) -> bool:
    """Whether every rank holds the promised bits after one call."""
    lists = random_lists(case)
    want = expected(lists, in_ring_order=name == "ring")
    reducer(name, comm, lists)()
    pairs = ((got, w) for tensors in lists for got, w in zip(tensors, want, strict=True))
    if name in PEERS:  # torch's order is its own, and it rounds 16 bits after every addition
        far = 0.1 if case.dtype in ("fp16", "bf16") else 1e-5
        return all(
            torch.allclose(g.view(-1).float(), w.float(), rtol=far, atol=far) for g, w in pairs
        )
    return all(torch.equal(got.view(-1), w) for got, w in pairs)


def run_case(case: Case, rounds: int, budget_s: float, settle_s: float = SETTLE_S) -> list[Row]:
    """Check every candidate, then time all of them and the limit in turns."""
    with pr.Communicator(["cpu"] * case.world_size) as comm:
        correct = {name: is_correct(name, comm, case) for name in case.candidates}
        lists = [[torch.zeros_like(t) for t in tensors] for tensors in random_lists(case)]
        functions = {name: reducer(name, comm, lists) for name in case.candidates}
        timings = interleaved(
            {**functions, "limit": lambda: touch_once(lists)},
            rounds=rounds,
            budget_s=budget_s,
            settle_s=settle_s,
        )
    rows = []
    taken, _ = choose("host", "any", case.size_bytes)
    for name in case.candidates:
        timing = timings[name]
        algbw = case.size_bytes / timing.median_s / 1e9
        k = case.world_size
        rows.append(
            Row(
                case=case.name,
                size_bytes=case.size_bytes,
                world_size=k,
                dtype=case.dtype,
                algorithm=name,
                **timing.spread("us"),
                limit_us=timings["limit"].median_s * 1e6,
                algbw_gbps=algbw,
                busbw_gbps=algbw * 2 * (k - 1) / k,
                limit_share=timings["limit"].median_s / timing.median_s,
                ratio_to_naive=timings["naive"].median_s / timing.median_s,
                ratio_of_minima=timings["naive"].min_s / timing.min_s,
                correct=correct[name],
                rounds=timing.rounds,
                takes=taken if name in UNNAMED else None,
            )
        )
    return rows


def flat_case(size_bytes: int, k: int, dtype: str, candidates: Sequence[str]) -> Case:
    """One flat tensor per rank."""
    item = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    shape = ((size_bytes // item,),)
    return Case(f"{format_size(size_bytes)} {dtype}", shape, k, dtype, ("naive", *candidates))


def readme_cases() -> list[Case]:
    """What the README's table shows."""
    cases = [flat_case(4096, k, "fp32", ("allreduce", "bound")) for k in (2, 4, 8, 16)]
    cases += [
        flat_case(size, k, "fp32", ("fused", "bound"))
        for size in (2**18, 2**20)
        for k in (2, 4, 8, 16)
    ]
    cases += [flat_case(2**24, k, "fp32", ("fused", "direct", "ring")) for k in (2, 4)]
    cases += [flat_case(2**24, 16, "fp32", ("fused",))]
    cases += [flat_case(2**26, k, "fp32", ("fused", "direct", "ring")) for k in (2, 4)]
    cases += [flat_case(2**26, 8, "fp32", ("fused",))]
    cases += [flat_case(2**26, k, dtype, ("fused",)) for dtype in ("bf16", "fp16") for k in (2, 4)]
    lenet, resnet = tuple(LENET), tuple(resnet18_shapes())
    cases += [Case("LeNet", lenet, k, "fp32", ("naive", "coalesced")) for k in (2, 4, 8)]
    cases += [Case("ResNet-18", resnet, k, "fp32", ("naive", "coalesced")) for k in (2, 4)]
    return cases


def grid_cases(sizes: Sequence[int], ranks: Sequence[int]) -> list[Case]:
    """Every algorithm and every peer, at all these sizes and numbers of ranks."""
    everyone = ("stack", "fused", "direct", "ring", "sharded", "auto")
    return [flat_case(size, k, "fp32", everyone) for size in sizes for k in ranks]


def list_cases(ranks: Sequence[int]) -> list[Case]:
    """All parameters of a model: where it matters who owns which."""
    everyone = ("naive", "stack", "coalesced", "fused", "direct", "ring", "sharded")
    models = {"LeNet": tuple(LENET), "ResNet-18": tuple(resnet18_shapes())}
    return [
        Case(name, shapes, k, "fp32", everyone) for name, shapes in models.items() for k in ranks
    ]


def merged(cases: Sequence[Case]) -> list[Case]:
    """Each case once, with all candidates that it has anywhere; flat ones by dtype, size, ranks."""
    found: dict[tuple[str, int], Case] = {}
    for case in cases:
        key = case.name, case.world_size
        others = found[key].candidates if key in found else ()
        found[key] = replace(case, candidates=tuple(dict.fromkeys((*others, *case.candidates))))
    dtypes = list(DTYPES)

    def place(case: Case) -> tuple[bool, int, int, int]:
        is_list = len(case.shapes) > 1
        return is_list, dtypes.index(case.dtype), case.size_bytes, case.world_size

    return sorted(found.values(), key=place)


def format_size(size_bytes: int) -> str:
    """1048576 -> "1 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:g} {unit}"
    return f"{size_bytes} B"


def parse_size(text: str) -> int:
    """Bytes of a size written as 64KiB, 1MiB, ..."""
    for unit in ("KiB", "MiB", "GiB", "B"):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * UNITS[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4KiB, 16MiB, ...")


HEADER = (
    f"{'case':<16} {'k':>2} {'algorithm':<10} {'median us':>11} {'min us':>11} "
    f"{'algbw GB/s':>10} {'busbw GB/s':>10} {'of limit':>8} {'x naive':>8} {'x (min)':>8} correct"
)


def format_row(row: Row) -> str:
    """One line of the table under HEADER."""
    return (
        f"{row.case:<16} {row.world_size:>2} {row.algorithm:<10} {row.median_us:>11.1f} "
        f"{row.min_us:>11.1f} {row.algbw_gbps:>10.2f} {row.busbw_gbps:>10.2f} "
        f"{row.limit_share:>8.2f} {row.ratio_to_naive:>8.2f} {row.ratio_of_minima:>8.2f} "
        f"{'yes' if row.correct else 'NO'}"
    )


def plot(rows: list[Row], machine: dict[str, object], path: str) -> None:
    """Speed-up over naive, a bar per case and algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.algorithm != "naive"]
    labels = [f"{row.case}, k = {row.world_size}, {row.algorithm}" for row in shown]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.26 * len(shown)), layout="constrained")
    bars = axes.barh(labels, [row.ratio_to_naive for row in shown], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.1fx", padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("times as fast as naive (medians of one interleaved run)")
    axes.set_title(f"all_reduce on {machine['cpu']}, {machine['cores']} cores", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Time all_reduce over CPU ranks against naive and the memory limit."
    )
    parser.add_argument(
        "--sizes", help="4KiB,1MiB,...: flat tensors of these sizes instead of the README's cases"
    )
    parser.add_argument(
        "--ranks", default="2,4,8", help="with --sizes: numbers of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithms",
        default="fused",
        help="with --sizes: auto, fused, direct, ring, sharded, allreduce, bound, stack",
    )
    parser.add_argument(
        "--dtype",
        default="fp32",
        choices=sorted(DTYPES),
        help="with --sizes (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="README cases whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=31, help="most rounds per case (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=4.0, help="seconds per case (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="PATH", help="write rows and machine there")
    parser.add_argument("--plot", metavar="PATH", help="write a PNG there")
    return parser.parse_args(argv)


def measure(
    cases: Sequence[Case],
    progress: Callable[[str, Sequence[Row]], None],
    *,
    rounds: int,
    budget_s: float,
    settle_s: float = SETTLE_S,
) -> dict[str, Any]:
    """Run the cases; ``progress`` is told of each when it is over. What a results file holds."""
    machine = describe_machine()
    rows: list[Row] = []
    for case in cases:
        found = run_case(case, rounds, budget_s, settle_s)
        rows += found
        progress(f"{case.name}, {case.world_size} ranks", found)
    return results_of("allreduce", machine, rows)


def print_rows(label: str, rows: Sequence[Row]) -> None:
    """One case's lines of the table."""
    for row in rows:
        print(format_row(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 when a result was wrong."""
    args = parse_arguments(argv)
    if args.sizes:
        cases = [
            flat_case(parse_size(size), int(k), args.dtype, args.algorithms.split(","))
            for size in args.sizes.split(",")
            for k in args.ranks.split(",")
        ]
    else:
        cases = [case for case in readme_cases() if args.only in case.name]
    machine = describe_machine()
    print(
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['torch_threads']} torch threads, {machine['date']}"
    )
    print(HEADER)
    results = measure(cases, print_rows, rounds=args.rounds, budget_s=args.budget_s)
    if args.json:
        write_results(args.json, results)
    if args.plot:
        plot([Row(**row) for row in results["rows"]], machine, args.plot)
    return 0 if all(row["correct"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
