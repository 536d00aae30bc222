"""Does the audit see every planted dependence and fault, in the property that it belongs to?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pyringar.audit.probes import bits_of
from pyringar.audit.questions import audit
from pyringar.audit.report import Report
from pyringar.grading.cases import Lists
from pyringar.grading.checks import Subject

SIZES = (8, 300)
Allreduce = Callable[[list[Tensor]], object]


class Planted:
    """A library in rank order, with both ways of calling; ``spoil`` changes what comes out."""

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


def noes(report: Report) -> set[str]:
    found = {f.name for s in report.sections for f in s.findings if f.verdict == "no"}
    return found - {"ranks renumbered"}


def audited(spoil: Callable[..., object]) -> Report:
    return audit(Planted(spoil), SIZES)


# -- the same bits ---------------------------------------------------------------------------------


def test_no_fault_is_found_without_one():
    report = audited(lambda results, **_: None)
    assert noes(report) == set()
    verdicts = {f.verdict for s in report.sections for f in s.findings}
    assert verdicts == {"yes", "no", "-", "rank", "each add"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_element_of_one_rank_is_named(dtype):
    def spoil(results, **_):
        if len(results[0]) == 300 and len(results) == 4 and str(results[0].dtype).endswith(dtype):
            bits = bits_of(results[2])
            bits[77] ^= 1

    report = audited(spoil)
    found = report["on every rank"]
    assert found.detail.startswith(f"{dtype}, element 77 of 300: 0x")
    assert found.detail.endswith("on rank 2")
    assert (found.case["index"], found.case["differing"]) == (77, 1)
    assert "on every rank" in noes(report)
    assert max(len(line) for line in str(report).splitlines()) <= 80
    assert str(report).startswith("planted, 4 ranks\n\nthe sum\n")


def test_other_bits_in_another_run():
    def spoil(results, given, **_):
        total = sum(random.sample(given, len(given)))
        for result in results:
            result.copy_(total)

    report = audited(spoil)
    assert "in every run" in noes(report)
    assert "in run 2" in report["in every run"].detail
    orders = [f for f in report.sections[1].findings if f.name != "1 element"]
    assert orders[-1].verdict in ("changes", "unknown", "differs from rank to rank")


def backwards(results, given, **_):
    total = sum(given[-2::-1], given[-1])
    for result in results:
        result.copy_(total)


@pytest.mark.parametrize(
    ("when", "seen"),
    [
        (lambda numel, way, is_cut: numel == 8, {"at every size", "in several calls"}),
        (lambda numel, way, is_cut: way == "async", {"async"}),
        (lambda numel, way, is_cut: is_cut and way == "in place", {"in several calls", "async"}),
    ],
)
def test_other_order_is_found(when, seen):
    def spoil(results, given, way, is_cut):
        if when(len(given[0]), way, is_cut):
            backwards(results, given)

    report = audited(spoil)
    assert noes(report) == seen
    if "async" in seen:
        assert report["async"].detail.endswith("; async: rank, last first, 0+(1+(2+3))") == (
            "in several calls" not in seen
        )


def test_orders_by_size_have_a_row_each():
    def spoil(results, given, **_):
        if len(given[0]) >= 123 or len(given) == 3:
            backwards(results, given)

    report = audited(spoil)
    assert report["3 ranks"].verdict == "rank, last first"
    assert [(f.name, f.verdict) for f in report.sections[1].findings] == [
        ("8 to 122 elements", "rank"),
        ("123 to 300 elements", "rank, last first"),
    ]


# -- special values --------------------------------------------------------------------------------


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
def test_lost_special_values(condition, value, seen):
    assert noes(audited(where(condition, value))) == seen


# -- calls that fail -------------------------------------------------------------------------------


def lists(allreduce: Allreduce) -> Lists:
    return Lists(Subject(allreduce, (torch.device("cpu"),) * 4).run, "planted", 4)


def fill(data: list[Tensor]) -> None:
    total = sum(data[1:], data[0])
    for tensor in data:
        tensor.copy_(total)


def test_refused_type_is_not_offered():
    def allreduce(data):
        if data[0].dtype == torch.bfloat16:
            raise ValueError("not this one")
        fill(data)

    report = audit(lists(allreduce), SIZES)
    assert report["bfloat16"].verdict == "-"
    assert report["bfloat16"].detail.startswith("not offered: raises ValueError: not this one at")
    assert report["NaN stays"].detail == "float32, float64, float16"
    assert noes(report) == set()


def test_failing_function_is_asked_no_more():
    calls = itertools.count()

    def allreduce(data):
        next(calls)
        raise ValueError("no")

    report = audit(lists(allreduce), SIZES)
    assert {f.verdict for s in report.sections for f in s.findings} == {"failed"}
    assert next(calls) < 10
    assert "not asked" in str(report)


def test_rebound_list_items_are_wrong():
    def allreduce(data):
        for i in range(1, len(data)):
            data[0][:] += data[i]
        for i in range(1, len(data)):
            data[i] = data[0]

    report = audit(lists(allreduce), SIZES)
    assert {"is right", "on every rank"} <= noes(report)
    assert "on rank 1, whose own tensor is unchanged (data[i] = ..." in report["is right"].detail
    assert report["8 to 300 elements"].verdict == "differs from rank to rank"


def test_order_by_address_is_found():
    def allreduce(data):
        is_aligned = data[0].data_ptr() % 64 == 0
        total = sum(data[1:], data[0]) if is_aligned else sum(data[-2::-1], data[-1])
        for tensor in data:
            tensor.copy_(total)

    report = audit(lists(allreduce), SIZES)
    assert noes(report) == {"at every address"}
    assert report["at every address"].detail.endswith("unaligned: rank, last first, 0+(1+(2+3))")


# -- the report ------------------------------------------------------------------------------------


def test_document_holds_the_table():
    report = audited(lambda results, **_: None)
    sections = {s["title"]: s["findings"] for s in report.as_dict()["sections"]}
    (row,) = sections["order of addition, float32"]
    assert row["case"]["300 elements"] == {
        "k": 4,
        "numel": 300,
        "num_regions": 1,
        "partial_sums": "float32",
        "regions": [{"start": 0, "stop": 300, "sum": "((0+1)+2)+3"}],
    }
