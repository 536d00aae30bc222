"""HierarchicalCommunicator: bits, bytes between machines, errors on all ranks.

``PYRINGAR_NODE_ID`` names the machine of a process. `test_two_machines.py` has real networks.
"""

import os
import time
from unittest import mock

import oracle
import pytest
import torch
from call_cases import CallSpec, Operand
from case_marks import mostly_slow
from process_checks import error_of
from rank_processes import RankGroup
from running import check_same
from torch import Tensor
from transports import MachinesTransport, check_on_rank, join_machines

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator, between, hierarchical
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.machines import Column
from pyringar.engine import load

TWO_BY_TWO = "aabb"
INTERLEAVED = "abab"


@pytest.fixture(scope="module")
def pool():
    made = RankGroup(4)
    yield made
    made.close()


def join(rank, world_size, store, machines=TWO_BY_TWO, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    between.PIECE_ELEMENTS = 1000
    return HierarchicalCommunicator(store, rank, world_size, **{"timeout": 20.0, **options})


def floats(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


PLACES = ["abab", "abbb", "aaba", "abca", "abcd", "aaaa"]


@pytest.mark.parametrize("machines", mostly_slow(PLACES, "abab"))
def test_calls_have_promised_bits(machines):
    """Run the tests/conformance calls on more layouts of machines, one size of each kind."""
    machines_of = MachinesTransport.__new__(MachinesTransport)
    parts = [Operand(dtype, (numel,)) for dtype in oracle.DTYPES for numel in (0, 4, 28, 30_004)]
    made = [
        CallSpec(entry, 4, (part,), op, by_communicator=True, root=root)
        for entry in MachinesTransport.entries
        for i, part in enumerate(parts)
        for op, root in (("sum", i % 4), ("mean", 3))
    ]
    calls = [call for call in made if machines_of.can_run(call)]
    with RankGroup(4) as group:
        group.join(function=join_machines, machines=machines, timeout=20)
        for call, *digests in zip(calls, *group.run(check_on_rank, calls=calls), strict=True):
            check_same(call, digests, is_on_gpu=True)


def sent_as_rank(rank, world_size, store, machines):
    with join(rank, world_size, store, machines) as comm:
        parts, whole = torch.empty(1000), floats(4000, rank)
        calls = {
            "barrier": comm.barrier,
            "all_reduce": lambda: comm.all_reduce(whole),
            "reduce_scatter": lambda: comm.reduce_scatter(parts, whole),
            "all_gather": lambda: comm.all_gather(whole, parts),
            "broadcast": lambda: comm.broadcast(whole, 0),
        }
        found = {}
        for name, call in calls.items():
            before = comm.stats()
            call()
            after = comm.stats()
            assert after["hierarchical"]["calls"] == before["hierarchical"]["calls"] + 1
            found[name] = after["inter"]["bytes"] - before["inter"]["bytes"]
        told = found["barrier"]  # bytes that describe a call
        return told, *[nbytes - told for name, nbytes in found.items() if name != "barrier"]


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        (TWO_BY_TWO, [(128, 8000, 4000, 4000, 8000)] * 2 + [(128, 8000, 4000, 4000, 0)] * 2),
        (
            "abbb",
            [(128, 16_000, 12_000, 4000, 16_000), (384, 16_000, 4000, 12_000, 0)] + [(0,) * 5] * 2,
        ),
    ],
)
def test_machines_send_minimal_bytes(pool, machines, wanted):
    """Compare the bytes that each rank sends per call. Flat gloo sends 16,000 bytes per rank."""
    assert pool.check(sent_as_rank, machines) == wanted


def overlapped_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        events, exchange = [], comm._column.exchange

        def recorded(sent, received):
            number = len([event for event, _ in events if event == "begin"])
            events.append(("begin", number))
            wait = exchange(sent, received)
            return lambda: (events.append(("wait", number)), wait())

        comm._column.exchange = recorded
        comm.all_reduce(floats(4000, rank))
        return events


def test_piece_transfer_overlaps_next_sum(pool):
    for events in pool.check(overlapped_as_rank):
        for number in range(1, 8):  # exchange 0 compares the calls of the ranks
            assert events.index(("begin", number + 1)) < events.index(("wait", number)), events


def choose_as_rank(rank, world_size, store, machines, order):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    try:
        with communicator_for(store, rank, world_size, timeout=20.0, order=order) as comm:
            return type(comm).__name__, ""
    except pr.RingarError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("machines", "order", "kind", "words"),
    [
        ("aaaa", "any", "ProcessCommunicator", ""),
        (TWO_BY_TWO, "any", "HierarchicalCommunicator", ""),
        (INTERLEAVED, "tree", "ArgumentError", "consecutive ranks"),
        ("abbb", "tree", "ArgumentError", "equally many and a power of two"),
        (TWO_BY_TWO, "rank", "ArgumentError", "expected 'any', or 'tree'"),
        (TWO_BY_TWO, "exact", "ArgumentError", "expected 'any', or 'tree'"),
    ],
)
def test_machines_and_order_choose_communicator(pool, machines, order, kind, words):
    for chosen, text in pool.check(choose_as_rank, machines, order):
        assert chosen == kind
        assert words in text
        if words:
            assert f"order is '{order}' and the ranks are on 2 machines: [0" in text


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2) as made:
        yield made


def numbers(rank):
    return torch.arange(5.0) % 17 + rank


def fail_locally(rank, size, store):
    def refuse(*_, **__):
        raise RuntimeError("no memory for you")

    with join(rank, size, store, "ab") as comm:
        tensor = numbers(rank)
        with mock.patch.object(torch, "cat", refuse):
            error = error_of(lambda: comm.all_reduce([tensor, numbers(rank)]))
        comm.all_reduce(tensor)
    return error, tensor.tolist()


