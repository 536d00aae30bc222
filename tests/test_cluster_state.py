"""Ranks that are threads: what each rank has for itself, also while others run."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import logging
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from cases import mostly_slow
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pyringar as pr


def begin() -> int:
    dist.init_process_group()
    return dist.get_rank()


# -- random numbers and settings -------------------------------------------------------------------


def draw(pause: bool) -> tuple[Any, ...]:
    """Draw numbers of all kinds, and change settings that a process has once."""
    rank = begin()
    found: list[Any] = []
    for step in range(3):
        found += [torch.rand(1).item(), random.random(), np.random.rand(), np.random.randn()]
        if step == 1:
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            torch.set_default_dtype([torch.float64, torch.float32][rank % 2])
            torch.set_grad_enabled(rank == 0)
        for _ in range(3):  # of two normal numbers NumPy keeps one
            if pause:
                dist.barrier()
            found.append(np.random.randn())
    return (*found, torch.ones(1).dtype, torch.is_grad_enabled())


def test_random_numbers_belong_to_the_rank():
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


def set_filters(rank: int) -> object:
    return warnings.simplefilter("error" if rank else "ignore", UserWarning)


def set_argv(rank: int) -> None:
    sys.argv[:] = [f"program {rank}"]


def disable_logging(rank: int) -> None:
    logging.disable(logging.CRITICAL if rank else logging.INFO)


def set_stance(rank: int) -> None:
    torch.compiler.set_stance("force_eager" if rank else "default")


# A rank's own setting: how to set it, and how to read it.
SETTINGS: dict[str, tuple[Callable[[int], object], Callable[[], Any]]] = {
    "environment": (
        lambda rank: os.environ.update(PYRINGAR_TEST=str(rank)),
        lambda: dict(os.environ).get("PYRINGAR_TEST"),
    ),
    "filters of warnings": (set_filters, lambda: list(warnings.filters)),
    "anomaly mode": (
        lambda rank: torch.autograd.set_detect_anomaly(rank == 1),
        torch.is_anomaly_enabled,
    ),
    "arguments": (set_argv, lambda: list(sys.argv)),
    "print": (lambda rank: setattr(builtins, "print", repr), lambda: builtins.print),
    "output": (lambda rank: setattr(sys, "stdout", io.StringIO()), lambda: sys.stdout),
    "disabled logging": (disable_logging, lambda: logging.root.manager.disable),
    "compiler's stance": (set_stance, lambda: torch._dynamo.eval_frame._stance.stance),
}


# Before torch 2.13 all ranks have force_eager.
HAS_STANCE = torch.__version__.split(".")[:2] >= ["2", "13"]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_belong_to_the_rank(name):
    """Rank 0 has those of the process."""
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
        if name != "compiler's stance" or HAS_STANCE:
            assert found[0][0] == before
        assert read() == before


def test_contexts_belong_to_the_rank():
    """Ranks leave such contexts in another order than they entered them."""

    def program() -> tuple[Any, ...]:
        rank, text, calls = begin(), io.StringIO(), []
        net = torch.nn.Linear(2, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(text):
                hook = torch.nn.modules.module.register_module_forward_hook(
                    lambda *_: calls.append(rank)
                )
                for step in range(3):
                    dist.barrier()
                    print(rank, step)
                    warnings.warn(f"{rank} {step}", stacklevel=1)
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
            lines = [f"{rank} {step}" for step in range(3)]
            assert printed == " ".join(lines).split()
            assert warned == lines
            assert calls == [rank] * 3
        assert (warnings.filters[:], warnings.showwarning, sys.stdout) == before


def add_filter(logger: logging.Logger) -> None:
    logger.addFilter(lambda _: False)


def clear(logger: logging.Logger) -> None:
    logger.handlers.clear()
    logger.propagate = False


def make_other_records(logger: logging.Logger) -> None:
    own = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args: own(*args[:4], "silent", (), None))


def set_level(logger: logging.Logger) -> None:
    logger.setLevel(logging.CRITICAL)


@pytest.mark.parametrize("silence", [add_filter, clear, make_other_records, set_level])
def test_rank_silences_its_logger(silence, caplog):
    logger = logging.getLogger("test_cluster_state.silenced")
    logger.addHandler(own := logging.NullHandler())

    def program() -> None:
        if begin():
            silence(logger)
        dist.barrier()
        logger.error("rank %d", dist.get_rank())

    for seed in range(3):
        caplog.clear()
        pr.launch(program, 3, seed=seed)
        logger.error("after it")
        told = [text for text in caplog.messages if text != "silent"]
        assert told == ["rank 0", "after it"]
    assert logger.handlers == [own]
    logger.removeHandler(own)


# -- processes and threads that a rank starts ------------------------------------------------------


def test_children_have_the_ranks_environment():
    code = "import os; print(os.getenv('RANK'), os.getenv('PYRINGAR_NEW'))"

    def program() -> list[str]:
        os.environ["PYRINGAR_NEW"] = f"of {begin()}"
        dist.barrier()
        found = [
            subprocess.run([sys.executable, "-Sc", code], env=env, capture_output=True, text=True)
            for env in (None, {}, {"PYRINGAR_NEW": "given"})
        ]
        return [done.stdout.strip() for done in found]

    given = ["None None", "None given"]
    assert pr.launch(program, 2) == [["0 of 0", *given], ["1 of 1", *given]]
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"PYRINGAR_NEW") is None, "also where C looks"


def environment_of_worker(_: Any) -> tuple[str | None, str | None]:
    return os.environ.get("RANK"), os.environ.get("PYRINGAR_TEST_OWN")


@pytest.mark.parametrize("method", mostly_slow(["spawn", "fork"], "fork"))
def test_data_workers_have_the_ranks_environment(method):
    def program() -> Any:
        os.environ["PYRINGAR_TEST_OWN"] = own = f"own {os.environ['RANK']}"
        assert os.environb[b"PYRINGAR_TEST_OWN"] == own.encode()
        loader = DataLoader(
            [0], num_workers=1, multiprocessing_context=method, collate_fn=environment_of_worker
        )
        return list(loader)

    found = pr.launch(program, 2, timeout=60)
    assert found == [[("0", "own 0")], [("1", "own 1")]]
    assert environment_of_worker(0) == (None, None)


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_threads_calls_leave_the_ranks_state_alone():
    def program(calls: bool) -> list[Any]:
        if begin() == 0:
            torch.set_default_dtype(torch.float64)
        found = []
        for _ in range(4):
            found.append(torch.rand(1).item())
            if calls:
                in_thread(dist.barrier)
        return [*found, torch.ones(1).dtype]

    alone = pr.launch(program, 3, args=(False,))
    for seed in range(8):
        assert pr.launch(program, 3, args=(True,), seed=seed) == alone


def test_helper_thread_draws_separately():
    def program() -> tuple[float, ...]:
        torch.manual_seed(begin())
        thread = threading.Thread(target=dist.barrier)
        thread.start()
        found = [torch.rand(1).item() for _ in range(200)]
        thread.join()
        found += [torch.rand(1).item() for _ in range(3)]
        dist.barrier()
        return tuple(found)

    assert len({tuple(pr.launch(program, 3)) for _ in range(10)}) == 1


def test_shared_pool_serves_the_calling_rank():
    pool = ThreadPoolExecutor(2)

    def program() -> Any:
        begin()
        return pool.submit(lambda: ("PATH" in os.environ, dist.get_rank())).result()

    for seed in range(3):
        assert pr.launch(program, 3, seed=seed) == [(True, 0), (True, 1), (True, 2)]
    outside = pool.submit(lambda: (os.environ.get("RANK"), dist.is_initialized())).result()
    assert outside == (None, False)
    pool.shutdown()


# -- torch's caches and globals --------------------------------------------------------------------


def test_plans_of_checkpoints_belong_to_the_rank(tmp_path):
    def state(rank: int, step: int) -> dict[str, torch.Tensor]:
        names = [*(f"all {i}" for i in range(6)), f"own {rank}"]
        return {name: torch.full((4 + i,), float(step)) for i, name in enumerate(names)}

    def program() -> list[bool]:
        rank, planner, right = begin(), DefaultSavePlanner(enable_plan_caching=True), []
        for step in range(3):
            dcp.save(state(rank, step), checkpoint_id=tmp_path / f"{step}", planner=planner)
        for step in range(3):
            read = state(rank, -1)
            dcp.load(read, checkpoint_id=tmp_path / f"{step}")
            right.append(all((tensor == step).all().item() for tensor in read.values()))
        return right

    assert pr.launch(program, 3) == [[True] * 3] * 3


def test_forward_of_ddp_leaves_no_module_active():
    """torch 2.14 puts back the active module, which the forward of another rank may have set."""

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
        begin()
        DistributedDataParallel(Waits(2, 1))(torch.ones(1, 2))

    for seed in range(8):
        pr.launch(program, 2, seed=seed)
        assert DistributedDataParallel._active_ddp_module is None


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


def test_shared_frozen_module_is_taken():
    backbone = nn.Linear(2, 2).requires_grad_(False)

    def program() -> None:
        begin()
        net = DistributedDataParallel(nn.Sequential(backbone, nn.Linear(2, 1)))
        net(torch.ones(1, 2)).sum().backward()

    pr.launch(program, 2)


def test_operator_of_two_ranks_is_refused():
    """Torch would crash."""

    def program() -> None:
        begin()

        @torch.library.custom_op("pyringar_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        dist.barrier()

    with pytest.raises(pr.UnsupportedError, match="pyringar_test::twice is defined by rank"):
        pr.launch(program, 2)


# -- compiled code ---------------------------------------------------------------------------------

graphs: list[Any] = []


def counted(graph: Any, _: Any) -> Any:
    graphs.append(graph)
    return graph.forward


@torch.compile(backend=counted)
def branch_by_rank(x: torch.Tensor) -> torch.Tensor:
    y = x + 100 if dist.get_rank() == 0 else x * dist.get_rank()
    dist.all_reduce(y)
    return y * dist.get_world_size() - dist.get_rank()


@torch.compile(backend=counted, fullgraph=True)
def sum_of(x: torch.Tensor, group: Any) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", group) + 1


@pytest.mark.parametrize("parallel", mostly_slow([False, True], False), ids=["in turn", "at once"])
def test_each_rank_compiles_for_itself(parallel):
    """Dynamo takes a rank's number for a constant, and keeps eight versions of a function."""

    def program() -> Any:
        begin()
        found = []
        for _ in range(2):
            found += [branch_by_rank(torch.ones(1)).item(), sum_of(torch.ones(1), dist.group.WORLD)]
        return [float(number) for number in found]

    is_compiled = torch.__version__.split(".")[:2] >= ["2", "15" if parallel else "13"]
    for ranks in (2, 10):
        graphs.clear()
        total = 101 + sum(range(1, ranks))
        found = pr.launch(program, ranks, parallel=parallel)
        assert found == [[total * ranks - rank, ranks + 1] * 2 for rank in range(ranks)]
        assert len(graphs) == (2 * ranks if is_compiled else 0)


@torch.compile(backend=counted)
def times_rank_after_a_wait(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    dist.barrier()
    torch._dynamo.graph_break()
    return y * dist.get_rank()


@pytest.mark.slow
def test_compiled_function_resumes_in_its_rank():
    def program() -> list[float]:
        begin()
        return [times_rank_after_a_wait(torch.ones(1)).item() for _ in range(3)]

    for seed in range(5):
        found = pr.launch(program, 4, seed=seed)
        assert found == [[2.0 * rank] * 3 for rank in range(4)]


@pytest.mark.slow
def test_runs_leave_torchs_limit_of_versions_alone():
    def program() -> float:
        return triple(torch.ones(1)).item()

    triple = torch.compile(lambda x: 3 * x, backend=counted, fullgraph=True)
    with torch._dynamo.config.patch(accumulated_recompile_limit=8):
        for _ in range(3):
            graphs.clear()
            assert pr.launch(program, 10) == [3.0] * 10
            assert len(graphs) in (0, 10)  # uncompiled before torch 2.13
        graphs.clear()
        triple(torch.ones(1))
        assert len(graphs) == 1
