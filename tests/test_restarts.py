"""Does a job that torchrun restarts go on after one restart for one fault, however it rendezvouses?

The agent's store outlives the workers, so that a new attempt finds the old one's keys.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from fork_server import HERE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

WORKER = """
import os, signal, sys
import torch, torch.distributed as dist
import pyringar as pr
import pyringar.distributed

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if sys.argv[1] == "backend":
    dist.init_process_group("ringar")
    reduce = dist.all_reduce
    dist.all_gather_object([None] * 3, rank)  # partly gloo's
    dist.barrier()
else:
    reduce = pr.ProcessCommunicator(timeout=120).all_reduce
for step in range(4):
    tensor = torch.arange(5.0) + rank
    reduce(tensor)
    assert torch.equal(tensor, 3 * torch.arange(5.0) + 3), tensor
    if attempt == 0 and rank == int(sys.argv[2]) and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"attempt {attempt} rank {rank} is done\\n", end="", flush=True)
if sys.argv[1] == "backend":
    dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("kind", ["backend", "communicator"])
@pytest.mark.parametrize("form", ["static", "standalone", "c10d"])
def test_one_restart_for_one_fault(tmp_path, form, kind):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    options = {
        "static": ["--master-port", str(free_port())],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"],
    }[form]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--nproc-per-node", "3", "--max-restarts", "1", str(script), kind, "1"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in range(3):
        assert f"attempt 1 rank {rank} is done" in ended.stdout, ended.stdout
