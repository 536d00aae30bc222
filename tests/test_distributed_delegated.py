"""Calls that the backend `ringar` hands to gloo: waits for messages, strided and negated views."""

import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_checks import error_of
from rank_processes import run_group
from torch import Tensor

import pyringar as pr
from pyringar.distributed.torch_works import DelegatedCall


def meet(rank: int, size: int, place: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{r}" for r in range(size)], timedelta(seconds=30))


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(5.0) % 17 + rank


def wait_repeatedly(rank: int, size: int) -> Any:
    tensor = numbers(rank)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    waits: list[Any] = []
    threads = [threading.Thread(target=lambda: waits.append(work.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [waits, work.wait(), work.is_completed(), work.is_success(), work.exception()]
    if rank == 1:
        assert work._source_rank() == 0
    future = work.get_future().wait()
    meet(rank, size, "asked")  # an early exit would fail the waits of the other rank
    return answers, work.result()[0].tolist(), future[0].tolist()


def test_repeated_waits_receive_one_message():
    """A second wait of gloo would wait for another message."""
    expected = numbers(0).tolist()
    answers = [[True] * 3, True, True, True, None]
    assert run_group(wait_repeatedly, 2, timeout_s=10.0) == [(answers, expected, expected)] * 2


def receive_from_each_other(rank: int, size: int) -> Any:
    return error_of(lambda: dist.recv(numbers(rank), 1 - rank))


def test_receive_deadlock_error_has_no_path():
    for kind, _, text, _ in run_group(receive_from_each_other, 2, timeout_s=1.0):
        assert kind in ("CollectiveTimeout", "PeerLostError")
        assert "recv over 2 ranks: rank" in text
        assert ".cc:" not in text


def wait_before_send(rank: int, size: int, how: str) -> Any:
    tensor = numbers(rank)
    if rank == 0:
        meet(rank, size, "waited")
        dist.send(tensor, 1)
        meet(rank, size, "done")
        return None
    work = dist.irecv(tensor, None if how == "any" else 0)
    began = time.monotonic()
    if how == "signal":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            work.wait()
            first = "no error"
        except KeyboardInterrupt:
            first = "KeyboardInterrupt"
    else:
        first = error_of(lambda: work.wait(timedelta(seconds=0.3)))[0]
    waited_s = time.monotonic() - began
    is_completed = work.is_completed()
    meet(rank, size, "waited")
    work.wait()
    meet(rank, size, "done")
    return first, is_completed, waited_s, tensor.tolist()


@pytest.mark.parametrize("how", ["timeout", "any", "signal"])
def test_message_arrives_after_failed_wait(how):
    _, receiver = run_group(wait_before_send, 2, how)
    assert not isinstance(receiver, str), receiver
    first, is_completed, waited_s, got = receiver
    assert first == ("KeyboardInterrupt" if how == "signal" else "CollectiveTimeout")
    assert not is_completed
    assert 0.2 < waited_s < 15, "the group's timeout is 30 s"
    assert got == numbers(0).tolist()


def test_wait_timeout_reaches_gloo_work():
    class Recorded:
        timeouts: list[Any]

        def wait(self, *timeouts: Any) -> bool:
            self.timeouts = list(timeouts)
            return True

    work = Recorded()
    for given, expected in [
        (None, []),
        (2.0, [timedelta(seconds=2)]),
        (0.0, [timedelta(0, 0, 1000)]),
    ]:
        DelegatedCall(work).wait(given)
        assert work.timeouts == expected


def strided(x: Tensor) -> Tensor:
    longer = torch.full((2 * len(x),), 77, dtype=x.dtype)
    longer[::2] = x
    return longer[::2]


DISGUISES = {"strided": strided, "negated": lambda x: torch._neg_view(-x)}


def same(*pairs: tuple[Tensor, Tensor]) -> None:
    for got, expected in pairs:
        assert got.tolist() == expected.tolist()


def disguised(rank: int, size: int, how: str, dtype: torch.dtype) -> None:
    hide = DISGUISES[how]
    parts = [torch.arange(4).to(dtype) + 10 * r for r in range(2)]

    def new() -> Tensor:
        return hide(torch.full((4,), 7).to(dtype))

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
def test_gloo_calls_accept_strided_negated_views(how, dtype):
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


def test_conjugated_and_negated_views_are_reduced():
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


def test_expanded_tensors_raise():
    for texts, whole in run_group(expanded, 2):
        assert all("expanded" in text for text in texts), texts
        assert whole == [3.0] * 4, "the group goes on"
