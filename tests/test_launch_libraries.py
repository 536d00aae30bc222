"""`pyringar run --processes` gives the results of torchrun for programs of other libraries."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("library_programs")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROCESSES = ("pyringar", "run", "--processes", "--ranks", "2")

pytestmark = pytest.mark.slow


def results_of(launcher, program, folder):
    """Return the results that each rank of a program wrote."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", *launcher, PROGRAMS / f"{program}.py", folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "library"),
    [
        ("data_workers", "torch"),
        ("lightning_fit", "lightning"),
        ("transformers_trainer", "transformers"),
    ],
)
def test_results_equal_torchrun(program, library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install '.[libraries]'")
    ours = results_of(PROCESSES, program, tmp_path / "processes")
    assert ours == results_of(TORCHRUN, program, tmp_path / "torchrun")
    assert ours[0] != ours[1]
