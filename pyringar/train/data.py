"""Images to train on: Fashion-MNIST or others in its format, or else a synthetic set.

Everything is loaded into tensors at once: decoding images one by one would take longer than
training on them, and would be what is timed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError, RingarError
from pyringar.train.config import CHOICES
from pyringar.train.download import download_fashion_mnist
from pyringar.train.idx import read_images, read_labels
from pyringar.train.synthetic import synthetic_images

__all__ = ["ImageData", "batches", "default_data_dir", "load_data"]

logger = logging.getLogger(__name__)

# So many that the book's own recipe, 10 epochs with batches of 256, learns.
_SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 12_000, 1_000
_SYNTHETIC_SEEDS = (20, 21)
# Where the files of a data_dir may be, in torchvision's layout first; downloads go there, too.
_PLACES = (Path("FashionMNIST", "raw"), Path("raw"), Path())
# Of each half: how many images the whole of it has, and the SHA-256 of their labels. Digits and
# letters come in files of the same names and sizes, but their labels are in another order.
_WHOLE = {
    "train": (60_000, "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"),
    "t10k": (10_000, "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9"),
}
_FILES = [f"{half}-{kind}-ubyte" for half in _WHOLE for kind in ("images-idx3", "labels-idx1")]


@dataclass(frozen=True)
class ImageData:
    """Training and test images, all of them.

    Attributes:
        name: What they are, for people.
        train_images: ``(n, 1, 28, 28)``, from 0 to 1.
        train_labels: ``(n,)``, int64, 0 to 9.
        test_images: As ``train_images``.
        test_labels: As ``train_labels``.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> ImageData:
        """Return the same on another device, with images of another dtype.

        Args:
            device: Where images and labels go.
            dtype: Of the images; labels stay int64.
        """
        return replace(
            self,
            train_images=self.train_images.to(device, dtype),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device, dtype),
            test_labels=self.test_labels.to(device),
        )

    def __str__(self) -> str:
        train, test = len(self.train_labels), len(self.test_labels)
        return f"{self.name}, {train:,} training and {test:,} test images"


