"""pyringar under torch.distributed: the backend ``ringar``, and a hook for other backends.

    import torch.distributed as dist
    import pyringar.distributed  # from torch 2.14 on, installing pyringar is enough

    dist.init_process_group("ringar")  # or "cpu:ringar,cuda:nccl"

    ddp.register_comm_hook(pyringar.distributed.HookState(), pyringar.distributed.ddp_hook)

all_reduce, broadcast, all_gather, reduce_scatter and barrier of CPU tensors go through shared
memory, with the bits and errors of the engine. Between machines every byte crosses once. Other
calls go to gloo, and CUDA tensors to NCCL if the group has it. `HierarchicalCommunicator` is
`pyringar.ProcessCommunicator` for several machines.
"""

from __future__ import annotations

import torch.distributed

from pyringar.errors import UnsupportedError

if not torch.distributed.is_available():
    raise UnsupportedError("this torch was built without torch.distributed")

from pyringar.distributed.backend import register
from pyringar.distributed.communication_hook import HookState, ddp_hook
from pyringar.distributed.hierarchical import HierarchicalCommunicator, communicator_for

__all__ = ["HierarchicalCommunicator", "HookState", "communicator_for", "ddp_hook", "register"]

register()
