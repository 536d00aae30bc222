"""Does the grader tell right from wrong: planted mistakes fail, every sane solution passes?"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pyringar as pr
from pyringar.grading.grader import Report, check_allreduce

Allreduce = Callable[[list[Tensor]], object]


@functools.cache
def graded(fn: Allreduce) -> Report:
    return check_allreduce(fn)


def fill(data, total):
    for tensor in data:
        tensor.copy_(total)


# -- functions that are right ----------------------------------------------------------------------


def rebinding(data):
    """The book's allreduce: its second loop rebinds entries of the list."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)


def repaired(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def stacked(data):
    fill(data, torch.stack(data).sum(0))


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


def ours(data):
    pr.allreduce(data)


@pytest.mark.parametrize("fn", [repaired, stacked, chunked_ring, ours])
def test_sane_solutions_pass(fn):
    report = graded(fn)
    assert report.passed, str(report)
    assert {p.verdict for p in report.properties} == {"pass", "reported"}


# -- functions that are wrong ----------------------------------------------------------------------


def forgets_rank_2(data):
    fill(data, torch.stack([t for i, t in enumerate(data) if i != 2]).sum(0))


def adds_its_own_twice(data):
    total = torch.stack(data).sum(0)
    for tensor in data:
        tensor += total


def shortens_the_list(data):
    repaired(data)
    data.pop()


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


def float32_only(data):
    fill(data, torch.stack([t.float() for t in data]).sum(0))


def exits(data):
    sys.exit("not implemented yet")


def leaves_ranks_beyond_32_alone(data):
    total = torch.stack(data).sum(0)
    fill(data[:32], total)


def drops_elements_beyond_two_million(data):
    if data[0].numel() > 2_000_000:
        data = [t.view(-1)[:2_000_000] for t in data]
    repaired(data)


def takes_a_group(data, group):
    repaired(data)


def averages(data):
    repaired(data)
    for tensor in data:
        tensor.copy_(tensor / len(data))


def skips_writing_the_last_rank(data):
    fill(data[: max(1, len(data) - 1)], torch.stack(data).sum(0))


def wrong_for_three(data):
    repaired(data)
    if len(data) == 3:
        data[2] += 1


def fails_on_nothing(data):
    data[0].max()
    repaired(data)


def swallows_nan_and_infinities(data):
    total = torch.stack(data).sum(0)
    fill(data, total.nan_to_num() if total.is_floating_point() else total)


# The function, what fails (all that fails, if it begins with "only"), and the words for the last.
PLANTED: list[tuple[Allreduce, str, str]] = [
    (rebinding, "only list, in place", "rank 1's own tensor still holds its own values"),
    (averages, "every rank, sizes, sum", "this is the mean, not the sum"),
    (skips_writing_the_last_rank, "in place, same bits, every rank", "expected 3.0, got 2.0 (it"),
    (forgets_rank_2, "sum, ranks", "what rank 2 had is missing"),
    (adds_its_own_twice, "sum, every rank", "what rank 0 had is in it twice"),
    (wrong_for_three, "sizes, same bits, ranks", "k=3, numel=1009"),
    (shortens_the_list, "only list", "the list had 1 items before and 0 after"),
    (points_tensors_elsewhere, "only in place", "made to point at other memory"),
    (random_order, "only repeatable", "than in run 1"),
    (each_rank_its_own_order, "only same bits", "has other bits than rank 0"),
    (only_contiguous, "only mixed strides, strides", "every other element"),
    (trusts_the_strides_of_rank_0, "only mixed strides", "beside transposed [5, 7]"),
    (writes_the_gaps, "outside", "that is not part of its tensor was written"),
    (float32_only, "dtypes", "float64, random values"),
    (fails_on_nothing, "only sizes", "numel=0, float32, positional values: raises Run"),
    (exits, "dtypes, sum", "raises SystemExit: not implemented yet at "),
    (swallows_nan_and_infinities, "only nan and inf", "element 0: expected nan, got 0.0"),
    (leaves_ranks_beyond_32_alone, "only ranks", "k=33, numel=1009, float32, positional values"),
    (drops_elements_beyond_two_million, "only sizes", "element 2000000: expected 3.0, got 1.0"),
    (takes_a_group, "sum", f"argument: 'group' (called as fn(data)) at {__file__}:"),
]


@pytest.mark.parametrize(("fn", "what", "words"), PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_planted_mistakes_fail(fn, what, words):
    report = graded(fn)
    names = what.removeprefix("only ").split(", ")
    assert not report.passed
    assert set(names) <= {p.name for p in report.failed}, str(report)
    assert len(names) == len(report.failed) or not what.startswith("only ")
    assert words in report[names[-1]].detail
    assert max(len(line) for line in str(report).splitlines()) <= 80
    if fn is rebinding:
        assert str(report).endswith("properties: in place, list\nfirst look at: in place")


# -- deadlines, devices, arguments -----------------------------------------------------------------


def test_repeated_hang_ends_grading():
    release = threading.Event()
    started = time.monotonic()
    report = check_allreduce(lambda data: release.wait(60), timeout_s=0.2)
    took_s = time.monotonic() - started
    release.set()
    assert took_s < 10
    assert "numel=1009, float32, positional values: no answer within" in report["sum"].detail
    assert report["dtypes"].detail.startswith("not run")
    assert [p.verdict for p in report.required] == 3 * ["timeout"] + 10 * ["fail"]
    assert report.first_look_at is report["sum"]


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


def test_wrong_arguments_are_named():
    with pytest.raises(pr.ArgumentError, match="fn is 3"):
        check_allreduce(3)
    with pytest.raises(pr.ArgumentError, match="timeout_s is 0"):
        check_allreduce(repaired, timeout_s=0)
