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
from pyringar.distributed.hierarchical import communicator_for

torch.set_num_threads(1)
out = sys.argv[1]
rank = int(os.environ["RANK"])
link = f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes"

def sent():
    return int(open(link).read())

tensor = torch.randn(4_000_000, generator=torch.Generator().manual_seed(rank))
small = torch.ones(1)
comm = communicator_for(timeout=60.0)
assert type(comm).__name__ == "HierarchicalCommunicator", type(comm)
reduce = comm.all_reduce
reduce(small)
time.sleep(1)
before = sent()
reduce(small)
reduce(tensor)
reduce(small)
time.sleep(1)
crossed = sent() - before
torch.save(tensor, f"{out}/{rank}.pt")
with open(f"{out}/{rank}.json", "w") as file:
    json.dump({"crossed": crossed, "handed": comm.stats()["inter"]["bytes"]}, file)
reduce(small)
comm.close()
"""


@pytest.fixture(scope="module")
def machines():
    if why := why_not():
        pytest.skip(why)
    with two_machines() as made:
        yield made


def torchrun(machines, *program: str) -> list[str]:
    running = []
    for node, machine in enumerate(machines):
        command = machine.command(sys.executable, "-m", "torch.distributed.run")
        command += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
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
        answers = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, error) in zip(running, answers, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in answers]


def test_each_byte_crosses_once(machines, tmp_path):
    program = tmp_path / "steps.py"
    program.write_text(STEPS)
    torchrun(machines, str(program), str(tmp_path))
    rows = [json.loads(Path(tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    tensors = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    a, b, c, d = (
        torch.randn(4_000_000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
    )
    assert all(torch.equal(tensor, (a + b) + (c + d)) for tensor in tensors)
    nbytes = 16_000_000
    for row in rows:
        assert row["handed"] == pytest.approx(nbytes / 2, rel=0.001)
    for row in (rows[0], rows[2]):  # each machine sends its own sum once, and TCP's headers
        assert row["crossed"] == pytest.approx(nbytes, rel=0.06)


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
