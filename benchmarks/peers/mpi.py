"""Be a rank of an MPI library, through mpi4py: mpiexec -n K python mpi.py ADDRESS."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.rank import Sum, serve

WORLD = MPI.COMM_WORLD


def prepare(candidate: str, numels: list[int]) -> Sum:
    """Return the call of `MPI_Allreduce` in place, tensor by tensor."""
    arrays = [np.zeros(numel, np.float32) for numel in numels]
    first, reduce, here, add = arrays[0], WORLD.Allreduce, MPI.IN_PLACE, MPI.SUM

    def one() -> None:
        reduce(here, first, add)

    def many() -> None:
        for array in arrays:
            reduce(here, array, add)

    call = one if len(arrays) == 1 else many
    return Sum(arrays, WORLD.rank, WORLD.size, WORLD.Barrier, call)


VERSION = MPI.Get_library_version().splitlines()[0].partition(", ")[0].rstrip("\0")
serve(sys.argv[1], WORLD.rank, VERSION, prepare)
