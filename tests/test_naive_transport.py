"""A transport written in one file keeps the promises of the public calls."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from naive_transport import NaiveTransport

import pyringar as pr

RANKS = 3


def made(rank: int, numel: int = 12, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return oracle.random(numel, dtype, rank)


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.ranks(RANKS)
def test_reductions_match_oracle(op):
    rank = dist.get_rank()
    with NaiveTransport() as comm:
        tensors = [made(rank), made(rank, 5, torch.int8).view(5, 1)]
        comm.all_reduce_coalesced(tensors, op)
        comm.all_reduce(own := made(rank), op)
        comm.reduce_scatter(part := torch.empty(4, dtype=torch.bfloat16), made(rank), op)
    wanted = oracle.reduced([made(r) for r in range(RANKS)], op)
    oracle.assert_bits(own, wanted, op)
    oracle.assert_bits(tensors[0], wanted, op)
    oracle.assert_bits(part, wanted[4 * rank : 4 * rank + 4], op)
    of_bytes = oracle.reduced([made(r, 5, torch.int8) for r in range(RANKS)], op)
    oracle.assert_bits(tensors[1].view(-1), of_bytes, op)


@pytest.mark.ranks(RANKS)
def test_copies_match_sources():
    rank = dist.get_rank()
    comm = NaiveTransport()
    comm.all_gather(whole := torch.empty(36, dtype=torch.bfloat16), made(rank))
    work = comm.broadcast(own := made(rank), 2, async_op=True)
    assert work is not None
    assert work.wait()
    comm.barrier()
    oracle.assert_bits(whole, torch.cat([made(r) for r in range(RANKS)]), "all_gather")
    oracle.assert_bits(own, made(2), "broadcast")


@pytest.mark.ranks(2)
def test_missing_features_name_alternatives():
    comm, tensor = NaiveTransport(), torch.ones(2)
    for call, words in (
        (lambda: comm.bind(tensor), "bind: a NaiveTransport does not offer this; take all_reduce"),
        (lambda: comm.reduce(tensor, [tensor]), "reduce: .*; take all_reduce"),
        (lambda: comm.broadcast_coalesced([tensor]), "broadcast_coalesced: .*; take broadcast"),
        (lambda: comm.plan(8), "plan: "),
    ):
        with pytest.raises(pr.UnsupportedError, match=words):
            call()
    with pytest.raises(pr.ArgumentError, match="order is 'tree': it adds in rank order"):
        comm.all_reduce(tensor, order="tree")
    with pytest.raises(pr.ArgumentError, match=r"root is 2, expected a rank from 0 to 1"):
        comm.broadcast(tensor, 2)
