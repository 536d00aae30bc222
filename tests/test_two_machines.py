"""Run torchrun on two network namespaces, as on two machines, and count the bytes between them.

Without root or `ip` (iproute2) the tests are skipped.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from network_namespaces import two_machines, why_not

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


def test_partial_sums_cross_network_once(machines, tmp_path):
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
    for row in (rows[0], rows[2]):  # each machine sends its partial sum once, plus TCP headers
        assert row["crossed"] == pytest.approx(nbytes, rel=0.06)


def test_sharded_training_matches_one_rank(machines):
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "1000", "--shards", "8"]
    first, second = torchrun(machines, "-m", "pyringar", "train", "lenet", *options, "--verbose")
    assert second == "", "rank 0 alone prints"
    alone = subprocess.run(
        [sys.executable, "-m", "pyringar", "train", "lenet", *options, "--ranks", "1"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    ).stdout
    print(first)
    assert "2 machines of 2 ranks" in first
    found = [re.search(r"^digest +([0-9a-f]{14})", text, re.M)[1] for text in (first, alone)]
    assert found[0] == found[1]
