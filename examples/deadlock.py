"""A common mistake: only rank 0 calls barrier(), so its calls no longer match those of other ranks.

pyringar run --ranks 2 examples/deadlock.py

Started with python alone it has no ranks, and init_process_group raises.
"""

import torch
import torch.distributed as dist

dist.init_process_group()
loss = torch.ones(1)
if dist.get_rank() == 0:
    dist.barrier()
dist.all_reduce(loss)
