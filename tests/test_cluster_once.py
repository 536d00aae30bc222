"""Ranks that are threads: what a process has once is each rank's, or is refused."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import mostly_slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr
from pyringar.cluster import internals
from pyringar.distributed import HierarchicalCommunicator, HookState, ddp_hook

# -- what a process has once -----------------------------------------------------------------------


def own_hook() -> None:
    dist.init_process_group()
    net = DistributedDataParallel(nn.Linear(3, 1))
    net.register_comm_hook(HookState(), ddp_hook)
    net(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("begin", [pr.ProcessCommunicator, HierarchicalCommunicator, own_hook])
def test_own_communicators_are_refused(begin, ranks):
    with pytest.raises(pr.UnsupportedError, match=r"ddp_hook: .*processes=True"):
        pr.launch(begin, ranks)
    with pytest.raises(pr.ArgumentError, match="RANK, WORLD_SIZE"):  # there is no store of a rank
        pr.ProcessCommunicator()


LIBRARIES = [path for path in internals._REFUSED if not path.startswith(("pyringar.", "torch."))]


@pytest.mark.parametrize("path", LIBRARIES)
def test_libraries_with_one_rank_are_refused(path, tmp_path, monkeypatch):
    module, _, name = path.partition(":")
    folder = tmp_path.joinpath(*module.split("."))
    folder.mkdir(parents=True)
    name = name.removesuffix(".__init__")
    kind = "class" if name[:1].isupper() else "def"
    (folder / "__init__.py").write_text(f"{kind} {name or 'f'}(): 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def program() -> None:
        getattr(importlib.import_module(module), name or "f")()

    def refused() -> None:
        with pytest.raises(pr.UnsupportedError, match=r"^\w+: .*processes=True"):
            pr.launch(program, 3)

    refused()
    pr.launch(program, 1)
    program() if not name else refused()  # it was imported before
    program()
    for added in set(sys.modules) - known:
        if added.partition(".")[0] == module.partition(".")[0]:
            del sys.modules[added]


@pytest.mark.parametrize(
    "patch",
    [
        lambda: mock.patch.object(time, "time", return_value=5.0),
        lambda: mock.patch.multiple(time, time=lambda: 5.0, sleep=lambda _: None),
        lambda: mock.patch.dict(vars(time), time=lambda: 5.0),
    ],
)
def test_patch_of_another_rank_is_refused(patch):
    own = time.time

    def program() -> None:
        dist.init_process_group()
        with patch():
            dist.barrier()

    def start() -> None:
        patch().start()

    pr.launch(program, 1)
    for seed in range(5):
        with pytest.raises(pr.UnsupportedError, match=r"mock.patch of .* rank \d has patched"):
            pr.launch(program, 3, seed=seed)
        assert time.time is own
    with pytest.raises(pr.UnsupportedError):
        pr.launch(start, 2)
    pr.launch(start, 1)
    assert time.time is own
    assert mock._patch._active_patches == []


def test_patches_in_turn_are_taken():
    class Mine:
        value = 0

    def program() -> list[Any]:
        dist.init_process_group()
        rank, mine, found = dist.get_rank(), Mine(), []
        with mock.patch.object(mine, "value", rank), mock.patch.dict(os.environ, MINE=str(rank)):
            dist.barrier()
            found += [mine.value, os.environ["MINE"]]
            with mock.patch.object(Mine, "value", 5), mock.patch.object(Mine, "value", 9):
                found += [Mine.value]
        return [*found, os.environ.get("MINE")]

    assert pr.launch(program, 3) == [[rank, str(rank), 9, None] for rank in range(3)]


def test_settings_made_once_pass(caplog):
    def program() -> str:
        torch.multiprocessing.set_start_method("spawn")
        torch.set_num_interop_threads(torch.get_num_interop_threads() + dist.is_initialized())
        dist.init_process_group()
        torch.set_num_interop_threads(torch.get_num_interop_threads() + 1)
        return str(multiprocessing.get_start_method())

    before = multiprocessing.get_start_method(allow_none=True)
    assert pr.launch(program, 3) == ["spawn"] * 3
    assert multiprocessing.get_start_method(allow_none=True) == before
    assert "torch.set_num_interop_threads" in caplog.text


@pytest.mark.parametrize("method", mostly_slow(["fork", "spawn", "forkserver"], "fork"))
def test_processes_have_the_ranks_environment(method):
    def run(*names: str) -> list[str | None]:
        with multiprocessing.get_context(method).Pool(1) as pool:
            return [pool.apply(os.getenv, (name,)) for name in names]

    def program() -> list[str | None]:
        dist.init_process_group()
        os.environ["MINE"] = os.environ["RANK"]
        return run("RANK", "MINE", "WORLD_SIZE")

    run("RANK")
    assert pr.launch(program, 2) == [["0", "0", "2"], ["1", "1", "2"]]
    assert run("RANK", "MINE") == [None, None]


def test_commands_have_the_ranks_environment():
    def program() -> str:
        dist.init_process_group()
        dist.barrier()
        if dist.get_rank() == 0:
            del os.environ["ROLE_NAME"]
        dist.barrier()
        return os.popen("echo $RANK $ROLE_NAME $WORLD_SIZE").read()

    for seed in range(4):
        found = pr.launch(program, 3, seed=seed)
        assert found == ["0 3\n", "1 default 3\n", "2 default 3\n"]
    assert os.popen("echo $RANK $WORLD_SIZE").read() == "\n"


# -- stores ----------------------------------------------------------------------------------------


def use_store(path: str, begin: str) -> list[Any]:
    root: Any = (
        dist.FileStore(path, 1) if begin == "file" else dist.TCPStore("127.0.0.1", 0, 1, True)
    )
    store = dist.PrefixStore("p", root) if begin == "prefix" else root
    kinds = (dist.Store, dist.TCPStore, dist.PrefixStore, dist.FileStore, dist.HashStore)
    store.set("a", "1")
    store.append("a", "2")
    found = [[isinstance(each, kind) for kind in kinds] for each in (store, store.clone())]
    found += [store.clone().get("a"), store.add("n", 3), store.compare_set("b", "", "x")]
    found += [store.multi_get(["a", "b"]), store.delete_key("b")]
    if begin == "file":
        return [*found, store.path == path]
    found += [store.num_keys()]
    store.queue_push("q", "x")
    dist.PrefixStore("z", store).queue_push("q", b"y")
    found += [store.queue_len("q"), store.check(["q"]), store.queue_pop("q"), store.queue_len("q")]
    found += [store.queue_pop("z/q"), sorted(store.list_keys()), root.host, root.port > 0]
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    if begin == "prefix":
        found += [isinstance(store.underlying_store, dist.TCPStore)]
    return found


@pytest.mark.parametrize("begin", ["tcp", "prefix", "file"])
def test_store_is_as_torchs(begin, tmp_path):
    expected = use_store(str(tmp_path / "torchs"), begin)
    assert pr.launch(use_store, 1, args=(str(tmp_path / "ranks"), begin)) == [expected]


def test_queue_passes_values():
    def program() -> list[bytes]:
        rank = int(os.environ["RANK"])
        store = dist.TCPStore("127.0.0.1", 29991, 3, rank == 0)
        for item in range(4) if rank == 0 else ():
            store.queue_push("q", str(item))
        return [store.queue_pop("q") for _ in range(2 if rank else 0)]

    for seed in range(5):
        _, one, two = pr.launch(program, 3, seed=seed)
        assert sorted(one + two) == [b"0", b"1", b"2", b"3"]
