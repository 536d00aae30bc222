"""The repr of every public object says what state it is in."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar.comm.work import Work


def ones(k: int = 2, n: int = 4) -> list[torch.Tensor]:
    return [torch.ones(n) for _ in range(k)]


@pytest.fixture
def comm():
    with pr.Communicator(["cpu"] * 2, timeout=5) as made:
        yield made


@pytest.mark.parametrize(
    ("native", "text"),
    [
        ({"is_completed": False, "exception": None}, "Work(broadcast, pending)"),
        ({"is_completed": True, "exception": None}, "Work(broadcast, done)"),
        (
            {"is_completed": True, "exception": pr.PeerLostError("rank 1 is gone")},
            "Work(broadcast, failed: PeerLostError: rank 1 is gone)",
        ),
    ],
)
def test_work_shows_failure(native, text):
    fake = SimpleNamespace(**{name: partial(lambda x: x, value) for name, value in native.items()})
    assert repr(Work(fake, {}, "broadcast")) == text


def test_closed_communicator_shows_it(comm):
    assert repr(comm).startswith("Communicator(host: ranks [0, 1], algorithm='auto'")
    comm.close()
    assert repr(comm).startswith("Communicator(closed, host: ranks [0, 1]")
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as alone:
        assert repr(alone).startswith("ProcessCommunicator(rank 0 of 1, ")
    assert repr(alone).startswith("ProcessCommunicator(closed, rank 0 of 1, ")


def test_repr_of_bucketer():
    replicas = pr.replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["cpu"] * 2)
    with pr.GradientBucketer(replicas, overlap=True) as bucketer:
        head = "GradientBucketer(world size 2, parameters: 4, buckets: 1, "
        assert repr(bucketer) == f"{head}waits for backward)"
        replicas[0](torch.ones(1, 2)).sum().backward()
        assert repr(bucketer) == f"{head}backward has begun)"
        replicas[1](torch.ones(1, 2)).sum().backward()
        assert repr(bucketer) == f"{head}1 of 1 buckets launched)"
        bucketer.wait()
        assert repr(bucketer) == f"{head}waits for backward)"
    assert repr(bucketer) == f"{head}closed)"
