"""pyringar: allreduce for many ranks in one process, on any hardware, with the same bits.

    import pyringar as pr

    pr.allreduce([tensor_of_rank_0, tensor_of_rank_1])   # summed into both, in place

    with pr.Communicator(["cpu"] * 4) as comm:
        comm.all_reduce_coalesced(gradients)              # gradients[rank][i]

The engine is C++, built by the first call for this very processor and kept in a cache. Importing
pyringar builds and loads nothing, not even torch: every name is imported when it is first used.

Packages: ``pr.distributed``, the torch.distributed backend ``ringar`` and several machines;
``pr.train``, trainers for LeNet and ResNet-18; ``pr.ops``, all-reduce for torch.compile and
autograd; ``pr.figures``, pictures in a line or two. For teaching: `pyringar.comm.ring_schedule`,
the ring's messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyringar.lazy import lazy_names

__version__ = "0.1.0"

# The public names, by the module that defines them.
_HOMES = {
    "cluster.faults": ["Fault"],
    "cluster.launch": ["launch"],
    "comm.communicator": ["Communicator", "Work"],
    "comm.default_group": ["allreduce"],
    "comm.orders": ["Guarantee"],
    "comm.process_communicator": ["ProcessCommunicator"],
    "comm.shared_tensors": ["shared_empty"],
    "comm.topology": ["Plan", "Topology"],
    "parallel.bucketer": ["GradientBucketer"],
    "parallel.module": ["DataParallel"],
    "parallel.replicate": ["replicate"],
    "parallel.sharded_step": ["ShardedStep"],
    "parallel.shards": [
        "check_replicas_equal",
        "evaluate_accuracy_gpus",
        "get_params",
        "split_batch",
    ],
    "grading.grader": ["check_allreduce"],
    "errors": [
        "RingarError",
        "ArgumentError",
        "UnsupportedError",
        "BuildError",
        "CompilerNotFoundError",
        "CudaError",
        "DeadlockError",
        "CollectiveTimeout",
        "PeerLostError",
    ],
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
    "DeadlockError",
    "Fault",
    "GradientBucketer",
    "Guarantee",
    "PeerLostError",
    "Plan",
    "ProcessCommunicator",
    "RingarError",
    "ShardedStep",
    "Topology",
    "UnsupportedError",
    "Work",
    "allreduce",
    "check_allreduce",
    "check_replicas_equal",
    "evaluate_accuracy_gpus",
    "get_params",
    "launch",
    "replicate",
    "shared_empty",
    "split_batch",
]


def __dir__() -> list[str]:
    """Return the public names, without the modules that importing them has set here."""
    return [*__all__, *_SUBPACKAGES, "__version__"]


if TYPE_CHECKING:  # the same names, for those who read without running
    from pyringar import distributed as distributed
    from pyringar import figures as figures
    from pyringar import ops as ops
    from pyringar import train as train
    from pyringar.cluster.faults import Fault
    from pyringar.cluster.launch import launch
    from pyringar.comm.communicator import Communicator, Work
    from pyringar.comm.default_group import allreduce
    from pyringar.comm.orders import Guarantee
    from pyringar.comm.process_communicator import ProcessCommunicator
    from pyringar.comm.shared_tensors import shared_empty
    from pyringar.comm.topology import Plan, Topology
    from pyringar.errors import (
        ArgumentError,
        BuildError,
        CollectiveTimeout,
        CompilerNotFoundError,
        CudaError,
        DeadlockError,
        PeerLostError,
        RingarError,
        UnsupportedError,
    )
    from pyringar.grading.grader import check_allreduce
    from pyringar.parallel.bucketer import GradientBucketer
    from pyringar.parallel.module import DataParallel
    from pyringar.parallel.replicate import replicate
    from pyringar.parallel.sharded_step import ShardedStep
    from pyringar.parallel.shards import (
        check_replicas_equal,
        evaluate_accuracy_gpus,
        get_params,
        split_batch,
    )
else:  # a type checker would take every name for one that exists
    __getattr__ = lazy_names(__name__, _HOMES, _SUBPACKAGES)
