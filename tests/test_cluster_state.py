"""Ranks that are threads: what each rank has for itself, also while others run."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import begin
from torch import nn
from torch.autograd import forward_ad
from torch.backends import mkldnn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

import pyringar as pr
from pyringar.cluster import internals

# -- random numbers and settings -------------------------------------------------------------------


def draw(pause: bool) -> tuple[Any, ...]:
    rank = begin()
    found: list[Any] = []
    for step in range(3):
        found += [torch.rand(1).item(), random.random(), np.random.rand()]
        if step == 1:
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            torch.set_default_dtype([torch.float64, torch.float32][rank % 2])
            torch.set_grad_enabled(rank == 0)
        if pause:
            dist.barrier()
        found.append(np.random.rand())
    return (*found, torch.ones(1).dtype, torch.is_grad_enabled())


def test_random_numbers_belong_to_the_rank():
    torch.manual_seed(99)
    np.random.seed(99)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    alone = pr.launch(draw, 3, args=(False,))
    for seed in range(10):
        assert pr.launch(draw, 3, args=(True,), seed=seed) == alone
    assert alone[0][-2:] == (torch.float64, True)
    assert alone[1][-2:] == (torch.float32, False)
    assert all(a != b for a, b in zip(alone[0][:3], alone[1][:3], strict=True)), "as in processes"
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert torch.get_default_dtype() is torch.float32


def anomaly(rank: int) -> Any:
    return torch.autograd.set_detect_anomaly(rank == 1)


# A rank's own setting: how to set it, and how to read it.
SETTINGS: dict[str, tuple[Callable[[int], object], Callable[[], Any]]] = {
    "environment": (
        lambda rank: os.environ.update(PYRINGAR_TEST=str(rank)),
        lambda: dict(os.environ).get("PYRINGAR_TEST"),
    ),
    "anomaly mode": (anomaly, torch.is_anomaly_enabled),
    "default device": (lambda _: torch.set_default_device("meta"), torch.get_default_device),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_belong_to_the_rank(name):
    change, read = SETTINGS[name]

    def program() -> tuple[Any, Any]:
        rank = begin()
        if rank:
            change(rank)
        wanted = read()
        for _ in range(3):
            dist.barrier()
        return wanted, read()

    before = read()
    for seed in range(3):
        found = pr.launch(program, 3, seed=seed)
        assert all(wanted == now for wanted, now in found)
        assert found[1][0] != before
        assert found[0][0] == before
        assert read() == before
    assert os.getenv("PYRINGAR_TEST") is None


def test_module_hooks_belong_to_the_rank():
    def program() -> list[int]:
        rank, calls = begin(), []
        net = torch.nn.Linear(2, 2)
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(rank))
        for _ in range(3):
            dist.barrier()
            net(torch.ones(1, 2))
        hook.remove()
        dist.barrier()
        net(torch.ones(1, 2))
        return calls

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed) == [[rank] * 3 for rank in range(3)]


# -- contexts of torch -----------------------------------------------------------------------------

# How a program enters a context, and what tells whether it is inside.
CONTEXTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "parametrize.cached": (parametrize.cached, lambda: parametrize._cache_enabled),
    "early stop": (
        lambda: checkpoint.set_checkpoint_early_stop(False),
        lambda: checkpoint._enable_checkpoint_early_stop,
    ),
    "saved tensors": (
        torch.autograd.graph.allow_mutation_on_saved_tensors,
        lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
    ),
    "implicit replication": (
        implicit_replication,
        lambda: DTensor._op_dispatcher._allow_implicit_replication,
    ),
    "min-cost redistribution": (
        lambda: _redistribute.use_min_cost_redistribution_plan(enabled=True),
        lambda: _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN,
    ),
    "sdpa_kernel": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: (torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_sdp_priority_order()),
    ),
    "mkldnn flags": (lambda: mkldnn.flags(enabled=False), lambda: mkldnn.enabled),
    "flop counter": (lambda: FlopCounterMode(display=False), is_in_torch_dispatch_mode),
    "forward AD": (forward_ad.dual_level, lambda: forward_ad._current_level),
    "loss_parallel": (
        loss_parallel,
        lambda: torch.ops.aten._log_softmax.default in DTensor._op_dispatcher._custom_op_handlers,
    ),
    "sparse invariants": (
        torch.sparse.check_sparse_tensor_invariants,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_belong_to_the_rank(name):
    enter, is_inside = CONTEXTS[name]

    def program() -> list[Any]:
        found = [is_inside() for _ in range(begin())]
        for _ in range(2):
            with enter():
                dist.barrier()
                found += [is_inside()]
            found += [is_inside()]
            dist.barrier()
        return found[dist.get_rank() :]

    before = is_inside()
    alone = pr.launch(program, 1)[0]
    assert alone == [alone[0], before] * 2
    assert alone[0] != before
    for seed in range(6):
        assert pr.launch(program, 3, seed=seed) == [alone] * 3
        assert is_inside() == before


def test_tangents_are_forgotten():
    """C++ has one level of forward AD, which it empties when the last rank leaves."""

    def program() -> tuple[list[float], bool]:
        rank, found = begin(), []
        kept = torch.zeros(2)
        for step in range(4):
            with forward_ad.dual_level():
                y = forward_ad.make_dual(torch.ones(2), torch.full((2,), rank + 1.0)) * (step + 1)
                kept.add_(y)
                tangent = forward_ad.unpack_dual(kept).tangent.clone()
                dist.all_reduce(tangent)
                found.append(tangent[0].item())
            for _ in range(rank % 2):
                torch.rand(1)
        return found, forward_ad.unpack_dual(kept).tangent is None

    for seed in range(8):
        assert pr.launch(program, 3, seed=seed) == [([6.0, 12.0, 18.0, 24.0], True)] * 3


# -- threads that a rank starts --------------------------------------------------------------------


def store_of_world() -> Any:
    return dist.distributed_c10d._get_default_store()


THREAD_CALLS: dict[str, Callable[[Any], object]] = {
    "collective": lambda _: dist.barrier(),
    "collective of a group": lambda given: dist.all_reduce(torch.ones(1), group=given["group"]),
    "guarded": lambda _: dist.barrier() if dist.is_initialized() else None,
    "functional": lambda _: funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD),
    "functional of a mesh": lambda given: funcol.all_reduce(torch.ones(1), "sum", given["mesh"]),
    "message": lambda given: dist.send(torch.ones(1), 1, group=given["group"]),
    "wait": lambda given: given["work"].wait(),
    "poll": lambda given: given["work"].is_completed(),
    "future": lambda given: given["work"].get_future(),
    "store": lambda _: store_of_world().set("key", "value"),
    "store's compare_set": lambda _: store_of_world().compare_set("key", "", "value"),
    "store's wait": lambda _: store_of_world().get("key"),
    "new group": lambda _: dist.new_group([1]),
    "end": lambda _: dist.destroy_process_group(),
}


STARTS: dict[str, Callable[[Callable[[], None]], object]] = {
    "thread": lambda run: threading.Thread(target=run).start(),
    "timer": lambda run: threading.Timer(0.0, run).start(),
    "executor": lambda run: ThreadPoolExecutor(1).submit(run),
    "handled": lambda run: threading.Thread(target=run).start(),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("call", THREAD_CALLS)
def test_thread_of_a_rank_is_refused(call, kind):
    """The thread calls when all ranks wait; no rank waits for the thread."""

    def program() -> None:
        rank = begin()
        given = {"group": dist.new_group(), "mesh": init_device_mesh("cpu", (2,))}
        given["work"] = dist.irecv(torch.ones(1), 1 - rank, group=given["group"])

        def run() -> None:
            time.sleep(0.02)
            with contextlib.suppress(pr.RingarError if kind == "handled" else ()):
                THREAD_CALLS[call](given)

        if rank == 0:
            STARTS[kind](run)
        with contextlib.suppress(pr.RingarError if kind == "handled" else ()):
            dist.recv(torch.ones(1), 1 - rank)

    with pytest.raises(pr.RingarError, match=r"the rank's own thread.*processes=True") as told:
        pr.launch(program, 2)
    assert type(told.value) is pr.RingarError


def test_deadlock_is_told_when_threads_have_ended():
    def program(seconds: float) -> None:
        thread = threading.Thread(target=time.sleep, args=(seconds,), name="reader")
        if begin() == 0:
            thread.start()
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(pr.CollectiveTimeout, match="all ranks wait for each other\n"):
        pr.launch(program, 2, args=(0.05,))
    with pytest.raises(pr.CollectiveTimeout, match=r"still run, reader: .* processes=True"):
        pr.launch(program, 2, args=(0.5,), timeout=0.1)


def test_call_in_a_forked_child_is_refused():
    def program() -> int:
        child = os.fork() if begin() == 0 else -1
        if child == 0:
            try:
                dist.barrier()
            except pr.RingarError as error:
                os._exit(7 if "processes=True" in str(error) else 8)
            os._exit(9)
        dist.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child > 0 else 7

    assert pr.launch(program, 2) == [7, 7]


def test_thread_of_no_rank_is_told():
    """An executor from before the launch: its threads belong to the process."""
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    def program() -> None:
        if begin() == 0:
            pool.submit(dist.barrier).result()

    with pool, pytest.raises(ValueError, match=r"ThreadPoolExecutor.*processes=True"):
        pr.launch(program, 2)


# -- torch's caches and globals --------------------------------------------------------------------


def test_meshes_of_ranks_differ():
    """DTensor's caches would take equal ones for one, with the first rank's coordinate."""

    def program() -> Any:
        begin()
        return init_device_mesh("cpu", (2,))

    first, second = pr.launch(program, 2)
    assert first != second
    assert hash(first) != hash(second)


def test_shared_module_is_refused():
    net = nn.Linear(2, 2)

    def program() -> None:
        begin()
        for _ in range(2):  # the same rank may wrap it again
            DistributedDataParallel(net)

    with pytest.raises(pr.ArgumentError, match=r"module has 'weight', which rank \d"):
        pr.launch(program, 2)
    for _ in range(2):
        pr.launch(program, 1)


def test_operator_of_two_ranks_is_refused():
    def program() -> None:
        begin()

        @torch.library.custom_op("pyringar_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        dist.barrier()

    with pytest.raises(pr.UnsupportedError, match="pyringar_test::twice is defined by rank"):
        pr.launch(program, 2)


# -- compiled code ---------------------------------------------------------------------------------


def never(graph: Any, _: Any) -> Any:
    raise AssertionError("a rank compiles")


@torch.compile(backend=never)
def branch_by_rank(x: torch.Tensor) -> torch.Tensor:
    y = x + 100 if dist.get_rank() == 0 else x * dist.get_rank()
    dist.all_reduce(y)
    return y * dist.get_world_size() - dist.get_rank()


@torch.compile(backend=never, fullgraph=True)
def sum_of(x: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", group) + 1


def test_compiled_functions_run_uncompiled(caplog):
    """Dynamo takes a rank's number for a constant, and keeps compiled code with the function."""

    def program() -> Any:
        begin()
        net = torch.compile(DistributedDataParallel(nn.Linear(2, 1)), backend=never)
        net(torch.ones(1, 2)).sum().backward()
        return [branch_by_rank(torch.ones(1)).item(), sum_of(torch.ones(1), dist.group.WORLD)]

    internals._say_once.cache_clear()
    total = 101 + 1 + 2
    assert pr.launch(program, 3) == [[total * 3 - rank, 4] for rank in range(3)]
    assert "torch.compile: ranks that are threads of one process run uncompiled" in caplog.text
    graphs: list[Any] = []
    triple = torch.compile(lambda x: 3 * x, backend=lambda graph, _: graphs.append(1) or graph)
    assert triple(torch.ones(1)) == 3.0
    assert len(graphs) == 1, "outside ranks"
