"""Ranks that are threads: worlds of ranks, threads, callbacks and scripts that programs make."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import run_programs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cli import main
from pyringar.cluster.faults import Fault


def begin() -> int:
    dist.init_process_group()
    return dist.get_rank()


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


def test_ranks_in_another_order():
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


def test_missing_rank_of_world_is_named():
    def program() -> None:
        rank = int(os.environ["RANK"])
        if rank:
            dist.init_process_group(init_method="tcp://localhost:1", rank=rank, world_size=3)
            total(1)

    with pytest.raises(pr.PeerLostError, match="wait for rank 0, which has ended"):
        pr.launch(program, 3)


def test_world_grows_and_loses_a_rank():
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
        fault = Fault("dies", rank=1, call=1)
        assert pr.launch(lose, 4, seed=seed, faults=[fault]) == ["lost", None, 2.0, 2.0]


@pytest.mark.parametrize(
    ("number", "size", "text"),
    [
        (lambda rank: 0, 2, "rank is 0, which is rank [01] of the cluster in this world already"),
        (lambda rank: rank, 8, "rank is [01] and world_size 8, expected a world of 2 ranks"),
        (lambda rank: rank + 4, 2, "rank is [45] and world_size 2, expected a world of 2 ranks"),
    ],
)
def test_impossible_world_is_refused(number, size, text):
    def program() -> None:
        rank = number(int(os.environ["RANK"]))
        dist.init_process_group(init_method="tcp://localhost:5", rank=rank, world_size=size)

    with pytest.raises(pr.ArgumentError, match=f"init_process_group: {text}"):
        pr.launch(program, 2)


def test_errors_have_numbers_of_the_cluster():
    def program() -> None:
        rank = int(os.environ["RANK"])
        by_address(rank)
        dist.barrier()
        dist.all_reduce(torch.ones(rank))

    with pytest.raises(pr.ArgumentError, match="number 2 of group 2, 3: rank 2: all_reduce"):
        pr.launch(program, 4)


def test_unknown_rank_is_not_named():
    def program() -> None:
        rank = int(os.environ["RANK"])
        if rank == 2:
            dist.init_process_group(init_method="tcp://localhost:1", rank=0, world_size=2)
            total(1)

    with pytest.raises(pr.CollectiveTimeout, match=r"for what nobody will do[^$]*group 2, \?"):
        pr.launch(program, 4)


# -- threads ---------------------------------------------------------------------------------------


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
def test_rank_ends_with_its_threads(save, parallel, tmp_path):
    def program() -> None:
        dist.init_process_group()
        save(tmp_path)

    pr.launch(program, 2, parallel=parallel, timeout=5)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_threads_of_threads_are_waited_for(tmp_path):
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


def test_daemon_thread_is_not_waited_for():
    event = threading.Event()

    def program() -> None:
        threading.Thread(target=event.wait, daemon=True).start()

    pr.launch(program, 2, timeout=2)
    event.set()


def test_asyncio_thread_calls():
    async def later(tensor: torch.Tensor) -> None:
        await asyncio.to_thread(dist.all_reduce, tensor)

    def program() -> float:
        dist.init_process_group()
        tensor = torch.ones(1)
        asyncio.run(later(tensor))
        return tensor.item()

    assert pr.launch(program, 2, timeout=5) == [2.0, 2.0]


def test_background_checkpoint_changes_no_bit(tmp_path):
    def program(saves: bool) -> bytes:
        rank = begin()
        group = dist.new_group([0, 1, 2])
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
        torch.manual_seed(rank + 1)
        optimizer, saved = torch.optim.SGD(net.parameters(), 0.1), None
        for step in range(12):
            if saves and step == 3:
                state = {"whole": torch.ones(3), f"of {rank}": torch.ones(3) * rank}
                saved = dcp.async_save(state, process_group=group, checkpoint_id=tmp_path)
            optimizer.zero_grad()
            net(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        if saved is not None:
            saved.result()
        return b"".join(p.detach().numpy().tobytes() for p in net.parameters())

    alone = pr.launch(program, 3, args=(False,))
    for seed in range(3):
        assert pr.launch(program, 3, args=(True,), seed=seed) == alone
    loaded = {"whole": torch.zeros(3), **{f"of {rank}": torch.zeros(3) for rank in range(3)}}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert [loaded[f"of {rank}"][0].item() for rank in range(3)] == [0.0, 1.0, 2.0]


def test_thread_that_waits_in_vain_raises():
    told: list[str] = []

    def program() -> None:
        if begin() == 0:

            def call() -> None:
                with pytest.raises(pr.PeerLostError, match="rank 1, which has ended"):
                    dist.barrier()
                told.append("told")

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    pr.launch(program, 2, timeout=5)
    assert told == ["told"]


LEFT = """
from concurrent.futures import ThreadPoolExecutor
import torch.distributed as dist, pyringar as pr
def program():
    dist.init_process_group()
    if dist.get_rank() == 0:
        ThreadPoolExecutor(1).submit(dist.barrier)
pr.launch(program, 2)
print("end")
"""


def test_waiting_thread_lets_interpreter_end():
    (done,) = run_programs(LEFT, [], timeout_s=30)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# -- calls -----------------------------------------------------------------------------------------


def test_callback_waits_for_another_future():
    def program() -> float:
        begin()
        first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        second = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        return float(first.then(lambda f: second.wait()[0] + f.value()[0]).wait()[0])

    for seed in range(4):
        assert pr.launch(program, 2, seed=seed, timeout=5) == [4.0] * 2


def test_wait_with_limit_beside_a_poll():
    def program() -> str:
        rank = begin()
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            with pytest.raises(pr.CollectiveTimeout):
                store.wait(["never"], timedelta(seconds=0.2))
            store.set("go", "on")
        while not store.check(["go"]):
            pass
        return "done"

    assert pr.launch(program, 2) == ["done"] * 2


def test_destroyed_group_is_refused():
    def program() -> None:
        begin()
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        group.allreduce([torch.ones(1)])

    with pytest.raises(pr.RingarError, match="was destroyed"):
        pr.launch(program, 2)


def test_input_may_be_part_of_output():
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


def test_short_list_is_refused():
    def program() -> None:
        rank = begin()
        dist.scatter(torch.ones(1), [torch.ones(1)] if rank == 0 else None)

    with pytest.raises(ValueError, match="scatter"):
        pr.launch(program, 2)


def test_receiver_of_expanded_tensor_fails():
    def program() -> None:
        if begin() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(1).expand(4), 0)

    with pytest.raises(pr.ArgumentError, match="overlaps itself") as caught:
        pr.launch(program, 2)
    if hasattr(caught.value, "__notes__"):
        assert "raised by rank 1 of 2" in caught.value.__notes__[0]


# -- scripts ---------------------------------------------------------------------------------------


def test_script_finds_its_own_folder(tmp_path, monkeypatch, capsys):
    script = "import os\nos.chdir('/')\nprint(open(__file__).read()[:9])\n"
    (tmp_path / "script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--ranks", "2", "script.py"]) == 0
    assert capsys.readouterr().out == "import os\n" * 2


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--parallel"]])
def test_scripts_own_objects_belong_to_the_rank(options, tmp_path):
    """Functions that are compiled, classes that are pickled, pools that are left."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pyringar", "run", "--ranks", "2", *options, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == ["4.0", "5.0"], done.stderr
