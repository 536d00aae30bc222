"""Ranks that are threads: the bits of processes, the order of ranks, the process afterwards."""

from __future__ import annotations

import functools
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
from cases import forks_run_backward, mostly_slow
from programs import run_programs
from ranks import run_group
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cluster import cluster, internals

NEED_TWO = ("broadcast", "objects", "delegated", "groups", "messages")


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
def test_collectives(name, size):
    pr.launch(run_case, size, args=(distributed_cases.CASES[name], size))


@pytest.mark.parametrize("size", mostly_slow([2, 4], 4))
@pytest.mark.parametrize("name", distributed_training.CASES)
def test_training(name, size):
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


def test_results_come_by_rank():
    def program(add: int, *, times: int) -> int:
        return (int(os.environ["RANK"]) + add) * times

    assert pr.launch(program, 3, args=(1,), kwargs={"times": 10}) == [10, 20, 30]


REFUSED: dict[str, Callable[[], object]] = {
    "maximum of sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
    "sparse": lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
    "expanded output": lambda: dist.all_gather_into_tensor(torch.ones(1).expand(2), torch.ones(1)),
    "twice the same": lambda: dist.group.WORLD.allreduce([torch.ones(2)] * 2),
    "other size": lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2)),
    "other size of a part": lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_call_does_not_end_the_run(name):
    def program() -> int:
        dist.init_process_group()
        with pytest.raises((pr.UnsupportedError, pr.ArgumentError)):
            REFUSED[name]()
        dist.barrier()
        return 1

    assert pr.launch(program, 2) == [1, 1]


# -- the bits of processes -------------------------------------------------------------------------

STEPS, SEEDS = 3, range(4)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 84),
        nn.Sigmoid(),
        nn.Linear(84, 10),
    )


MODELS: dict[str, Any] = {"convolutions": convolutions, "transformer": Transformer}


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    for part in model.children():
        if any(True for _ in part.parameters()) and not isinstance(part, nn.ModuleList):
            fully_shard(part)
    fully_shard(model)
    return model


def train(rank: int, size: int, name: str, wrapper: str, seed: int) -> bytes:
    torch.manual_seed(seed)
    model = wrapped(MODELS[name](), wrapper)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(1000 * seed + rank)  # of dropout, and of the data
    for _ in range(STEPS):
        x, y = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    whole = [p.full_tensor() if wrapper == "fsdp2" else p for p in model.parameters()]
    return b"".join(p.detach().numpy().tobytes() for p in whole)


def train_all(rank: int, size: int, name: str, wrapper: str) -> list[bytes]:
    return [train(rank, size, name, wrapper, seed) for seed in SEEDS]


@functools.cache
def of_processes(size: int, name: str, wrapper: str) -> list[list[bytes]]:
    return run_group(train_all, size, name, wrapper)


def train_on_thread(size: int, name: str, wrapper: str, seed: int) -> bytes:
    dist.init_process_group("ringar")
    return train(dist.get_rank(), size, name, wrapper, seed)


@pytest.mark.parametrize(
    ("size", "name", "wrapper"),
    mostly_slow(
        itertools.product([1, 2, 4], MODELS, ["ddp", "fsdp2"]),
        (2, "transformer", "ddp"),
    ),
)
def test_threads_have_the_bits_of_processes(size, name, wrapper):
    wanted = of_processes(size, name, wrapper)
    for seed in SEEDS:
        found = pr.launch(train_on_thread, size, args=(size, name, wrapper, seed), seed=seed)
        assert all(isinstance(bits, list) for bits in wanted), wanted
        assert found == [bits[seed] for bits in wanted], f"seed {seed}"
    assert len({bits[0] for bits in wanted}) == 1, "all ranks hold the same"
    assert len(set(wanted[0])) == len(SEEDS), "seeds differ"


# -- the order of ranks ----------------------------------------------------------------------------


def order_of_ranks(seed: int) -> list[int]:
    order: list[int] = []

    def program() -> None:
        dist.init_process_group()
        for _ in range(4):
            order.append(dist.get_rank())
            dist.barrier()

    pr.launch(program, 3, seed=seed)
    return order


