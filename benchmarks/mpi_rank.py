"""Be one rank of Open MPI, started by mpi_machines.py: mpi_rank.py SOCKET.

Between requests it waits in the kernel. A request is a line, ``NUMEL CALLS``; its answer the
seconds of a call, or ``nan`` if a sum was wrong.
"""

from __future__ import annotations

import socket
import sys
import time

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def answer(numel: int, calls: int) -> float:
    """Check a sum, then time calls from a common barrier on."""
    k = WORLD.size
    row = np.arange(numel, dtype=np.float32) % 17
    array = row + np.float32(WORLD.rank)
    WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
    is_right = bool((array == k * row + k * (k - 1) // 2).all())
    array[:] = 0
    WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
    each_s = (time.perf_counter() - begin) / max(1, calls)
    return each_s if is_right else float("nan")


with socket.socket(socket.AF_UNIX) as parent:
    parent.connect(sys.argv[1])
    while request := parent.recv(64):
        parent.sendall(str(answer(*map(int, request.split()))).encode())
