"""A rank of a simulated library for tests of benchmarks; FAULT selects its failure."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.rank import CheckedSum, serve

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAULT = os.environ.get("FAULT", "")
IS_LAST = RANK == WORLD_SIZE - 1


def prepare(candidate: str, numel: int) -> CheckedSum:
    array = np.zeros(numel, np.float32)
    earlier: list[Any] = []

    def call() -> None:
        if FAULT == "dies" and IS_LAST:
            os._exit(7)
        if FAULT == "raises" and IS_LAST:
            raise ValueError("planted\nin two lines")
        if IS_LAST:
            time.sleep({"hangs": 60, "is slow": 0.02}.get(FAULT, 0))
        others = WORLD_SIZE * (WORLD_SIZE - 1) // 2
        array[...] = WORLD_SIZE * (array - RANK) + others
        if FAULT == "one element" and IS_LAST:
            array[-1] += 1
        if FAULT == "two swapped" and IS_LAST:
            array[:2] = array[1::-1].copy()
        if FAULT == "the call before":
            earlier.append(array.copy())
            array[...] = earlier[-2 if len(earlier) > 1 else -1]

    return CheckedSum(array, RANK, WORLD_SIZE, lambda: None, call)


if FAULT == "does not start":
    sys.exit("planted: no such fabric")
if FAULT == "leaves":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
    sys.exit("planted: left")
if FAULT == "never comes" and IS_LAST:
    time.sleep(60)
serve(sys.argv[1], RANK, f"fake {FAULT}", prepare)
