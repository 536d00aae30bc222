"""Load Fashion-MNIST, images in its format, or synthetic images.

All images are loaded into tensors at once, since decoding each image in the training loop would
take longer than the training.
"""

from __future__ import annotations

import gzip
import logging
import math
import os
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.train.config import CHOICES, folder_of
from pyringar.train.synthetic import synthetic_images

logger = logging.getLogger(__name__)

# Numbers of images: enough to learn with the book's 10 epochs and batches of 256.
_SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 12_000, 1_000
# Folders below data_dir that may hold the files; the first is torchvision's layout.
_PLACES = (Path("FashionMNIST", "raw"), Path("raw"), Path())
_HALVES = ("train", "t10k")
_FILES = [f"{half}-{kind}-ubyte" for half in _HALVES for kind in ("images-idx3", "labels-idx1")]
_SIDE = 28
_NUM_CLASSES = 10
_UINT8 = 0x0800  # magic number of an IDX file of bytes, minus its number of dimensions
_REACHABLE_WITHIN_S = 5.0


@dataclass(frozen=True)
class ImageData:
    """Training and test images.

    Attributes:
        name: Name of the data set, for display.
        train_images: ``(n, 1, 28, 28)``, from 0 to 1.
        train_labels: ``(n,)``, int64, 0 to 9.
        test_images: In the form of ``train_images``.
        test_labels: In the form of ``train_labels``.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> ImageData:
        """Return a copy on another device, with images of another dtype.

        Args:
            device: Device of images and labels.
            dtype: Dtype of the images; labels stay int64.
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
    """Yield batches, shuffled if a CPU generator is given; the last batch may be smaller."""
    if generator is None:
        both = (torch.split(part, batch_size) for part in (images, labels))
        yield from zip(*both, strict=True)
        return
    shuffled = torch.randperm(len(labels), generator=generator).to(images.device)
    for chosen in torch.split(shuffled, batch_size):
        yield images[chosen], labels[chosen]


def default_data_dir() -> Path:
    import platformdirs  # needed only without data_dir

    return Path(platformdirs.user_data_dir("pyringar", appauthor=False))


def load_data(dataset: str = "auto", data_dir: str | Path | None = None) -> ImageData:
    """Load Fashion-MNIST, images in its format, or the synthetic set into tensors.

    Reads four files: ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, and two with
    ``t10k`` instead of ``train``. Each may be compressed, with ``.gz`` at the end.

    Args:
        dataset: ``"fashion-mnist"``: read from ``data_dir``, or downloaded into it (30 MB).
            ``"synthetic"``: drawn by formula. ``"auto"``: Fashion-MNIST; if that is not available
            and ``data_dir`` is not given, synthetic images, with a logged warning.
        data_dir: Folder that holds the files, directly or in ``FashionMNIST/raw`` (the layout of
            torchvision) or ``raw``. Default: `default_data_dir`. The files may hold other images in
            this format.

    Returns:
        float32 images on the CPU.

    Raises:
        ArgumentError: ``dataset`` is unknown; the images are missing and cannot be downloaded; a
            file is missing, damaged or has another format. Names the file or folder.
    """
    check_choice("dataset", dataset, CHOICES["dataset"])
    if dataset == "synthetic":
        return _synthetic()
    if data_dir is None:
        root, asked = default_data_dir(), f"dataset is {dataset!r}"
    else:
        root, asked = folder_of("data_dir", data_dir), f"data_dir is {str(data_dir)!r}"
    try:
        return _fashion_mnist(root)
    except RingarError as error:
        is_broken = isinstance(error, ArgumentError)
        if is_broken or data_dir is not None or dataset != "auto":
            raise ArgumentError(f"{asked}, but {error}") from error
        logger.warning(
            "Training on synthetic images (Fashion-MNIST could not be downloaded).\n%s", error
        )
        return _synthetic()


