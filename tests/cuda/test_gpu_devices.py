"""GPU: ranks on the CPU and on several GPUs: exact bits, streams and failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch
from oracle import DTYPES, OPS, assert_bits, expected, reduced

import pyringar as pr

pytestmark = gpu.needed
ROOT = Path(__file__).resolve().parents[2]


def over(devices, **options):
    """Return a communicator over devices; a device is "cpu" or a GPU index."""
    names = [device if device == "cpu" else f"cuda:{device}" for device in devices]
    return pr.Communicator(names, **options)


def on(*devices):
    """Return a test parameter that is skipped without the ``devices``."""
    return pytest.param(devices, marks=gpu.two if 1 in devices else gpu.only, id=str(devices))


# One CPU rank, and two ranks on the current GPU or on another GPU.
MIXED, MIXED_OTHER_GPU = on("cpu", 0, 0), on("cpu", 1, 1)
SEVERAL = [on(0, 1), on(0, 0, 1, 1), on(0, 1, 0, 1), on(1, 0, 0)]


@pytest.mark.parametrize("devices", [MIXED, MIXED_OTHER_GPU, *SEVERAL])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "auto"])
def test_all_reduce_is_bit_exact(algorithm, dtype, devices):
    if algorithm == "ring" and "cpu" in devices:
        pytest.skip("refused: see test_mixed_memories_refuse_ring")
    with over(devices, algorithm=algorithm) as comm:
        for numel in (0, 1, 3, 257, 30_011):
            for op in OPS:
                parts = gpu.drawn(numel, dtype, len(devices))
                tensors = gpu.placed(comm, parts)
                comm.all_reduce(tensors, op)
                ran = comm.plan(numel * dtype.itemsize).algorithm
                gpu.assert_ranks(tensors, expected(parts, op, ran), f"{ran} {op} {dtype} n={numel}")


@pytest.mark.parametrize(
    ("devices", "algorithm"),
    [
        pytest.param(*case.values, algorithm, marks=case.marks)
        for case, algorithm in [(MIXED, "direct"), (on(0, 1, 1), "direct"), (on(0, 1, 1), "ring")]
    ],
)
def test_coalesced_and_other_collectives_are_right(devices, algorithm):
    shapes = [(3, 5), (700,), (0,), (64, 3), *((1 + 7 * i % 90,) for i in range(500))]
    flat = gpu.drawn(300, torch.float32, 3)
    shares = [part[:100] for part in flat]
    with over(devices, algorithm=algorithm) as comm:
        for op in ("sum", "mean"):
            parts = gpu.lists_of(shapes, (torch.float32, torch.float32, torch.float16), 3)
            lists = gpu.placed(comm, parts)
            comm.all_reduce_coalesced(lists, op)
            gpu.assert_lists(lists, parts, op, algorithm)
        outs = gpu.zeros(comm, 100)
        comm.reduce_scatter(outs, gpu.placed(comm, flat))
        assert_bits(torch.cat([out.cpu() for out in outs]), expected(flat, "sum", algorithm))
        whole = gpu.zeros(comm, 300)
        comm.all_gather(whole, gpu.placed(comm, shares))
        gpu.assert_ranks(whole, torch.cat(shares))
        tensors = gpu.placed(comm, flat)
        comm.broadcast(tensors, root=1)
        gpu.assert_ranks(tensors, flat[1])
        for root, device in enumerate(comm.devices):
            check_rooted_lists(
                comm, root, parts, [part.to(device, copy=True) for part in parts[root]]
            )


def check_rooted_lists(comm, root, parts, outputs):
    lists = gpu.placed(comm, parts)
    outputs[::2] = lists[root][::2]
    comm.reduce_coalesced(outputs, lists, "sum", root=root, algorithm="direct")
    gpu.assert_lists([outputs], parts, "sum", "direct")
    lists[root] = outputs
    comm.broadcast_coalesced(lists, root)
    gpu.assert_lists(lists, parts, "sum", "direct")


@pytest.mark.parametrize("devices", [MIXED])
def test_mixed_memories_follow_stream_order(devices):
    parts = gpu.drawn(2000, torch.float32, 3)
    with over(devices) as comm, torch.cuda.stream(torch.cuda.Stream()):
        bases, sources = gpu.zeros(comm, 2000), gpu.placed(comm, parts)
        torch.cuda._sleep(gpu.SLEEP_CYCLES)
        gpu.copy_all(bases, sources)
        comm.all_reduce([base[::2] for base in bases], async_op=True).wait()
        got = [base[::2].cpu() for base in bases]
    gpu.assert_ranks(got, reduced([part[::2] for part in parts], "sum"))


@pytest.mark.parametrize("devices", [MIXED])
def test_mixed_memories_refuse_ring(devices):
    with over(devices) as comm:
        tensors = gpu.ones(comm, 4)
        with pytest.raises(pr.ArgumentError, match="fused"):
            comm.all_reduce(tensors, algorithm="fused")
        with pytest.raises(pr.UnsupportedError, match="host's memory"):
            comm.all_reduce(tensors, algorithm="ring")
        comm.all_reduce(tensors)
        assert tensors[0].tolist() == [3, 3, 3, 3]


@gpu.two
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_calls_follow_streams_of_devices(algorithm, is_async, current):
    parts = gpu.drawn(30_011, torch.float32, 2)
    with over((0, 1)) as comm, torch.cuda.device(current):
        tensors, sources = gpu.zeros(comm, 30_011), gpu.placed(comm, parts)
        comm.all_reduce(tensors, algorithm=algorithm)
        for late in (0, 1):
            for i in range(2):
                torch.cuda.synchronize(i)
            with torch.cuda.device(late):
                torch.cuda._sleep(gpu.SLEEP_CYCLES)
            gpu.copy_all(tensors, sources)
            work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
            if is_async:
                work.wait()
            results = [tensor.clone() for tensor in tensors]
            gpu.assert_ranks(results, expected(parts, "sum", algorithm), f"late: {late}")


@gpu.two
def test_graph_replays_on_two_devices():
    parts = gpu.drawn(30_011, torch.float32, 2)
    with over((0, 1)) as comm:
        tensors, sources = gpu.zeros(comm, 30_011), gpu.placed(comm, parts)
        graph, first = torch.cuda.CUDAGraph(), torch.cuda.Stream(0)
        second = torch.cuda.Stream(1)
        with torch.cuda.graph(graph, stream=first), torch.cuda.stream(second):
            with torch.cuda.stream(first), pytest.raises(pr.UnsupportedError, match="not that of"):
                comm.all_reduce(tensors, algorithm="direct")
            second.wait_stream(first)
            with torch.cuda.stream(first), torch.cuda.stream(second):
                comm.all_reduce(tensors, algorithm="direct")
                with pytest.raises(pr.UnsupportedError, match="cannot be captured"):
                    comm.all_reduce(tensors, algorithm="ring")
            first.wait_stream(second)
        for replay in range(3):
            gpu.copy_all(tensors, sources)
            for i in range(2):
                torch.cuda.synchronize(i)
            graph.replay()
            torch.cuda.synchronize(0)
            gpu.assert_ranks(tensors, expected(parts, "sum", "direct"), f"replay {replay}")


def run_in_new_process(code, **environment):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@gpu.two
def test_unused_gpus_get_no_context():
    assert run_in_new_process(ONE_OF_TWO_GPUS) == ["[False,", "True]"]


@gpu.two
def test_peers_need_device_access():
    with over((0, 1)) as comm:
        may_reach = all(torch.cuda.can_device_access_peer(a, 1 - a) for a in (0, 1))
        assert may_reach or not comm._group.has_peers()


ONE_OF_TWO_GPUS = """
import ctypes, threading, torch, pyringar as pr
torch.cuda.set_device(1)
with pr.Communicator(["cuda:1", "cuda:1"]) as comm:
    work = comm.all_reduce([torch.ones(100, device="cuda:1") for _ in range(2)], algorithm="ring",
                           async_op=True)
    def other():
        work.wait()
        work.is_completed()
        comm.close()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
