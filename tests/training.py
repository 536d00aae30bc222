"""Shared by tests of the book's chapters: its allreduce, garments to train on, runs, and errors."""

from __future__ import annotations

import math

from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.synthetic import synthetic_images


def garments(num_train: int, num_test: int) -> ImageData:
    return ImageData("garments", *synthetic_images(num_train, 1), *synthetic_images(num_test, 2))


def run(data: ImageData, **options):
    with Trainer(TrainConfig(**options), data) as trainer:
        return trainer.run()


def relative_error(found, expected):
    difference = sum(((a - b) ** 2).sum() for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum((b**2).sum() for b in expected))


def rebinding(data):
    """The book's allreduce as first printed: its second loop rebinds entries of the list."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)


def repaired(data):
    """The book's allreduce as its later editions have it."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)
