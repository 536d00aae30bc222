"""Do calls between machines end on all ranks: by Ctrl-C, handlers, abort(), lost and late ranks?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Crew

from pyringar.distributed import HierarchicalCommunicator, between, hierarchical
from pyringar.distributed.machines import Column


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def join(rank: int, store: Any, machines: str = "ab", timeout: float = 20.0) -> Any:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    return HierarchicalCommunicator(store, rank, len(machines), timeout=timeout)


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(5.0) % 17 + rank


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "none", ""


def local_errors(rank: int, size: int, store: Any) -> Any:
    comm = join(rank, store)
    tensor = numbers(rank)
    expanded = torch.zeros(1).expand(4)
    errors = [
        error_of(lambda: comm.all_reduce([tensor, expanded], "mean")),
        error_of(lambda: comm.broadcast(expanded, 1)),
    ]
    cat = torch.cat

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory for you")

    torch.cat = refuse  # type: ignore[assignment]
    try:
        errors.append(error_of(lambda: comm.all_reduce([tensor, numbers(rank)])))
    finally:
        torch.cat = cat
    comm.all_reduce(tensor)
    comm.close()
    return errors, tensor.tolist()


def test_local_error_keeps_group(pool):
    for errors, got in pool.check(local_errors):
        expanded, sent, memory = errors
        assert expanded[0] == "ArgumentError"
        assert "tensors[1] of shape (4,) overlaps itself" in expanded[1]
        assert sent[0] == "ArgumentError"
        assert "tensor of shape (4,) overlaps itself" in sent[1]
        assert memory == ("RuntimeError", "no memory for you")
        assert got == (numbers(0) + numbers(1)).tolist(), "the group goes on"


# -- ranks that are lost or late -------------------------------------------------------------------


def unknown_network(rank: int, size: int, store: Any) -> tuple[str, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense0"
    try:
        return error_of(lambda: join(rank, store))
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_unknown_network_is_named(pool):
    for kind, text in pool.check(unknown_network):
        assert kind == "ArgumentError", text
        assert "GLOO_SOCKET_IFNAME is 'nonsense0'" in text


def absent(rank: int, size: int, store: Any) -> tuple[str, str]:
    if rank == 1:
        hierarchical.Column = lambda *_: time.sleep(1.5)
    try:
        return error_of(lambda: join(rank, store, timeout=1.0))
    finally:
        hierarchical.Column = Column


def test_machine_that_does_not_connect_is_named(pool):
    (kind, text), _ = pool.check(absent)
    assert kind == "CollectiveTimeout", text
    assert "machine 1" in text
    assert "has ranks [1]" in text


class SlowColumn(Column):
    """Connections over which 4,000 bytes take 0.3 s."""

    def exchange(self, sent: Any, received: Any) -> Any:
        arrived = super().exchange(sent, received)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in received.values())
        return lambda: (time.sleep(0.3 * nbytes / 4000), arrived())


def slowly(rank: int, size: int, store: Any) -> list[float]:
    between.PIECE_ELEMENTS = 1000
    hierarchical.Column = SlowColumn
    try:
        with join(rank, store, "aabb", timeout=0.5) as comm:
            tensor = numbers(rank).repeat(1000)
            comm.broadcast(tensor, 0)
            return tensor[-5:].tolist()
    finally:
        hierarchical.Column = Column


def test_timeout_counts_time_without_progress():
    with Crew(4) as crew:
        assert crew.check(slowly) == [numbers(0).tolist()] * 4
