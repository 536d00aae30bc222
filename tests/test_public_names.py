"""Public names: list, lazy imports, docstrings, types and reprs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pyringar as pr
from pyringar import choices, cli, errors
from pyringar.comm import arguments
from pyringar.comm.background_work import Work

ROOT = Path(__file__).resolve().parents[1]

NAMES = """
allreduce Communicator ProcessCommunicator GradientBucketer ShardedStep DataParallel
replicate get_params split_batch evaluate_accuracy_gpus check_allreduce launch
RingarError ArgumentError UnsupportedError BuildError CompilerNotFoundError CudaError
CollectiveTimeout PeerLostError
"""
SUBPACKAGES = {"distributed": "ddp_hook", "figures": "draw", "ops": "all_reduce", "train": "train"}
COMMANDS = "train run trace info build check audit completion"


def test_public_names_are_listed():
    assert set(pr.__all__) == set(NAMES.split())
    assert {name for name in dir(pr) if name[0] != "_"} == {*pr.__all__, *SUBPACKAGES}
    assert all(hasattr(pr, name) for name in dir(pr))
    assert set(cli._COMMANDS) == set(COMMANDS.split())


def test_reference_has_all_names():
    page = (ROOT / "docs/api/README.md").read_text()
    assert "::: pyringar.errors\n" in page
    names = set(pr.__all__) - set(errors.__all__)
    assert {name for name in names if f"::: pyringar.{name}\n" not in page} == set()
    with pytest.raises(AttributeError, match="'pyringar' has no attribute 'al_reduce'"):
        pr.al_reduce  # noqa: B018


FIRST_USE = """
import sys
import pyringar as pr

names = {names!r}
assert not {{"torch", *(f"pyringar.{{name}}" for name in names)}} & set(sys.modules)
before = dir(pr)
for name, member in names.items():
    assert callable(getattr(getattr(pr, name), member))
    assert getattr(pr, name) is sys.modules[f"pyringar.{{name}}"]
assert dir(pr) == before
"""
WITHOUT = """
import sys
import torch.distributed

torch.distributed.is_available = lambda: False
sys.modules["platformdirs"] = None
import pyringar as pr

