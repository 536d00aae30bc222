"""Test that captured training steps are bit-identical to eager steps, and wrong uses raise.

Without a GPU, a recorder captures the operators of a step on the CPU and replays them on the same
tensors. Like a CUDA graph, a replay runs no Python code of the step, so values that the host read
during the capture stay constant.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_marks import mostly_slow
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import garments, run, same_results

from pyringar import Communicator
from pyringar.cli import main
from pyringar.errors import ArgumentError, CudaError, RingarError
from pyringar.parallel import shards
from pyringar.train import TrainConfig, Trainer, graph, train_group
from pyringar.train import trainer as trainer_module
from pyringar.train.step import EagerStep
from pyringar.train.step_trace import Trace

Function = Callable[[], None]


# -- graphs without a GPU --------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records operators and reductions; a replay runs them again on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_warm_ups = self.num_replays = 0
        self.is_recording = False
        self.calls: list[Function] = []  # operators and reductions of the latest capture
        self._own: set[int] = set()  # addresses allocated during the capture
        # Storages that existed before the capture, with copies of their content.
        self._before: dict[int, tuple[Any, Any]] = {}

    def warm_up(self, function: Function) -> None:
        for _ in range(3):
            function()
            self.num_warm_ups += 1

    def record(self, function: Function) -> Function:
        self.is_recording = True
        calls = self.calls = []
        self._own, self._before = set(), {}
        with self:
            function()
        self.is_recording = False
        # Undo all writes, since a CUDA capture runs no kernel.
        for storage, then in self._before.values():
            storage.copy_(then)
        return functools.partial(self.replay, calls)

    def replay(self, calls: list[Function]) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for call in calls:
                call()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError("a tensor made of the host's numbers")
        for storage in self._storages((args, kwargs)):
            if storage.data_ptr() not in self._own and storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()
        result = func(*args, **kwargs)
        outputs, _ = pytree.tree_flatten(result)
        if not all(output is None or isinstance(output, torch.Tensor) for output in outputs):
            raise RuntimeError(f"the host waits for {func}")
        self._own |= {s.data_ptr() for s in self._storages(result)} - self._before.keys()

        def again() -> None:
            for old, new in zip(outputs, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                # With equal pointers the operator made a view or worked in place: copy nothing.
                if old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return result

    @staticmethod
    def _storages(value):
        leaves = pytree.tree_leaves(value)
        return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


class InOrder(graph.RankStreams):
    def __init__(self, device, num_ranks, score):
        self.score = score

    def run(self, functions):
        return {rank: function() for rank, function in functions.items()}


class Caller(Recorder):
    """Fake CUDA graph: a replay calls the captured function again."""

    def record(self, function: Function) -> Function:
        return functools.partial(self.replay, [torch.enable_grad()(function)])


@pytest.fixture
def caller(monkeypatch) -> Caller:
    made = Caller()
    monkeypatch.setattr(trainer_module, "check_ranks", lambda *_: None)
    monkeypatch.setattr(trainer_module, "RankStreams", InOrder)
    monkeypatch.setattr(graph, "CudaCapture", lambda _: made)
    return made


@pytest.fixture
def recorder(monkeypatch, caller) -> Recorder:
    made = Recorder()
    real = Communicator.all_reduce_coalesced

    def all_reduce_coalesced(self, lists, op="sum", **options):
        if made.is_recording:
            made.calls.append(lambda: real(self, lists, op))
        return real(self, lists, op, **options)

    monkeypatch.setattr(Communicator, "all_reduce_coalesced", all_reduce_coalesced)
    # Compare replicas as on a GPU, without waiting for the result.
    monkeypatch.setattr(shards, "_are_on_cpu", lambda _: False)
    monkeypatch.setattr(graph, "CudaCapture", lambda _: made)
    return made


@pytest.fixture(scope="module")
def data():
    return garments(100, 40)


# 100 images: three batches of 32, and one of 4, which needs a second capture.
RESNET = {"model": "resnet18", "width": 4}
RUNS = [
    {"ranks": 1},
    {"ranks": 3, "weights": (3, 0, 1), "bucket_cap_mb": 0.05, "momentum": 0.9},
    {"ranks": 2, "amp": True, "channels_last": True, **RESNET},
]
MORE_RUNS = [
    {"ranks": 2},
    {"ranks": 2, "amp": True},
    {"ranks": 4, "allreduce": "direct", "dtype": "float64"},
    {"ranks": 2, "lr_schedule": "constant", "overlap": False},
    {"ranks": 2, "batch_size": 25},  # all batches have equal sizes
    {"ranks": 5, **RESNET, "epochs": 2, "batch_size": 3, "init": "book"},
]


@pytest.mark.parametrize("options", mostly_slow([*RUNS, *MORE_RUNS], *RUNS), ids=str)
def test_replay_is_bit_identical_to_eager(data, recorder, options):
    options = {"batch_size": 32, "epochs": 1 if "amp" in options else 2, **options}
    replayed = run(data, cuda_graph=True, **options)
    assert recorder.num_warm_ups == (6 if 100 % min(100, options["batch_size"]) else 3)
    assert recorder.num_replays == len(replayed.epochs) * math.ceil(100 / options["batch_size"])
    same_results(replayed, run(data, **options))


def test_sync_batch_norm_is_captured(data, caller):
    options = {**RESNET, "batchnorm": "sync", "batch_size": 32, "epochs": 1}
    replayed = run(data, cuda_graph=True, **options)
    assert caller.num_replays == 4
    same_results(replayed, run(data, **options))


def test_replica_divergence_between_replays_raises(data, recorder):
    steps = []

    def slip():
        steps.append(1)
        if len(steps) == 2:
            with torch.no_grad():
                trainer.replicas[1][4][5, 6] += 1e-3

    config = TrainConfig(ranks=2, batch_size=32, cuda_graph=True)
    with (
        Trainer(config, data) as trainer,
        pytest.raises(RingarError, match=r"after step 2: .*parameter 4, .* on rank 1"),
    ):
        trainer.run(on_step=slip)
    assert len(steps) == 2


# -- streams ---------------------------------------------------------------------------------------


def test_step_reduces_after_streams_join(monkeypatch, data):
    log: list[tuple[str, ...]] = []

    class Stream:
        def __init__(self, *_: object) -> None:
            self.name = f"stream {len(made)}"
            made.append(self)

        def wait_stream(self, other: Stream) -> None:
            log.append((self.name, "waits for", other.name))

    made: list[Stream] = []
    current = [Stream()]

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])

    def note(what: str) -> None:
        log.append((current[-1].name, what))

    params = [[torch.full((28 * 28, 10), 1e-3, requires_grad=True)] for _ in range(3)]

    def score(rank, X):  # noqa: N803
        note(f"forward {rank}")
        scores = X.flatten(1) @ params[rank][0]
        scores.register_hook(lambda _: note(f"backward {rank}"))
        return scores

    step = EagerStep(
        params,
        None,
        lambda: note("reduce"),
        split=lambda X, y: (X.chunk(3), y.chunk(3)),  # noqa: N803
        streams=graph.RankStreams(torch.device("cuda:0"), 3, score),
    )
    step(data.train_images[:9], data.train_labels[:9], 0.1)
    sides = ["stream 1", "stream 2"]
    fork = [(side, "waits for", "stream 0") for side in sides]
    join = [("stream 0", "waits for", side) for side in sides]
    ranks = [(f"stream {r}", f"{p} {r}") for r in range(3) for p in ("forward", "backward")]
    assert log == [*fork, *ranks, *join, ("stream 0", "reduce"), *fork, *join]


# -- errors ----------------------------------------------------------------------------------------


def test_graph_on_cpu_raises_before_loading(monkeypatch, capsys):
    monkeypatch.setattr(trainer_module, "load_data", None)
    monkeypatch.setattr(train_group, "Communicator", None)
    assert main(["train", "lenet", "--devices", "cpu,cpu", "--cuda-graph"]) == 2
    said = "--cuda-graph is on and the ranks run on [cpu x 2 ranks], expected all ranks on one"
    assert said in capsys.readouterr().err


def test_graph_refuses_several_devices_or_trace():
    gpu, other = torch.device("cuda:0"), torch.device("cuda:1")
    with pytest.raises(ArgumentError, match=r"the ranks run on \[cuda:0, cuda:1\]"):
        graph.check_ranks([gpu, other], None)
    with pytest.raises(ArgumentError, match="trace is given, but the host sees one replay"):
        graph.check_ranks([gpu], Trace())
    graph.check_ranks([other] * 3, None)


def test_failed_capture_raises(monkeypatch):
    def fail() -> None:
        raise RuntimeError("not permitted")

    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    with pytest.raises(CudaError, match=r"on cuda:0: not permitted; try it without"):
        graph.CudaCapture(torch.device("cuda:0")).record(fail)


# -- on a GPU --------------------------------------------------------------------------------------

LARGER = {"model": "resnet18", "width": 8}
GPU_RUNS = [
    {"ranks": 3, **LARGER, "amp": True},
    {"ranks": 2, "momentum": 0.9, "weights": (1, 0)},
    {"ranks": 2, **LARGER, "batchnorm": "sync", "amp": True, "epochs": 1},
    {"ranks": 2, **LARGER, "channels_last": True},
]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device here")
@pytest.mark.parametrize("options", [*RUNS, *MORE_RUNS, *GPU_RUNS], ids=str)
def test_gpu_graph_is_bit_identical(data, monkeypatch, options):
    # By default cuDNN convolutions add in any order, so even two eager runs could differ.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    options = {"batch_size": 32, "epochs": 2, **options}
    options["devices"] = ["cuda:0"] * options["ranks"]
    replayed, eager = (run(data, cuda_graph=on, **options) for on in (True, False))
    same_results(replayed, eager)
