"""Images, training runs and comparisons of results, for tests of training."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import ImageData, TrainConfig, Trainer
from pyringar.train.synthetic import synthetic_images


def garments(num_train: int, num_test: int) -> ImageData:
    return ImageData("garments", *synthetic_images(num_train, 1), *synthetic_images(num_test, 2))


def write_idx_set(folder: Path, num_train: int, num_test: int, suffix: str = "") -> Path:
    """Write image files; all pixels of image ``i`` are ``i``, and its label is ``i % 10``."""
    folder.mkdir(parents=True, exist_ok=True)
    for half, n in (("train", num_train), ("t10k", num_test)):
        images = b"".join(bytes([i]) * 28 * 28 for i in range(n))
        labels = bytes(i % 10 for i in range(n))
        for name, sizes, data in (("images", (n, 28, 28), images), ("labels", (n,), labels)):
            header = bytes([0, 0, 8, len(sizes)]) + b"".join(k.to_bytes(4, "big") for k in sizes)
            path = folder / f"{half}-{name}-idx{len(sizes)}-ubyte{suffix}"
            path.write_bytes(gzip.compress(header + data) if suffix else header + data)
    return folder


def run(data: ImageData, save=None, resume=None, **options):
    with Trainer(TrainConfig(**options), data, save=save, resume=resume) as trainer:
        return trainer.run()


def same_results(ours, theirs):
    assert ours.losses == theirs.losses
    assert ours.curve == theirs.curve
    assert list(ours.state) == list(theirs.state)
    check_replicas_equal([list(ours.state.values()), list(theirs.state.values())])


def relative_error(found, expected):
    difference = sum(((a - b) ** 2).sum() for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum((b**2).sum() for b in expected))
