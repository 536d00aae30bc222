"""Background calls, and the calls of a closed group, over the CPU transports."""

from __future__ import annotations

import gc

import pytest
import torch
from pairs import K, make_pair

import pyringar as pr


@pytest.fixture(params=["threads", "processes"])
def pair(request):
    with make_pair(request.param) as made:
        yield made


def ranks(numel):
    return [torch.arange(numel, dtype=torch.float32) + rank for rank in range(K)]


def begin(pair, tensors):
    begun = pair.all_reduce(tensors, async_op=True)
    return begun if isinstance(begun, list) else [begun]


def test_background_calls_run_in_order(pair):
    tensors = ranks(300_000)
    want = tensors[0] + tensors[1]
    works = [work for _ in range(5) for work in begin(pair, tensors)]
    pair.all_reduce(tensors)  # the sixth
    assert torch.equal(tensors[0], want * 32)
    for work in works:
        assert work.wait() is True
        assert work.is_completed()
        assert work.exception() is None


def test_dropped_works_keep_their_tensors(pair):
    for _ in range(30):
        begin(pair, [torch.ones(200_000) for _ in range(K)])
        gc.collect(0)
    kept = [torch.ones(300_000) for _ in range(K)]
    pair.all_reduce(kept)
    assert torch.equal(kept[1], torch.full((300_000,), 2.0))


def test_close_ends_background_calls(pair):
    tensors = ranks(500_000)
    want = tensors[0] + tensors[1]
    works = begin(pair, tensors)
    pair.close()
    assert all(work.is_completed() for work in works)
    assert torch.equal(tensors[1], want)
    pair.close()


def test_closed_group_refuses_calls(pair):
    two, four = ranks(2), ranks(4)
    lists = [[tensor] for tensor in two]
    prepared = ranks(3)
    pair.all_reduce(prepared)
    calls = [
        lambda: pair.all_reduce(prepared),
        pair.bind(two),
        pair.bind_coalesced(lists),
        lambda: pair.all_reduce(two),
        lambda: pair.all_reduce(two, async_op=True),
        lambda: pair.all_reduce_coalesced(lists),
        lambda: pair.reduce_scatter(two, four),
        lambda: pair.all_gather(four, two),
        lambda: pair.broadcast(two),
        lambda: pair.bind(two),
        lambda: pair.bind_coalesced(lists),
        pair.check,
    ]
    if isinstance(pair, pr.Communicator):
        calls += [
            lambda: pair.all_reduce(two, algorithm="naive"),
            lambda: pair.broadcast_coalesced(lists),
            lambda: pair.reduce(two[0], two),
            lambda: pair.reduce_coalesced(two[:1], lists),
        ]
    pair.close()
    for call in calls:
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert all(map(torch.equal, two, ranks(2)))
    assert [tensor._version for tensor in two] == [0] * K
