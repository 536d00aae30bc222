"""List the benchmarks that a report has, in its order."""

from __future__ import annotations

from benchmarks import (
    allreduce,
    allreduce_cuda,
    bucketing,
    ddp,
    lists,
    machines,
    orders,
    peers_cuda,
    processes,
    training,
    training_cuda,
)
from benchmarks.bench import Benchmark

SECTIONS: dict[str, Benchmark] = {
    module.BENCHMARK.section: module.BENCHMARK
    for module in (
        allreduce,
        lists,
        orders,
        processes,
        machines,
        ddp,
        bucketing,
        training,
        allreduce_cuda,
        peers_cuda,
        training_cuda,
    )
}
