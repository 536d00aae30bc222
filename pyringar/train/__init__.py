"""The book's trainers for many ranks, done right: LeNet by hand and ResNet-18, data parallel.

from pyringar.train import train, train_resnet18

print(train(num_gpus=2, batch_size=64, lr=0.1))
print(train_resnet18(num_gpus=2, batch_size=64, lr=0.1))
"""

from __future__ import annotations

from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData, load_data
from pyringar.train.live import LivePlot
from pyringar.train.model_lenet import lenet, lenet_params
from pyringar.train.model_resnet18 import initialise, resnet18
from pyringar.train.step import train_batch
from pyringar.train.trainer import EpochResult, Trainer, TrainResult, train, train_resnet18

__all__ = [
    "EpochResult",
    "ImageData",
    "LivePlot",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "initialise",
    "lenet",
    "lenet_params",
    "load_data",
    "resnet18",
    "train",
    "train_batch",
    "train_resnet18",
]
