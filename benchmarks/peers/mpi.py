"""A rank of an MPI library, through mpi4py: mpiexec -n K python mpi.py ADDRESS."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.rank import CheckedSum, serve

WORLD = MPI.COMM_WORLD


def prepare(candidate: str, numel: int) -> CheckedSum:
    """Return a `CheckedSum` that calls `MPI_Allreduce` in place."""
    array = np.zeros(numel, np.float32)
    call = lambda: WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)  # noqa: E731
    return CheckedSum(array, WORLD.rank, WORLD.size, WORLD.Barrier, call)


VERSION = MPI.Get_library_version().splitlines()[0].partition(", ")[0].rstrip("\0")
serve(sys.argv[1], WORLD.rank, VERSION, prepare)