def test_seed_decides_the_order():
    orders = [order_of_ranks(seed) for seed in range(12)]
    assert orders == [order_of_ranks(seed) for seed in range(12)]
    assert len(set(map(tuple, orders))) == 12
    assert {order[3] for order in orders} == {0, 1, 2}, "also which rank goes on first"
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


def test_messages_of_any_rank_repeat_their_order():
    def program() -> list[int]:
        dist.init_process_group()
        if dist.get_rank():
            dist.send(torch.ones(1), 0)
            return []
        return [dist.recv(torch.empty(1)) for _ in range(3)]

    orders = [pr.launch(program, 4, seed=seed)[0] for seed in range(10)]
    assert orders == [pr.launch(program, 4, seed=seed)[0] for seed in range(10)]
    assert len(set(map(tuple, orders))) > 1


# -- the process -----------------------------------------------------------------------------------


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


def test_process_is_as_before():
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


OUTSIDE = """
import torch, torch.distributed as dist, pyringar as pr
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
pair = dist.new_group([0])
def program():
    assert not dist.is_initialized()
    dist.init_process_group()
    x = torch.ones(1)
    dist.all_reduce(x)
    return int(x)
assert pr.launch(program, 3) == [3, 3, 3]
assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
x = torch.ones(2)
dist.all_reduce(x, group=pair)
print(torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name).tolist())
dist.destroy_process_group()
"""


def test_group_of_the_process_stays_its_own():
    (done,) = run_programs(OUTSIDE, [])
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


def test_engine_is_loaded_before_ranks_start(monkeypatch):
    makers: list[str] = []

    def make(*args: Any, **options: Any) -> Any:
        makers.append(threading.current_thread().name)
        return pr.Communicator(*args, **options)

    def program() -> None:
        dist.init_process_group()
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(cluster, "Communicator", make)
    pr.launch(program, 2)
    assert set(makers) == {threading.main_thread().name}


def test_second_cluster_is_refused():
    def program() -> None:
        with pytest.raises(pr.RingarError, match="one at a time"):
            pr.launch(print, 2)

    pr.launch(program, 2)


def test_untried_torch_is_refused(monkeypatch):
    for version in ("2.10.1", "2.16.0a0+git", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(pr.UnsupportedError, match=r"expected 2\.11 to 2\.15"):
            pr.launch(print)


def test_torchs_state_of_groups_is_known():
    """A property that is not known would be shared by all ranks."""
    world = vars(dist.distributed_c10d._World)
    properties = {name for name, value in world.items() if isinstance(value, property)}
    assert properties - {"pg_config_info"} <= set(internals._empty_world())


async def coroutine():
    pass


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fn": 3}, "fn is an int, expected a function"),
        ({"fn": coroutine}, "fn is a coroutine or generator function"),
        ({"ranks": 0}, "ranks is 0, expected a positive int"),
        ({"ranks": "4"}, "ranks is '4'"),
        ({"devices": ["cpu"]}, "devices has 1 entries, expected 4"),
        ({"devices": ["cuda:9"] * 4}, "cuda:9"),
        ({"seed": -1}, "seed is -1, expected an int, 0 or more"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_arguments(arguments, text):
    arguments = {"fn": print, **arguments}
    with pytest.raises(pr.ArgumentError) as caught:
        pr.launch(arguments.pop("fn"), **arguments)
    assert text in str(caught.value)


# -- stores ----------------------------------------------------------------------------------------


POLLS: dict[str, Callable[[Any], bool]] = {
    "check": lambda store: store.check(["ready"]),
    "add": lambda store: store.add("count", 0) == 3,
    "compare_set": lambda store: store.compare_set("ready", "never", "set") == b"yes",
    "queue_len": lambda store: store.queue_len("queue") == 1,
}


@pytest.mark.parametrize("name", POLLS)
def test_store_may_be_polled(name):
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


# -- after a run -----------------------------------------------------------------------------------


def test_group_outlives_its_ranks():
    def program() -> Any:
        dist.init_process_group()
        return dist.group.WORLD

    groups = pr.launch(program, 2)
    with pytest.raises(pr.RingarError, match="launch has returned"):
        groups[0].allreduce([torch.ones(1)])


def test_run_frees_its_objects():
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
