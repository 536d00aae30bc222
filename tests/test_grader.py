"""Does the grader tell right from wrong: planted mistakes fail, every sane solution passes?"""

from __future__ import annotations

import functools
import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from training import rebinding, repaired

import pyringar as pr
from pyringar.cli import main
from pyringar.grading.grader import Report, check_allreduce

Allreduce = Callable[[list[Tensor]], object]


@functools.cache
def graded(fn: Allreduce) -> Report:
    return check_allreduce(fn)


def failed(report: Report) -> set[str]:
    return {p.name for p in report.failed}


def fill(data, total):
    for tensor in data:
        tensor.copy_(total)


# -- functions that are right ----------------------------------------------------------------------


def stacked(data):
    fill(data, torch.stack(data).sum(0))


def last_rank_first(data):
    total = data[-1].clone()
    for tensor in reversed(data[:-1]):
        total += tensor
    fill(data, total)


def wide(data):
    """One rounding at the end."""
    is_float = data[0].is_floating_point()
    fill(data, torch.stack(data).to(torch.float64 if is_float else torch.int64).sum(0))


def chunked_ring(data):
    """Every chunk added in an order of its own, as a ring does."""
    k = len(data)
    flats = [t.reshape(-1) for t in data]
    bounds = [c * flats[0].numel() // k for c in range(k + 1)]
    total = flats[0].clone()
    for c in range(k):
        part = slice(bounds[c], bounds[c + 1])
        total[part] = flats[(c + 1) % k][part]
        for i in range(2, k + 1):
            total[part] += flats[(c + i) % k][part]
    fill(data, total.view(data[0].shape))


@pytest.mark.parametrize("fn", [repaired, stacked, last_rank_first, wide, chunked_ring])
def test_sane_solutions_pass(fn):
    report = graded(fn)
    assert report.passed, str(report)
    assert {p.verdict for p in report.properties} == {"pass", "reported"}


def test_order_is_reported():
    order = {fn: graded(fn)["order"] for fn in (stacked, last_rank_first)}
    assert {found.verdict for found in order.values()} == {"reported"}
    assert order[stacked].detail == "rank, with 4 ranks and 1000 elements: ((0+1)+2)+3"
    assert order[last_rank_first].detail.startswith("rank, last first, with 4 ranks")


def test_ours_passes():
    pr.allreduce([torch.ones(1), torch.ones(1)])  # compiling is not what the deadlines are for
    report = pr.check_allreduce(pr.allreduce)
    assert report.passed, str(report)
    assert report["returns"].detail == "None"


# -- functions that are wrong ----------------------------------------------------------------------


def averages(data):
    repaired(data)
    for tensor in data:
        tensor.copy_(tensor / len(data))


def skips_writing_the_last_rank(data):
    fill(data[: max(1, len(data) - 1)], torch.stack(data).sum(0))


def forgets_rank_2(data):
    fill(data, torch.stack([t for i, t in enumerate(data) if i != 2]).sum(0))


def adds_its_own_twice(data):
    total = torch.stack(data).sum(0)
    for tensor in data:
        tensor += total


def wrong_for_three(data):
    repaired(data)
    if len(data) == 3:
        data[2] += 1


def drops_the_last_element(data):
    k, numel = len(data), data[0].numel()
    whole = numel - numel % k
    if data[0].is_contiguous():
        repaired([t.view(-1)[:whole] for t in data])
    else:
        repaired(data)


def clones(data):
    repaired([t.clone() for t in data])


def returns_new_tensors(data):
    total = torch.stack(data).sum(0)
    return [total.clone() for _ in data]


def shortens_the_list(data):
    repaired(data)
    data.pop()


def reverses_the_list(data):
    repaired(data)
    data.reverse()


def points_tensors_elsewhere(data):
    total = torch.stack(data).sum(0)
    for tensor in data:
        tensor.data = total.to(tensor.dtype, copy=True)


def random_order(data):
    order = torch.randperm(len(data)).tolist()
    total = data[order[0]].clone()
    for i in order[1:]:
        total += data[i]
    fill(data, total)


def each_rank_its_own_order(data):
    k = len(data)
    before = [t.clone() for t in data]
    for rank in range(k):
        data[rank].copy_(before[rank])
        for i in range(1, k):
            data[rank] += before[(rank + i) % k]


def only_contiguous(data):
    """ravel() copies what is not contiguous, and the copy is what gets written."""
    repaired([t.ravel() for t in data])


def trusts_the_strides_of_rank_0(data):
    """Right as long as every rank's elements lie where rank 0's do."""
    repaired([t.as_strided(data[0].shape, data[0].stride()) for t in data])


def writes_the_gaps(data):
    """Sums everything from the first to the last byte, whatever lies between."""
    spans = []
    for tensor in data:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append(tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,)))
    repaired(spans)


