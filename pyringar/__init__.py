"""pyringar: allreduce for many ranks in one process, on any hardware, with the same bits.

    import pyringar as pr

    pr.allreduce([tensor_of_rank_0, tensor_of_rank_1])   # summed into both, in place

    with pr.Communicator(["cpu"] * 4) as comm:
        comm.all_reduce_coalesced(gradients)              # gradients[rank][i]

The engine is C++, built by the first call for this very processor and kept in a cache; importing
builds and loads nothing.

Three packages are imported when they are first used: ``pr.distributed``, the backend ``ringar`` of
torch.distributed and several machines (:mod:`pyringar.distributed`); ``pr.train``, trainers for
LeNet and ResNet-18 (:mod:`pyringar.train`); ``pr.predict``, times on machines that you do not have
(:mod:`pyringar.predict`). What calls return: :mod:`pyringar.parallel.bucketer` (statistics of a
step), :mod:`pyringar.parallel.optimizer`, :mod:`pyringar.grading.grader` (a verdict per property),
:mod:`pyringar.train.trace`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from pyringar.comm.communicator import Communicator, Work, allreduce
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.comm.shared_tensors import shared_empty
from pyringar.comm.topology import Plan, Topology
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
from pyringar.grading.grader import check_allreduce
from pyringar.parallel.bucketer import GradientBucketer
from pyringar.parallel.module import DataParallel
from pyringar.parallel.replicate import replicate
from pyringar.parallel.shards import (
    check_replicas_equal,
    evaluate_accuracy_gpus,
    get_params,
    split_batch,
)

__version__ = "0.1.0"

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
    "Plan",
    "ProcessCommunicator",
    "RingarError",
    "Topology",
    "UnsupportedError",
    "Work",
    "allreduce",
    "check_allreduce",
    "check_replicas_equal",
    "evaluate_accuracy_gpus",
    "get_params",
    "replicate",
    "shared_empty",
    "split_batch",
]

_SUBPACKAGES = ("distributed", "predict", "train")


def __dir__() -> list[str]:
    """Return the public names, without the modules that importing them has set here."""
    return [*__all__, *_SUBPACKAGES, "__version__"]


if TYPE_CHECKING:
    from pyringar import distributed as distributed
    from pyringar import predict as predict
    from pyringar import train as train
else:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> ModuleType:
        """Import a subpackage when it is first used."""
        if name in _SUBPACKAGES:
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except UnsupportedError as error:  # `distributed`, where torch has none
                raise AttributeError(f"pyringar.{name}: {error}") from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
