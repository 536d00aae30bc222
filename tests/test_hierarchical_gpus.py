"""Are several machines with GPUs one group: streams in order, memory in use kept, errors right?

Without a GPU `late_gpu.py` stands for it: everything above the CUDA engine runs, gloo between the
machines included. The last tests carry the marker `cuda`. NCCL is not tried.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path

import late_gpu
import pytest
import torch
from cases import mostly_slow
from oracle import DTYPES
from ranks import Crew
from torch import Tensor
from torch.distributed import PrefixStore

import pyringar as pr
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.distributed import HierarchicalCommunicator, communicator_for, hierarchical
from pyringar.distributed.sockets import SocketInter
from pyringar.engine import load

MACHINES = ["ab", "aabb"]
SIZES = (1, 700, 3001)
SEEDS = range(4)


def inside(*arguments, device, **options):
    if device == "cpu":
        return ProcessCommunicator(*arguments, **options)
    return Inside(*arguments, **options)


class Inside:
    """A machine's communicator, whose calls run on the stand-in's streams."""

    def __init__(self, *arguments, **options) -> None:
        self._real = ProcessCommunicator(*arguments, **options)
        self.check_peers, self._abort = self._real.check_peers, self._real._abort

    def reduce_scatter(self, output, input, op) -> None:
        self._put(self._real.reduce_scatter, output.host, input.host, op)

    def all_gather(self, output, input) -> None:
        self._put(self._real.all_gather, output.host, input.host)

    def broadcast(self, tensor, root) -> None:
        self._put(self._real.broadcast, tensor.host, root)

    def barrier(self) -> None:
        self._put(self._real.barrier)

    def _put(self, *call) -> None:
        late_gpu.gpu.current().put(partial(*call))

    def close(self) -> None:
        late_gpu.gpu.synchronize()
        self._real.close()


class OnStream:
    """In the place of NCCL: an inter whose data crosses when the stream has come to it."""

    def __init__(self, store, rank) -> None:
        self._inters = [
            SocketInter(PrefixStore(name, store), rank, [1 - rank], 20.0)
            for name in ("data", "words")
        ]

    def exchange(self, sent, received):
        data, words = self._inters
        if all(tensor.device.type == "cpu" for _, tensor in (*sent, *received)):
            return words.exchange(sent, received)
        lists = [[(peer, tensor.host) for peer, tensor in some] for some in (sent, received)]
        late_gpu.gpu.current().put(lambda: data.exchange(*lists)())
        return lambda: None

    def abort(self) -> None:
        for inter in self._inters:
            inter.abort()

    def close(self) -> None:
        for inter in self._inters:
            inter.close()


def join(rank, store, machines, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    hierarchical.ProcessCommunicator, load.cuda_engine = inside, load.engine
    options = {"device": "cuda:0", "timeout": 20.0, "piece_bytes": 4000, **options}
    return HierarchicalCommunicator(store, rank, len(machines), **options)


def whole(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) % 5 + rank).to(dtype)


def on_gpu(values: Tensor) -> Tensor:
    """Known later."""
    return late_gpu.later(values, lambda: values)


def values_of(tensors) -> list[Tensor]:
    late_gpu.gpu.synchronize()
    return [tensor.host.clone() for tensor in tensors]


@pytest.fixture(params=MACHINES)
def machines(request):
    return request.param


@pytest.fixture
def crew(machines):
    with Crew(len(machines)) as made:
        yield made


# -- on the stand-in -------------------------------------------------------------------------------


def plant(module: str, right: str, wrong: str) -> None:
    """Let this process run with a mistake."""
    found = importlib.import_module(f"pyringar.distributed.{module}")
    source = Path(found.__file__).read_text()
    assert source.count(right) == 1
    exec(source.replace(right, wrong), found.__dict__)
    for name in found.__all__:
        setattr(hierarchical, name, getattr(found, name))


def reduce_as_rank(rank, world_size, store, machines, op, seed, mistake=None):
    """Results as the current stream sees them; whether memory was left alone; pinned buffers."""
    if mistake:
        plant(*mistake)
    found = []
    with late_gpu.installed(seed) as gpu, join(rank, store, machines) as comm:
        for round_, dtype in enumerate(DTYPES):
            with gpu.on(late_gpu.Stream(gpu) if round_ % 3 == 0 else gpu.default):
                tensors = [on_gpu(whole(numel, rank, dtype)) for numel in SIZES]
                work = comm.all_reduce(tensors, op, async_op=round_ % 2 == 1)
                if work is not None:
                    assert work.wait()
                    assert work.exception() is None
                found.append([tensor + 1 for tensor in tensors])
                dropped = on_gpu(whole(50, rank, dtype))
                comm.all_reduce(dropped, op, async_op=True)
                del dropped
        found = [values_of(tensors) for tensors in found]
    gpu.synchronize()
    return found, gpu.check_freed(), gpu.pinned


def enqueue_as_rank(rank, world_size, store, machines, seed):
    """With NCCL nobody on the host waits for the GPU."""
    options = {"backend": "nccl", "inter": OnStream(store, rank)}
    with late_gpu.installed(seed) as gpu, join(rank, store, machines, **options) as comm:
        early, found = [], []
        for numel in SIZES:
            mine = on_gpu(whole(numel, rank, torch.float32))
            work = comm.all_reduce(mine, "mean", async_op=True)
            work.wait()
            found.append(mine + 1)
            early.append(work.is_completed())
            del mine
        found = values_of(found)
        late = work.is_completed()
    gpu.synchronize()
    return found, early, late, gpu.check_freed(), gpu.pinned


@pytest.mark.parametrize("machines", ["ab"])
def test_no_host_waits_where_data_crosses_from_gpu_to_gpu(crew, machines):
    for seed in SEEDS:
        for found, early, late, is_kept, pinned in crew.check(enqueue_as_rank, machines, seed):
            assert (early, late, is_kept, pinned) == ([False] * 3, True, True, [])
            for tensor, numel in zip(found, SIZES, strict=True):
                wanted = [whole(numel, rank, torch.float32) for rank in range(2)]
                pr.allreduce(wanted, "mean")
                assert torch.equal(tensor, wanted[0] + 1)


def is_right(answers, op: str) -> bool:
    for at, dtype in enumerate(DTYPES):
        for i, numel in enumerate(SIZES):
            wanted = [whole(numel, rank, dtype) for rank in range(len(answers))]
            pr.allreduce(wanted, op)
            if not all(torch.equal(found[at][i], wanted[0] + 1) for found, _, _ in answers):
                return False
    return all(is_kept for _, is_kept, _ in answers)


@pytest.mark.parametrize("op", mostly_slow(["sum", "mean", "max", "min"], "mean"))
def test_results_are_there_for_the_current_stream(crew, machines, op):
    for seed in SEEDS:
        answers = crew.check(reduce_as_rank, machines, op, seed)
        assert is_right(answers, op), seed
        for _, _, pinned in answers:
            assert len(pinned) <= 6, "buffers are kept, and grow"


MISTAKES = {
    "after the caller's stream": ("own_stream", "self._stream.wait_event(before)", "pass"),
    "before the caller's stream": (
        *("own_stream", "torch.cuda.current_stream(self._device).wait_event(self._done)", "pass"),
    ),
    "memory in use": ("own_stream", "tensor.record_stream(self._stream)", "pass"),
    "no wait before the copy out": ("wire", "host.copy_(tensor)  #", "host.copy_(tensor, True)  #"),
    "no wait for the others": ("wire", "arrived()  # what", "pass  # what"),
    "a buffer is taken too early": (
        *("wire", "exchange(leaving, coming)", "exchange(leaving, coming); self._idle += taken"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["ab"])
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_planted_mistake_is_found(machines, mistake):
    """One stream that waits for another too little goes unseen by some seeds."""
    is_seen = False
    for seed in SEEDS:
        with Crew(len(machines)) as crew:
            is_seen |= not is_right(
                crew.check(reduce_as_rank, machines, "sum", seed, mistake), "sum"
            )
    assert is_seen


def others_as_rank(rank, world_size, store, machines):
    with late_gpu.installed(rank), join(rank, store, machines) as comm:
        found = []
        for root in range(world_size):
            tensors = [on_gpu(whole(n, rank, torch.bfloat16)) for n in (1, 3001)]
            tensors.append(on_gpu(whole(12, rank, torch.int64)).view(3, 4).t())
            for tensor in tensors:
                comm.broadcast(tensor, root)
            comm.barrier()
            found.append(values_of(tensors))
        return found, repr(comm), comm.device


def test_broadcast_and_barrier(crew, machines):
    for found, text, device in crew.check(others_as_rank, machines):
        assert "device='cuda:0'" in text
        assert device == torch.device("cuda:0")
        for root, tensors in enumerate(found):
            for tensor, numel in zip(tensors[:2], (1, 3001), strict=True):
                assert torch.equal(tensor, whole(numel, root, torch.bfloat16))
            assert torch.equal(tensors[2], whole(12, root, torch.int64).view(3, 4).t())


def refusals_as_rank(rank, world_size, store, machines):
    texts = []
    with late_gpu.installed(0) as gpu, join(rank, store, machines) as comm:
        mine = on_gpu(whole(100, rank, torch.float32))
        for call in (
            lambda: comm.all_reduce(torch.ones(3)),
            lambda: comm.all_reduce([mine, torch.ones(3)]),
            lambda: comm.broadcast(torch.ones(3), 0),
        ):
            with pytest.raises(pr.ArgumentError) as error:
                call()
            texts.append(str(error.value))
        gpu.is_capturing = True
        for call in (lambda: comm.all_reduce(mine), comm.barrier):
            with pytest.raises(pr.UnsupportedError, match="CUDA graph"):
                call()
        gpu.is_capturing = False
        assert mine._version == 0
        comm.all_reduce(mine)  # nobody was told
        return texts, values_of([mine])


def test_wrong_devices_and_captured_streams_are_refused(crew, machines):
    for texts, [mine] in crew.check(refusals_as_rank, machines):
        for text, name in zip(texts, ("tensors[0]", "tensors[1]", "tensor"), strict=True):
            assert text == f"{name} is on cpu, expected cuda:0, this rank's device"
        assert torch.equal(mine, sum(whole(100, r, torch.float32) for r in range(len(machines))))


def lose_as_rank(rank, world_size, store, machines):
    """On rank 0's GPU the first call ends without the data of a rank that is gone."""
    with late_gpu.installed(0), join(rank, store, machines) as comm:
        mine = on_gpu(whole(100, rank, torch.float32))

        def find(_) -> None:
            raise pr.PeerLostError("rank 1 is gone")

        if rank == 0:
            comm._intra.check_peers = find
        with pytest.raises(pr.RingarError) as error:
            comm.all_reduce(mine)
        return str(error.value), torch.equal(values_of([mine])[0], whole(100, rank, torch.float32))


