"""Are several machines one group: right bits, few bytes between them, and errors on all ranks?

Here machines are names that processes give themselves; in `test_two_machines.py` they are networks.
"""

from __future__ import annotations

import os
import time

import oracle
import pytest
import torch
from calls import Call, Part
from cases import mostly_slow
from ranks import Crew
from running import check_same
from torch import Tensor
from transports import Machines, check_on_rank, join_machines

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator, between, hierarchical
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.machines import Column
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.group import Processes
from pyringar.train.synthetic import synthetic_images

TWO_BY_TWO = "aabb"
INTERLEAVED = "abab"


@pytest.fixture(scope="module")
def pool():
    made = Crew(4)
    yield made
    made.close()


@pytest.fixture
def in_machine_order(monkeypatch):
    return lambda machines: monkeypatch.setattr(oracle, "machines", machines)


def join(rank, world_size, store, machines=TWO_BY_TWO, **options) -> HierarchicalCommunicator:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    between.PIECE_ELEMENTS = 1000
    return HierarchicalCommunicator(store, rank, world_size, **{"timeout": 20.0, **options})


def floats(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


# -- bits ------------------------------------------------------------------------------------------

PLACES = ["abab", "abbb", "aaba", "abca", "abcd", "aaaa"]


@pytest.mark.parametrize("machines", mostly_slow(PLACES, "abab"))
def test_calls_on_any_machines(machines):
    """The calls of tests/conformance, which has other machines, with a size of each kind."""
    machines_of = Machines.__new__(Machines)
    parts = [Part(dtype, (numel,)) for dtype in oracle.DTYPES for numel in (0, 4, 28, 30_004)]
    made = [
        Call(entry, 4, (part,), op, by_communicator=True, root=root)
        for entry in Machines.entries
        for i, part in enumerate(parts)
        for op, root in (("sum", i % 4), ("mean", 3))
    ]
    calls = [call for call in made if machines_of.can_run(call)]
    with Crew(4) as crew:
        crew.join(function=join_machines, machines=machines, timeout=20)
        for call, *digests in zip(calls, *crew.run(check_on_rank, calls=calls), strict=True):
            check_same(call, digests, is_on_gpu=True)


# -- modes of torch -------------------------------------------------------------------------------


def modes_as_rank(rank, world_size, store):
    """A change that torch counts late would look like the user's, to the bucketer."""
    with join(rank, world_size, store) as comm:
        tensors = [floats(1001, rank).requires_grad_(), floats(12, rank).view(3, 4).t()]
        with torch.inference_mode():
            tensors.append(floats(7, rank))
            work = comm.all_reduce_coalesced(tensors, async_op=True)
            versions = [t._version for t in tensors[:2]]
            assert work.wait()
            assert work.is_completed()
            assert work.exception() is None
            assert work.finished_ns() > 0
            comm.broadcast(tensors[2], 3)
            alone, parts = torch.full((7,), 1.0 + rank), torch.zeros(28)
        comm.all_reduce(alone)  # begun outside
        comm.all_gather(parts, alone)
        comm.reduce_scatter(alone, parts)
        assert alone.tolist() == [40.0] * 7
        return [t.detach().clone() for t in tensors], versions, [t._version for t in tensors[:2]]


def test_writes_are_counted_at_once(pool, in_machine_order):
    in_machine_order(TWO_BY_TWO)
    for tensors, early, late in pool.check(modes_as_rank):
        assert early == late == [1, 1]
        for tensor, numel in zip(tensors, (1001, 12, 7), strict=True):
            wanted = oracle.reduced([floats(numel, rank) for rank in range(4)], "sum")
            assert torch.equal(tensor, wanted.view(3, 4).t() if numel == 12 else wanted)


# -- what crosses ----------------------------------------------------------------------------------


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
        told = found["barrier"]  # a description of the call
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
def test_machines_send_no_more_than_needed(pool, machines, wanted):
    """In the order of the calls above; flat gloo is handed 16,000 bytes by every rank."""
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


def test_pieces_cross_while_next_is_summed(pool):
    for events in pool.check(overlapped_as_rank):
        for number in range(1, 8):  # 0 compares the calls
            assert events.index(("begin", number + 1)) < events.index(("wait", number)), events


# -- what differs, what is refused -----------------------------------------------------------------


def caught(function, *args) -> tuple[type, str, float]:
    began = time.monotonic()
    with pytest.raises(pr.RingarError) as error:
        function(*args)
    return type(error.value), str(error.value), time.monotonic() - began


def refuse_as_rank(rank, world_size, store):
    with join(rank, world_size, store) as comm:
        tensor, parts = floats(3, rank), torch.ones(12)
        calls = {
            "is a str, expected a dense tensor": lambda: comm.all_reduce("x"),
            "order is 'rank'": lambda: comm.all_reduce(tensor, order="rank"),
            "algorithm is 'ring'": lambda: comm.all_reduce(tensor, algorithm="ring"),
            "op is 'avg'": lambda: comm.all_reduce(tensor, "avg"),
            "root is 4": lambda: comm.broadcast(tensor, 4),
            "expected a list": lambda: comm.all_reduce_coalesced(tensor),
            "nbytes is -1": lambda: comm.plan(-1),
            "tensors requires grad": lambda: comm.all_reduce(tensor.clone().requires_grad_() * 2),
            "reduce_scatter: inputs has 11 torch.float32 elements and outputs has 3": (
                lambda: comm.reduce_scatter(tensor, torch.empty(11))
            ),
            "outputs has dtype torch.float32, but inputs has torch.float64": (
                lambda: comm.reduce_scatter(tensor, parts.double())
            ),
            "inputs is a str, expected a dense tensor": lambda: comm.all_gather(parts, "x"),
            "tensors[1] shares memory with tensors[0]": (
                lambda: comm.all_reduce_coalesced([parts[:7], parts[5:]])
            ),
            "timeout is 0": lambda: comm.set_timeout(0),
        }
        found = {words: caught(call)[1] for words, call in calls.items()}
        assert comm.timeout_s == 20.0
        comm.set_timeout(15)
        assert comm.timeout_s == 15.0
        comm.check_peers(range(world_size))
        comm.all_reduce(tensor)  # still usable
        assert [member.rank for member in comm.members] == [0, 1, 2, 3]
        text = str(comm.plan(10_000_000)), repr(comm)
    return found, text, caught(comm.all_reduce, tensor)


def test_wrong_arguments_change_nothing(pool):
    for found, (plan, text), closed in pool.check(refuse_as_rank):
        for words, message in found.items():
            assert words in message
        assert "2 machines of 2 ranks" in plan
        assert "machine 0 of 2" in text or "machine 1 of 2" in text
        assert "closed" in closed[1]


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


# -- errors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with Crew(2) as made:
        yield made


def numbers(rank):
    return torch.arange(5.0) % 17 + rank


def error_of(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "none", ""


def unknown_network(rank, size, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense0"
    try:
        return error_of(lambda: join(rank, size, store, "ab"))
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_unknown_network_is_named(pair):
    for kind, text in pair.check(unknown_network):
        assert kind == "ArgumentError", text
        assert "GLOO_SOCKET_IFNAME is 'nonsense0'" in text


def absent(rank, size, store):
    if rank == 1:
        hierarchical.Column = lambda *_: time.sleep(1.5)
    try:
        return error_of(lambda: join(rank, size, store, "ab", timeout=1.0))
    finally:
        hierarchical.Column = Column


def test_machine_that_does_not_connect_is_named(pair):
    (kind, text), _ = pair.check(absent)
    assert kind == "CollectiveTimeout", text
    assert "machine 1" in text
    assert "has ranks [1]" in text


class SlowColumn(Column):
    """Connections over which 4,000 bytes take 0.3 s."""

    def exchange(self, sent, received):
        arrived = super().exchange(sent, received)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in received.values())
        return lambda: (time.sleep(0.3 * nbytes / 4000), arrived())


def slowly(rank, size, store):
    hierarchical.Column = SlowColumn
    try:
        with join(rank, size, store, timeout=0.5) as comm:
            tensor = numbers(rank).repeat(1000)
            comm.broadcast(tensor, 0)
            return tensor[-5:].tolist()
    finally:
        hierarchical.Column = Column


def test_timeout_counts_time_without_progress(pool):
    assert pool.check(slowly) == [numbers(0).tolist()] * 4


# -- training --------------------------------------------------------------------------------------


def garments() -> ImageData:
    return ImageData("garments", *synthetic_images(60, 1), *synthetic_images(30, 2))


def train_as_rank(rank, world_size, store, options):
    os.environ["PYRINGAR_NODE_ID"] = TWO_BY_TWO[rank]
    config = TrainConfig(ranks=world_size, **options)
    group = Processes(config, store, rank, world_size)
    with Trainer(config, garments(), group=group) as trainer:
        result = trainer.run()
    return result.params, result.losses, result.plan.algorithm, group.digest


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 20, "epochs": 1}, {"model": "resnet18", "width": 4, "epochs": 1}],
    ids=["lenet", "resnet18"],
)
def test_training_matches_one_machine(pool, options):
    with Trainer(TrainConfig(ranks=4, **options), garments()) as trainer:
        alone = trainer.run()
    answers = pool.check(train_as_rank, options)
    for params, losses, algorithm, digest in answers:
        assert algorithm == "hierarchical"
        assert digest == answers[0][3] != ""
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        for ours, theirs in zip(params, alone.params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
