"""What does the short way of `ProcessCommunicator.all_reduce` take, what does it leave to the long?

Results over several ranks, failures and deadlines of both are what tests/test_process*.py is about.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pyringar as pr


@pytest.fixture
def comm():
    with pr.ProcessCommunicator(dist.HashStore(), 0, 1) as one:
        yield one


@pytest.fixture
def pair():
    """Two ranks in threads of this process."""
    store, comms = dist.HashStore(), [None, None]

    def join(rank):
        comms[rank] = pr.ProcessCommunicator(store, rank, 2, timeout=20)

    together(join)
    yield comms
    for comm in comms:
        comm.close()


def together(call):
    """Run call(rank) in a thread for each of two ranks; raise what one of them raises."""
    errors = []

    def run(rank):
        try:
            call(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def wait_until(is_there):
    deadline = time.monotonic() + 20
    while not is_there() and time.monotonic() < deadline:
        time.sleep(0.01)


class Mine(torch.Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_takes_plain_tensors(comm):
    for tensor in (
        torch.ones(3),
        torch.ones(2, 3),
        torch.ones(()),
        torch.ones(4, dtype=torch.int8),
    ):
        version = tensor._version
        assert comm.reduce_plain(tensor, "sum", None, None)
        assert tensor._version == version + 1
    assert comm.reduce_plain([torch.ones(3)], "mean", None, None)
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert not comm.reduce_plain(parameter, "sum", None, None)  # a subclass
        assert comm.reduce_plain(torch.ones(3, requires_grad=True), "sum", None, None)
    assert comm.stats()["exchange"]["calls"] == 6


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4)[:, ::2],
        torch.ones(4, 4).t(),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.cfloat).conj().imag,  # negated
        torch.ones(0),
        torch.ones(3).as_subclass(Mine),
        torch.empty(3, device="meta"),
        [torch.ones(3), torch.ones(3)],
        (torch.ones(3),),
        [],
        None,
        "tensor",
    ],
    ids=str,
)
def test_declines_what_needs_a_second_look(comm, tensor):
    assert not comm.reduce_plain(tensor, "sum", None, None)
    assert comm.stats() == {}


def test_declines_other_arguments(comm):
    tensor = torch.ones(3)
    for call in (
        (tensor, dist.ReduceOp.SUM, None, None),
        (tensor, "summ", None, None),
        (tensor, None, None, None),
        (tensor, "sum", "direct", None),
        (tensor, "sum", None, "rank"),
        (tensor, "sum"),
    ):
        assert not comm.reduce_plain(*call)
    assert tensor._version == 0
    assert comm.stats() == {}


def test_declines_while_a_mode_looks(comm):
    tensor = torch.ones(3)
    with Watching():
        assert not comm.reduce_plain(tensor, "sum", None, None)

    def program(x):
        y = x.clone()
        comm.all_reduce(y)
        return y

    graph = make_fx(program, tracing_mode="real")(tensor)
    assert "pyringar" in graph.code


def test_errors_are_those_of_the_long_way(comm):
    tensor = torch.ones(3, requires_grad=True)
    with pytest.raises(pr.ArgumentError, match=r"all_reduce: tensor requires grad"):
        comm.all_reduce(tensor)
    with pytest.raises(pr.ArgumentError, match=r"op is 'summ', expected one of .*sum"):
        comm.all_reduce(torch.ones(3), "summ")
    with pytest.raises(pr.ArgumentError, match=r"algorithm is 'rings'"):
        comm.all_reduce(torch.ones(3), algorithm="rings")
    comm.close()
    with pytest.raises(pr.RingarError, match="closed"):
        comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_call_that_fails_after_others_saw_it_counts_as_a_change(is_bound):
    store, versions = dist.HashStore(), []

    def call(rank):
        with pr.ProcessCommunicator(store, rank, 2, timeout=1) as comm:
            tensor = torch.ones(3)
            reduce = comm.bind(tensor) if is_bound else lambda: comm.all_reduce(tensor)
            if rank == 0:
                with pytest.raises(pr.CollectiveTimeout):
                    reduce()
                versions.append(tensor._version)
                with pytest.raises(pr.CollectiveTimeout):
                    reduce()  # refused at once
                versions.append(tensor._version)
            else:
                wait_until(lambda: len(versions) == 2)

    together(call)
    assert versions == [1, 1]


def test_threads_that_share_a_communicator(pair):
    """One call uses the short way's memory; others meanwhile go the long way."""
    num_calls = 200

    def reduce(rank):
        def call(value):
            for _ in range(num_calls):
                tensor = torch.full((8,), float(value))
                pair[rank].all_reduce(tensor)
                assert tensor[0] == tensor[7]
                totals.append(tensor[0].item())

        totals = []
        threads = [threading.Thread(target=call, args=(value,)) for value in (1, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert totals == [2.0] * (2 * num_calls)

    together(reduce)
