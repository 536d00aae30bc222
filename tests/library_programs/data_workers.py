"""DistributedDataParallel, a DistributedSampler, and workers that draw random numbers."""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noise(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((4,), float(i)) + torch.rand(4), int(os.environ["RANK"])


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
random.seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
optimizer = torch.optim.Adam(net.parameters())
data = Noise()
loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2)
ranks = set()
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for batch, of_worker in loader:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        ranks |= set(of_worker.tolist())
found = {"ranks": sorted(ranks), "parameters": net.module[0].weight.tolist()}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
