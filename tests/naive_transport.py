"""A transport in one file: gather all tensors with torch.distributed, then reduce them naively.

It shows the methods that a transport implements. Tests compare other transports with it.
"""

import torch
import torch.distributed as dist

from pyringar.comm.background_work import Work
from pyringar.comm.collective_call import tensors_of
from pyringar.comm.plain_group import check_tensors_of_rank
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.reference import naive_all_reduce
from pyringar.comm.sum_orders import engine_order

REFUSED = {
    **RankCommunicator._refused,
    "bind": "take all_reduce",
    "bind_coalesced": "take all_reduce_coalesced",
    "plan": "each call sends all tensors to all ranks",
    "abort": "abort the group of torch.distributed",
}


class NaiveTransport(RankCommunicator):
    """One rank of the default group of torch.distributed, with CPU tensors."""

    _refused = REFUSED

    def __init__(self, *, order="any"):
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._name = "naive"
        self._configure("auto", order, 30.0)

    def _order_of(self, algorithm, order):
        return engine_order("naive", order, has_gpus=False)

    def _run(self, call, *, async_op=False, what=""):
        check_tensors_of_rank(call, self._device, self._world_size)
        with torch.no_grad():
            for output in tensors_of(call.outputs):
                is_sent = call.operation == "broadcast" and call.root == self._rank
                rows = self._gathered(call.inputs if call.has_inputs else output)
                if call.is_reduction:
                    naive_all_reduce(rows, call.op)
                result = rows[call.root]
                if call.operation == "all_gather":
                    result = torch.cat(rows)
                elif call.operation == "reduce_scatter":
                    result = rows[0].chunk(self._world_size)[self._rank]
                if not is_sent:
                    output.copy_(result.view(output.shape))
        if call.operation == "barrier":
            dist.barrier()
        return Work(None, {}, *call.words()) if async_op else None

    def _gathered(self, tensor):
        own = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
        rows = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather([row.view(torch.uint8) for row in rows], own.view(torch.uint8))
        return rows
