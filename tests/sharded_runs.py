"""Training runs in shards, and digests of their state after every step."""

import hashlib
import itertools
import os
from typing import Any

import torch
from training_runs import garments

from pyringar.train import TrainConfig, Trainer
from pyringar.train.train_group import ProcessTrainGroup, TrainGroup

# The last of 4 batches has 6 images, so two of the eight shards are empty.
RECIPE: dict[str, Any] = {"batch_size": 20, "epochs": 1, "shards": 8, "momentum": 0.9, "lr": 0.05}
MODELS: dict[str, dict[str, Any]] = {"lenet": {}, "resnet18": {"model": "resnet18", "width": 4}}
KINDS: dict[str, dict[str, Any]] = {"float32": {}, "amp": {"amp": True}}
TRAIN, TEST = 66, 130


def digest(trainer: Trainer, rank: int = 0) -> str:
    found = hashlib.blake2b(digest_size=6)
    step = trainer._run_step
    kinds = (trainer.model.params, trainer.model.buffers(), step.velocities)
    for tensor in [*itertools.chain(*(kind[rank] for kind in kinds)), step.sums[rank]]:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(group: Any, config: TrainConfig, data: Any = None) -> list[str]:
    rows: list[str] = []
    with Trainer(config, data or garments(TRAIN, TEST), group=group) as trainer:

        def record() -> None:
            digests = {digest(trainer, rank) for rank in range(len(trainer.devices))}
            rows.append("|".join(sorted(digests)))

        result = trainer.run(on_step=record)
    return [*rows, f"{result.losses[-1]!r}", f"{result.curve[-1]!r}"]


def in_one_process(ranks: int, data: Any = None, **options: Any) -> list[str]:
    config = TrainConfig(**{**RECIPE, **options}, ranks=ranks)
    return train(TrainGroup(config), config, data)


def as_rank(
    rank: int, world_size: int, store: Any, machines: str, options: dict[str, Any]
) -> list[str]:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    torch.set_num_threads(1 + rank % 2)  # the number of threads must not change bits
    config = TrainConfig(**{**RECIPE, **options}, ranks=world_size)
    return train(ProcessTrainGroup(config, store, rank, world_size), config)
