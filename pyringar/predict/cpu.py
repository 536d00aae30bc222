"""This machine's memory: what the engine's algorithms should take in it, and what they do.

Measured first, and all that a prediction rests on: the bandwidth with which as many buffers of the
same size are multiplied in place, and what a call for one element takes. The program of an
algorithm then runs through the same event loop as over links, with the memory as the one port that
all ranks queue for. Good for buffers that do not fit the caches: inside them, handing lines from
core to core is what a ring costs, and nothing here knows of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pyringar.comm.communicator import Communicator
from pyringar.engine import load, toolchain
from pyringar.predict.algorithms import ITEM_BYTES, ring_in_memory
from pyringar.predict.events import Program, simulate
from pyringar.predict.network import Memory

__all__ = ["CPU_ALGORITHMS", "QUIET_SHARE", "CpuRow", "compare_cpu", "render_cpu"]

CPU_ALGORITHMS = ("fused", "direct", "ring")
QUIET_SHARE = 0.9  # of the cores, below which others disturb too much
_LEAST_S = 5e-3  # shortest time to measure at once


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
        cores_share: Of the cores' time that the multiplications asked for, what they got: less than
            1 where others use the machine, and then neither figure says much.
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
        """Return the prediction's error as a share of the measurement; negative: too short."""
        return self.predicted_s / self.measured_s - 1


def compare_cpu(
    world_sizes: Sequence[int], sizes_bytes: Sequence[int], rounds: int = 15
) -> list[CpuRow]:
    """Predict and measure every algorithm, for all numbers of CPU ranks and sizes.

    Args:
        world_sizes: Numbers of ranks.
        sizes_bytes: Bytes of one rank's float32 tensor.
        rounds: In which all that is measured takes turns, so that drift hits all alike.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(toolchain.cores_allowed())
    try:
        return [
            row
            for k in world_sizes
            for nbytes in sizes_bytes
            for row in _compare(k, nbytes, rounds)
        ]
    finally:
        torch.set_num_threads(threads_before)


def _compare(world_size: int, nbytes: int, rounds: int) -> list[CpuRow]:
    numel = nbytes // ITEM_BYTES
    tensors = [torch.zeros(numel) for _ in range(world_size)]
    ones = [torch.zeros(1) for _ in range(world_size)]
    # With a bandwidth of one byte a second: how many bytes' time a program takes.
    byte_times = {
        name: simulate(_program(name, world_size, numel), Memory(1e-9)).time_s
        for name in CPU_ALGORITHMS
    }
    multiply = _Multiply(tensors)
    with Communicator(["cpu"] * world_size) as comm:
        calls: dict[str, Callable[[], object]] = {"multiply": multiply}
        for name in CPU_ALGORITHMS:
            calls[name] = functools.partial(comm.all_reduce, tensors, algorithm=name)
            calls[f"one {name}"] = functools.partial(comm.all_reduce, ones, algorithm=name)
        took_s = _quartiles(calls, rounds)
    rate = 2 * world_size * nbytes / took_s["multiply"]
    return [
        CpuRow(
            algorithm=name,
            world_size=world_size,
            nbytes=nbytes,
            bandwidth_gbps=rate * 1e-9,
            overhead_s=took_s[f"one {name}"],
            predicted_s=took_s[f"one {name}"] + byte_times[name] / rate,
            measured_s=took_s[name],
            cores_share=multiply.cores_share,
        )
        for name in CPU_ALGORITHMS
    ]


class _Multiply:
    """Reads and writes every buffer once, with a thread on each core.

    Attributes:
        cores_share: As of :class:`CpuRow`, over all calls so far.
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


def _program(name: str, world_size: int, numel: int) -> Program:
    """Bytes read and written, as messages from a rank to itself."""
    if name == "ring":
        return ring_in_memory(world_size, numel)
    program = Program()
    for rank in range(world_size):
        # Its slice of every buffer, read and written once: by a helper (fused), or by its own rank.
        begin, end = load.engine().chunk_range(numel, world_size, rank)
        program.send(rank, rank, 2 * world_size * (end - begin) * ITEM_BYTES)
    return program


def _quartiles(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds a call, the lower quartile of rounds in which all take turns.

    Whoever else uses the machine makes some rounds longer, and luck makes a few shorter.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_time(calls[name]))
    return {name: sorted(seconds)[len(seconds) // 4] for name, seconds in samples.items()}


def _time(call: Callable[[], object]) -> float:
    """Seconds a call, over as many as fill a while."""
    # torch's threads spin for milliseconds after a loop, and would take the next one's core.
    time.sleep(0.01)
    call()
    begin_s = time.perf_counter()
    calls = 0
    while time.perf_counter() - begin_s < _LEAST_S:
        call()
        calls += 1
    return (time.perf_counter() - begin_s) / calls


def render_cpu(rows: Sequence[CpuRow]) -> str:
    """The rows as a table."""
    titles = ["ranks", "a rank", "algorithm", "memory GB/s", "overhead us"]
    titles += ["predicted ms", "measured ms", "off by"]
    form = "{:>5}  {:>10}  {:<9}  {:>11}  {:>11}  {:>12}  {:>11}  {:>6}"
    cells = [
        (
            row.world_size,
            f"{row.nbytes / 2**20:.4g} MiB",
            row.algorithm,
            f"{row.bandwidth_gbps:.1f}",
            f"{row.overhead_s * 1e6:.1f}",
            f"{row.predicted_s * 1e3:.3f}",
            f"{row.measured_s * 1e3:.3f}",
            f"{row.error:+.0%}",
        )
        for row in rows
    ]
    cores = toolchain.cores_allowed()
    lines = [
        f"CPU ranks in this machine's memory: {toolchain.read_cpu().name}, {cores} cores.",
        "Predicted from two measurements: the bandwidth of multiplying the same buffers in place,",
        "and a call for one element. The calls themselves were measured in turn with them (lower",
        "quartile of rounds). For sizes beyond the caches; other work on this machine disturbs it.",
        "",
        form.format(*titles),
        *(form.format(*row) for row in cells),
    ]
    share = min(row.cores_share for row in rows)
    if share < QUIET_SHARE:
        lines += [
            "",
            f"Others use this machine: it gave {share:.0%} of its cores at times. Try again.",
        ]
    return "\n".join(lines)
