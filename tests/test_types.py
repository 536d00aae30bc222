"""Does a program outside that uses every public name pass mypy --strict, and are its types real?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyringar as pr

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pr": pr, "pr.train": pr.train}
if hasattr(pr, "distributed"):
    PACKAGES["pr.distributed"] = pr.distributed

PROGRAM = """
from collections.abc import Callable

import torch
from torch import nn

import pyringar as pr
from pyringar import *
from pyringar.comm.topology import Plan
from pyringar.comm.work import Work

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


@pytest.mark.slow  # half a minute: mypy reads torch
def test_a_program_that_uses_every_public_name(tmp_path):
    pytest.importorskip("mypy")
    names = [f"{where}.{name}" for where, package in PACKAGES.items() for name in package.__all__]
    reveal = "".join(f"reveal_type({name})\n" for name in names)
    (tmp_path / "program.py").write_text(PROGRAM + reveal)
    (tmp_path / "wrong.py").write_text("import pyringar as pr\n\npr.nothing\npr.allreduce(3)\n")
    # As an installed package: found along sys.path, taken for its py.typed.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.partition(":")[0] for line in errors] == ["wrong.py", "wrong.py"], done.stdout
    assert "pyringar" not in errors[0].partition("error:")[0]
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == len(names)
    unknown = [name for name, found in zip(names, revealed, strict=True) if found == "Any"]
    assert not unknown
