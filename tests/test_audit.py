"""The audit finds each planted order of addition, rounding and fault, and no others."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from case_marks import mostly_slow
from torch import Tensor

from pyringar.audit.findings import AuditReport
from pyringar.audit.probes import DTYPES, evaluate, exact_sum, find_order, wide_values
from pyringar.audit.questions import audit, order_of
from pyringar.audit.trees import EXACT, Region, Tree, balanced, fold, join
from pyringar.grading.checks import Subject
from pyringar.grading.graded_calls import ListAllreduce
from pyringar.parallel.shards import bits_of

SIZES = (8, 300)
Sum = Callable[[list[Tensor]], Tensor]
Allreduce = Callable[[list[Tensor]], object]


def fill(data: list[Tensor], total: Tensor) -> None:
    for tensor in data:
        tensor.copy_(total)


def lists_of(allreduce: Allreduce, k: int = 4) -> ListAllreduce:
    return ListAllreduce(Subject(allreduce, (torch.device("cpu"),) * k).run, "planted", k)


def lists(total: Sum, k: int = 5) -> ListAllreduce:
    return lists_of(lambda data: fill(data, total(data)), k)


def audited(total: Sum, k: int = 5) -> AuditReport:
    return audit(lists(total, k), SIZES)


def added(tree: Tree, data: Sequence[Tensor], partial: torch.dtype | None = None) -> Tensor:
    return evaluate([Region(0, len(data[0]), tree)], data, partial)


def random_tree(k: int, seed: int) -> Tree:
    rng, parts = random.Random(seed), list(range(k))
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append(join(parts.pop(), parts.pop()))
    return parts[0]


def ring(data: list[Tensor], shift: int = 1, step: int = 1, piece: int = 0) -> Tensor:
    """Add chunk c in the order of ranks c + shift, c + shift + step, ...; ``piece``: its length."""
    k, numel = len(data), len(data[0])
    size = piece or -(-numel // k)
    parts = []
    for c, start in enumerate(range(0, numel, size)):
        tree = fold([(c + shift + step * i) % k for i in range(k)])
        parts.append(added(tree, [x[start : start + size] for x in data]))
    return torch.cat(parts)


def order(total: Sum, k: int = 5) -> tuple[str, str]:
    found = order_of(lists(total, k), k, 300)[1]
    return found.verdict, found.detail


def order_in(report: AuditReport) -> tuple[str, str]:
    (section,) = (s for s in report.sections if s.title.startswith("order of addition, float32"))
    found = section.findings[-1]
    return found.verdict, found.detail


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", mostly_slow([2, 3, 4, 7, 12], 3, 7))
def test_audit_recovers_random_addition_trees(k, dtype):
    for seed in range(4):
        tree = random_tree(k, seed)
        # Sums of float16 in float64 would be exact in every order.
        for partial in (dtype, torch.float32 if dtype == torch.float16 else torch.float64):
            total = functools.partial(added, tree, partial=partial)
            found = find_order(lists(total, k), k, 9, dtype)
            assert found == [[Region(0, 9, tree)]] * k


@pytest.mark.parametrize(
    ("total", "name", "detail"),
    [
        (lambda d: added(fold(range(5)), d), "rank", "(((0+1)+2)+3)+4"),
        (lambda d: added(balanced(range(5)), d), "tree", "((0+1)+(2+3))+4"),
        (lambda d: added(fold(range(5)[::-1]), d), "rank, last first", "0+(1+(2+(3+4)))"),
        (ring, "ring", "chunk c adds ranks c+1, c+2, ..., c+5 (mod 5)"),
        (lambda d: ring(d, 0), "ring", "chunk c adds ranks c, c+1, ..., c+4 (mod 5)"),
        (lambda d: ring(d, 3, -1), "ring", "chunk c adds ranks c-2, c-3, ..., c-6 (mod 5)"),
        pytest.param(exact_sum, EXACT, "no partial sum is rounded", marks=pytest.mark.slow),
    ],
)
def test_audit_names_known_addition_orders(total, name, detail):
    verdict, found = order(total)
    assert (verdict, found.partition(" (also")[0].partition(";")[0]) == (name, detail)


def test_audit_reports_different_orders_per_rank():
    def allreduce(data):
        k, given = len(data), [x.clone() for x in data]
        for rank, tensor in enumerate(data):
            tensor.copy_(added(fold([(rank + i) % k for i in range(k)]), given))

    report = audit(lists_of(allreduce), SIZES)
    assert order_in(report)[0] == "differs from rank to rank"
    assert report["on every rank"].verdict == "no"
    assert "on rank 1" in report["on every rank"].detail


def kahan(data):
    total, lost = data[0].clone(), torch.zeros_like(data[0])
    for x in data[1:]:
        y = x - lost
        new = total + y
        lost = (new - total) - y
        total = new
    return total


def in_rank_order(data, partial=None):
    return added(fold(range(len(data))), data, partial)


def reverse(data):
    return added(fold(range(len(data))[::-1]), data)


def tree(data, partial=None):
    return added(balanced(range(len(data))), data, partial)


def in_random_order(data):
    return in_rank_order(random.sample(data, len(data)))


def by_value(data):
    return in_rank_order(list(torch.stack(data).sort(0).values))


def rounded_halfway(data):
    """Sum ranks 0 to 2, and the other ranks, in float32; round both sums, then add them."""
    dtype = data[0].dtype
    return in_rank_order(data[:3], torch.float32) + in_rank_order(data[3:], torch.float32).to(dtype)


def by_size(short, long):
    return lambda data: (short if len(data[0]) < 100 else long)(data)


def by_position(data):
    is_even = torch.arange(len(data[0])) % 2 == 0
    return torch.where(is_even, in_rank_order(data), reverse(data))


def by_magnitude(data):
    total = in_rank_order(data)
    return torch.where(total.abs() > 1, total, reverse(data))


def partial(total, dtype):
    return functools.partial(total, partial=dtype)


ALTERNATING = itertools.cycle([in_rank_order, reverse])
F32, F64 = torch.float32, torch.float64
HALVING = "recursive halving"
# Each row: a float32 sum, and the names of its order for few (1 or 8) and for 300 elements.
PLANTED = {
    "halving": (lambda d: added((((0, 1), 3), (2, 4)), d), HALVING, HALVING),
    "ring": (ring, "rank, up from 1", "ring"),
    "kahan": (kahan, "unknown", "unknown"),
    "float64 tree": (partial(tree, F64), "tree, in float64", "tree, in float64"),
    "float64 if short": (by_size(partial(tree, F64), in_rank_order), "tree, in float64", "rank"),
    "alternating": (lambda d: next(ALTERNATING)(d), "changes", "changes"),
    "random": (in_random_order, "changes", "changes"),
    "sorted": (by_value, "unknown", "unknown"),
    "by position": (by_position, "rank", "rank and rank, last first"),
    "by magnitude": (by_magnitude, "unknown", "unknown"),
    "scaled": (lambda d: in_rank_order(d) * (1 + 2**-23), "unknown", "unknown"),
}
# Each row: a sum, the expected dtype of partial sums for bfloat16, and for float16 (None: unknown).
PLANTED_16 = {
    "each add": (in_rank_order, "bfloat16", "float16"),
    "float32": (partial(in_rank_order, F32), "float32", "float32"),
    "float64": (partial(in_rank_order, F64), "float64", "float64"),
    "exact": (exact_sum, "bfloat16", "float16"),
    "kahan": (kahan, None, None),
    "halfway": (rounded_halfway, None, None),
    "ring": (ring, "bfloat16", "float16"),
}


@pytest.mark.parametrize(("total", "short", "long"), PLANTED.values(), ids=PLANTED)
def test_audit_names_planted_addition_order(total, short, long):
    few = 8 if short == long else 1  # the audit of 1 element takes 1000 calls
    found = [order_of(lists(total), 5, numel)[1].verdict for numel in (few, 300)]
    assert found == [short, long]


@pytest.mark.parametrize(("total", "brain", "half"), PLANTED_16.values(), ids=PLANTED_16)
def test_audit_finds_partial_sum_dtype(total, brain, half):
    for numel in (1 if total is ring else 8, 300):
        found = [
            order_of(lists(total), 5, numel, dtype)[1].case["partial_sums"]
            for dtype in (torch.bfloat16, torch.float16)
        ]
        assert found == [brain, half]


def test_audit_reports_wrong_sums():
    report = audited(lambda d: added(fold(range(4)), d))  # rank 4 is missing
    assert report["is right"].verdict == "no"
    assert report["is right"].detail.startswith("float32, element 0 of 8: 0x41200000 (10)")
    assert audited(lambda d: sum(d) / len(d))["is right"].verdict == "no"
    assert order_in(audited(lambda d: d[0].clone()))[0] == "unknown"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_sum_is_correctly_rounded(dtype):
    inputs = wide_values(5, 400, dtype)
    wipes_out = torch.arange(400) % 3 == 0  # elements whose large inputs cancel
    inputs[1] = torch.where(wipes_out, -inputs[0], inputs[1])
    inputs[2] = torch.where(wipes_out, -inputs[3] * 1.01, inputs[2]).to(dtype)
    inputs[4] = torch.where(wipes_out, inputs[4] * torch.finfo(dtype).tiny, inputs[4]).to(dtype)
    sums = exact_sum(inputs)
    bits = sums.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    rows = list(zip(*(x.tolist() for x in inputs), strict=True))
    for neighbour in ((bits + 1).view(dtype).tolist(), (bits - 1).view(dtype).tolist()):
        for row, got, other, pattern in zip(rows, sums.tolist(), neighbour, bits, strict=True):
            exact = sum(map(Fraction, row), Fraction(0))
            if math.isfinite(other):
                distance, further = abs(Fraction(got) - exact), abs(Fraction(other) - exact)
                assert distance < further or (distance == further and pattern % 2 == 0)
    if dtype == torch.float64:
        assert sums.tolist() == [math.fsum(row) for row in rows]


def test_exact_sum_overflows_to_infinity():
    for dtype in DTYPES:
        most = torch.finfo(dtype).max
        column = [most, most, -most]
        assert exact_sum([torch.tensor([x], dtype=dtype) for x in column]).item() == most
        assert exact_sum([torch.tensor([x], dtype=dtype) for x in column[:2]]).item() == math.inf
        assert exact_sum([torch.tensor([-x], dtype=dtype) for x in column[:2]]).item() == -math.inf


class SpoiledTarget:
    """An audit target that adds in rank order; ``spoil`` changes its results."""

    name, ranks = "planted", 4
    ways = ("in place", "async")

    def __init__(self, spoil: Callable[..., object]) -> None:
        self.spoil = spoil

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        results = [x.clone() for x in inputs]
        for a, b in itertools.pairwise([0, *cuts, len(inputs[0])]):
            given = [x[a:b].clone() for x in inputs]
            total = sum(given[1:], given[0])
            for result in results:
                result[a:b] = total
            self.spoil([x[a:b] for x in results], given=given, way=way, is_cut=bool(cuts))
        return results


def faults(report: AuditReport) -> set[str]:
    found = {f.name for s in report.sections for f in s.findings if f.verdict == "no"}
    return found - {"ranks renumbered"}


def spoiled(spoil: Callable[..., object]) -> AuditReport:
    return audit(SpoiledTarget(spoil), SIZES)


def test_correct_target_passes_audit():
    report = spoiled(lambda results, **_: None)
    assert faults(report) == set()
    verdicts = {f.verdict for s in report.sections for f in s.findings}
    assert verdicts == {"yes", "no", "-", "rank", "each add"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_audit_names_wrong_element(dtype):
    def spoil(results, **_):
        if len(results[0]) == 300 and len(results) == 4 and str(results[0].dtype).endswith(dtype):
            bits = bits_of(results[2])
            bits[77] ^= 1

    report = spoiled(spoil)
    found = report["on every rank"]
    assert found.detail.startswith(f"{dtype}, element 77 of 300: 0x")
    assert found.detail.endswith("on rank 2")
    assert (found.case["index"], found.case["differing"]) == (77, 1)
    assert "on every rank" in faults(report)
    assert max(len(line) for line in str(report).splitlines()) <= 80
    assert str(report).startswith("planted, 4 ranks\n\nthe sum\n")


def test_audit_finds_nondeterministic_sum():
    def spoil(results, given, **_):
        fill(results, in_random_order(given))

    report = spoiled(spoil)
    assert "in every run" in faults(report)
    assert "in run 2" in report["in every run"].detail
    orders = [f for f in report.sections[1].findings if f.name != "1 element"]
    assert orders[-1].verdict in ("changes", "unknown", "differs from rank to rank")


def backwards(results, given, **_):
    fill(results, reverse(given))


@pytest.mark.parametrize(
    ("when", "seen"),
    [
        (lambda numel, way, is_cut: numel == 8, {"at every size", "in several calls"}),
        (lambda numel, way, is_cut: way == "async", {"async"}),
        (lambda numel, way, is_cut: is_cut and way == "in place", {"in several calls", "async"}),
    ],
)
def test_audit_finds_call_dependent_order(when, seen):
    def spoil(results, given, way, is_cut):
        if when(len(given[0]), way, is_cut):
            backwards(results, given)

    report = spoiled(spoil)
    assert faults(report) == seen
    if "async" in seen:
        assert report["async"].detail.endswith("; async: rank, last first, 0+(1+(2+3))") == (
            "in several calls" not in seen
        )


def test_report_lists_each_addition_order():
    def spoil(results, given, **_):
        if len(given[0]) >= 123 or len(given) == 3:
            backwards(results, given)

    report = spoiled(spoil)
    assert report["3 ranks"].verdict == "rank, last first"
    assert [(f.name, f.verdict) for f in report.sections[1].findings] == [
        ("8 to 122 elements", "rank"),
        ("123 to 300 elements", "rank, last first"),
    ]


def where(condition: Callable[[Tensor], Tensor], value: float) -> Callable[..., object]:
    def spoil(results, **_):
        for result in results:
            result[condition(result)] = value

    return spoil


def is_subnormal(x: Tensor) -> Tensor:
    return (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)


@pytest.mark.parametrize(
    ("condition", "value", "seen"),
    [
        (torch.isnan, 0.0, {"NaN stays", "inf - inf is NaN"}),
        (torch.isinf, 3e4, {"infinity stays", "overflow is inf"}),
        (lambda x: x == 0, 0.0, {"-0 - 0 is -0"}),
        (is_subnormal, 0.0, {"subnormals stay"}),
        (lambda x: is_subnormal(x) & (x.dtype == torch.bfloat16), 0.0, {"subnormals stay"}),
    ],
)
def test_audit_finds_lost_special_values(condition, value, seen):
    assert faults(spoiled(where(condition, value))) == seen


def test_unsupported_dtype_is_no_fault():
    def allreduce(data):
        if data[0].dtype == torch.bfloat16:
            raise ValueError("not this one")
        fill(data, in_rank_order(data))

    report = audit(lists_of(allreduce), SIZES)
    assert report["bfloat16"].verdict == "-"
    assert report["bfloat16"].detail.startswith("not offered: raises ValueError: not this one at")
    assert report["NaN stays"].detail == "float32, float64, float16"
    assert faults(report) == set()


def test_failing_function_stops_audit():
    calls = itertools.count()

    def allreduce(data):
        next(calls)
        raise ValueError("no")

    report = audit(lists_of(allreduce), SIZES)
    assert {f.verdict for s in report.sections for f in s.findings} == {"failed"}
    assert next(calls) < 10
    assert report["NaN stays"].detail == "not asked: 4 other questions failed"
    assert str(report).count("ValueError") == 2
    assert str(report).endswith("\n\nThe other calls failed likewise.")


def test_audit_prints_different_failures():
    calls = itertools.count()

    def allreduce(data):
        raise ValueError(f"number {next(calls)}")

    text = str(audit(lists_of(allreduce), SIZES))
    assert text.count("ValueError") == 4
    assert "likewise" not in text


def test_audit_finds_alignment_dependent_order():
    def allreduce(data):
        is_aligned = data[0].data_ptr() % 64 == 0
        fill(data, (in_rank_order if is_aligned else reverse)(data))

    report = audit(lists_of(allreduce), SIZES)
    assert faults(report) == {"at every address"}
    assert report["at every address"].detail.endswith("unaligned: rank, last first, 0+(1+(2+3))")
