"""GradientBucketer with one rank per process: bits, launch order, failures."""

import ctypes
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from bucketing_nets import (
    EACH,
    NETS,
    Explode,
    TwoLayers,
    armed,
    assert_closed,
    assert_steps,
    error_of,
    grads_of,
    inputs,
    loss_of,
    make_net,
    step_of,
)
from case_marks import mostly_slow
from torch import Tensor, nn

import pyringar as pr


class Fragile(TwoLayers):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.two(Explode.apply(x, "here") if self.where == "middle" else x)
        return Explode.apply(x, "here") if self.where == "end" else x


@contextmanager
def bucketer_of(store, rank, world_size, net, options, **comm_options):
    with (
        pr.ProcessCommunicator(store, rank, world_size, **comm_options) as comm,
        pr.GradientBucketer([net], comm=comm, **options) as bucketer,
    ):
        yield bucketer


def steps(nets, ranks, world_size, bucketer):
    found = []
    for seed in range(4):
        for net, rank in zip(nets, ranks, strict=True):
            net.zero_grad(set_to_none=seed % 2 == 0)
            loss_of(net, inputs(world_size, seed)[rank]).backward()
        bucketer.wait()
        found.append([grads_of(net) for net in nets])
    return [list(mine) for mine in zip(*found, strict=True)]


def steps_as_rank(rank, world_size, store, name, options):
    net = NETS[name]()
    with bucketer_of(store, rank, world_size, net, options, order="rank") as bucketer:
        return steps([net], [rank], world_size, bucketer)[0], bucketer.buckets


@pytest.mark.parametrize("world_size", mostly_slow([2, 3], 2))
@pytest.mark.parametrize("name", NETS)
def test_process_ranks_match_local_bits(rank_group_of, name, world_size):
    late, mean = {**EACH, "overlap": False}, {"bucket_cap_mb": 2e-3, "op": "mean"}
    for options in ({}, EACH, late, mean):
        nets = [NETS[name]() for _ in range(world_size)]
        with pr.GradientBucketer(nets, **options) as bucketer:
            wanted = steps(nets, range(world_size), world_size, bucketer)
        answers = rank_group_of(world_size).check(steps_as_rank, name, options)
        for rank, (got, buckets) in enumerate(answers):
            assert_steps(got, wanted[rank])
            assert buckets == answers[0][1]


def plan_and_times(rank, world_size, store):
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
    with bucketer_of(store, rank, world_size, net, EACH) as bucketer:
        for _ in range(2):
            net.zero_grad()
            out = torch.randn(4, 6)
            for name in "cab" if rank == 0 else "bca":
                out = torch.tanh(net[name](out))
            out.sum().backward()
            launched = repr(bucketer)
            bucketer.wait()
        return bucketer.buckets, bucketer.stats(), launched


def test_buckets_launch_in_order_of_rank_0(rank_group_of):
    answers = rank_group_of(2).check(plan_and_times)
    assert answers[0][0] == answers[1][0]
    # Rank 0 runs layers c, a, b. Its backward reaches b (parameters 2, 3) first, then a, then c.
    assert [bucket[0] // 2 for bucket in answers[0][0]] == [1, 1, 0, 0, 2, 2]
    for _, stats, launched in answers:
        times = [bucket.launched_s for bucket in stats.buckets]
        assert times == sorted(times)
        assert all(b.ready_s <= b.launched_s <= b.done_s for b in stats.buckets)
        assert "5 of 6 buckets launched" in launched, "wait() launches the last bucket"


def test_two_threads_launch_each_bucket_once():
    comm = pr.ProcessCommunicator(dist.HashStore(), 0, 1)
    params = [nn.Parameter(torch.zeros(8)) for _ in range(8)]
    plain, sizes = comm.all_reduce_coalesced, []

    def launch(tensors, *arguments, **options):
        sizes.append(len(tensors))
        if len(sizes) == 1:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(lambda: torch.stack(params[:4]).sum().backward()).result(60)
        return plain(tensors, *arguments, **options)

    with comm, pr.GradientBucketer([params], comm=comm, **EACH) as bucketer:
        comm.all_reduce_coalesced = launch
        torch.stack(params[4:]).sum().backward()
        assert sizes == [2] * (len(bucketer.buckets) - 1), "wait() launches the last bucket"
        bucketer.wait()
        assert sizes == [2] * len(bucketer.buckets)
        assert all(torch.equal(param.grad, torch.ones(8)) for param in params)


DIFFERENCES = {  # a change of rank 1's net, or options of rank 1
    "number": lambda net: net.append(nn.Linear(5, 5)),
    "shape": lambda net: setattr(net, "0", nn.Linear(7, 30)),
    "dtype": lambda net: net[4].double(),
    "cap": {"bucket_cap_mb": 7},
    "op": {"op": "mean"},
}


def differ_as_rank(rank, world_size, store, setting):
    net, change, options = make_net(), DIFFERENCES[setting], EACH
    if rank == 1 and callable(change):
        change(net)
    elif rank == 1:
        options = EACH | change
    with pr.ProcessCommunicator(store, rank, world_size) as comm:
        return error_of(lambda: pr.GradientBucketer([net], comm=comm, **options))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("number", "rank 1 has 8 parameters, but rank 0 has 6 parameters"),
        (
            "shape",
            "has parameter 0 of (30, 7) torch.float32, but rank 0 has parameter 0 of (30, 6) ",
        ),
        (
            "dtype",
            "has parameter 4 of (5, 40) torch.float64, but rank 0 has parameter 4 of (5, 40) ",
        ),
        ("cap", "has bucket_cap_mb 7, but rank 0 has bucket_cap_mb 1e-06"),
        ("op", "rank 1 has op mean, but rank 0 has op sum: expected the same"),
    ],
)
def test_mismatched_settings_name_rank(rank_group_of, setting, words):
    answers = rank_group_of(2).check(differ_as_rank, setting)
    assert words in answers[0][1]
    assert [kind for kind, _ in answers] == [pr.ArgumentError] * 2


