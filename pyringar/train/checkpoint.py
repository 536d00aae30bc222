"""Checkpoints of a training run, from which it resumes bit for bit.

A folder holds one checkpoint in one file: a first line, a digest, and the bytes of ``torch.save``.
The next checkpoint replaces the file atomically, so there is a whole one at any moment.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyringar.errors import ArgumentError, RingarError
from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData
from pyringar.train.devices import describe_devices

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "EpochProgress",
    "check_same",
    "images_digest",
    "recipe_of",
    "save_state",
    "to_file",
    "write_file",
]

_FILE = "checkpoint.bin"
_FIRST_LINE = b"pyringar checkpoint 2\n"
_DIGEST_BYTES = 32
# Options that do not decide the bits of a run, or that the recipe describes by other words.
_FREE = {"ranks", "devices", "allreduce", "epochs", "dataset", "data_dir", "cuda_graph"}
_RECIPE = ("model", *(field.name for field in fields(TrainConfig) if field.name not in _FREE))


@dataclass
class EpochProgress:
    """Finished steps of an epoch, and their time."""

    shuffle: Tensor  # state of the generator of the images' order before the epoch
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after one of its steps."""

    recipe: dict[str, Any]  # options that decide the bits of the run: see `recipe_of`
    setting: dict[str, Any]  # version and number of threads of torch, which decide them too
    num_epochs: int  # of the whole run
    epochs: list[list[float]]  # number, loss, accuracy and seconds of each finished epoch
    epoch_steps: int  # finished steps of the current epoch
    epoch_seconds: float  # their time
    images: str  # digest
    data: str  # description of the images, for people
    order: str  # in which ranks are added: "rank", "ring", "machine" or "tree"
    shuffle: Tensor  # see EpochProgress
    params: list[Tensor]  # equal on all ranks
    # By rank: summed loss of the current epoch, buffers, and momentum buffers. With shards these
    # are equal on all ranks and stored once.
    rank_tensors: list[list[Tensor]]

    def encode(self) -> bytes:
        """Return the content of the file."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        payload = buffer.getvalue()
        return _FIRST_LINE + _digest(payload) + payload

    @classmethod
    def decode(cls, content: bytes, folder: Path) -> Checkpoint:
        """Read the content of a file; refuse damaged files and those of other versions."""
        named = f"resume is '{folder}', but its {_FILE}"
        if not content.startswith(_FIRST_LINE):
            raise ArgumentError(f"{named} is no checkpoint of this version of pyringar")
        rest = content[len(_FIRST_LINE) :]
        payload = rest[_DIGEST_BYTES:]
        if rest[:_DIGEST_BYTES] != _digest(payload):
            raise ArgumentError(
                f"{named} is damaged: it was cut short or changed after it was written"
            )
        return cls(**torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))


class CheckpointFolder:
    """A folder with one checkpoint. Its methods raise ArgumentError unless they say otherwise."""

    def __init__(self, path: str | Path, name: str) -> None:
        if not str(path):
            raise ArgumentError(f"{name} is '', expected the path of a folder")
        self.name = name
        self.path = Path(os.path.expanduser(path))
        self.file = self.path / _FILE

    def read(self) -> bytes:
        """Return the content of the checkpoint's file."""
        try:
            return self.file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ArgumentError(
                f"resume is '{self.path}', expected a folder that save has written: there is no "
                f"'{self.file}'"
            ) from None
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"resume is '{self.path}', but its {_FILE} cannot be read: {_reason_of(error)}"
            ) from None

    def prepare(self, *, may_replace: bool) -> None:
        """Make the folder if it is missing, and check that files can be written there."""
        try:
            if not may_replace and os.path.lexists(self.file):
                raise ArgumentError(
                    f"{self.name} is '{self.path}', which has a checkpoint: go on from it with "
                    f"resume='{self.path}', name another folder, or remove '{self.file}'"
                )
            self.path.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{self.name} is '{self.path}', which cannot be written: {_reason_of(error)}"
            ) from None

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint. After a RingarError the last checkpoint is still there."""
        try:
            write_file(self.file, checkpoint.encode())
        except OSError as error:
            raise RingarError(
                f"the checkpoint '{self.file}' cannot be written: {_reason_of(error)}; the one "
                "before it, if there was one, is whole"
            ) from None


def _reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. After an OSError the old file is unchanged."""
    path = Path(os.path.realpath(path))  # a link stays a link
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def recipe_of(config: TrainConfig, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the options that decide the bits of a run on these devices, one per rank."""
    if config.shards is not None:  # any number of ranks continues with the same bits
        devices = devices[:1]
    return {
        **{name: getattr(config, name) for name in _RECIPE},
        "ranks": len(devices),
        "the kind of devices": describe_devices([torch.device(device.type) for device in devices]),
    }


def to_file(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous, so that files do not depend on its layout."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def save_state(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write parameters for ``load_state_dict(torch.load(path, weights_only=True))``."""
    buffer = io.BytesIO()
    torch.save({name: to_file(tensor) for name, tensor in state.items()}, buffer)
    write_file(Path(path), buffer.getvalue())


def check_same(found: Checkpoint, config: TrainConfig, recipe: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless a run has the options of the checkpoint."""
    for name, value in recipe.items():
        if found.recipe[name] != value:
            told = "not given" if value is None else repr(value)
            raise ArgumentError(f"{name} is {told}, but the checkpoint has {found.recipe[name]!r}")
    if config.epochs < found.num_epochs:
        raise ArgumentError(
            f"epochs is {config.epochs}, but the checkpoint is of a run of {found.num_epochs}; "
            "expected as many or more"
        )


def images_digest(data: ImageData) -> str:
    """Return a digest of all images and labels. Cost: some 0.3 s for Fashion-MNIST."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
