"""Train with DistributedDataParallel. One line is changed: the backend is pyringar's.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyringar.distributed  # noqa: F401  # registers the backend; torch 2.14 finds it by itself

dist.init_process_group("ringar")  # the changed line: it was "gloo"
rank = dist.get_rank()
torch.manual_seed(0)  # the same parameters on every rank
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
ddp = DistributedDataParallel(net)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
samples = torch.Generator().manual_seed(1 + rank)  # other samples on every rank

for step in range(1, 201):
    X = torch.randn(32, 20, generator=samples)
    y = (X.sum(1) > 0).long()
    loss = nn.functional.cross_entropy(ddp(X), y)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients meanwhile
    optimizer.step()
    if step % 50 == 0 and rank == 0:
        print(f"step {step:3}: loss {loss.item():.3f}\n", end="", flush=True)

parameters = nn.utils.parameters_to_vector(net.parameters()).detach()
digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12]
# The digest is equal on all ranks. Each print writes its newline too, so that lines do not mix.
print(f"rank {rank} has parameters {digest}\n", end="", flush=True)
dist.destroy_process_group()
