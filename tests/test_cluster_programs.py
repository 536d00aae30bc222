"""Do programs that are written for processes do on threads what they do there?"""

from __future__ import annotations

import asyncio
import builtins
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def total(number: float) -> float:
    tensor = torch.full((1,), float(number))
    dist.all_reduce(tensor)
    return tensor.item()


# -- worlds ----------------------------------------------------------------------------------------


def by_address(rank: int) -> None:
    port = 29800 + rank // 2
    dist.init_process_group(
        init_method=f"tcp://127.0.0.1:{port}", rank=rank % 2, world_size=2, backend="gloo"
    )


def by_environment(rank: int) -> None:
    os.environ |= {"RANK": f"{rank % 2}", "WORLD_SIZE": "2", "MASTER_PORT": f"{29800 + rank // 2}"}
    dist.init_process_group()


def by_store(rank: int) -> None:
    store = dist.TCPStore("localhost", 29800 + rank // 2, 2, is_master=rank % 2 == 0)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2)


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "at once"])
@pytest.mark.parametrize("begin", [by_address, by_environment, by_store])
def test_two_worlds_of_two(begin, parallel):
    def program() -> Any:
        rank = int(os.environ["RANK"])
        found = []
        for _ in range(2):
            begin(rank)
            own = dist.new_group([1])
            alone = dist.get_rank() == 1 and dist.get_world_size(own) == 1
            found += [dist.get_rank(), dist.get_world_size(), total(rank), alone]
            dist.destroy_process_group()
        return found

    for seed in range(5):
        assert pr.launch(program, 4, seed=seed, parallel=parallel) == [
            [rank % 2, 2, 1.0 if rank < 2 else 5.0, rank % 2 == 1] * 2 for rank in range(4)
        ]


def test_ranks_may_be_numbered_otherwise():
    def program() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group(init_method="tcp://localhost:29777", rank=2 - rank, world_size=3)
        numbers: list[Any] = [None] * 3
        dist.all_gather_object(numbers, rank)
        last = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.broadcast(at := torch.full((1,), float(rank)), 0, group=last)
            numbers.append(at.item())
        return numbers

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed) == [[2, 1, 0], [2, 1, 0, 2.0], [2, 1, 0, 2.0]]


def test_some_ranks_alone_and_each_for_itself():
    def some() -> Any:
        rank = int(os.environ["RANK"])
        if rank < 2:
            dist.init_process_group(init_method="tcp://localhost:1", rank=rank, world_size=2)
            return total(1)

    def each() -> Any:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return total(int(os.environ["RANK"]))

    assert pr.launch(some, 3) == [2.0, 2.0, None]
    assert pr.launch(each, 3) == [0.0, 1.0, 2.0]


def test_a_rank_that_misses_in_a_world_is_named():
    def program() -> None:
        rank = int(os.environ["RANK"])
        if rank:
            dist.init_process_group(init_method="tcp://localhost:1", rank=rank, world_size=3)
            total(1)

    with pytest.raises(pr.PeerLostError, match="wait for rank 0, which has ended"):
        pr.launch(program, 3)


def test_a_world_that_grows_and_one_that_lost_a_rank():
    def grow() -> list[float]:
        rank, sums = int(os.environ["RANK"]), []
        for size in (2, 4):
            if rank < size:
                dist.init_process_group(init_method="tcp://localhost:5", rank=rank, world_size=size)
                sums.append(total(1))
                dist.destroy_process_group()
        return sums

    def lose() -> Any:
        by_address(int(os.environ["RANK"]))
        try:
            return total(1)
        except pr.PeerLostError:
            return "lost"

    for seed in range(10):
        assert pr.launch(grow, 4, seed=seed) == [[2.0, 4.0]] * 2 + [[4.0]] * 2
        fault = pr.Fault("dies", rank=1, call=1)
        assert pr.launch(lose, 4, seed=seed, faults=[fault]) == ["lost", None, 2.0, 2.0]