def test_wrong_arguments_raise():
    net = make_net()
    with pr.ProcessCommunicator(dist.HashStore(), 0, 1) as comm:
        with pytest.raises(pr.ArgumentError, match="replicas has 2 entries"):
            pr.GradientBucketer([net, net], comm=comm)
        with pytest.raises(pr.UnsupportedError, match="op is 'max'"):
            pr.GradientBucketer([net], comm=comm, op="max")
        with torch.device("meta"):  # buckets must not depend on the default device
            pr.GradientBucketer([net], comm=comm).close()
        comm.barrier()  # comm is still usable


def fail_step(net: Fragile, bucketer: pr.GradientBucketer, x: Tensor, how: str) -> None:
    net.zero_grad()
    if how == "middle":
        with armed("here"):
            loss_of(net, x).backward()
        return
    loss_of(net, x).backward()
    if how == "close":
        bucketer.close()
    elif how == "signal":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            bucketer.wait()
    else:
        net.zero_grad(set_to_none=how != "zero")
        if how == "no wait":
            assert "of rank 1 got a gradient" in error_of(loss_of(net, x).backward)[1]
        else:
            assert "of rank 1 was changed or cleared" in error_of(bucketer.wait)[1]


def fail_as_rank(rank, world_size, store, how):
    net = Fragile(how)
    xs = [inputs(world_size, seed)[rank] for seed in range(3)]
    with bucketer_of(store, rank, world_size, net, EACH, timeout=20.0, order="rank") as bucketer:
        step_of(net, bucketer, xs[0])
        began, error = time.monotonic(), (None, "")
        if rank == 1:
            fail_step(net, bucketer, xs[1], how)
        else:
            if how == "signal":
                time.sleep(1)  # so that rank 1 waits for this rank when rank 1's signal arrives
            error = error_of(lambda: step_of(net, bucketer, xs[1]))
        seconds = time.monotonic() - began
        assert_closed(bucketer, [net], "")
    with bucketer_of(store, rank, world_size, net, EACH, order="rank") as bucketer:
        step_of(net, bucketer, xs[1])
        return error, seconds, grads_of(net)


@pytest.mark.parametrize("how", ["middle", "clear", "zero", "close", "no wait", "signal"])
def test_failure_aborts_all_ranks(rank_group_of, how):
    ((kind, text), *others_s), (_, *own_s) = rank_group_of(2).check(fail_as_rank, how)
    assert kind is pr.PeerLostError
    assert "rank 1" in text
    end = "left the group in the midst of a call" if how == "signal" else "aborted the group"
    assert f"has {end}" in text
    assert max(own_s[0], others_s[0]) < 10, "sooner than the deadline"
    nets = [Fragile(how) for _ in range(2)]
    with pr.GradientBucketer(nets) as bucketer:
        for net, x in zip(nets, inputs(2, 1), strict=True):
            loss_of(net, x).backward()
        bucketer.wait()
    assert_steps([others_s[1], own_s[1]], [grads_of(nets[0])] * 2)


# Fakes of the GPU engine that record gradients, stream waits and allreduces in order.
# test_cuda_processes.py uses real streams.
Start = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
Record = ctypes.PYFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_bool
)


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class ReadyHook(ctypes.Structure):
    _fields_ = (("self", ctypes.c_void_p), ("start_step", Start), ("note", Record))


class FakeReady:
    def __init__(self, events: list[tuple[str, int]]) -> None:
        self.events = events
        self.kept = ReadyHook(None, Start(lambda _: None), Record(self.note))

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


def test_launch_waits_for_backward_streams():
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
    # wait() launches the last bucket, after torch has made the current stream wait for backward.
    assert events[-2:] == [("gradient", len(buckets) - 1), ("reduce", 0)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.randn(3, 4), [("reduce", 0)]),
        (lambda: torch.randn(4, 3).t(), [("wait", 0), ("wait", 0), ("reduce", -1)]),
    ],
    ids=["the engine waits", "torch packs on the current stream"],
)
def test_packing_waits_for_backward_streams(make, expected):
    events, weights = [], [nn.Parameter(make()) for _ in range(2)]
    comm = pr.Communicator(["cpu"] * 2)
    comm._group = FakeGpuGroup(comm._group, events)
    with comm, pr.GradientBucketer([[w] for w in weights], comm=comm, overlap=True) as bucketer:
        for weight in weights:
            (torch.ones(2, 3) @ weight).sum().backward()
        bucketer.wait()
    assert events == [("gradient", 0), ("gradient", 0), *expected]
    assert torch.equal(weights[0].grad, weights[1].grad)
