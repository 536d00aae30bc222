"""Images to train on: Fashion-MNIST through torchvision, or else a synthetic set.

Everything is loaded into tensors at once: decoding images one by one would take longer than
training on them, and would be what is timed.
"""

from __future__ import annotations

import logging
import queue
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.threads import start_thread
from pyringar.errors import ArgumentError, RingarError, UnsupportedError
from pyringar.train.config import CHOICES, check_choice
from pyringar.train.synthetic import synthetic_images

__all__ = ["ImageData", "batches", "default_data_dir", "load_data"]

logger = logging.getLogger(__name__)

_SYNTHETIC_TRAIN, _SYNTHETIC_TEST = 6_000, 1_000
_SYNTHETIC_SEEDS = (20, 21)
_REACHABLE_WITHIN_S = 4.0
_STALLED_AFTER_S = 20.0


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
    """Load Fashion-MNIST or the synthetic set into tensors.

    Args:
        dataset: ``"fashion-mnist"``: from ``data_dir``, or downloaded into it (30 MB).
            ``"synthetic"``: drawn by formula. ``"auto"``: the first, or the second with a logged
            warning that says why.
        data_dir: Folder that holds ``FashionMNIST/raw``, as torchvision has it; by default
            :func:`default_data_dir`.

    Returns:
        float32 images on the CPU.

    Raises:
        ArgumentError: Unknown ``dataset``, or files that are no Fashion-MNIST.
        UnsupportedError: torchvision cannot be imported; says why and how to mend it.
        RingarError: It is not there, and the network cannot be reached.

    An unreachable network is noticed within 5 seconds, a download that stalls within 20.
    """
    check_choice("dataset", dataset, CHOICES["dataset"])
    if dataset == "synthetic":
        return _synthetic()
    try:
        return _fashion_mnist(default_data_dir() if data_dir is None else Path(data_dir))
    except RingarError as error:
        if dataset == "fashion-mnist":
            raise
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


def _fashion_mnist(root: Path) -> ImageData:
    fashion_mnist = _import_fashion_mnist()
    if not _is_there(fashion_mnist, root):
        _download(fashion_mnist, root)
    tensors = [
        tensor
        for train, name in ((True, "train"), (False, "t10k"))
        for tensor in _read_part(fashion_mnist, root, train, name)
    ]
    return ImageData("Fashion-MNIST", *tensors)


def _read_part(fashion_mnist: Any, root: Path, train: bool, name: str) -> tuple[Tensor, Tensor]:
    """Read all images and labels of one half, past torchvision's pipeline of single images."""
    files = f"data_dir is '{root}', but its FashionMNIST/raw/{name}"
    try:
        dataset = fashion_mnist(root, train=train)
    # What torchvision raises for files that are cut short or something else.
    except (
        *(ArithmeticError, AssertionError, EOFError, LookupError, MemoryError),
        *(OSError, RuntimeError, TypeError, ValueError),
    ) as error:
        raise ArgumentError(
            f"{files}-* cannot be read ({type(error).__name__}: {error}); remove it to have it "
            "downloaded again"
        ) from error
    images, labels = dataset.data, dataset.targets
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or len(labels) == 0:
        raise ArgumentError(
            f"{files}-* has images of shape {tuple(images.shape)} and labels of shape "
            f"{tuple(labels.shape)}, expected (n, 28, 28) and (n,)"
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most > 9:
        raise ArgumentError(
            f"{files}-labels-idx1-ubyte has labels from {least} to {most}, expected 0 to 9"
        )
    return images.unsqueeze(1).float() / 255, labels.long()


def _import_fashion_mnist() -> Any:
    """Return the data set's class; torchvision is imported here and nowhere else."""
    try:
        from torchvision.datasets import FashionMNIST
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"torchvision cannot be imported ({error}); install it with `pip install torchvision`"
        ) from error
    # A build for another torch fails with any of these, deep in its own registrations.
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"torchvision cannot be imported ({type(error).__name__}: {error}): it was probably "
            f"built for another torch than the {torch.__version__} here; install the two "
            f"together with `{_install_command()}`"
        ) from error
    return FashionMNIST


def _install_command() -> str:
    """Return the pip command for a torchvision that goes with the torch that is installed."""
    version, _, variant = torch.__version__.partition("+")
    command = f"pip install --force-reinstall torch=={version} torchvision"
    if variant == "cpu" or variant.startswith(("cu", "rocm", "xpu")):
        command += f" --index-url https://download.pytorch.org/whl/{variant}"
    return command


def _is_there(fashion_mnist: Any, root: Path) -> bool:
    raw = root / "FashionMNIST" / "raw"
    names = [Path(archive).stem for archive, _ in fashion_mnist.resources]
    return all((raw / name).is_file() for name in names)


def _download(fashion_mnist: Any, root: Path) -> None:
    mirror = fashion_mnist.mirrors[0]
    where = f"Fashion-MNIST is not in '{root}'"
    reason = _why_unreachable(mirror + fashion_mnist.resources[1][0], _REACHABLE_WITHIN_S)
    if reason:
        raise RingarError(
            f"{where} and {mirror} cannot be reached ({reason}); name a folder that holds "
            "FashionMNIST/raw as data_dir"
        )
    logger.info("downloading Fashion-MNIST (30 MB) from %s into %s", mirror, root)
    try:
        with _socket_timeout(_STALLED_AFTER_S):
            fashion_mnist(root, download=True)
    except (OSError, RuntimeError) as error:  # no room, no permission, connection lost
        raise RingarError(
            f"{where} and downloading it failed ({type(error).__name__}: {error})"
        ) from error


def _why_unreachable(url: str, timeout_s: float) -> str | None:
    """Ask a server for one header; the reason why that failed, or None.

    In a thread, because looking up a host's name has no timeout of its own. A thread that is still
    at it when the time is up ends by itself when the lookup does.
    """
    answer: queue.Queue[str | None] = queue.Queue()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=timeout_s):
                answer.put(None)
        except (OSError, ValueError, HTTPException) as error:
            answer.put(str(error.reason if type(error) is urllib.error.URLError else error))

    try:
        start_thread("reachable", ask)
    except RingarError as error:
        return str(error)
    try:
        return answer.get(timeout=timeout_s + 0.5)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for sockets opened inside: torchvision opens its own without any."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