found = []
for device in range(2):
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    found.append(bool(active.value))
print(found)
"""


EXPANDABLE = """
import torch, pyringar as pr
parts = [torch.arange(30_011.0) + rank for rank in range(2)]
with pr.Communicator(["cuda:0", "cuda:1"]) as comm:
    for algorithm in ("direct", "ring"):
        tensors = [part.to(f"cuda:{rank}") for rank, part in enumerate(parts)]
        comm.all_reduce(tensors, algorithm=algorithm)
        assert all(torch.equal(t.cpu(), parts[0] + parts[1]) for t in tensors), algorithm
print("right")
"""


@gpu.two
def test_expandable_segments_give_right_sums():
    setting = "expandable_segments:True"
    assert run_in_new_process(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF=setting) == ["right"]


@gpu.two
def test_withheld_device_raises_timeout():
    with over((0, 1), timeout=0.5, algorithm="ring") as comm:
        tensors = gpu.ones(comm, 1000)
        comm.all_reduce(tensors)
        comm._group.withhold_rank(1)
        comm.all_reduce(tensors)
        for i in range(2):
            torch.cuda.synchronize(i)
        with pytest.raises(pr.CollectiveTimeout, match=r"cuda:0.* waited 0.5 s for .*cuda:1"):
            comm.all_reduce(tensors)
