"""Process-wide state under `pr.launch` on threads: each rank has a copy, or launch raises."""

import contextlib
import importlib
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from case_marks import mostly_slow
from rank_processes import begin
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
from pyringar.distributed import HierarchicalCommunicator, HookState, ddp_hook


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


def test_random_generators_are_per_rank():
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


# Settings with a value per rank: a function that sets and a function that reads the setting.
SETTINGS: dict[str, tuple[Callable[[int], object], Callable[[], Any]]] = {
    "environment": (
        lambda rank: os.environ.update(PYRINGAR_TEST=str(rank)),
        lambda: dict(os.environ).get("PYRINGAR_TEST"),
    ),
    "anomaly mode": (anomaly, torch.is_anomaly_enabled),
    "module hooks": (
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
        lambda: len(nn.modules.module._global_forward_hooks),
    ),
    "default device": (lambda _: torch.set_default_device("meta"), torch.get_default_device),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_torch_settings_are_per_rank(name):
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


# Context managers of torch, and for each a function whose result differs inside.
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
def test_torch_contexts_are_per_rank(name):
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


def test_tangents_end_with_dual_level():
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
def test_call_in_started_thread_raises(call, kind):
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


def test_deadlock_raises_after_threads_end():
    def program(seconds: float) -> None:
        thread = threading.Thread(target=time.sleep, args=(seconds,), name="reader")
        if begin() == 0:
            thread.start()
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(pr.CollectiveTimeout, match="all ranks wait for each other\n"):
        pr.launch(program, 2, args=(0.05,))
    with pytest.raises(pr.CollectiveTimeout, match=r"still run, reader: .* processes=True"):
        pr.launch(program, 2, args=(0.5,), timeout=0.1)


def test_call_in_forked_child_raises():
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


def test_foreign_thread_call_raises():
    """Threads of an executor made before the launch belong to no rank."""
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    def program() -> None:
        if begin() == 0:
            pool.submit(dist.barrier).result()

    with pool, pytest.raises(ValueError, match=r"ThreadPoolExecutor.*processes=True"):
        pr.launch(program, 2)


def test_device_meshes_of_ranks_differ():
    def program() -> Any:
        begin()
        return init_device_mesh("cpu", (2,))

    first, second = pr.launch(program, 2)
    assert first != second
    assert hash(first) != hash(second)


def test_module_shared_by_ranks_raises():
    net = nn.Linear(2, 2)

    def program() -> None:
        begin()
        for _ in range(2):  # the same rank may wrap the module again
            DistributedDataParallel(net)

    with pytest.raises(pr.ArgumentError, match=r"module has 'weight', which rank \d"):
        pr.launch(program, 2)
    for _ in range(2):
        pr.launch(program, 1)


def test_operator_defined_twice_raises():
    def program() -> None:
        begin()

        @torch.library.custom_op("pyringar_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        dist.barrier()

    with pytest.raises(pr.UnsupportedError, match="pyringar_test::twice is defined by rank"):
        pr.launch(program, 2)


def never(graph: Any, _: Any) -> Any:
    raise AssertionError("a rank compiles")


@torch.compile(backend=never, fullgraph=True)
def branch_by_rank(x: torch.Tensor) -> torch.Tensor:
    y = x + 100 if dist.get_rank() == 0 else x * dist.get_rank()
    return funcol.all_reduce(y, "sum", dist.group.WORLD) * 3 - dist.get_rank()


def test_compiled_functions_run_uncompiled(caplog):
    """Dynamo would compile a rank's number as a constant for all ranks."""

    def program() -> Any:
        begin()
        net = torch.compile(DistributedDataParallel(nn.Linear(2, 1)), backend=never)
        net(torch.ones(1, 2)).sum().backward()
        return branch_by_rank(torch.ones(1)).item()

    internals._say_once.cache_clear()
    total = 101 + 1 + 2
    assert pr.launch(program, 3) == [total * 3 - rank for rank in range(3)]
    assert "torch.compile: ranks that are threads of one process run uncompiled" in caplog.text
    graphs: list[Any] = []
    triple = torch.compile(lambda x: 3 * x, backend=lambda graph, _: graphs.append(1) or graph)
    assert triple(torch.ones(1)) == 3.0
    assert len(graphs) == 1, "outside ranks"


def own_hook() -> None:
    dist.init_process_group()
    net = DistributedDataParallel(nn.Linear(3, 1))
    net.register_comm_hook(HookState(), ddp_hook)
    net(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("begin", [pr.ProcessCommunicator, HierarchicalCommunicator, own_hook])
def test_process_communicators_raise(begin, ranks):
    with pytest.raises(pr.UnsupportedError, match=r"ddp_hook: .*processes=True"):
        pr.launch(begin, ranks)
    with pytest.raises(pr.ArgumentError, match="RANK, WORLD_SIZE"):  # launch left no store
        pr.ProcessCommunicator()


LIBRARIES = [path for path in internals._REFUSED if not path.startswith(("pyringar.", "torch."))]


@pytest.mark.parametrize("path", LIBRARIES)
def test_libraries_with_rank_state_raise(path, tmp_path, monkeypatch):
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
    program() if not name else refused()  # without a function, only the import is refused
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
def test_concurrent_mock_patches_raise(patch):
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


def test_sequential_mock_patches_work():
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


def test_process_wide_settings_are_accepted(caplog):
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
def test_child_processes_inherit_rank_environment(method):
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


def test_commands_inherit_rank_environment():
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
def test_store_behaves_like_torch(begin, tmp_path):
    expected = use_store(str(tmp_path / "torchs"), begin)
    assert pr.launch(use_store, 1, args=(str(tmp_path / "ranks"), begin)) == [expected]


def test_store_queue_passes_values():
    def program() -> list[bytes]:
        rank = int(os.environ["RANK"])
        store = dist.TCPStore("127.0.0.1", 29991, 3, rank == 0)
        for item in range(4) if rank == 0 else ():
            store.queue_push("q", str(item))
        return [store.queue_pop("q") for _ in range(2 if rank else 0)]

    for seed in range(5):
        _, one, two = pr.launch(program, 3, seed=seed)
        assert sorted(one + two) == [b"0", b"1", b"2", b"3"]