def writes_past_the_end(data):
    repaired(data)
    for tensor in data:
        end = tensor.storage_offset() + tensor.numel()
        if tensor.is_contiguous() and tensor.untyped_storage().nbytes() // tensor.itemsize > end:
            tensor.as_strided((1,), (1,), end).zero_()


def through_float(data):
    fill(data, torch.stack([t.to(torch.float64) for t in data]).sum(0))


def float32_only(data):
    fill(data, torch.stack([t.float() for t in data]).sum(0))


def fails_on_nothing(data):
    data[0].max()
    repaired(data)


def exits(data):
    sys.exit("not implemented yet")


def swallows_nan_and_infinities(data):
    total = torch.stack(data).sum(0)
    fill(data, total.nan_to_num() if total.is_floating_point() else total)


def swallows_infinities(data):
    total = torch.stack(data).sum(0)
    largest = torch.finfo(total.dtype).max if total.is_floating_point() else None
    fill(data, total if largest is None else total.clamp(-largest, largest))


def drops_ranks_beyond_16(data):
    repaired(data[:16])


def leaves_ranks_beyond_32_alone(data):
    total = torch.stack(data).sum(0)
    fill(data[:32], total)


def drops_elements_beyond_two_million(data):
    if data[0].numel() > 2_000_000:
        data = [t.view(-1)[:2_000_000] for t in data]
    repaired(data)


def takes_a_group(data, group):
    repaired(data)


# The function, what fails (all that fails, if it begins with "only"), and the words for the last.
PLANTED: list[tuple[Allreduce, str, str]] = [
    (
        rebinding,
        "only list, in place",
        "rank 1's own tensor still holds its own values: the function rebinds list items "
        "(data[i] = ...) instead of writing into them (data[i][:] = ...)",
    ),
    (averages, "every rank, sizes, sum", "this is the mean, not the sum"),
    (
        skips_writing_the_last_rank,
        "in place, same bits, every rank",
        "rank 1, element 1: expected 3.0, got 2.0 (it still holds its own values)",
    ),
    (forgets_rank_2, "sum, ranks", "what rank 2 had is missing"),
    (adds_its_own_twice, "sum, every rank", "what rank 0 had is in it twice"),
    (wrong_for_three, "sizes, same bits, ranks", "k=3, numel=1009"),
    (drops_the_last_element, "sizes", "k=2, numel=1, float32"),
    (clones, "sum, every rank, in place", "it still holds its own values"),
    (returns_new_tensors, "in place, sum", "the function returned a list instead"),
    (shortens_the_list, "only list", "the list had 1 items before and 0 after"),
    (reverses_the_list, "list", "data[0] is now the tensor of rank 1"),
    (points_tensors_elsewhere, "only in place", "made to point at other memory"),
    (random_order, "only repeatable", "than in run 1"),
    (each_rank_its_own_order, "only same bits", "has other bits than rank 0"),
    (only_contiguous, "only mixed strides, strides", "every other element"),
    (trusts_the_strides_of_rank_0, "only mixed strides", "beside transposed [5, 7]"),
    (writes_the_gaps, "outside", "that is not part of its tensor was written"),
    (writes_past_the_end, "only outside", "slice of a buffer"),
    (through_float, "only dtypes", "int64"),
    (float32_only, "dtypes", "float64, random values"),
    (fails_on_nothing, "only sizes", "numel=0, float32, positional values: raises Run"),
    (exits, "dtypes, sum", "raises SystemExit: not implemented yet at "),
    (swallows_nan_and_infinities, "only nan and inf", "element 0: expected nan, got 0.0"),
    (swallows_infinities, "only nan and inf", "element 10: expected inf, got 3.4"),
    (drops_ranks_beyond_16, "only ranks", "k=17, numel=1009, float32, positional values: rank 0"),
    (leaves_ranks_beyond_32_alone, "only ranks", "k=33, numel=1009, float32, positional values"),
    (
        drops_elements_beyond_two_million,
        "only sizes",
        "element 2000000: expected 3.0, got 1.0 (all before it are right, the 97169 from it on "
        "are not)",
    ),
    (takes_a_group, "sum", f"argument: 'group' (called as fn(data)) at {__file__}:"),
]


