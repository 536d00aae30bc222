"""Are buckets launched after the GPU streams of their gradients?"""

import ctypes

import pytest
import torch
import torch.distributed as dist
from bucketing_nets import inputs, loss_of, make_net
from torch import nn

import pyringar as pr

Start = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
Note = ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_bool)


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class ReadyHook(ctypes.Structure):
    _fields_ = (("self", ctypes.c_void_p), ("start_step", Start), ("note", Note))


class FakeReady:
    def __init__(self, events: list[tuple[str, int]]) -> None:
        self.events = events
        self.kept = ReadyHook(None, Start(lambda _: None), Note(self.note))

    def note(self, _: object, bucket: int, rank: int, is_new: bool) -> bool:
        self.events.append(("gradient", bucket))
        return True

    def make_wait(self, bucket: int, rank: int) -> None:
        self.events.append(("wait", bucket))

    def hook(self) -> object:
        return new_capsule(ctypes.addressof(self.kept), b"pyringar.ready", None)


class FakeGpuGroup:
    def __init__(self, group: object, events: list[tuple[str, int]]) -> None:
        self.group, self.events = group, events

    def make_ready(self, sizes: list[int]) -> FakeReady:
        return FakeReady(self.events)

    def run(self, call, in_flight=None, after=None, what=""):
        if call.operation == "all_reduce":
            self.events.append(("reduce", 0))
        elif call.operation == "all_reduce_coalesced":
            self.events.append(("reduce", -1 if after is None else after[1]))
        return self.group.run(call, in_flight, None, what)

    def __getattr__(self, name: str) -> object:
        return getattr(self.group, name)


def test_bucket_waits_for_streams():
    events, net = [], make_net()
    comm = pr.ProcessCommunicator(dist.HashStore(), 0, 1)
    comm._group = FakeGpuGroup(comm._group, events)
    with comm, pr.GradientBucketer([net], comm=comm, bucket_cap_mb=1e-4) as bucketer:
        buckets = bucketer.buckets
        loss_of(net, inputs(1)[0]).backward()
        bucketer.wait()
    for bucket, params in enumerate(buckets[:-1]):
        wait = events.index(("wait", bucket))
        assert events[:wait].count(("gradient", bucket)) == len(params)
        assert events[wait + 1] == ("reduce", 0)
    # wait() launches the last bucket: torch has joined the current stream with those of backward.
    assert events[-2:] == [("gradient", len(buckets) - 1), ("reduce", 0)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.randn(3, 4), [("reduce", 0)]),
        (lambda: torch.randn(4, 3).t(), [("wait", 0), ("wait", 0), ("reduce", -1)]),
    ],
    ids=["the engine waits", "torch packs on the current stream"],
)
def test_packing_waits_for_streams(make, expected):
    events, weights = [], [nn.Parameter(make()) for _ in range(2)]
    comm = pr.Communicator(["cpu"] * 2)
    comm._group = FakeGpuGroup(comm._group, events)
    with comm, pr.GradientBucketer([[w] for w in weights], comm=comm, overlap=True) as bucketer:
        for weight in weights:
            (torch.ones(2, 3) @ weight).sum().backward()
        bucketer.wait()
    assert events == [("gradient", 0), ("gradient", 0), *expected]
    assert torch.equal(weights[0].grad, weights[1].grad)
