"""`pr.launch` on threads: collectives, order of ranks, groups, process state after a run."""

import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import distributed_cases
import distributed_training
import pytest
import torch
import torch.distributed as dist
from case_marks import forks_run_backward, mostly_slow
from rank_processes import begin
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cluster import internals, rank_calls

NEED_TWO = ("delegated", "groups", "messages")


def run_case(case: Any, size: int) -> None:
    dist.init_process_group("ringar")
    case(dist.get_rank(), size)


@pytest.mark.parametrize(
    ("name", "size"),
    mostly_slow(
        [(n, k) for n in distributed_cases.CASES for k in range(1 + (n in NEED_TWO), 5)],
        *itertools.product(distributed_cases.CASES, [4]),
    ),
)
def test_collectives_have_promised_bits(name, size):
    pr.launch(run_case, size, args=(distributed_cases.CASES[name], size))


@pytest.mark.parametrize("size", mostly_slow([2, 4], 4))
@pytest.mark.parametrize("name", distributed_training.CASES)
def test_training_matches_reference(name, size):
    pr.launch(run_case, size, args=(distributed_training.CASES[name], size), seed=size)


@forks_run_backward
@pytest.mark.parametrize(
    ("cases", "name"),
    mostly_slow(
        [(c, name) for c in (distributed_cases, distributed_training) for name in c.CASES],
        (distributed_cases, "messages"),
    ),
)
def test_processes_run_torch_distributed(cases, name):
    pr.launch(run_case, 3, args=(cases.CASES[name], 3), processes=True)


REFUSED: dict[str, Callable[[], object]] = {
    "maximum of sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
    "sparse": lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
    "expanded output": lambda: dist.all_gather_into_tensor(torch.ones(1).expand(2), torch.ones(1)),
    "twice the same": lambda: dist.group.WORLD.allreduce([torch.ones(2)] * 2),
    "other size": lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2)),
    "other size of a part": lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_call_keeps_ranks_running(name):
    def program() -> int:
        dist.init_process_group()
        with pytest.raises((pr.UnsupportedError, pr.ArgumentError)):
            REFUSED[name]()
        dist.barrier()
        return 1

    assert pr.launch(program, 2) == [1, 1]


def order_of_ranks(seed: int) -> list[int]:
    order: list[int] = []

    def program() -> None:
        dist.init_process_group()
        for _ in range(4):
            order.append(dist.get_rank())
            dist.barrier()

    pr.launch(program, 3, seed=seed)
    return order


def test_seed_determines_rank_order():
    orders = [order_of_ranks(seed) for seed in range(12)]
    assert orders == [order_of_ranks(seed) for seed in range(12)]
    assert len(set(map(tuple, orders))) == 12
    assert {order[3] for order in orders} == {0, 1, 2}, "also the first rank after a barrier"
    for order in orders:
        assert all(sorted(order[i : i + 3]) == [0, 1, 2] for i in range(0, 12, 3))


def test_one_rank_runs_at_a_time():
    running: list[int] = []

    def program() -> None:
        dist.init_process_group()
        for _ in range(20):
            running.append(1)
            assert len(running) == 1
            torch.ones(1000).sum()
            running.pop()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert len(running) == 0
            work.wait()

    pr.launch(program, 4)


def in_new_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def process() -> tuple[Any, ...]:
    c10d: Any = dist.distributed_c10d
    return (
        dict(os.environ),
        type(os.environ._data),  # type: ignore[attr-defined]
        type(c10d._world),
        c10d._backend,
        c10d._new_process_group_helper,
        dict(dist.Backend._plugins),
        dict(dist.rendezvous.__globals__["_rendezvous_handlers"]),
        dist.TCPStore,
        threading.active_count(),
        torch.get_num_threads(),
        in_new_thread(torch.get_num_threads),
        sys.excepthook,
        dist.is_initialized(),
        dist.device_mesh.DeviceMesh.__init__,
        os.getenv("RANK"),
    )


def test_launch_restores_process_state():
    import pyringar.distributed  # noqa: F401

    own = torch.get_num_threads()
    torch.set_num_threads(3)
    before = process()
    for _ in range(2):
        pr.launch(lambda: dist.init_process_group(), 3)
        with pytest.raises(KeyError):
            pr.launch(lambda: {}["nothing"], 2)
    assert process() == before
    torch.set_num_threads(own)


def test_nested_launch_raises():
    def program() -> None:
        with pytest.raises(pr.RingarError, match="one at a time"):
            pr.launch(print, 2)

    pr.launch(program, 2)