@pytest.mark.parametrize("machines", ["ab"])
def test_data_of_a_rank_that_is_lost_on_its_gpu_does_not_cross(crew, machines):
    (here, is_kept_here), (there, is_kept_there) = crew.check(lose_as_rank, machines)
    assert "rank 1 is gone" in here
    assert "waited for ranks [0] of the other machines" in there
    assert is_kept_here
    assert is_kept_there


def differ_as_rank(rank, world_size, store, machines):
    device = "cuda:0" if rank == 0 else None
    with late_gpu.installed(0), pytest.raises(pr.ArgumentError) as error:
        join(rank, store, machines, device=device)
    return str(error.value)


@pytest.mark.parametrize("machines", ["ab"])
def test_gpus_on_all_machines_or_on_none(crew, machines):
    for text in crew.check(differ_as_rank, machines):
        assert "expected GPUs for all ranks, or for none" in text


def nccl_as_rank(rank, world_size, store, machines):
    with late_gpu.installed(0), pytest.raises(pr.ArgumentError) as error:
        join(rank, store, machines, backend="nccl")
    return str(error.value)


@pytest.mark.parametrize("machines", ["ab"])
def test_nccl_needs_torch_distributed_and_a_gpu(crew, machines):
    for text in crew.check(nccl_as_rank, machines):
        assert "backend is 'nccl', which this torch was built" in text or "init_process" in text
    for make in (HierarchicalCommunicator, communicator_for):
        with pytest.raises(pr.ArgumentError, match="'nccl' and device the CPU, expected a GPU"):
            make(backend="nccl")