def _synthetic() -> ImageData:
    train, test = synthetic_images(_SYNTHETIC_TRAIN, 20), synthetic_images(_SYNTHETIC_TEST, 21)
    return ImageData("synthetic garments", *train, *test)


def _fashion_mnist(root: Path) -> ImageData:
    """Read or download the files. ArgumentError: a file is damaged; RingarError: missing."""
    files = _find_files(root)
    if not files:
        try:
            _download(root)
        except RingarError as error:
            raise RingarError(
                f"'{root}', {_PLACES[0]} and {_PLACES[1]} in it lack {_FILES[0]} (or .gz) and the "
                f"other three files, and Fashion-MNIST cannot be downloaded: {error}"
            ) from error
        files = _find_files(root)
    train, test = (_read_half(files, half) for half in _HALVES)
    return ImageData("images in Fashion-MNIST's format", *train, *test)


def _find_files(root: Path) -> dict[str, Path]:
    for folder in (root / place for place in _PLACES):
        try:
            there = set(os.listdir(folder))
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
                f"'{folder}' lacks {', '.join(missing)}; add the missing files, or remove the "
                "other files of the set"
            )
    return {}


def _download(root: Path) -> None:
    """Download Fashion-MNIST into torchvision's layout below ``root``."""
    try:
        from torchvision.datasets import FashionMNIST
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: wrong torchvision
        raise UnsupportedError(
            f"torchvision, which downloads it, cannot be imported ({type(error).__name__}: "
            f"{error}); install the torchvision for torch {torch.__version__}"
        ) from error
    url = FashionMNIST.mirrors[0] + FashionMNIST.resources[1][0]
    try:
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=_REACHABLE_WITHIN_S).close()
        logger.info("downloading Fashion-MNIST (30 MB) from %s into '%s'", url, root)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as temporary:
            FashionMNIST(temporary, download=True)
            (root / _PLACES[0].parent).mkdir(exist_ok=True)
            Path(temporary, _PLACES[0]).rename(root / _PLACES[0])
    except (OSError, RuntimeError, HTTPException) as error:
        if _find_files(root):
            return  # another process has downloaded the files meanwhile
        raise RingarError(
            f"the download from {url} failed ({type(error).__name__}: {error})"
        ) from error


def _read_half(files: dict[str, Path], half: str) -> tuple[Tensor, Tensor]:
    images_path = files[f"{half}-images-idx3-ubyte"]
    labels_path = files[f"{half}-labels-idx1-ubyte"]
    images = _read_idx(images_path, "images", (_SIDE, _SIDE))
    labels = _read_idx(labels_path, "labels", ())
    if len(images) != len(labels):
        raise ArgumentError(
            f"'{labels_path}' holds {len(labels):,} labels, expected {len(images):,}, one per "
            f"image of '{images_path}'"
        )
    wrong = (labels >= _NUM_CLASSES).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ArgumentError(
            f"'{labels_path}' has label {int(labels[index])} at index {index:,}, "
            f"expected 0 to {_NUM_CLASSES - 1}"
        )
    return images.unsqueeze(1).float() / 255, labels.long()


def _read_idx(path: Path, what: str, shape: tuple[int, ...]) -> Tensor:
    """Read an IDX file: a header of big-endian 32-bit numbers, then bytes. Unzip ``.gz``."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytearray(file.read())
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError(f"'{path}' cannot be read ({type(error).__name__}: {error})") from error
    header = struct.Struct(f">{2 + len(shape)}I")
    numbers = header.unpack_from(content.ljust(header.size, b"\0"))
    count = numbers[1]
    expected = (_UINT8 + 1 + len(shape), count, *shape)
    if numbers != expected or count == 0 or len(content) != header.size + count * math.prod(shape):
        raise ArgumentError(
            f"'{path}' has {len(content):,} bytes and begins with the numbers {numbers}, expected "
            f"{(expected[0], 'n', *shape)} and then n x {math.prod(shape)} bytes of {what}"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header.size).view(count, *shape)
