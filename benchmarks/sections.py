"""All sections of the benchmark report, in order."""

from __future__ import annotations

from benchmarks import (
    allreduce,
    allreduce_cuda,
    bucketing,
    ddp_steps,
    order_cost,
    peers_cuda,
    process_allreduce,
    training_cuda,
    training_steps,
)
from benchmarks.bench import Benchmark

_MODULES = (
    allreduce,
    order_cost,
    process_allreduce,
    ddp_steps,
    bucketing,
    training_steps,
    allreduce_cuda,
    peers_cuda,
    training_cuda,
)
SECTIONS: dict[str, Benchmark] = {module.BENCHMARK.section: module.BENCHMARK for module in _MODULES}
