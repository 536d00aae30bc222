"""The repr of every public object says what state it is in."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import pyringar as pr
from pyringar.comm.work import Work


def test_work_shows_failure():
    native = SimpleNamespace(
        is_completed=lambda: True, exception=lambda: pr.PeerLostError("rank 1 is gone")
    )
    expected = "Work(broadcast, failed: PeerLostError: rank 1 is gone)"
    assert repr(Work(native, {}, "broadcast")) == expected


def test_closed_communicator_shows_it():
    comm = pr.Communicator(["cpu"] * 2)
    assert repr(comm).startswith("Communicator(host: ranks [0, 1], algorithm='auto'")
    comm.close()
    assert repr(comm).startswith("Communicator(closed, host: ranks [0, 1]")
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as alone:
        pass
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
