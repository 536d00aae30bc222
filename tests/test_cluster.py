"""Do ranks that are threads get what ranks in processes get, each with a state of its own?"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import sys
import threading
import warnings
import weakref
from typing import Any

import distributed_cases
import distributed_training
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import mostly_slow
from programs import run_fresh, run_programs
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cluster import internals

NEED_TWO = ("broadcast", "objects", "delegated", "groups", "messages")


def run_case(case: Any, size: int) -> None:
    dist.init_process_group("ringar")
    case(dist.get_rank(), size)


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize("size", mostly_slow([1, 2, 3, 4], 2, 4))
@pytest.mark.parametrize("name", distributed_cases.CASES)
def test_collectives_have_the_backends_bits(name, size, parallel):
    if size == 1 and name in NEED_TWO:
        return
    pr.launch(run_case, size, args=(distributed_cases.CASES[name], size), parallel=parallel)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", distributed_training.CASES)
def test_training(name, size):
    pr.launch(run_case, size, args=(distributed_training.CASES[name], size), seed=size)


def test_results_come_by_rank():
    def program(add: int, *, times: int) -> int:
        return (int(os.environ["RANK"]) + add) * times

    assert pr.launch(program, 3, args=(1,), kwargs={"times": 10}) == [10, 20, 30]
    assert pr.launch(lambda: os.environ["WORLD_SIZE"], 1) == ["1"]


# -- what belongs to a rank ------------------------------------------------------------------------


def draw(pause: bool) -> tuple[Any, ...]:
    """Draw numbers of all kinds, and change what a process has only once."""
    dist.init_process_group()
    found: list[Any] = []
    for step in range(3):
        found += [torch.rand(1).item(), random.random(), np.random.rand(), np.random.randn()]
        if step == 1:
            torch.manual_seed(dist.get_rank())
            np.random.seed(dist.get_rank())
            random.seed(dist.get_rank())
            torch.set_default_dtype([torch.float64, torch.float32][dist.get_rank() % 2])
            torch.set_grad_enabled(dist.get_rank() == 0)
        for _ in range(3):  # of two normal numbers NumPy keeps one
            if pause:
                dist.barrier()
            found.append(np.random.randn())
    return (*found, torch.ones(1).dtype, torch.is_grad_enabled())


def test_random_numbers_and_defaults_belong_to_the_rank():
    torch.manual_seed(99)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    alone = pr.launch(draw, 3, args=(False,))
    for seed in range(10):
        assert pr.launch(draw, 3, args=(True,), seed=seed) == alone
    assert alone[0][-2:] == (torch.float64, True)
    assert alone[1][-2:] == (torch.float32, False)
    assert all(a != b for a, b in zip(alone[0][:4], alone[1][:4], strict=True)), "as in processes"
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.get_default_dtype() is torch.float32


def test_the_environment_belongs_to_the_rank():
    def program() -> tuple[Any, ...]:
        os.environ["PYRINGAR_OF_A_RANK"] = os.environ["RANK"]
        dist.init_process_group()
        dist.barrier()
        names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYRINGAR_OF_A_RANK", "MASTER_ADDR"
        copied = dict(os.environ)
        return tuple(copied[name] for name in names)

    before = dict(os.environ)
    found = pr.launch(program, 2)
    assert found == [("0", "0", "2", "0", "127.0.0.1"), ("1", "1", "2", "1", "127.0.0.1")]
    assert dict(os.environ) == before
    assert "PYRINGAR_OF_A_RANK" not in dict(os.environ)


def test_threads_of_a_rank_are_the_ranks():
    def program() -> int:
        dist.init_process_group()
        found = []

        def work() -> None:
            mine = torch.ones(1)
            dist.all_reduce(mine, group=group)
            found.append((int(mine), os.environ["RANK"], dist.get_rank()))

        group = dist.new_group([0, 1, 2])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [(3, str(dist.get_rank()), dist.get_rank())]

    pr.launch(program, 3)


# -- who goes next ---------------------------------------------------------------------------------


def note_turns(seed: int, parallel: bool = False) -> list[int]:
    turns: list[int] = []

    def program() -> None:
        dist.init_process_group()
        for _ in range(4):
            turns.append(dist.get_rank())
            dist.barrier()

    pr.launch(program, 3, seed=seed, parallel=parallel)
    return turns


def test_the_seed_decides_who_goes_next():
    orders = [note_turns(seed) for seed in range(12)]
    assert orders == [note_turns(seed) for seed in range(12)]
    assert len(set(map(tuple, orders))) == 12
    # Also who goes first after a barrier, and not only who comes last.
    assert {order[3] for order in orders} == {0, 1, 2}
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


def test_messages_of_any_rank_come_in_an_order_that_repeats():
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


def process() -> tuple[Any, ...]:
    """What a cluster changes while it runs."""
    c10d: Any = dist.distributed_c10d
    return (
        *(dict(os.environ), type(os.environ._data), type(c10d._world), c10d._backend),  # type: ignore[attr-defined]
        *(c10d._new_process_group_helper, dict(dist.Backend._plugins)),
        dict(dist.rendezvous.__globals__["_rendezvous_handlers"]),
        *(threading.Thread.start, threading.active_count(), torch.get_num_threads()),
        *(dist.is_initialized(), dist.device_mesh.DeviceMesh.__init__, os.getenv("RANK")),
    )


def test_the_process_is_as_before():
    import pyringar.distributed  # noqa: F401

    before = process()
    for _ in range(2):
        pr.launch(lambda: dist.init_process_group(), 3)
        with pytest.raises(KeyError):
            pr.launch(lambda: {}["nothing"], 2)
    assert process() == before


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


def test_a_group_of_the_process_stays_its_own():
    (done,) = run_programs(OUTSIDE, [])
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


COMPILES = """
import threading
import torch
import torch.distributed as dist
import pyringar as pr
from pyringar.engine import build

