"""A training loop of accelerate: samples, losses and parameters of each rank."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
net = nn.Linear(4, 1)
data = torch.arange(160.0).reshape(40, 4) / 160
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 5, num_workers=1)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
samples, losses = [], []
for (batch,) in loader:
    optimizer.zero_grad()
    loss = net(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    samples += batch[:, 0].tolist()
    losses += accelerator.gather(loss.detach().reshape(1)).tolist()
found = {
    "rank": accelerator.process_index,
    "is main": accelerator.is_main_process,
    "samples": samples,
    "losses": losses,
    "parameters": accelerator.unwrap_model(net).weight.tolist(),
}
Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(found))