def test_local_error_keeps_group_usable(pair):
    for error, got in pair.check(fail_locally):
        assert error[::2] == ("RuntimeError", "no memory for you")
        assert got == (numbers(0) + numbers(1)).tolist(), "the group goes on"


def unknown_network(rank, size, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense0"
    try:
        return error_of(lambda: join(rank, size, store, "ab"))
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_unknown_network_is_named(pair):
    for kind, _, text, _ in pair.check(unknown_network):
        assert kind == "ArgumentError", text
        assert "GLOO_SOCKET_IFNAME is 'nonsense0'" in text


def connect_late(rank, size, store):
    if rank == 1:
        hierarchical.Column = lambda *_: time.sleep(1.5)
    try:
        return error_of(lambda: join(rank, size, store, "ab", timeout=1.0))
    finally:
        hierarchical.Column = Column


def test_timeout_names_absent_machine(pair):
    (kind, _, text, _), _ = pair.check(connect_late)
    assert kind == "CollectiveTimeout", text
    assert "machine 1" in text
    assert "has ranks [1]" in text


class SlowColumn(Column):
    """A column (group of ranks across machines) in which 4,000 bytes take 0.3 s."""

    def exchange(self, sent, received):
        arrived = super().exchange(sent, received)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in received.values())
        return lambda: (time.sleep(0.3 * nbytes / 4000), arrived())


def broadcast_slowly(rank, size, store):
    hierarchical.Column = SlowColumn
    try:
        with join(rank, size, store, timeout=0.5) as comm:
            tensor = numbers(rank).repeat(1000)
            comm.broadcast(tensor, 0)
            return tensor[-5:].tolist()
    finally:
        hierarchical.Column = Column


def test_timeout_counts_time_without_progress(pool):
    assert pool.check(broadcast_slowly) == [numbers(0).tolist()] * 4


needs_two_gpus = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU per rank"),
]
MACHINES = ["ab", "aabb"]


def reduced_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    device = torch.device("cuda", rank)
    found = []
    with HierarchicalCommunicator(store, rank, world_size, timeout=60.0, device=device) as comm:
        for round_, dtype in enumerate(oracle.DTYPES):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                mine = torch.zeros(70_001, dtype=dtype, device=device)
                torch.cuda._sleep(2_000_000 * ((rank + round_) % 3))
                mine.copy_(oracle.random(70_001, dtype, rank), non_blocking=True)
                work = comm.all_reduce(mine, "mean" if round_ % 2 else "max", async_op=True)
                assert work.wait()
                found.append(mine.clone().cpu())
        comm.broadcast(mine, 1)
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(pr.UnsupportedError, match="CUDA graph"):
            comm.all_reduce(mine)
    return found


@pytest.mark.parametrize(
    "machines", [pytest.param(machines, marks=needs_two_gpus) for machines in MACHINES]
)
def test_gpu_sums_have_promised_bits(machines, monkeypatch):
    if torch.cuda.device_count() < len(machines):
        pytest.skip(f"NCCL wants a GPU per rank, here: {torch.cuda.device_count()}")
    monkeypatch.setattr(oracle, "machines", machines)
    load.cuda_engine()  # compile before the ranks start
    with RankGroup(len(machines)) as group:
        answers = group.check(reduced_as_rank, machines, timeout_s=100)
    for round_, dtype in enumerate(oracle.DTYPES):
        parts = [oracle.random(70_001, dtype, rank) for rank in range(len(machines))]
        wanted = oracle.reduced(parts, "mean" if round_ % 2 else "max")
        oracle.assert_all_ranks([found[round_] for found in answers], wanted, dtype)


class FakeNccl:
    """Fake NCCL group: an all-to-all of lists over the column's gloo."""

    def __init__(self, gloo) -> None:
        self._gloo = gloo

    def alltoall(self, outputs, inputs, options):
        begun = [
            begin([tensor.view(-1)], node, 1)
            for begin, tensors in ((self._gloo.recv, outputs), (self._gloo.send, inputs))
            for node, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        return self._Work(begun)

    class _Work:
        def __init__(self, begun) -> None:
            self._begun = begun

        def wait(self) -> None:
            for work in self._begun:
                work.wait()


def use_fake_nccl_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    with HierarchicalCommunicator(store, rank, world_size, timeout=20.0) as comm:
        column = comm._column
        if column._gloo is not None:
            column._nccl = FakeNccl(column._gloo)
            exchange = column.exchange
            column.exchange = lambda sent, received: (
                exchange(sent, received)
                if sent and next(iter(sent.values())).dtype is torch.uint8
                else column._exchange_on_gpu(sent, received)
            )
        mine, parts = oracle.random(4001, torch.float32, rank), torch.empty(4000)
        comm.all_reduce(mine)
        comm.all_gather(parts, mine[:1000])
        column._nccl = None
        return mine, parts


@pytest.mark.parametrize("machines", ["aabb", "abbb", "abcd"])
def test_nccl_gets_same_blocks_as_gloo(machines, monkeypatch):
    monkeypatch.setattr(oracle, "machines", machines)
    with RankGroup(4) as group:
        answers = group.check(use_fake_nccl_as_rank, machines)
    wanted = oracle.reduced([oracle.random(4001, torch.float32, rank) for rank in range(4)], "sum")
    oracle.assert_all_ranks([mine for mine, _ in answers], wanted)
    oracle.assert_all_ranks([parts for _, parts in answers], wanted[:1000].repeat(4))