assert callable(pr.train.train)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [FIRST_USE.format(names=SUBPACKAGES), WITHOUT])
def test_imports_happen_at_first_use(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- docstrings ------------------------------------------------------------------------------------


def documented(package: str) -> Iterator[tuple[str, Any]]:
    module = importlib.import_module(f"pyringar{package}")
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found
        bases = inspect.getmro(found) if inspect.isclass(found) else ()
        for base in (base for base in bases if base.__module__.startswith("pyringar.")):
            for member, value in vars(base).items():
                function = getattr(value, "__func__", value)  # unwraps a class method
                if isinstance(function, types.FunctionType) and member[0] != "_":
                    yield f"{name}.{member}", function


def undocumented(found: Any) -> list[str]:
    doc = inspect.getdoc(found) or ""
    if not doc:
        return ["docstring"]
    is_error = inspect.isclass(found) and issubclass(found, BaseException)
    if "See `" in doc or is_error:
        return []
    names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
    return [name for name in names if not re.search(rf"^    .*\b{name}\b.*:", doc, re.MULTILINE)]


@pytest.mark.parametrize("package", ["", *(f".{name}" for name in SUBPACKAGES)])
def test_docstrings_name_all_arguments(package):
    for name, found in documented(package):
        assert undocumented(found) == [], name
        assert not re.search(r":\w+:`", inspect.getdoc(found) or ""), name


# -- types ---------------------------------------------------------------------------------------

CHOICES = {"op": choices.OPS, "algorithm": choices.ALGORITHMS, "order": choices.ORDERS}
CHOOSING = [pr.Communicator, pr.ProcessCommunicator, pr.GradientBucketer, pr.DataParallel]
CHOOSING += [pr.distributed.HierarchicalCommunicator, pr.allreduce, pr.Communicator.all_reduce]


@pytest.mark.parametrize("function", [*CHOOSING, pr.ops.all_reduce, pr.ops.all_reduce_coalesced])
def test_choices_have_literal_types(function):
    parameters = inspect.signature(function, eval_str=True).parameters
    for name in CHOICES.keys() & parameters:
        kind = parameters[name].annotation
        assert CHOICES[name] in [typing.get_args(k) for k in (kind, *typing.get_args(kind))]


def test_reduce_ops_match_op_names():
    assert tuple(arguments.REDUCE_OPS.values()) == choices.OPS


PACKAGES = {"pr": pr, "pr.train": pr.train, "pr.distributed": pr.distributed}

PROGRAM = """
from collections.abc import Callable

import torch
from torch import nn

import pyringar as pr
from pyringar import *
from pyringar.comm.topology import Plan
from pyringar.comm.background_work import Work

tensors = [torch.ones(3), torch.ones(3)]
allreduce(tensors, op="mean")
with Communicator(["cpu"] * 2, algorithm="ring") as comm:
    work: Work | None = comm.all_reduce(tensors, async_op=True)
    if work is not None:
        ended: bool = work.wait(timeout=3)
        error: BaseException | None = work.exception()
    again: Callable[[], None] = comm.bind(tensors)
    done: Work | None = comm.reduce(tensors[0], tensors, root=0, order="any")
    comm.reduce_coalesced(tensors[:1], [[one] for one in tensors], async_op=True)
    comm.broadcast_coalesced([[one] for one in tensors], root=1)
    plan: Plan = comm.plan(1000)
    steps: int = plan.steps
replicas: list[nn.Module] = replicate(nn.Linear(2, 2), ["cpu"] * 2)
with GradientBucketer(replicas, comm=comm) as bucketer, bucketer.no_sync():
    buckets: list[list[int]] = bucketer.buckets
net = DataParallel(nn.Linear(2, 2), ["cpu"])
accuracy: float = evaluate_accuracy_gpus(net, [])
accuracy = evaluate_accuracy_gpus(replicas, [], split_batch)
accuracy = evaluate_accuracy_gpus(lambda X: X, [])
optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
result: pr.train.TrainResult = pr.train.train(2, 64, 0.1, epochs=1)
passed: bool = check_allreduce(pr.allreduce).passed
try:
    pass
except (CollectiveTimeout, PeerLostError) as late:
    raise RingarError(str(late)) from late
"""


@pytest.mark.slow  # half a minute until mypy has cached torch
def test_typed_program_passes_mypy(tmp_path):
    pytest.importorskip("mypy")
    names = [f"{where}.{name}" for where, package in PACKAGES.items() for name in package.__all__]
    reveal = "".join(f"reveal_type({name})\n" for name in names)
    (tmp_path / "program.py").write_text(PROGRAM + reveal)
    (tmp_path / "wrong.py").write_text("import pyringar as pr\n\npr.nothing\npr.allreduce(3)\n")
    # PYTHONPATH makes mypy find pyringar like an installed package, by its py.typed file.
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]  # keeps what mypy has read of torch
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *cache, "program.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.partition(":")[0] for line in errors] == ["wrong.py", "wrong.py"], done.stdout
    assert "pyringar" not in errors[0].partition("error:")[0]
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [name for name, found in zip(names, revealed, strict=True) if found == "Any"] == []


# -- reprs -----------------------------------------------------------------------------------------


def test_repr_shows_failed_work():
    native = SimpleNamespace(
        is_completed=lambda: True, exception=lambda: pr.PeerLostError("rank 1 is gone")
    )
    expected = "Work(broadcast, failed: PeerLostError: rank 1 is gone)"
    assert repr(Work(native, {}, "broadcast")) == expected


def test_repr_shows_closed_communicator():
    comm = pr.Communicator(["cpu"] * 2)
    assert repr(comm).startswith("Communicator(host: ranks [0, 1], algorithm='auto'")
    comm.close()
    assert repr(comm).startswith("Communicator(closed, host: ranks [0, 1]")
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as alone:
        pass
    assert repr(alone).startswith("ProcessCommunicator(closed, rank 0 of 1, ")


def test_repr_of_bucketer():
    replicas = pr.replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["cpu"] * 2)
    with pr.GradientBucketer(replicas, overlap=True) as bucketer:
        head = "GradientBucketer(world size 2, parameters: 4, buckets: 1, "
        assert repr(bucketer) == f"{head}waits for backward)"
        replicas[0](torch.ones(1, 2)).sum().backward()
        assert repr(bucketer) == f"{head}backward has begun)"
        replicas[1](torch.ones(1, 2)).sum().backward()
        assert repr(bucketer) == f"{head}1 of 1 buckets launched)"
        bucketer.wait()
        assert repr(bucketer) == f"{head}waits for backward)"
    assert repr(bucketer) == f"{head}closed)"
