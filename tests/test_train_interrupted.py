"""Is a training that is killed, in one process or under torchrun, gone on with bit for bit?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from pyringar.parallel.shards import check_replicas_equal

TRAIN = ["-m", "pyringar", "train", "lenet", "--dataset", "synthetic", "--epochs", "3"]
ALONE = [sys.executable, *TRAIN, "--batch-size", "500"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
TOGETHER = [sys.executable, *TORCHRUN, *ALONE[1:]]
NAME = "checkpoint.bin"


def rows(lines):
    """The table of epochs, without the times."""
    return [line.split()[:3] for line in lines if line[:5].strip().isdecimal()]


def go(command, after=None, stop=signal.SIGKILL):
    """Run to the end, or until the line of an epoch is there; return lines and status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if after is not None and rows([line]) and rows([line])[0][0] == after:
                process.send_signal(stop)
                after = None
    return lines, process.returncode


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_and_gone_on_with_by_others(tmp_path):
    whole, status = go([*ALONE, "--out", str(tmp_path / "whole.pt")])
    assert status == 0, whole
    for number, (first, stop, second) in enumerate(
        [
            (ALONE, signal.SIGKILL, TOGETHER),
            (TOGETHER, signal.SIGINT, ALONE),
            (ALONE, signal.SIGTERM, ALONE),
        ]
    ):
        folder, out = tmp_path / f"run{number}", tmp_path / f"{number}.pt"
        stopped, status = go([*first, "--save", str(folder)], after="1", stop=stop)
        assert status != 0
        assert [path.name for path in folder.iterdir()] == [NAME]
        assert len(rows(stopped)) < 3
        told = any("to go on: " in line for line in stopped)
        assert told == (stop != signal.SIGKILL), stopped
        rest, status = go([*second, "--resume", str(folder), "--out", str(out)])
        assert status == 0, rest
        assert rows(rest) == rows(whole)
        found, wanted = (
            torch.load(path, weights_only=True) for path in (out, tmp_path / "whole.pt")
        )
        assert list(found) == list(wanted)
        check_replicas_equal([list(found.values()), list(wanted.values())])
