"""Lightning's Trainer on CPU ranks, with a log that rank 0 writes."""

import json
import os
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


folder = Path(sys.argv[1])
world_size = int(os.environ["WORLD_SIZE"])
trainer = lightning.Trainer(
    max_steps=5,
    accelerator="cpu",
    devices=world_size,
    strategy="ddp",
    logger=CSVLogger(folder, name="log", version=0),
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(torch.arange(256.0).reshape(64, 4) / 256, 4))
found = {"rank": trainer.global_rank, "parameters": module.net.weight.tolist()}
if trainer.global_rank == 0:
    found["log"] = (folder / "log" / "version_0" / "metrics.csv").read_text()
(folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
