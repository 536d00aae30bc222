"""Ranks that are threads: groups, calls, callbacks and scripts of programs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import begin
from torch.utils._python_dispatch import TorchDispatchMode

import pyringar as pr
from pyringar.cli import main
from pyringar.cluster import calls


def total(number: float) -> float:
    tensor = torch.full((1,), float(number))
    dist.all_reduce(tensor)
    return tensor.item()


# -- groups ----------------------------------------------------------------------------------------


def by_address(rank: int) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29800", rank=rank, world_size=3)


def by_store(rank: int) -> None:
    store = dist.TCPStore("localhost", 29800, 3, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)


@pytest.mark.parametrize("begin", [by_address, by_store])
def test_groups_may_be_made_again(begin):
    def program() -> list[float]:
        rank, found = int(os.environ["RANK"]), []
        for _ in range(2):
            begin(rank)
            pair = dist.new_group([0, 2])
            mine = torch.full((1,), float(rank))
            if rank != 1:
                dist.all_reduce(mine, group=pair)
            found += [total(rank), mine.item()]
            dist.destroy_process_group()
        return found

    for seed in range(5):
        found = pr.launch(program, 3, seed=seed)
        assert found == [[3.0, 1.0 if rank == 1 else 2.0] * 2 for rank in range(3)]


@pytest.mark.parametrize(("number", "size"), [(0, 2), (1, 8), (5, 2)])
def test_world_of_other_numbers_is_refused(number, size):
    def program() -> None:
        if os.environ["RANK"] == "1":
            dist.init_process_group(init_method="tcp://localhost:5", rank=number, world_size=size)

    words = f"init_process_group: rank is {number} and world_size {size}, expected rank 1 and"
    with pytest.raises(pr.ArgumentError, match=words):
        pr.launch(program, 2)


# -- calls -----------------------------------------------------------------------------------------


def test_tags_tell_messages_apart():
    def program() -> list[float]:
        if begin() == 0:
            works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (1, 2)]
            return [float(work.wait()) for work in works]
        found = [torch.empty(1), torch.empty(1)]
        for tag in (2, 1):
            dist.recv(found[tag - 1], 0, tag=tag)
        return [tensor.item() for tensor in found]

    assert pr.launch(program, 2)[1] == [1.0, 2.0]


def test_receiver_chooses_the_sender():
    def program() -> list[float]:
        rank = begin()
        if rank != 0:
            dist.send(torch.full((1,), float(rank)), 0)
            return []
        found = [torch.empty(1), torch.empty(1)]
        for source in (2, 1):
            dist.recv(found[source - 1], source)
        return [tensor.item() for tensor in found]

    for seed in range(4):
        assert pr.launch(program, 3, seed=seed)[0] == [1.0, 2.0]


class RefusesCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_copies_of_stand_ins_pass_modes_by():
    def program() -> list[int]:
        begin()
        mine = torch.ones(2, dtype=torch.int16)
        with RefusesCopies():
            dist.all_reduce(mine)
        return mine.tolist()

    assert pr.launch(program, 2) == [[2, 2]] * 2


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


def test_call_waits_for_its_gpus(monkeypatch):
    """Before and after it: ranks have streams of their own. Here GPUs are planted."""
    seen: list[tuple[torch.device, list[float]]] = []
    tensors = [torch.full((1,), float(rank)) for rank in range(2)]
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]

    def synchronize(device: torch.device) -> None:
        seen.append((device, [tensor.item() for tensor in tensors]))

    def program() -> None:
        dist.all_reduce(tensors[begin()])

    pr.launch(begin, 2)  # imports the modules that take devices_of from calls
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(calls, "devices_of", lambda tensors: [gpus[int(t)] for t in tensors])
    pr.launch(program, 2)
    assert [values for _, values in seen] == [[0.0, 1.0]] * 2 + [[1.0, 1.0]] * 2
    assert {device for device, _ in seen[:2]} == {device for device, _ in seen[2:]} == set(gpus)


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
