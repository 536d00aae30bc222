"""pyringar under torch.distributed: the backend ``ringar``, and a hook for others' process groups.

    import torch.distributed as dist
    import pyringar.distributed  # from torch 2.14 on, installing pyringar is enough

    dist.init_process_group("ringar")  # or "cpu:ringar,cuda:nccl"

    ddp.register_comm_hook(pyringar.distributed.HookState(), pyringar.distributed.ddp_hook)

all_reduce, broadcast, all_gather, reduce_scatter and barrier of CPU tensors go through shared
memory, with the engine's bits and errors, and every byte crosses once between machines. Other calls
go to gloo, and CUDA tensors to NCCL where the group has one. On several machines
`HierarchicalCommunicator` takes the place of `pyringar.ProcessCommunicator`.
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