@pytest.mark.parametrize(
    ("number", "size", "text"),
    [
        (lambda rank: 0, 2, "rank is 0, which is rank [01] of the cluster in this world already"),
        (lambda rank: rank, 8, "rank is [01] and world_size 8, expected a world of 2 ranks"),
        (lambda rank: rank + 4, 2, "rank is [45] and world_size 2, expected a world of 2 ranks"),
    ],
)
def test_a_world_that_cannot_be_is_refused(number, size, text):
    def program() -> None:
        rank = number(int(os.environ["RANK"]))
        dist.init_process_group(init_method="tcp://localhost:5", rank=rank, world_size=size)

    with pytest.raises(pr.ArgumentError, match=f"init_process_group: {text}"):
        pr.launch(program, 2)


def test_a_world_is_told_of_by_ranks_of_the_cluster():
    def program() -> None:
        rank = int(os.environ["RANK"])
        by_address(rank)
        dist.barrier()
        dist.all_reduce(torch.ones(rank))

    with pytest.raises(pr.ArgumentError, match="number 2 of group 2, 3: rank 2: all_reduce"):
        pr.launch(program, 4)


def test_nobody_is_blamed_for_a_rank_that_is_not_known():
    def program() -> None:
        rank = int(os.environ["RANK"])
        if rank == 2:
            dist.init_process_group(init_method="tcp://localhost:1", rank=0, world_size=2)
            total(1)

    with pytest.raises(pr.DeadlockError, match=r"for what nobody will do[^$]*group 2, \?"):
        pr.launch(program, 4)


# -- what is left to other threads -----------------------------------------------------------------


def save_in_thread(path: Path) -> None:
    def save() -> None:
        threading.Event().wait(0.05)
        number = total(1)
        (path / f"{dist.get_rank()}").write_text(f"{number}")

    thread = threading.Thread(target=save)
    assert not thread.daemon
    thread.start()
    assert not thread.daemon


def save_in_pool(path: Path) -> None:
    pool = ThreadPoolExecutor(1)
    for _ in range(2):
        pool.submit(lambda name: (path / name).write_text(f"{total(1)}"), f"{dist.get_rank()}")


@pytest.mark.parametrize("save", [save_in_thread, save_in_pool])
@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "at once"])
def test_a_rank_ends_with_its_threads(save, parallel, tmp_path):
    def program() -> None:
        dist.init_process_group()
        save(tmp_path)

    pr.launch(program, 2, parallel=parallel, timeout=5)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_the_last_checkpoint_is_written(tmp_path):
    def program() -> None:
        dist.init_process_group()
        dcp.async_save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)

    pr.launch(program, 2)
    assert ".metadata" in os.listdir(tmp_path)


def test_threads_that_threads_start_are_waited_for(tmp_path):
    def write(name: str) -> None:
        threading.Event().wait(0.1)
        (tmp_path / name).write_text("")

    def begin(name: str) -> None:
        threading.Thread(target=write, args=(name,)).start()

    def program() -> None:
        for number in range(10):
            threading.Thread(target=begin, args=(f"{os.environ['RANK']} {number}",)).start()

    pr.launch(program, 2)
    assert len(os.listdir(tmp_path)) == 20


def test_a_thread_that_is_a_daemon_is_not_waited_for():
    event = threading.Event()

    def program() -> None:
        threading.Thread(target=event.wait, daemon=True).start()

    pr.launch(program, 2, timeout=2)
    event.set()


def test_a_pool_of_a_module_serves_all_ranks_and_runs():
    pool = ThreadPoolExecutor(2)

    def program() -> Any:
        dist.init_process_group()
        path, rank = pool.submit(lambda: ("PATH" in os.environ, dist.get_rank())).result()
        return path, rank

    for seed in range(3):
        assert pr.launch(program, 3, seed=seed) == [(True, 0), (True, 1), (True, 2)]
    assert pool.submit(lambda: (os.environ.get("RANK"), dist.is_initialized())).result() == (
        None,
        False,
    )
    pool.shutdown()


def test_asyncio():
    async def later(tensor: torch.Tensor) -> None:
        await asyncio.to_thread(dist.all_reduce, tensor)

    def program() -> float:
        dist.init_process_group()
        tensor = torch.ones(1)
        asyncio.run(later(tensor))
        return tensor.item()

    assert pr.launch(program, 2, timeout=5) == [2.0, 2.0]


