"""Call NCCL on ranks that share a GPU, by its C functions, to compare with.

    python benchmarks/nccl.py --ranks 2 --sizes 65536,1048576 --rounds 7

Prints one line of JSON. A process of its own, since a hang must cost no other row; NCCL must be
told in its environment that ranks may share a GPU, see `run`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.timing import ROTATED_BYTES, Clock, rotating

DEADLINE_S = 45.0


class Nccl:
    """NCCL's C functions, from the library that torch brings."""

    UNIQUE_ID = ctypes.c_char * 128
    FLOAT32, SUM = 7, 0

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetLastError.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; RuntimeError with NCCL's reason when it fails."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            reason = self._library.ncclGetErrorString(status).decode()
            last = (self._library.ncclGetLastError(None) or b"").decode().strip()
            raise RuntimeError(f"{name}: {reason}. {last}".strip())

    def version(self) -> str:
        """Return the version, such as "2.28.9"."""
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"

    def communicators(self, world_size: int) -> list[ctypes.c_void_p]:
        """Return a communicator per rank, all on the current device."""

        class UniqueId(ctypes.Structure):
            _fields_ = (("internal", self.UNIQUE_ID),)

        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        made = [ctypes.c_void_p() for _ in range(world_size)]
        errors: list[BaseException] = []

        def join(rank: int) -> None:
            torch.cuda.set_device(0)
            try:
                self.call("ncclCommInitRank", ctypes.byref(made[rank]), world_size, unique, rank)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return made

    def all_reduce(
        self,
        communicators: Sequence[ctypes.c_void_p],
        tensors: Sequence[Tensor],
        streams: Sequence[torch.cuda.Stream],
    ) -> None:
        """Sum fp32 tensors in place, every rank on its own stream."""
        self.call("ncclGroupStart")
        for communicator, tensor, stream in zip(communicators, tensors, streams, strict=True):
            pointer = ctypes.c_void_p(tensor.data_ptr())
            self.call(
                "ncclAllReduce",
                *(pointer, pointer, ctypes.c_size_t(tensor.numel()), self.FLOAT32, self.SUM),
                *(communicator, ctypes.c_void_p(stream.cuda_stream)),
            )
        self.call("ncclGroupEnd")


def nccl_version() -> str:
    """Return the version of the library which torch brings."""
    try:
        return Nccl().version()
    except (OSError, RuntimeError) as error:
        return f"none: {error}"


# -- the process that calls it ---------------------------------------------------------------------


def time_here(world_size: int, sizes: Sequence[int], rounds: int) -> None:
    """Time NCCL in this process and print JSON."""
    torch.cuda.init()
    nccl = Nccl()
    communicators = nccl.communicators(world_size)
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    clock, timings = Clock("cuda:0"), []
    for size_bytes in sizes:
        numel = size_bytes // 4
        num_sets = max(1, -(-ROTATED_BYTES // (world_size * size_bytes)))
        sets = [
            [torch.full((numel,), rank + 1.0, device="cuda") for rank in range(world_size)]
            for _ in range(num_sets)
        ]

        def call(tensors: Sequence[Tensor]) -> None:
            here = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(here)
            nccl.all_reduce(communicators, tensors, streams)
            for stream in streams:
                here.wait_stream(stream)

        call(sets[0])
        torch.cuda.synchronize()
        correct = all((t == world_size * (world_size + 1) / 2).all() for t in sets[0])
        for tensors in sets:
            for tensor in tensors:
                tensor.zero_()
        turns = rotating([functools.partial(call, tensors) for tensors in sets])
        timing = clock.interleaved({"nccl": turns}, rounds=rounds, budget_s=1.5)["nccl"]
        timings.append({"size_bytes": size_bytes, "correct": correct, "timing": asdict(timing)})
    print(json.dumps({"version": nccl.version(), "timings": timings}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Time NCCL with the ranks and sizes that the command line names."""
    parser = argparse.ArgumentParser(description="Time NCCL over ranks on one GPU.")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--sizes", required=True, help="bytes per rank, with commas between")
    parser.add_argument("--rounds", type=int, default=31, help="most rounds (default: %(default)s)")
    args = parser.parse_args(argv)
    time_here(args.ranks, [int(size) for size in args.sizes.split(",")], args.rounds)
    os._exit(0)  # NCCL's threads are not waited for


# -- the process that asks -------------------------------------------------------------------------


def run(
    world_size: int, sizes: Sequence[int], rounds: int
) -> tuple[dict[str, Any] | None, str | None]:
    """Measure in a process of its own; return its answer, or the reason why there is none.

    Returns:
        ``{"version": ..., "timings": [{"size_bytes", "correct", "timing"}, ...]}`` or None, and
        None or the reason.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(world_size)]
    command += ["--sizes", ",".join(map(str, sizes)), "--rounds", str(rounds)]
    # A rank takes its share of the multiprocessors: more than two need a smaller one.
    settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
    if world_size > 2:
        settings["NCCL_MAX_CTAS"] = "16"
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {DEADLINE_S:g} s"
    if done.returncode != 0:
        return None, reason_in(done.stdout + done.stderr)
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith('{"version"'))
    return json.loads(answer), None


def reason_in(output: str) -> str:
    """Return the line of NCCL's output that says what is wrong, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "Duplicate GPU" in line] or [
        line for line in lines if "Error" in line
    ]
    return (telling or lines or ["no output"])[-1][-300:]


if __name__ == "__main__":
    main()
