"""Cases of ``test_distributed.py``: each case runs on every rank of a ``ringar`` group.

Every rank computes the inputs of all ranks and the expected result.
"""

import re
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pyringar as pr

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHER_DTYPES = (torch.bool, torch.int16, torch.complex64, torch.complex128, *FLOAT8)
ALL_DTYPES = (*oracle.DTYPES, *OTHER_DTYPES)

Case = Callable[[int, int], None]


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    if dtype is torch.bool:
        return oracle.positional(numel, torch.int32, rank) % 3 == 0
    if dtype.is_complex:
        real = dtype.to_real()
        return torch.complex(
            oracle.random(numel, real, 2 * rank, specials=False),
            oracle.random(numel, real, 2 * rank + 1, specials=False),
        )
    if dtype in FLOAT8:
        return (oracle.positional(numel, torch.float32, rank) / 8).to(dtype)
    if dtype not in oracle.DTYPES:
        return oracle.positional(numel, dtype, rank)
    return oracle.random(numel, dtype, rank)


def assert_equal(actual: Tensor, expected: Tensor, context: object = "") -> None:
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if actual.dtype in (torch.bool, torch.uint8, *FLOAT8):
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    oracle.assert_bits(actual, expected, context)


def is_process_group_ours() -> bool:
    """Return True up to torch 2.13; later, the group is a `dist.ProcessGroup` of torch."""
    return type(dist.group.WORLD) is not dist.ProcessGroup


def raises(kind: type[BaseException], text: str) -> Any:
    return pytest.raises(kind, match=re.escape(text))


def finish(call: Callable[..., Any], how: str, *args: Any, **kwargs: Any) -> None:
    if how == "sync":
        assert call(*args, **kwargs) is None
        return
    work = call(*args, async_op=True, **kwargs)
    if how == "future":
        work.get_future().wait()
    elif how == "poll":
        future = work.get_future()
        while not future.done():
            pass
    else:
        work.wait()


def coalesced(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    for how in ("sync", "async"):
        mixed = [torch.full((n,), 1.0 + rank) for n in (0, 1, 70000)]
        mixed[1].requires_grad_(rank == 0)
        finish(dist.all_reduce_coalesced, how, mixed)
        assert all((t == total).all() for t in mixed)
    for async_ops in (False, True):
        reduced = [torch.full((n,), 1.0 + rank) for n in (3, 4)]
        gathered = [torch.empty(size * n) for n in (3, 4)]
        scattered = [torch.empty(n) for n in (3, 4)]
        ranks = [torch.full((n,), float(rank)) for n in (3, 4)]
        wholes = [torch.full((size * n,), 1.0 + rank) for n in (3, 4)]
        for call, *arguments in (
            (dist.all_reduce, reduced),
            (dist.all_gather_into_tensor, gathered, ranks),
            (dist.reduce_scatter_tensor, scattered, wholes),
        ):
            with dist.distributed_c10d._coalescing_manager(async_ops=async_ops) as works:
                for each in zip(*arguments, strict=True):
                    call(*each)
            if async_ops:
                works.wait()
        assert all((t == total).all() for t in [*reduced, *scattered])
        assert all(t.view(size, -1)[:, 0].tolist() == list(range(size)) for t in gathered)


def delegated(rank: int, size: int) -> None:
    for dtype in ALL_DTYPES:
        parts = [values(4 * size, dtype, r) for r in range(size)]
        rows = [torch.empty_like(parts[0]) for _ in range(size)] if rank == 0 else None
        dist.gather(parts[rank], rows)
        if rows is not None:
            assert_equal(torch.stack(rows), torch.stack(parts), dtype)
        out = torch.empty(4, dtype=dtype)
        dist.scatter(out, list(parts[0].chunk(size)) if rank == 0 else None)
        assert_equal(out, parts[0].chunk(size)[rank], dtype)
        exchanged = torch.empty_like(parts[0])
        dist.all_to_all_single(exchanged, parts[rank])
        expected = torch.cat([p.chunk(size)[rank] for p in parts])
        assert_equal(exchanged, expected, dtype)
        if rank == 0:
            dist.send(parts[0], 1)
        elif rank == 1:
            received = torch.empty_like(parts[0])
            if is_process_group_ours():
                assert dist.recv(received) == 0
            else:  # torch's ProcessGroup does not return the source rank
                with raises(pr.UnsupportedError, "needs src"):
                    dist.recv(received)
                dist.recv(received, 0)
            assert_equal(received, parts[0], dtype)


def messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, theirs = torch.tensor([float(rank)]), torch.empty(1)
    work = dist.isend(mine, after)
    dist.recv(theirs, before)
    work.wait()
    assert theirs.item() == before
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, theirs, before)]
    )
    for request in requests:
        request.wait()
    assert theirs.item() == before
    # A barrier may run while a message between two ranks is pending.
    if rank == 0:
        work = dist.isend(mine, 1, tag=7)
    dist.barrier()
    if rank == 0:
        work.wait()
    if rank == 1:
        dist.recv(theirs, 0, tag=7)


