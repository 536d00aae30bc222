"""The book's trainer for many ranks, done right: LeNet from scratch, data parallel.

from pyringar.train import train

print(train(num_gpus=2, batch_size=64, lr=0.1))
"""

from __future__ import annotations

from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData, load_data
from pyringar.train.model_lenet import lenet, lenet_params
from pyringar.train.step import train_batch
from pyringar.train.trainer import EpochResult, Trainer, TrainResult, train

__all__ = [
    "EpochResult",
    "ImageData",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "lenet",
    "lenet_params",
    "load_data",
    "train",
    "train_batch",
]