def test_an_endless_loop_after_a_question_to_the_store_is_told_as_such():
    def program() -> None:
        dist.init_process_group()
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().check(["never"])
            while True:
                pass
        dist.barrier()

    for seed in range(4):  # rank 0 waits in its call, or for a turn
        with pytest.raises(pr.CollectiveTimeout, match=r"rank 1 ran for [\d.]+ s without a call"):
            pr.launch(program, 2, timeout=0.1, seed=seed)


# -- what a process has once -----------------------------------------------------------------------


def test_a_rank_may_silence_print(capsys):
    """As programs do that let rank 0 alone print."""
    own = builtins.print

    def program() -> None:
        dist.init_process_group()
        if dist.get_rank():
            builtins.print = lambda *_: None
        dist.barrier()
        print(f"rank {dist.get_rank()}")

    for seed in range(5):
        pr.launch(program, 3, seed=seed)
        assert capsys.readouterr().out == "rank 0\n"
        assert builtins.print is own


def test_loggers_are_set_up_by_rank(tmp_path):
    logger = logging.getLogger("test_cluster_programs")
    before = logger.level, list(logger.handlers)

    def program() -> None:
        dist.init_process_group()
        logger.setLevel(logging.INFO if dist.get_rank() == 0 else logging.ERROR)
        if dist.get_rank() < 2:
            logger.addHandler(logging.FileHandler(tmp_path / f"{dist.get_rank()}"))
        dist.barrier()
        logger.info("information")
        logger.error("error %d", dist.get_rank())

    for seed in range(3):
        pr.launch(program, 3, seed=seed)
    assert (tmp_path / "0").read_text() == "information\nerror 0\n" * 3
    assert (tmp_path / "1").read_text() == "error 1\n" * 3
    assert (logger.level, logger.handlers) == before


def disable(logger: logging.Logger) -> None:
    logging.disable(logging.CRITICAL)


def add_filter(logger: logging.Logger) -> None:
    logger.addFilter(lambda _: False)


def forbid(logger: logging.Logger) -> None:
    logger.propagate = False


def clear(logger: logging.Logger) -> None:
    logger.handlers.clear()
    logger.propagate = False


def make_other_records(logger: logging.Logger) -> None:
    own = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *args: own(*args[:4], "silent", (), None))


@pytest.mark.parametrize("silence", [disable, add_filter, forbid, clear, make_other_records])
def test_a_rank_may_silence_a_logger(silence, caplog):
    logger = logging.getLogger("test_cluster_programs.silenced")
    logger.addHandler(own := logging.NullHandler())

    def program() -> None:
        dist.init_process_group()
        if dist.get_rank():
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


def test_plans_of_checkpoints_are_kept_by_rank(tmp_path):
    def state(rank: int, step: int) -> dict[str, torch.Tensor]:
        names = [*(f"all {i}" for i in range(6)), f"own {rank}"]
        return {name: torch.full((4 + i,), float(step)) for i, name in enumerate(names)}

    def program() -> list[bool]:
        dist.init_process_group()
        planner, right = DefaultSavePlanner(enable_plan_caching=True), []
        for step in range(3):
            dcp.save(
                state(dist.get_rank(), step), checkpoint_id=tmp_path / f"{step}", planner=planner
            )
        for step in range(3):
            read = state(dist.get_rank(), -1)
            dcp.load(read, checkpoint_id=tmp_path / f"{step}")
            right.append(all((tensor == step).all().item() for tensor in read.values()))
        return right

    assert pr.launch(program, 3) == [[True] * 3] * 3


def test_an_environment_that_is_given_is_the_childs():
    def program() -> str:
        code = "import os; print('RANK' in os.environ, 'A' in os.environ)"
        found = [
            subprocess.run([sys.executable, "-Sc", code], env=env, capture_output=True, text=True)
            for env in ({}, {"A": "b"}, None)
        ]
        return "".join(done.stdout for done in found)

    assert pr.launch(program, 1) == ["False False\nFalse True\nTrue False\n"]


def rank_of_environment(_: Any) -> tuple[str | None, str | None]:
    return os.environ.get("RANK"), os.environ.get("PYRINGAR_TEST_OWN")