def batches(
    images: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut images into batches; the last one may be smaller.

    Args:
        images: ``(n, ...)``.
        labels: ``(n,)``.
        batch_size: Samples in a batch.
        generator: Shuffles, on the CPU. Without one the batches are views, in order.
    """
    if generator is None:
        yield from zip(
            torch.split(images, batch_size), torch.split(labels, batch_size), strict=True
        )
        return
    shuffled = torch.randperm(len(labels), generator=generator).to(images.device)
    for chosen in torch.split(shuffled, batch_size):
        yield images[chosen], labels[chosen]


def default_data_dir() -> Path:
    """Return the folder of Fashion-MNIST, unless another is named."""
    import platformdirs  # not everywhere, and not needed where a folder is named

    return Path(platformdirs.user_data_dir("pyringar", appauthor=False))


def load_data(dataset: str = "auto", data_dir: str | Path | None = None) -> ImageData:
    """Load Fashion-MNIST, images in its format, or the synthetic set into tensors.

    Four files are read: ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the two that
    begin with ``t10k``, or the same packed, with ``.gz`` at the end.

    Args:
        dataset: ``"fashion-mnist"``: from ``data_dir``, or downloaded into it (30 MB).
            ``"synthetic"``: drawn by formula, whatever ``data_dir`` is. ``"auto"``: the first; if
            it cannot be had and no ``data_dir`` is named, the second with a logged warning that
            says why.
        data_dir: Folder that holds the files, itself or in ``FashionMNIST/raw`` or ``raw``, as
            torchvision has it; by default `default_data_dir`. Other images may be in it, as
            many as you like.

    Returns:
        float32 images on the CPU. The name is ``"Fashion-MNIST"`` for the whole of it; of a part,
        nothing here could tell.

    Raises:
        ArgumentError: Unknown ``dataset``; what was asked for is not there and cannot be
            downloaded; files that are damaged, incomplete or something else. Says what was looked
            for and where.

    An unreachable network is noticed within 5 seconds, a download that stalls within 20.
    """
    check_choice("dataset", dataset, CHOICES["dataset"])
    if dataset == "synthetic":
        return _synthetic()
    if data_dir is None:
        root, asked = default_data_dir(), f"dataset is {dataset!r}"
    else:
        root, asked = _folder(data_dir), f"data_dir is {str(data_dir)!r}"
    try:
        return _fashion_mnist(root, is_named=dataset == "fashion-mnist")
    except RingarError as error:
        is_broken = isinstance(error, ArgumentError)
        if is_broken or data_dir is not None or dataset != "auto":
            raise ArgumentError(f"{asked}, but {error}") from error
        logger.warning(
            "WARNING: this is NOT Fashion-MNIST but the built-in synthetic set, because %s", error
        )
        return _synthetic()


def _synthetic() -> ImageData:
    return ImageData(
        "synthetic garments",
        *synthetic_images(_SYNTHETIC_TRAIN, _SYNTHETIC_SEEDS[0]),
        *synthetic_images(_SYNTHETIC_TEST, _SYNTHETIC_SEEDS[1]),
    )


def _folder(data_dir: str | Path) -> Path:
    """Return a folder that was named, ``~`` expanded."""
    if not isinstance(data_dir, (str, Path)) or not str(data_dir) or "\0" in str(data_dir):
        raise ArgumentError(f"data_dir is {data_dir!r}, expected the path of a folder")
    return Path(os.path.expanduser(data_dir))


def _fashion_mnist(root: Path, is_named: bool) -> ImageData:
    """Read the four files, or download them first.

    Raises:
        ArgumentError: Something that is there is broken, or not what ``is_named`` demands.
        RingarError: Nothing is there, and nothing can be downloaded.
    """
    files = _find_files(root)
    if not files:
        try:
            download_fashion_mnist(root / _PLACES[0])
        except RingarError as error:
            raise RingarError(
                f"neither '{root}' nor its {_PLACES[0]} or {_PLACES[1]} holds {_FILES[0]} (or .gz) "
                f"and its three companions, and Fashion-MNIST cannot be downloaded: {error}"
            ) from error
        files = _find_files(root)
    train, test = (_read_half(files, half, is_named) for half in _WHOLE)
    name = "Fashion-MNIST" if train[2] and test[2] else "images in Fashion-MNIST's format"
    return ImageData(name, *train[:2], *test[:2])


def _find_files(root: Path) -> dict[str, Path]:
    """Return the four files by their plain names, or nothing if there is none of them."""
    for folder in (root / place for place in _PLACES):
        try:
            there = set(os.listdir(folder))  # at once: another process may be about to add them
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ArgumentError(f"'{folder}' cannot be read ({error.strerror})") from error
        names = {name: name if name in there else f"{name}.gz" for name in _FILES}
        missing = [plain for plain, name in names.items() if name not in there]
        if not missing:
            return {plain: folder / name for plain, name in names.items()}
        if len(missing) < len(_FILES):
            raise ArgumentError(
                f"'{folder}' lacks {', '.join(missing)}; add what is missing, or remove the other "
                "files of the set"
            )
    return {}


def _read_half(files: dict[str, Path], half: str, is_named: bool) -> tuple[Tensor, Tensor, bool]:
    """Return images, labels, and whether they are a whole half of Fashion-MNIST."""
    images_path = files[f"{half}-images-idx3-ubyte"]
    labels_path = files[f"{half}-labels-idx1-ubyte"]
    images, labels = read_images(images_path), read_labels(labels_path)
    if len(images) != len(labels):
        raise ArgumentError(
            f"'{labels_path}' holds {len(labels):,} labels, expected {len(images):,}: one for each "
            f"image of '{images_path}'"
        )
    whole, expected = _WHOLE[half]
    found = hashlib.sha256(bytes(labels.tolist())).hexdigest()
    if is_named and len(labels) == whole and found != expected:
        raise ArgumentError(
            f"'{labels_path}' is not Fashion-MNIST's: SHA-256 of the labels is {found}, expected "
            f"{expected}; where other images are meant, name data_dir and leave out dataset"
        )
    return images.unsqueeze(1).float() / 255, labels.long(), found == expected
