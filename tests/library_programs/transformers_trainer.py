"""The Trainer of transformers on a tiny model with random weights."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

folder = Path(sys.argv[1])
set_seed(0)
config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
model = GPT2LMHeadModel(config)
tokens = torch.randint(20, (32, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=str(folder / "out"),
    use_cpu=True,
    per_device_train_batch_size=2,
    max_steps=4,
    logging_steps=1,
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
found = {
    "is main": trainer.is_world_process_zero(),
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "parameters": model.transformer.wte.weight.tolist(),
}
if trainer.is_world_process_zero():  # rank 0 writes the checkpoints
    found["checkpoints"] = sorted(p.name for p in (folder / "out").glob("checkpoint-*"))
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
