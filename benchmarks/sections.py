"""The sections of the report, in its order."""

from __future__ import annotations

from benchmarks import (
    allreduce,
    allreduce_cuda,
    bucketing,
    ddp,
    orders,
    peers_cuda,
    processes,
    training,
    training_cuda,
)
from benchmarks.bench import Benchmark

_MODULES = (
    allreduce,
    orders,
    processes,
    ddp,
    bucketing,
    training,
    allreduce_cuda,
    peers_cuda,
    training_cuda,
)
SECTIONS: dict[str, Benchmark] = {module.BENCHMARK.section: module.BENCHMARK for module in _MODULES}
