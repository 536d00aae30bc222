"""This machine's memory: what it allows the engine's algorithms, and what they take.

A prediction rests on two measurements: the bandwidth with which as many buffers of the same size
are multiplied in place, and the time of a call for one element. It holds for buffers that do not
fit the caches; inside them, a ring's cost is handing lines from core to core, which it leaves out.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pyringar.comm.communicator import Communicator
from pyringar.engine import toolchain
from pyringar.predict.algorithms import ITEM_BYTES
from pyringar.predict.report import align

__all__ = ["CPU_ALGORITHMS", "QUIET_SHARE", "CpuRow", "bytes_moved", "compare_cpu", "render_cpu"]

CPU_ALGORITHMS = ("fused", "direct", "ring")
QUIET_SHARE = 0.9  # of the cores, below which others disturb too much
_ROUND_S = 5e-3  # shortest time to measure at once


@dataclass(frozen=True)
class CpuRow:
    """One algorithm at one size.

    Attributes:
        algorithm: Its name.
        world_size: Number of CPU ranks.
        nbytes: Of one rank's tensor.
        bandwidth_gbps: Measured: reads and writes together, GB/s.
        overhead_s: Measured: a call for one element.
        predicted_s: From these two.
        measured_s: The call itself.
        cores_share: The share of the cores' time that the multiplications got. Below 1 others use
            the machine, and neither figure says much.
    """

    algorithm: str
    world_size: int
    nbytes: int
    bandwidth_gbps: float
    overhead_s: float
    predicted_s: float
    measured_s: float
    cores_share: float

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measurement; negative: too short."""
        return self.predicted_s / self.measured_s - 1


def bytes_moved(algorithm: str, world_size: int, nbytes: int) -> int:
    """Return the bytes that an algorithm reads and writes in memory, for tensors of ``nbytes``.

    ``fused`` and ``direct`` read and write every tensor once. In the ring, all ranks together pass
    on one tensor in each of k - 1 steps of either phase: to add, a rank reads its neighbour's sum
    and its own part, and writes; to pass a result on, it reads and writes.
    """
    if algorithm == "ring":
        return (3 + 2) * (world_size - 1) * nbytes
    return 2 * world_size * nbytes


def compare_cpu(
    world_sizes: Sequence[int], sizes_bytes: Sequence[int], rounds: int = 15
) -> list[CpuRow]:
    """Predict and measure every algorithm, for all numbers of CPU ranks and sizes.

    Args:
        world_sizes: Numbers of ranks.
        sizes_bytes: Bytes of one rank's float32 tensor.
        rounds: In which all that is measured takes turns, so that drift affects all alike.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(toolchain.cores_allowed())
    try:
        cases = [(k, nbytes) for k in world_sizes for nbytes in sizes_bytes]
        return [row for k, nbytes in cases for row in _compare(k, nbytes, rounds)]
    finally:
        torch.set_num_threads(threads_before)


def _compare(world_size: int, nbytes: int, rounds: int) -> list[CpuRow]:
    tensors = [torch.zeros(nbytes // ITEM_BYTES) for _ in range(world_size)]
    ones = [torch.zeros(1) for _ in range(world_size)]
    multiply = _Multiply(tensors)
    with Communicator(["cpu"] * world_size) as comm:
        calls: dict[str, Callable[[], object]] = {"multiply": multiply}
        for name in CPU_ALGORITHMS:
            calls[name] = functools.partial(comm.all_reduce, tensors, algorithm=name)
            calls[f"one {name}"] = functools.partial(comm.all_reduce, ones, algorithm=name)
        took_s = _quartiles(calls, rounds)
    bytes_per_s = 2 * world_size * nbytes / took_s["multiply"]
    return [
        CpuRow(
            algorithm=name,
            world_size=world_size,
            nbytes=nbytes,
            bandwidth_gbps=bytes_per_s * 1e-9,
            overhead_s=took_s[f"one {name}"],
            predicted_s=took_s[f"one {name}"] + bytes_moved(name, world_size, nbytes) / bytes_per_s,
            measured_s=took_s[name],
            cores_share=multiply.cores_share,
        )
        for name in CPU_ALGORITHMS
    ]


class _Multiply:
    """Reads and writes every buffer once, with a thread on each core.

    Attributes:
        cores_share: See `CpuRow`; over all calls so far.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._wanted_s = 0.0
        self._got_s = 0.0

    def __call__(self) -> None:
        begin_s, busy_s = time.perf_counter(), time.process_time()
        for tensor in self._tensors:
            tensor.mul_(1)
        # Threads that wait for the others spin: all are busy all the time, if they are let.
        self._got_s += time.process_time() - busy_s
        self._wanted_s += (time.perf_counter() - begin_s) * torch.get_num_threads()

    @property
    def cores_share(self) -> float:
        return min(1.0, self._got_s / self._wanted_s)


def _quartiles(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return seconds per call: the lower quartile of rounds in which all take turns.

    Other users of the machine make some rounds longer, and luck makes a few shorter.
    """
    names = list(calls)
    samples_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            # torch's threads spin for milliseconds after a loop, and would take a core from this.
            time.sleep(0.01)
            calls[name]()
            samples_s[name].append(_time_s(calls[name]))
    return {name: sorted(seconds)[len(seconds) // 4] for name, seconds in samples_s.items()}


def _time_s(call: Callable[[], object]) -> float:
    took_s, count = 0.0, 0
    begin_s = time.perf_counter()
    while not count or took_s < _ROUND_S:  # once at least: a busy machine may have taken the time
        call()
        count += 1
        took_s = time.perf_counter() - begin_s
    return took_s / count


def render_cpu(rows: Sequence[CpuRow]) -> str:
    """Return the rows as a table."""
    titles = ["ranks", "a rank", "algorithm", "memory\nGB/s", "overhead\nus"]
    titles += ["predicted\nms", "measured\nms", "off by"]
    cells = [
        [
            f"{row.world_size}",
            f"{row.nbytes / 2**20:.4g} MiB",
            row.algorithm,
            f"{row.bandwidth_gbps:.1f}",
            f"{row.overhead_s * 1e6:.1f}",
            f"{row.predicted_s * 1e3:.3f}",
            f"{row.measured_s * 1e3:.3f}",
            f"{row.error:+.0%}",
        ]
        for row in rows
    ]
    cpu, cores = toolchain.read_cpu().name, toolchain.cores_allowed()
    text = f"""CPU ranks in this machine's memory, {cores} cores:
{cpu}.
Predicted from two measurements: the bandwidth of multiplying the same buffers
in place, and a call for one element. The calls themselves were measured in turn
with them (lower quartile of rounds). For sizes beyond the caches; other work on
this machine disturbs it.

{align([titles, *cells])}"""
    share = min(row.cores_share for row in rows)
    if share < QUIET_SHARE:
        text += (
            f"\n\nOthers use this machine: it gave {share:.0%} of its cores at times. Try again."
        )
    return text