def test_untested_torch_version_raises(monkeypatch):
    for version in ("2.10.1", "2.16.0a0+git", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(pr.UnsupportedError, match=r"expected 2\.11 to 2\.15"):
            pr.launch(print)


def test_torch_world_properties_are_known():
    """All ranks would share a property of `_World` that `_empty_world` does not contain."""
    world = vars(dist.distributed_c10d._World)
    properties = {name for name, value in world.items() if isinstance(value, property)}
    assert properties - {"pg_config_info"} <= set(internals._empty_world())


async def coroutine():
    pass


def test_launch_of_coroutine_raises():
    """test_wrong_arguments.py and test_cluster_run.py test other wrong arguments."""
    with pytest.raises(pr.ArgumentError, match="fn is a coroutine or generator function"):
        pr.launch(coroutine, 2)


def test_process_group_can_be_recreated():
    def program() -> list[float]:
        rank, found = int(os.environ["RANK"]), []
        for _ in range(2):
            store = dist.TCPStore("localhost", 29800, 3, is_master=rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
            pair, mine = dist.new_group([0, 2]), torch.full((1,), float(rank))
            dist.all_reduce(mine, group=pair) if rank != 1 else None
            dist.all_reduce(mine)
            found.append(mine.item())
            dist.destroy_process_group()
        return found

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed) == [[5.0, 5.0]] * 3


@pytest.mark.parametrize(("number", "size"), [(0, 2), (1, 8), (5, 2)])
def test_wrong_rank_or_world_size_raises(number, size):
    def program() -> None:
        if os.environ["RANK"] == "1":
            dist.init_process_group(init_method="tcp://localhost:5", rank=number, world_size=size)

    words = f"init_process_group: rank is {number} and world_size {size}, expected rank 1 and"
    with pytest.raises(pr.ArgumentError, match=words):
        pr.launch(program, 2)


def test_tags_separate_messages():
    def program() -> list[float]:
        if begin() == 0:
            works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (1, 2)]
            return [float(work.wait()) for work in works]
        found = [torch.empty(1), torch.empty(1)]
        for tag in (2, 1):
            dist.recv(found[tag - 1], 0, tag=tag)
        return [tensor.item() for tensor in found]

    assert pr.launch(program, 2)[1] == [1.0, 2.0]


def test_callback_can_wait_for_future():
    def program() -> float:
        begin()
        first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        second = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        return float(first.then(lambda f: second.wait()[0] + f.value()[0]).wait()[0])

    for seed in range(4):
        assert pr.launch(program, 2, seed=seed, timeout=5) == [4.0] * 2


def test_collective_synchronizes_gpus(monkeypatch):
    """A collective synchronizes its GPUs before and after the sum. The GPUs are fake."""
    seen: list[tuple[torch.device, list[float]]] = []
    tensors = [torch.full((1,), float(rank)) for rank in range(2)]
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]

    def synchronize(device: torch.device) -> None:
        seen.append((device, [tensor.item() for tensor in tensors]))

    def program() -> None:
        dist.all_reduce(tensors[begin()])

    pr.launch(begin, 2)  # import modules that use devices_of before the patch
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(rank_calls, "devices_of", lambda tensors: [gpus[int(t)] for t in tensors])
    pr.launch(program, 2)
    assert [values for _, values in seen] == [[0.0, 1.0]] * 2 + [[1.0, 1.0]] * 2
    assert {device for device, _ in seen[:2]} == {device for device, _ in seen[2:]} == set(gpus)


def test_input_can_be_part_of_output():
    def program() -> list[list[float]]:
        rank = begin()
        mine = torch.full((1,), float(rank))
        every = [mine, torch.zeros(1), torch.zeros(1)]
        dist.all_gather(every, mine)
        own = torch.full((1,), float(rank))
        at_root = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
        at_root[0] = own
        dist.gather(own, at_root if rank == 1 else None, dst=1)
        whole = torch.full((3,), float(rank))
        dist.all_gather_into_tensor(whole, whole[:1])
        found = [[t.item() for t in every], whole.tolist()]
        return [*found, [t.item() for t in at_root]] if rank == 1 else found

    for rank, found in enumerate(pr.launch(program, 3)):
        assert found == [[0.0, 1.0, 2.0]] * (3 if rank == 1 else 2)


POLLS: dict[str, Callable[[Any], bool]] = {
    "check": lambda store: store.check(["ready"]),
    "add": lambda store: store.add("count", 0) == 3,
    "compare_set": lambda store: store.compare_set("ready", "never", "set") == b"yes",
    "queue_len": lambda store: store.queue_len("queue") == 1,
}


@pytest.mark.parametrize("name", POLLS)
def test_store_can_be_polled(name):
    def program() -> bytes:
        dist.init_process_group()
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 2:
            store.queue_push("queue", "value")
            store.add("count", 3)
            store.set("ready", "yes")
        while not POLLS[name](store):
            pass
        return store.get("ready")

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed, timeout=2) == [b"yes"] * 3


def test_process_group_raises_after_launch():
    def program() -> Any:
        dist.init_process_group()
        return dist.group.WORLD

    groups = pr.launch(program, 2)
    with pytest.raises(pr.RingarError, match="launch has returned"):
        groups[0].allreduce([torch.ones(1)])


def test_launch_frees_models_and_groups():
    made = []

    def program() -> None:
        dist.init_process_group()
        net = DistributedDataParallel(torch.nn.Linear(2, 2))
        net(torch.ones(1, 2)).sum().backward()
        made.append(weakref.ref(net))
        made.append(weakref.ref(dist.group.WORLD))

    pr.launch(program, 3)
    gc.collect()
    assert [ref() for ref in made] == [None] * 6
