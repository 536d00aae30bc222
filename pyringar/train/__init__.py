"""Train LeNet and ResNet-18 data parallel on many ranks, as the book does.

    from pyringar.train import train, train_resnet18

    print(train(num_gpus=2, batch_size=64, lr=0.1))
    print(train_resnet18(num_gpus=2, batch_size=64, lr=0.1))

Both print the accuracy, the seconds per epoch, and the devices of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyringar.lazy import lazy_names

# Public names, by the module that defines them.
_HOMES = {
    "trainer": ["train", "train_resnet18", "Trainer", "TrainResult", "EpochResult"],
    "config": ["TrainConfig"],
    "step": ["train_batch"],
    "model_lenet": ["LeNet", "lenet", "lenet_params"],
    "model_resnet18": ["initialise", "resnet18"],
    "data": ["ImageData", "load_data"],
    "training_plots": ["LivePlot"],
}

__all__ = [
    "EpochResult",
    "ImageData",
    "LeNet",
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


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__]


if TYPE_CHECKING:
    from pyringar.train.config import TrainConfig
    from pyringar.train.data import ImageData, load_data
    from pyringar.train.model_lenet import LeNet, lenet, lenet_params
    from pyringar.train.model_resnet18 import initialise, resnet18
    from pyringar.train.step import train_batch
    from pyringar.train.trainer import EpochResult, Trainer, TrainResult, train, train_resnet18
    from pyringar.train.training_plots import LivePlot
else:
    __getattr__ = lazy_names(__name__, _HOMES)
