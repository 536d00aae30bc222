"""Two machines with a cable between them: network namespaces, torchrun in each.

Needs root and `ip` (iproute2); skipped where they are not to be had.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyringar as pr

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = ("10.231.7.1", "10.231.7.2")

STEPS = """
import json, os, sys, time
import torch
import torch.distributed as dist
import pyringar as pr
from pyringar.distributed.hierarchical import communicator_for
from pyringar.comm.stores import default_store

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


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Names of two namespaces that a veth pair connects."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ringar{os.getpid()}{end}" for end in "ab"]
    links = [f"rv{os.getpid() % 10**6}{end}" for end in "ab"]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, OSError) as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
    yield list(zip(names, links, strict=True))
    for name in names:  # the veth pair goes with them
        ip("netns", "del", name)


def torchrun(machines, *program: str, timeout_s: float = 240) -> list[str]:
    """Run a program with two processes on each machine; what each machine printed."""
    running = []
    for node, (name, link) in enumerate(machines):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
        command += ["--master-addr", ADDRESSES[0], "--master-port", "29531", *program]
        environment = {
            **os.environ,
            **{"PYRINGAR_NODE_ID": name, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"},
            "PYTHONPATH": str(Path(pr.__file__).parents[1]),
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


def test_each_byte_crosses_once_per_machine_and_ranks_agree(machines, tmp_path):
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
def test_training_on_two_machines_is_that_on_one(machines, tmp_path, model):
    options = ["--dataset", "synthetic", "--epochs", "1", "--batch-size", "500", "--lr", "0.02"]
    options += ["--dtype", "float64"]  # another order of sums shows after many digits only
    options += ["--width", "4"] if model == "resnet18" else []
    plot = ["--plot", str(tmp_path / "curve.png")]
    first, second = torchrun(machines, "-m", "pyringar", "train", model, *options, *plot)
    assert second == "", "rank 0 alone prints"
    print(first)
    assert "[cpu x 4 ranks], each a process" in first
    assert "hierarchical" in first
    assert "2 machines of 2 ranks" in first
    assert re.search(r"ranks +4 processes, equal parameters [0-9a-f]{14}", first)
    alone = subprocess.run(
        [sys.executable, "-m", "pyringar", "train", model, *options, "--ranks", "4"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    loss, accuracy = (
        [re.search(r"^ +1 +(\S+) +(\S+)", text, re.M)[at] for text in (first, alone)]
        for at in (1, 2)
    )
    assert float(loss[0]) == pytest.approx(float(loss[1]), abs=1.01e-4)  # the last digit printed
    assert accuracy[0] == accuracy[1]