def writes_are_counted(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bool, torch.complex64):
        for step in (1, 2):
            for i, (call, written, read) in enumerate(calls_and_tensors(rank, size, dtype, step)):
                before = [t._version for t in (*written, *read)]
                call()
                grew = [t._version > v for t, v in zip((*written, *read), before, strict=True)]
                assert grew == [True] * len(written) + [False] * len(read), (i, dtype, step)


def calls_and_tensors(rank: int, size: int, dtype: torch.dtype, step: int) -> list[Any]:
    """Return calls, each with the tensors that it writes and the tensors that it reads."""

    def new(numel: int) -> Tensor:
        return torch.zeros(numel * step, dtype=dtype)[::step]

    one, whole = new(3), new(3 * size)
    rows, row = [new(3) for _ in range(size)], [new(3) for _ in range(size)]
    at_root = rows if rank == 0 else []
    message = dist.recv if rank == 0 else dist.send
    calls: list[tuple[Callable[[], object], list[Tensor], list[Tensor]]] = [
        (lambda: dist.all_gather(rows, one), rows, [one]),
        (lambda: dist.reduce_scatter(one, rows), [one], rows),
        (lambda: dist.gather(one, at_root or None), at_root, [one]),
        (lambda: dist.scatter(one, at_root or None), [one], at_root),
        (lambda: dist.all_to_all_single(whole, new(3 * size)), [whole], []),
    ]
    if torch.__version__.split(".")[:2] >= ["2", "14"]:  # no all_to_all in gloo of 2.11
        calls.append((lambda: dist.all_to_all(rows, row), rows, row))
    if rank < 2 <= size:
        calls.append((lambda: message(one, 1 - rank), [one][rank:], [one][:rank]))
    return calls


def groups(rank: int, size: int) -> None:
    pair = dist.new_group([0, 1])
    last = dist.new_group([size - 1], backend="ringar")
    if rank < 2:
        mine = torch.tensor([1.0 + rank])
        dist.all_reduce(mine, group=pair)
        assert mine.item() == 3.0
        assert dist.get_backend(pair) == "ringar"
        dist.destroy_process_group(pair)
    if rank == size - 1:
        mine = torch.tensor([5.0])
        dist.all_reduce(mine, group=last)
        dist.all_gather([mine], mine.clone(), group=last)
        assert mine.item() == 5.0
    again = dist.new_group(list(range(size)), timeout=None)
    mine = torch.tensor([1])
    dist.all_reduce(mine, group=again)
    assert mine.item() == size


def functional(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    mine = torch.full((4,), 1.0 + rank)
    total = size * (size + 1) / 2
    assert (funcol.all_reduce(mine, "sum", group) == total).all()
    assert (funcol.all_reduce(mine, "avg", group) == total / size).all()
    assert (mine == 1.0 + rank).all()
    gathered = funcol.all_gather_tensor(mine, 0, group)
    assert gathered.view(size, 4)[:, 0].tolist() == [1.0 + r for r in range(size)]
    scattered = funcol.reduce_scatter_tensor(torch.ones(size * 3), "sum", 0, group)
    assert scattered.tolist() == [float(size)] * 3
    assert funcol.broadcast(mine, 0, group).tolist() == [1.0] * 4
    swapped = funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    assert swapped.tolist() == list(range(size))


def mistakes(rank: int, size: int) -> None:
    if is_process_group_ours():  # torch's ProcessGroup raises another error
        with raises(pr.UnsupportedError, "this one is on meta"):
            dist.all_reduce(torch.empty(3, device="meta"))
    with raises(pr.UnsupportedError, "mean"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)
    with raises(pr.UnsupportedError, "PREMUL"):
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))
    with raises(pr.ArgumentError, "one per rank"):
        dist.all_gather([torch.empty(1)] * (size + 1), torch.empty(1))
    with raises(pr.ArgumentError, "reduce_scatter"):
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size + 1))
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [float(size)] * 2


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        coalesced,
        delegated,
        messages,
        writes_are_counted,
        groups,
        functional,
        mistakes,
    )
}
