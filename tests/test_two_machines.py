"""Two machines with a cable between them: network namespaces, torchrun in each, bytes counted.

Needs root and `ip` (iproute2); skipped where they are not to be had.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from networks import two_machines, why_not

import pyringar as pr

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = """
import json, os, sys, time
import torch
import torch.distributed as dist
import pyringar as pr
from pyringar.distributed.hierarchical import communicator_for

torch.set_num_threads(1)
kind, out = sys.argv[1:3]
rank = int(os.environ["RANK"])
link = f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes"

def sent():
    return int(open(link).read())

tensor = torch.randn(4_000_000, generator=torch.Generator().manual_seed(rank))
small = torch.ones(1)
if kind == "flat":
    dist.init_process_group("gloo")
    reduce = dist.all_reduce
    handed = 16_000_000
else:
    comm = communicator_for(timeout=60.0)
    reduce = comm.all_reduce
reduce(small)
time.sleep(1)
before = sent()
reduce(small)
began = time.perf_counter()
reduce(tensor)
seconds = time.perf_counter() - began
reduce(small)
time.sleep(1)
crossed = sent() - before
if kind != "flat":
    assert type(comm).__name__ == "HierarchicalCommunicator", type(comm)
    handed = comm.stats()["inter"]["bytes"]
torch.save(tensor, f"{out}/{kind}{rank}.pt")
with open(f"{out}/{kind}{rank}.json", "w") as file:
    json.dump({"crossed": crossed, "handed": handed, "seconds": seconds}, file)
reduce(small)
if kind == "flat":
    dist.destroy_process_group()
else:
    comm.close()
"""


@pytest.fixture(scope="module")
def machines():
    """Two namespaces that a veth pair connects."""
    if why := why_not():
        pytest.skip(why)
    with two_machines() as made:
        yield made


def torchrun(machines, *program: str, num_ranks=(2, 2), timeout_s: float = 240) -> list[str]:
    """Run a program with so many processes on each machine; what each machine printed."""
    running = []
    for node, (machine, ranks) in enumerate(zip(machines, num_ranks, strict=True)):
        command = machine.command(sys.executable, "-m", "torch.distributed.run")
        command += ["--nnodes", "2", "--nproc-per-node", str(ranks), "--node-rank", str(node)]
        command += ["--master-addr", machines[0].address, "--master-port", "29531", *program]
        folders = (Path(pr.__file__).parents[1], Path(__file__).parent)
        environment = {
            **os.environ,
            **machine.environment,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }
        running.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        answers = [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, error) in zip(running, answers, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in answers]


def test_each_byte_crosses_once(machines, tmp_path):
    program = tmp_path / "steps.py"
    program.write_text(STEPS)
    found = {}
    for kind in ("flat", "machines"):
        torchrun(machines, str(program), kind, str(tmp_path))
        rows = [json.loads(Path(tmp_path / f"{kind}{rank}.json").read_text()) for rank in range(4)]
        found[kind] = rows
        tensors = [torch.load(tmp_path / f"{kind}{rank}.pt") for rank in range(4)]
        a, b, c, d = (
            torch.randn(4_000_000, generator=torch.Generator().manual_seed(rank))
            for rank in range(4)
        )
        if kind == "machines":
            assert torch.equal(tensors[0], (a + b) + (c + d))
        else:  # gloo promises no order
            torch.testing.assert_close(tensors[0], a + b + c + d, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    nbytes = 16_000_000
    for rank in range(4):
        assert found["flat"][rank]["handed"] == nbytes
        assert found["machines"][rank]["handed"] == pytest.approx(nbytes / 2, rel=0.001)
    crossed = {kind: [row["crossed"] for row in rows] for kind, rows in found.items()}
    seconds = {kind: round(rows[0]["seconds"], 3) for kind, rows in found.items()}
    print(f"bytes sent by each machine: {crossed}; seconds {seconds}")
    # Each machine sends its own sum once, and TCP's headers.
    for at in (0, 2):
        assert crossed["machines"][at] == pytest.approx(nbytes, rel=0.06)
        assert crossed["machines"][at] < 0.75 * crossed["flat"][at]


@pytest.mark.parametrize("model", ["lenet", pytest.param("resnet18", marks=pytest.mark.thorough)])
def test_shards_have_bits_of_one_rank(machines, model):
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "1000", "--shards", "8"]
    options += ["--width", "4", "--amp"] if model == "resnet18" else []
    first, second = torchrun(machines, "-m", "pyringar", "train", model, *options)
    assert second == "", "rank 0 alone prints"
    alone = subprocess.run(
        [sys.executable, "-m", "pyringar", "train", model, *options, "--ranks", "1"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    ).stdout
    print(first)
    assert "2 machines of 2 ranks" in first
    found = [re.search(r"^digest +([0-9a-f]{14})", text, re.M)[1] for text in (first, alone)]
    assert found[0] == found[1]


# -- the backend, with torch's own trainers --------------------------------------------------------

TRAIN = """
import sys
import torch
import torch.distributed as dist
import pyringar.distributed
import distributed_training
import oracle

torch.set_num_threads(1)
oracle.machines = sys.argv[1]
dist.init_process_group("ringar")
for name in ("data_parallel", "fully_sharded", "zero_redundancy", "accumulation"):
    distributed_training.CASES[name](dist.get_rank(), dist.get_world_size())
print(f"rank {dist.get_rank()} is done\\n", end="", flush=True)  # one write: ranks share a pipe
dist.destroy_process_group()
"""


def test_ddp_fsdp_and_zero_run_unchanged(machines, tmp_path):
    """Each case compares parameters, bit for bit, with replicas that one process averages."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    printed = torchrun(machines, str(program), "aabb")
    assert sorted("".join(printed).splitlines()) == [f"rank {rank} is done" for rank in range(4)]


# -- a machine that dies ---------------------------------------------------------------------------

DIE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta
import pyringar as pr
import pyringar.distributed

torch.set_num_threads(1)
rank, size = int(sys.argv[1]), 5
store = dist.TCPStore(sys.argv[2], 29533, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group(
    "ringar", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=8)
)
tensor = torch.ones(4_000_000)
dist.all_reduce(tensor)
print("ready", flush=True)
try:
    while True:
        began = time.monotonic()
        dist.all_reduce(tensor)
except (pr.PeerLostError, pr.CollectiveTimeout) as error:
    print(type(error).__name__, round(time.monotonic() - began, 1), error, flush=True)
"""


def test_dead_machine_is_named_by_deadline(machines, tmp_path):
    """All its processes get SIGKILL in the middle of a call; 2 ranks are left of 2 + 3."""
    program = tmp_path / "die.py"
    program.write_text(DIE)
    ranks = []
    for rank in range(5):
        machine = machines[rank >= 2]
        folder = str(Path(pr.__file__).parents[1])
        ranks.append(
            subprocess.Popen(
                machine.command(sys.executable, str(program), str(rank), machines[0].address),
                env={**os.environ, **machine.environment, "PYTHONPATH": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        for process in ranks[2:]:
            process.kill()
        killed_at = time.monotonic()
        answers = [process.communicate(timeout=30)[0] for process in ranks[:2]]
        assert time.monotonic() - killed_at < 12
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for answer in answers:
        assert answer.startswith(("PeerLostError", "CollectiveTimeout")), answer
        assert "has ranks [2, 3, 4]" in answer, answer
