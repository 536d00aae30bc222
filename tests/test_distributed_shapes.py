"""Do gloo's calls keep index and sign of views, and are expanded tensors refused?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_group
from torch import Tensor

import pyringar as pr


def strided(x: Tensor) -> Tensor:
    longer = torch.full((2 * len(x),), 77, dtype=x.dtype)
    longer[::2] = x
    return longer[::2]


DISGUISES = {"strided": strided, "negated": lambda x: torch._neg_view(-x)}


def same(*pairs: tuple[Tensor, Tensor]) -> None:
    for got, expected in pairs:
        assert got.tolist() == expected.tolist()


def reduce_disguised(rank: int, hide: Callable[[Tensor], Tensor], parts: list[Tensor]) -> None:
    for op, total in (("SUM", parts[0] + parts[1]), ("MAX", torch.maximum(*parts))):
        for x in (hide(parts[rank]) if rank else parts[0].clone(), hide(parts[rank])):
            dist.reduce(x, 0, getattr(dist.ReduceOp, op))
            if rank == 0:
                same((x, total))


def disguised(rank: int, size: int, how: str, dtype: torch.dtype) -> None:
    hide = DISGUISES[how]
    parts = [torch.arange(4).to(dtype) + 10 * r for r in range(2)]

    def new() -> Tensor:
        return hide(torch.full((4,), 7).to(dtype))

    if dtype is torch.float32:
        reduce_disguised(rank, hide, parts)
    for mine in (hide(parts[rank]), parts[rank]):
        rows = [new(), new()]
        dist.gather(mine, rows if rank == 0 else None, 0)
        if rank == 0:
            same(*zip(rows, parts, strict=True))
    for root in range(2):
        into = new()
        dist.scatter(into, [hide(part) for part in parts] if rank == root else None, root)
        same((into, parts[rank]))
    into = new()
    dist.all_to_all_single(into, hide(parts[rank]))
    same((into, torch.cat([part.chunk(2)[rank] for part in parts])))
    into = new()
    if rank == 0:
        dist.send(hide(parts[0]), 1)
    else:
        dist.recv(into, 0)
        same((into, parts[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
@pytest.mark.parametrize("how", DISGUISES)
def test_gloo_calls_keep_index_and_sign(how, dtype):
    assert run_group(disguised, 2, how, dtype, timeout_s=10.0) == [None] * 2


def signs(rank: int, size: int) -> None:
    plain = [torch.tensor([1 - 1j, 2 + 3j]).add(10 * r) for r in range(2)]
    rows = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
    dist.gather(plain[rank].conj(), rows if rank == 0 else None, 0)
    if rank == 0:
        same(*zip(rows, [part.conj() for part in plain], strict=True))
    group = dist.distributed_c10d._get_default_group()
    into = plain[rank].clone().conj()
    group.allreduce([into]).wait()
    same((into, (plain[0] + plain[1]).conj()))
    group.broadcast([into := plain[rank].clone().conj()], 1).wait()
    same((into, plain[1].conj()))
    bits = [torch.arange(1, 5, dtype=torch.int32) + 10 * r for r in range(2)]
    dist.all_reduce(into := torch._neg_view(bits[rank].clone()), dist.ReduceOp.BAND)
    same((into, -bits[0] & -bits[1]))


def test_no_sign_is_lost():
    assert run_group(signs, 2) == [None] * 2


def expanded(rank: int, size: int) -> Any:
    x = torch.tensor([1.0 + rank]).expand(4)
    texts = []
    conjugated = torch.zeros(1, dtype=torch.complex64).expand(4).conj()
    short = torch.zeros(1, dtype=torch.int16).expand(4)
    for call in (
        lambda: dist.all_reduce(short),
        lambda: dist.group.WORLD.allreduce([conjugated]).wait(),
        lambda: dist.broadcast(short, 0),
        lambda: dist.all_gather_into_tensor(short, torch.zeros(4 // size, dtype=torch.int16)),
        lambda: dist.all_gather([x] * size, torch.zeros(4)),
        lambda: dist.reduce_scatter_tensor(short, torch.zeros(4 * size, dtype=torch.int16)),
        lambda: dist.reduce_scatter(x, [torch.zeros(4)] * size),
        lambda: dist.reduce(x, 0),
        lambda: dist.recv(x, 1 - rank),
        lambda: dist.all_to_all_single(x, torch.zeros(4)),
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * size), x),
        lambda: dist.reduce_scatter_tensor(torch.empty(4 // size), x),
    ):
        with pytest.raises(pr.ArgumentError) as raised:
            call()
        texts.append(str(raised.value))
    whole = x.contiguous()
    dist.all_reduce(whole)
    return texts, whole.tolist()


def test_expanded_tensors_are_refused():
    for texts, whole in run_group(expanded, 2):
        assert all("expanded" in text for text in texts), texts
        assert whole == [3.0] * 4, "the group goes on"
