"""Allreduce with reproducible bits, for ranks in one process or in several.

    import pyringar as pr

    pr.allreduce([tensor_of_rank_0, tensor_of_rank_1])   # summed into both, in place

    with pr.Communicator(["cpu"] * 4) as comm:
        comm.all_reduce_coalesced(gradients)              # gradients[rank][i]

The first call compiles the C++ engine for this CPU and keeps it in a cache. ``import pyringar``
loads neither the engine nor torch: every name is imported at its first use.

Packages:

- ``pr.distributed``: the torch.distributed backend ``ringar``, and groups over several machines.
- ``pr.train``: trainers for LeNet and ResNet-18.
- ``pr.ops``: all-reduce for torch.compile and autograd.
- ``pr.figures``: charts.
- `pyringar.comm.ring_schedule`: the messages of a ring, for teaching.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyringar.errors import (
    ArgumentError,
    BuildError,
    CollectiveTimeout,
    CompilerNotFoundError,
    CudaError,
    PeerLostError,
    RingarError,
    UnsupportedError,
)
from pyringar.lazy import lazy_names

__version__ = "0.1.0"

# Public names by module, without the errors.
_HOMES = {
    "cluster.launch": ["launch"],
    "comm.communicator": ["Communicator"],
    "comm.default_group": ["allreduce"],
    "comm.process_communicator": ["ProcessCommunicator"],
    "parallel.bucketer": ["GradientBucketer"],
    "parallel.data_parallel": ["DataParallel"],
    "parallel.replicate": ["replicate"],
    "parallel.sharded_step": ["ShardedStep"],
    "parallel.shards": ["evaluate_accuracy_gpus", "get_params", "split_batch"],
    "grading.grader": ["check_allreduce"],
}
_SUBPACKAGES = ("distributed", "figures", "ops", "train")

__all__ = [
    "ArgumentError",
    "BuildError",
    "CollectiveTimeout",
    "Communicator",
    "CompilerNotFoundError",
    "CudaError",
    "DataParallel",
    "GradientBucketer",
    "PeerLostError",
    "ProcessCommunicator",
    "RingarError",
    "ShardedStep",
    "UnsupportedError",
    "allreduce",
    "check_allreduce",
    "evaluate_accuracy_gpus",
    "get_params",
    "launch",
    "replicate",
    "split_batch",
]


def __dir__() -> list[str]:
    """Return the public names, without imported submodules."""
    return [*__all__, *_SUBPACKAGES, "__version__"]


if TYPE_CHECKING:  # the same names, for type checkers and editors
    from pyringar import distributed as distributed
    from pyringar import figures as figures
    from pyringar import ops as ops
    from pyringar import train as train
    from pyringar.cluster.launch import launch
    from pyringar.comm.communicator import Communicator
    from pyringar.comm.default_group import allreduce
    from pyringar.comm.process_communicator import ProcessCommunicator
    from pyringar.grading.grader import check_allreduce
    from pyringar.parallel.bucketer import GradientBucketer
    from pyringar.parallel.data_parallel import DataParallel
    from pyringar.parallel.replicate import replicate
    from pyringar.parallel.sharded_step import ShardedStep
    from pyringar.parallel.shards import evaluate_accuracy_gpus, get_params, split_batch
else:  # a type checker that saw __getattr__ would accept every name
    __getattr__ = lazy_names(__name__, _HOMES, _SUBPACKAGES)