def ensure(recipe, own=build.ensure_engine):
    print(threading.current_thread().name)
    return own(recipe)

def program():
    dist.init_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

build.ensure_engine = ensure
print(pr.launch(program, 2))
"""


def test_no_rank_compiles_while_others_wait_for_it():
    done = run_fresh(COMPILES)
    assert done.stdout == "MainThread\n[2.0, 2.0]\n", done.stderr


def test_one_cluster_at_a_time():
    def program() -> None:
        with pytest.raises(pr.RingarError, match="one at a time"):
            pr.launch(print, 2)

    pr.launch(program, 2)


def test_torch_that_was_not_tried_is_refused(monkeypatch):
    for version in ("2.10.1", "2.16.0a0+git", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(pr.UnsupportedError, match=r"expected 2\.11 to 2\.15"):
            pr.launch(print)


def test_all_that_torch_keeps_of_groups_is_known():
    """A property that is not known would be shared by all ranks."""
    world = vars(dist.distributed_c10d._World)
    properties = {name for name, value in world.items() if isinstance(value, property)}
    assert properties - {"pg_config_info"} <= set(internals._WORLD)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fn": 3}, "fn is an int, expected a function"),
        ({"ranks": 0}, "ranks is 0, expected a positive int"),
        ({"ranks": "4"}, "ranks is '4'"),
        ({"devices": ["cpu"]}, "devices has 1 entries, expected 4"),
        ({"devices": ["cuda:9"] * 4}, "cuda:9"),
        ({"seed": -1}, "seed is -1, expected an int, 0 or more"),
        ({"seed": None}, "seed is None"),
        ({"timeout": 0}, "timeout is 0"),
        ({"faults": ["dies"]}, "faults[0] is a str, expected a Fault"),
        ({"faults": [pr.Fault("dies", 4, 1)]}, "faults[0].rank is 4, expected 0 to 3"),
    ],
)
def test_wrong_arguments(arguments, text):
    arguments = {"fn": print, **arguments}
    with pytest.raises(pr.ArgumentError) as caught:
        pr.launch(arguments.pop("fn"), **arguments)
    assert text in str(caught.value)


# -- what contexts set -----------------------------------------------------------------------------


def test_what_a_context_sets_belongs_to_the_rank():
    """Ranks leave such contexts in another order than they entered them."""

    def program() -> tuple[Any, ...]:
        dist.init_process_group()
        rank, text, calls = dist.get_rank(), io.StringIO(), []
        net = torch.nn.Linear(2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(text):
                hook = torch.nn.modules.module.register_module_forward_hook(
                    lambda *_: calls.append(rank)
                )
                for turn in range(3):
                    dist.barrier()
                    print(rank, turn)
                    warnings.warn(f"{rank} {turn}", stacklevel=1)
                    net(torch.ones(1, 2))
                hook.remove()
            if rank:
                dist.barrier(group=dist.group.WORLD)
        if not rank:
            dist.barrier()
        return text.getvalue().split(), [str(w.message) for w in caught], calls

    before = warnings.filters[:], warnings.showwarning, sys.stdout
    for seed in range(5):
        for rank, (printed, warned, calls) in enumerate(pr.launch(program, 3, seed=seed)):
            lines = [f"{rank} {turn}" for turn in range(3)]
            assert printed == " ".join(lines).split()
            assert warned == lines
            assert calls == [rank] * 3
        assert (warnings.filters[:], warnings.showwarning, sys.stdout) == before


def test_a_store_may_be_polled():
    def program() -> bytes:
        dist.init_process_group()
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 2:
            store.set("ready", "yes")
            store.add("count", 3)
        while not store.check(["ready"]):
            pass
        while store.add("count", 0) < 3:
            pass
        return store.get("ready")

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed) == [b"yes"] * 3


def test_ranks_that_run_at_once_lose_nothing_that_they_tell_the_store():
    def program() -> int:
        dist.init_process_group()
        store = dist.distributed_c10d._get_default_store()
        for _ in range(300):
            store.add("number", 1)
            store.append("text", "x")
        dist.barrier()
        return len(store.get("text")) if store.get("number") == b"1200" else -1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert pr.launch(program, 4, parallel=True) == [1200] * 4
    finally:
        sys.setswitchinterval(interval_s)


def test_stores_that_a_program_makes_are_the_clusters():
    def program() -> bytes:
        rank = int(os.environ["RANK"])
        store = dist.TCPStore("localhost", 1, 3, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        store.set(f"rank{rank}", "there")
        named = dist.TCPStore(host_name="localhost", port=1, world_size=3, is_master=rank == 0)
        return b"".join(named.get(f"rank{r}") for r in range(3))

    assert pr.launch(program, 3) == [b"there" * 3] * 3
    assert dist.TCPStore is torch._C._distributed_c10d.TCPStore


def test_a_result_that_needs_its_ranks_says_that_they_are_gone():
    def program() -> Any:
        dist.init_process_group()
        return dist.group.WORLD

    groups = pr.launch(program, 2)
    with pytest.raises(pr.RingarError, match="launch has returned"):
        groups[0].allreduce([torch.ones(1)])


def test_nothing_of_a_run_is_kept():
    made = []

    def program() -> None:
        dist.init_process_group()
        net = DistributedDataParallel(torch.nn.Linear(2, 2))
        net(torch.ones(1, 2)).sum().backward()
        made.append(weakref.ref(net))
        made.append(weakref.ref(dist.group.WORLD))
        assert not getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})

    pr.launch(program, 3)
    gc.collect()
    assert [ref() for ref in made] == [None] * 6


def test_forward_of_ddp_leaves_no_module_active():
    """torch 2.14 puts back what was active, which another rank's forward may have set."""

    class Waits(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            active = DistributedDataParallel._active_ddp_module
            for _ in range(dist.get_rank() + 1):
                dist.barrier()
            assert DistributedDataParallel._active_ddp_module is active
            assert active is not None
            assert active.module is self
            dist.barrier() if dist.get_rank() == 0 else None
            return super().forward(x)

    def program() -> None:
        dist.init_process_group()
        DistributedDataParallel(Waits(2, 1))(torch.ones(1, 2))

    for seed in range(8):
        pr.launch(program, 2, seed=seed)
        assert DistributedDataParallel._active_ddp_module is None