# -- on a GPU --------------------------------------------------------------------------------------


def real_as_rank(rank, world_size, store, machines, backend):
    import torch.distributed as dist

    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    device = torch.device("cuda", rank % torch.cuda.device_count())
    if backend == "nccl":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    found = []
    with HierarchicalCommunicator(
        *(store, rank, world_size),
        **{"timeout": 60.0, "piece_bytes": 65_536, "backend": backend, "device": device},
    ) as comm:
        for round_, dtype in enumerate(DTYPES):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                mine = torch.zeros(70_001, dtype=dtype, device=device)
                torch.cuda._sleep(2_000_000 * ((rank + round_) % 3))
                mine += whole(70_001, rank, dtype).to(device, non_blocking=True)
                work = comm.all_reduce(mine, "mean" if round_ % 2 else "max", async_op=True)
                assert work.wait()
                found.append((mine + 1).cpu())
        comm.broadcast(mine, 1)
        comm.barrier()
    if backend == "nccl":
        dist.destroy_process_group()
    return found


@pytest.mark.timeout(120)
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device here")
@pytest.mark.parametrize("backend", ["tcp", "nccl"])
def test_on_gpus(crew, machines, backend):
    if backend == "nccl" and torch.cuda.device_count() < len(machines):
        pytest.skip(f"NCCL wants a GPU per rank, here: {torch.cuda.device_count()}")
    load.cuda_engine()  # compiled once, here
    answers = crew.check(real_as_rank, machines, backend, timeout_s=100)
    for round_, dtype in enumerate(DTYPES):
        wanted = [whole(70_001, rank, dtype) for rank in range(len(machines))]
        pr.allreduce(wanted, "mean" if round_ % 2 else "max")
        assert all(torch.equal(found[round_], wanted[0] + 1) for found in answers), dtype