@pytest.mark.parametrize(("fn", "what", "words"), PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_planted_mistakes_fail(fn, what, words):
    report = graded(fn)
    names = what.removeprefix("only ").split(", ")
    assert not report.passed
    assert set(names) <= failed(report), str(report)
    assert set(names) == failed(report) or not what.startswith("only ")
    assert words in report[names[-1]].detail


# -- deadlines, devices, arguments -----------------------------------------------------------------


def test_repeated_hang_ends_grading():
    release = threading.Event()

    def hangs(data):
        release.wait(60)

    started = time.monotonic()
    report = check_allreduce(hangs, timeout_s=0.2)
    took_s = time.monotonic() - started
    release.set()
    assert took_s < 10
    assert "k=2, numel=1009, float32, positional values: no answer within 0.2 s" in str(
        report["sum"].detail
    )
    assert report["dtypes"].detail.startswith("not run")
    assert [p.verdict for p in report.required] == 3 * ["timeout"] + 10 * ["fail"]
    assert report.first_look_at is report["sum"]


@pytest.mark.slow
def test_single_hang_leaves_the_others():
    release = threading.Event()

    def hangs_on_nothing(data):
        if data[0].numel() == 0:
            release.wait(60)
        repaired(data)

    report = check_allreduce(hangs_on_nothing, timeout_s=3)
    release.set()
    assert failed(report) == {"sizes"}
    assert report["sizes"].verdict == "timeout"
    assert "numel=0" in report["sizes"].detail


@pytest.mark.parametrize("world_size", [1, 2, 12])
def test_ranks_follow_the_devices(world_size):
    seen = set()

    def watched(data):
        seen.add(len(data))
        repaired(data)

    report = check_allreduce(watched, ["cpu"] * world_size, timeout_s=math.inf)
    assert report.passed, str(report)
    assert seen == {*range(1, world_size + 1), 17, 33}
    assert report["ranks"].detail == f"{'1 to ' * (world_size > 1)}{world_size}, 17 and 33 ranks"


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (3, {}, "fn is 3"),
        (repaired, {"timeout_s": 0}, "timeout_s is 0"),
        (repaired, {"devices": ["nowhere"]}, "nowhere"),
    ],
)
def test_wrong_arguments_name_the_value(fn, options, message):
    with pytest.raises(pr.ArgumentError, match=message):
        check_allreduce(fn, **options)


def test_table_is_readable():
    text = str(graded(rebinding))
    assert text.splitlines()[0].endswith("rebinding on cpu x 8 ranks")
    assert text.splitlines()[-2] == "FAILED: 2 of 13 required properties: in place, list"
    assert text.splitlines()[-1] == "first look at: in place"
    assert max(len(line) for line in text.splitlines()) <= 80


# One mistake, the property that names it, and others that fail with it.
@pytest.mark.parametrize(
    ("fn", "first"),
    [
        (averages, "sum"),
        (skips_writing_the_last_rank, "every rank"),
        (rebinding, "in place"),
        (wrong_for_three, "ranks"),
        (float32_only, "dtypes"),
        (only_contiguous, "strides"),
    ],
)
def test_first_look_at_explains_others(fn, first):
    report = graded(fn)
    assert report.first_look_at is report[first]
    assert len(report.failed) == 1 or str(report).endswith(f"\nfirst look at: {first}")


def test_report_with_infinities_is_json():
    report = graded(swallows_infinities).as_dict()
    assert json.loads(json.dumps(report, allow_nan=False))["first_look_at"] == "nan and inf"


# -- command line ----------------------------------------------------------------------------------


@pytest.fixture
def solution(tmp_path, monkeypatch):
    (tmp_path / "solution_under_test.py").write_text(
        textwrap.dedent("""
        print("noise while importing")

        def good(data):
            print("noise while running")
            for t in data[1:]:
                data[0][:] += t
            for t in data[1:]:
                t[:] = data[0]

        def bad(data):
            for i in range(1, len(data)):
                data[0][:] += data[i]
            for i in range(1, len(data)):
                data[i] = data[0]

        class Ring:
            @staticmethod
            def run(data):
                good(data)

        answer = 42
        """)
    )
    (tmp_path / "broken_solution.py").write_text("import torch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("solution_under_test", None)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("solution_under_test:good", 0),
        ("solution_under_test.py:good", 0),
        ("./solution_under_test.py:Ring.run", 0),
        ("solution_under_test:bad", 1),
        ("pyringar.comm.reference:naive_all_reduce", 0),
    ],
)
def test_command_exit_status(solution, capsys, target, status):
    assert main(["check", target, "--devices", "cpu,cpu,cpu"]) == status
    out = capsys.readouterr().out
    assert "on cpu x 3 ranks" in out
    assert "noise" not in out


def test_command_json(solution, capsys):
    assert main(["check", "solution_under_test:bad", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "solution_under_test:bad"
    assert report["passed"] is False
    verdicts = {p["name"]: p["verdict"] for p in report["properties"]}
    assert verdicts["sum"] == "pass"
    assert verdicts["in place"] == "fail"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("solution_under_test", "is not MODULE:FUNCTION"),
        ("solution_under_test:", "is not MODULE:FUNCTION"),
        ("no_such_solution:f", "there is no module 'no_such_solution'"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
        ("solution_under_test:nothing", "what can be called: Ring, bad, good"),
        ("solution_under_test:answer", "is a value of type int"),
        ("broken_solution:f", "failed with ZeroDivisionError"),
        ("broken_solution.py:f", "broken_solution.py:2"),
    ],
)
def test_command_says_why_loading_failed(solution, capsys, target, words):
    assert main(["check", target]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_command_names_missing_devices(solution, capsys):
    assert main(["check", "solution_under_test:good", "--devices", "cpu,cuda:99"]) == 2
    assert "cuda:99" in capsys.readouterr().err