@pytest.mark.parametrize("method", mostly_slow(["spawn", "fork"], "fork"))
def test_workers_of_multiprocessing_have_the_ranks_environment(method):
    def program() -> Any:
        os.environ["PYRINGAR_TEST_OWN"] = own = f"own {os.environ['RANK']}"
        assert os.environb[b"PYRINGAR_TEST_OWN"] == own.encode()
        loader = DataLoader(
            [0], num_workers=1, multiprocessing_context=method, collate_fn=rank_of_environment
        )
        return list(loader)

    found = pr.launch(program, 2, timeout=60)
    assert found == [[("0", "own 0")], [("1", "own 1")]]
    assert rank_of_environment(0) == (None, None)


def test_a_module_that_ranks_share_is_refused():
    """What a cell of a notebook above the program made."""
    net = nn.Linear(2, 2)

    def program() -> None:
        dist.init_process_group()
        DistributedDataParallel(net)

    with pytest.raises(pr.ArgumentError, match=r"module has 'weight', which rank \d"):
        pr.launch(program, 2)


def test_a_frozen_module_may_be_shared():
    backbone = nn.Linear(2, 2).requires_grad_(False)

    def program() -> None:
        dist.init_process_group()
        net = DistributedDataParallel(nn.Sequential(backbone, nn.Linear(2, 1)))
        net(torch.ones(1, 2)).sum().backward()

    pr.launch(program, 2)


def test_a_module_may_be_wrapped_again():
    net = nn.Linear(2, 2)

    def program() -> None:
        dist.init_process_group()
        for _ in range(2):
            DistributedDataParallel(net)

    for _ in range(2):
        pr.launch(program, 1)


def test_a_script_finds_its_own_folder(tmp_path):
    script = "import os\nos.chdir('/')\nprint(open(__file__).read()[:9])\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "pyringar", "run", "--ranks", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "import os\n" * 2, done.stderr


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


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "at once"])
def test_each_rank_compiles_for_itself(parallel):
    """Dynamo takes a rank's number for a constant, and keeps eight versions of a function."""

    def program() -> Any:
        dist.init_process_group()
        found = []
        for _ in range(2):
            found += [branch_by_rank(torch.ones(1)).item(), sum_of(torch.ones(1), dist.group.WORLD)]
        return [float(number) for number in found]

    is_compiled = torch.__version__.split(".")[:2] >= ["2", "15" if parallel else "13"]
    for ranks in (4, 2, 10, 4):
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


def test_a_rank_that_waits_in_a_compiled_function_goes_on_in_its_own():
    def program() -> list[float]:
        dist.init_process_group()
        return [times_rank_after_a_wait(torch.ones(1)).item() for _ in range(3)]

    for seed in range(5):
        found = pr.launch(program, 4, seed=seed)
        assert found == [[2.0 * rank] * 3 for rank in range(4)]


def test_what_is_set_of_the_compiler_holds_in_ranks_and_no_longer():
    config = torch._dynamo.config

    def program() -> Any:
        torch.compiler.set_stance("force_eager")
        return config.capture_scalar_outputs

    with config.patch(capture_scalar_outputs=True):
        assert pr.launch(program, 2) == [True, True]
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_no_run_takes_versions_from_the_next_one():
    """Of which torch keeps so many, of all ranks and of what is outside."""

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


SCRIPT = """
import concurrent.futures
import io
import torch
import torch.distributed as dist

class Config:
    pass

pool = concurrent.futures.ProcessPoolExecutor(1)  # is never shut down
dist.init_process_group()
triple = torch.compile(lambda x: 3 * x + dist.get_rank(), backend="eager")
with concurrent.futures.ThreadPoolExecutor(1) as threads:
    future = threads.submit(torch.save, Config(), io.BytesIO())
    for _ in range(10):
        dist.barrier()
    future.result()
objects = [None] * 2
dist.all_gather_object(objects, Config())
assert all(type(each) is Config for each in objects)
number = triple(torch.ones(1)).item() + pool.submit(abs, -1).result()
print(f"{number}\\n", end="")  # in one piece: ranks may print at once
"""


@pytest.mark.parametrize("options", [[], ["--parallel"]])
def test_what_belongs_to_a_script_is_the_ranks(options, tmp_path):
    """Functions that are compiled, classes that are pickled, pools that are left."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pyringar", "run", "--ranks", "2", *options, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["4.0", "5.0"], done.stderr
