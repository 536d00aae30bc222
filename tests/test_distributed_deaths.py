"""Under torchrun a line on stderr names the rank that died, before torchrun ends the others."""

import os
import re
import signal
import subprocess
import sys

import pytest
from case_marks import mostly_slow
from programs import ROOT, run_fresh

from pyringar.engine import load

PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import pyringar as pr
from pyringar.distributed import communicator_for

kind, survivors = sys.argv[1:]
if kind == "machines":
    os.environ["PYRINGAR_NODE_ID"] = "aabb"[int(os.environ["RANK"])]
if kind == "backend":
    dist.init_process_group("ringar")
    reduce = dist.all_reduce
else:
    comm = communicator_for() if kind == "machines" else pr.ProcessCommunicator()
    reduce = comm.all_reduce
rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
for step in range(3):
    reduce(torch.ones(1000))
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
if survivors == "compute":
    time.sleep(60)
reduce(torch.ones(1000))
"""


def stderr_of(tmp_path, size, *words):
    program = tmp_path / "die.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    load.engine()  # compile before torchrun starts the ranks
    done = subprocess.run(
        [*command, str(size), program, *words],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


CASES = [("backend", 2, "rank 1"), ("communicator", 2, "rank 1"), ("machines", 4, "rank 3")]


@pytest.mark.parametrize(("kind", "size", "dead"), mostly_slow(CASES, CASES[0]))
def test_stderr_line_names_dead_rank(kind, size, dead, tmp_path):
    [line] = re.findall("^pyringar: .*", stderr_of(tmp_path, size, kind, "compute"), re.MULTILINE)
    assert re.match(rf"pyringar: {dead} \(process \d+ on .+\) has died", line), line


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["backend", "communicator"])
def test_twenty_runs_name_dead_rank(kind, tmp_path):
    for _ in range(20):
        assert "rank 1 (process" in stderr_of(tmp_path, 2, kind, "wait")


CHILD = """
import os, signal, sys, time
import torch.distributed as dist
import pyringar as pr

comm = pr.ProcessCommunicator(dist.HashStore(), 0, 1)
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
comm.barrier()
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_still_ends_processes():
    """Only the rank has the SIGTERM handler, not its forked children."""
    done = run_fresh(CHILD, TORCHELASTIC_ERROR_FILE="errors.json")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n"), done
