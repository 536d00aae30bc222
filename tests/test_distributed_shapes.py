"""Does torch.distributed go by index and sign, whatever tensors' shapes, strides and views?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_group
from torch import Tensor

import pyringar as pr

# What ranks 0 and 1 pass; elements correspond by index.
SHAPES = {
    "scalar and vector": ((), (1,)),
    "flat and square": ((4,), (2, 2)),
    "wide and tall": ((2, 6), (6, 2)),
    "with ones": ((3, 1, 2), (1, 6)),
}
LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
}


def filled(rank: int, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) * 3 % 17 + 10 * rank).float().reshape(shape)


def reduce_and_copy(rank: int, size: int, shapes: Any) -> Any:
    found = {}
    for how in ("sync", "async"):
        reduced, copied = filled(rank, shapes[rank]), filled(rank, shapes[rank])
        for call in (
            lambda x=reduced, **k: dist.all_reduce(x, **k),
            lambda x=copied, **k: dist.broadcast(x, 1, **k),
        ):
            if how == "sync":
                call()
            else:
                call(async_op=True).wait()
        found[how] = reduced.shape, reduced.flatten().tolist(), copied.flatten().tolist()
    return found


@pytest.mark.parametrize("what", SHAPES)
def test_shapes(what):
    shapes = SHAPES[what]
    results = run_group(reduce_and_copy, 2, shapes)
    parts = [filled(rank, shapes[rank]).flatten() for rank in range(2)]
    for rank, found in enumerate(results):
        for shape, reduced, copied in found.values():
            assert shape == torch.Size(shapes[rank])
            assert reduced == (parts[0] + parts[1]).tolist()
            assert copied == parts[1].tolist()


def reduce_layouts(rank: int, size: int) -> Any:
    """One rank's elements lie in another order; that of another dtype is copied on the way."""
    found = {}
    for name, layout in LAYOUTS.items():
        for dtype in (torch.float32, torch.int16):
            plain = filled(rank, (3, 4)).to(dtype)
            for root in (None, 0, 1):
                x = layout(plain) if rank == 0 else plain.clone()
                if root is None:
                    dist.all_reduce(x)
                else:
                    dist.broadcast(x, root)
                found[name, dtype, root] = x.tolist()
    image = filled(rank, (2, 3, 4, 5))
    if rank == 1:
        image = image.to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    dist.all_reduce_coalesced([image]) if hasattr(dist, "all_reduce_coalesced") else None
    found["image"] = image.tolist()
    return found


def test_elements_correspond_by_index():
    results = run_group(reduce_layouts, 2)
    parts = [filled(rank, (3, 4)) for rank in range(2)]
    image = sum(filled(rank, (2, 3, 4, 5)) for rank in range(2))
    for found in results:
        assert not isinstance(found, str), found
        assert found.pop("image") == (2 * image).tolist()
        for (name, dtype, root), values in found.items():
            expected = parts[0] + parts[1] if root is None else parts[root]
            assert values == expected.to(dtype).tolist(), (name, dtype, root)


def strided(x: Tensor) -> Tensor:
    """The same numbers, every other one of a longer tensor's."""
    longer = torch.full((2 * len(x),), 77, dtype=x.dtype)
    longer[::2] = x
    return longer[::2]


DISGUISES = {"strided": strided, "negated": lambda x: torch._neg_view(-x)}


def same(*pairs: tuple[Tensor, Tensor]) -> None:
    for got, expected in pairs:
        assert got.tolist() == expected.tolist()


def reduce_disguised(rank: int, hide: Callable[[Tensor], Tensor], parts: list[Tensor]) -> None:
    """Disguised on one rank, and on both."""
    for op, total in (("SUM", parts[0] + parts[1]), ("MAX", torch.maximum(*parts))):
        for x in (hide(parts[rank]) if rank else parts[0].clone(), hide(parts[rank])):
            dist.reduce(x, 0, getattr(dist.ReduceOp, op))
            if rank == 0:
                same((x, total))


def disguised(rank: int, size: int, how: str, dtype: torch.dtype) -> None:
    """What gloo does, two ranks: it would go by memory, past the tensor's end or without a sign."""
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
    first = 2 * rank
    same((into, torch.cat([part[first : first + 2] for part in parts])))
    if torch.__version__.split(".")[:2] >= ["2", "14"]:  # torch 2.11's gloo has no such call
        rows = [new(), new()]
        dist.all_to_all(rows, [hide(parts[rank])] * 2)
        same(*zip(rows, parts, strict=True))
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


def conjugated(rank: int) -> Tensor:
    return torch.tensor([1 + 1j, 2 - 3j]).add(10 * rank).conj()


def signs(rank: int, size: int) -> None:
    """Of calls that gloo and the engine do, two ranks."""

    def same(got: Tensor, expected: Tensor) -> None:
        got, expected = (t.resolve_neg().resolve_conj().tolist() for t in (got, expected))
        assert got == expected

    def negated(rank: int, dtype: torch.dtype) -> Tensor:
        return torch._neg_view(torch.tensor([1, 2, 3, 4], dtype=dtype) + 10 * rank)

    rows = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
    dist.gather(conjugated(rank), rows if rank == 0 else None, 0)
    if rank == 0:
        same(torch.stack(rows), torch.stack([conjugated(0), conjugated(1)]))
    into = negated(rank, torch.int32)
    dist.all_reduce(into, dist.ReduceOp.BAND)
    same(into, negated(0, torch.int32).clone() & negated(1, torch.int32).clone())
    into = negated(rank, torch.int16)
    dist.broadcast(into, 0)
    same(into, negated(0, torch.int16))
    group = dist.distributed_c10d._get_default_group()
    into = conjugated(rank)  # the functions of torch.distributed refuse it
    group.allreduce([into]).wait()
    same(into, conjugated(0).resolve_conj() + conjugated(1).resolve_conj())
    into = conjugated(rank)
    group.broadcast([into], 1).wait()
    same(into, conjugated(1))


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


def differ(rank: int, size: int) -> Any:
    with pytest.raises(pr.ArgumentError) as raised:
        pr.ProcessCommunicator(name="strict").all_reduce(torch.ones((4,) if rank else (2, 2)))
    return str(raised.value)


def test_communicator_compares_shapes():
    assert all("4 float32" in text for text in run_group(differ, 2))
