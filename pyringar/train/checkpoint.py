"""Write what a training run leaves behind, and go on with it, bit for bit.

A folder holds one checkpoint, in one file: a line that says what it is, a digest, and what
``torch.save`` made. It is replaced by the next one in one step, so that whoever looks, also after a
power cut, finds a whole one.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
    "reason_of",
    "recipe_of",
    "restore",
    "save_state",
    "setting",
    "to_file",
    "write_file",
]

_FILE = "checkpoint.bin"
_KIND = b"pyringar checkpoint "
_VERSION = b"1"
_DIGEST_BYTES = 32
# What decides the bits of a run, beside its ranks and images.
_RECIPE = (
    *("model", "width", "batchnorm", "init", "seed", "dtype", "amp", "compile"),
    *("batch_size", "scale_batch", "lr", "lr_schedule", "lr_scale", "bucket_cap_mb", "overlap"),
    "shards",
)
# Options that older checkpoints do not name, and what these ran with.
_OLDER = {"channels_last": False}


@dataclass
class EpochProgress:
    """Say how far an epoch has come.

    Attributes:
        shuffle: State of the generator of the images' order, at the epoch's beginning.
        steps: Steps done.
        seconds: What they took.
    """

    shuffle: Tensor
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its steps.

    Attributes:
        recipe: What decides the bits of the run: see `recipe_of`.
        setting: What else does: see `setting`.
        num_epochs: How many were wanted.
        epochs: Those that are done: number, loss, accuracy and seconds of each.
        epoch_steps: Steps of the epoch that is under way.
        epoch_seconds: What they took.
        images: Digest of the images.
        data: What they are, for people.
        order: In which ranks are added: ``"rank"``, ``"ring"``, ``"machine"`` or ``"tree"``.
        weights: The ranks' shares, measured or given.
        shuffle: State of the generator of the images' order, at the epoch's beginning.
        params: The parameters, which all ranks have alike.
        rank_tensors: Of every rank: the summed loss of the epoch under way, its buffers, and with
            momentum its velocities. Of rank 0 alone with shards, where all have the same.
    """

    recipe: dict[str, Any]
    setting: dict[str, Any]
    num_epochs: int
    epochs: list[list[float]]
    epoch_steps: int
    epoch_seconds: float
    images: str
    data: str
    order: str
    weights: list[float] | None
    shuffle: Tensor
    params: list[Tensor]
    rank_tensors: list[list[Tensor]]

    def encode(self) -> bytes:
        """Return the file's content."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        payload = buffer.getvalue()
        return _KIND + _VERSION + b"\n" + _digest(payload) + payload

    @classmethod
    def decode(cls, content: bytes, folder: Path) -> Checkpoint:
        """Return what a file holds. Runs none of it.

        Args:
            content: The file's.
            folder: Where it is, for messages.

        Raises:
            ArgumentError: It is no checkpoint, one of another version, or damaged.
        """
        named = f"resume is '{folder}', but its {_FILE}"
        if not content.startswith(_KIND):
            raise ArgumentError(f"{named} is no checkpoint of pyringar")
        version, _, rest = content[len(_KIND) :].partition(b"\n")
        if version != _VERSION and version.isdigit():
            raise ArgumentError(
                f"{named} has format {version.decode()}, expected {_VERSION.decode()}: it was "
                "written by another version of pyringar"
            )
        payload = rest[_DIGEST_BYTES:]
        if version != _VERSION or rest[:_DIGEST_BYTES] != _digest(payload):
            raise ArgumentError(
                f"{named} is damaged: it was cut short or changed after it was written"
            )
        try:
            found = cls(**torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))
            found._check()
            return found
        except Exception as error:  # somebody's own bytes under a digest that fits
            raise ArgumentError(f"{named} cannot be read: {type(error).__name__}") from error

    def _check(self) -> None:
        """Raise unless all is of the kind that it should be."""
        kinds: dict[type, list[Any]] = {
            dict: [self.recipe, self.setting],
            int: [self.num_epochs, self.epoch_steps],
            str: [self.order],
            list: [self.epochs, self.params, self.rank_tensors, *self.epochs, *self.rank_tensors],
            Tensor: [self.shuffle, *self.params],
        }
        for kind, values in kinds.items():
            if not all(isinstance(value, kind) for value in values):
                raise TypeError(f"expected {kind.__name__}")
        if len(self.rank_tensors) != self.recipe["ranks"] or self.epoch_steps < 0:
            raise ValueError("other ranks")
        torch.Generator().set_state(self.shuffle)
        for epoch in self.epochs:
            if [type(number) for number in epoch] != [int, float, float, float]:
                raise TypeError("expected four numbers an epoch")
        if not all(isinstance(t, Tensor) for mine in self.rank_tensors for t in mine):
            raise TypeError("expected tensors")


class CheckpointFolder:
    """A folder with one checkpoint.

    Args:
        path: The folder; ``~`` is expanded.
        name: The option that names it, for messages.

    Raises:
        ArgumentError: There is no name.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        if not str(path):
            raise ArgumentError(f"{name} is '', expected the path of a folder")
        self.name = name
        self.path = Path(os.path.expanduser(path))
        self.file = self.path / _FILE

    def is_at(self, path: str | Path) -> bool:
        """Return whether this is the folder that a path leads to."""
        return os.path.realpath(self.path) == os.path.realpath(path)

    def read(self) -> bytes:
        """Return the content of its file.

        Raises:
            ArgumentError: There is none, or it cannot be read.
        """
        try:
            return self.file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ArgumentError(
                f"resume is '{self.path}', expected a folder that save has written: there is no "
                f"'{self.file}'"
            ) from None
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"resume is '{self.path}', but its {_FILE} cannot be read: {reason_of(error)}"
            ) from None

    def prepare(self, *, may_hold_one: bool) -> None:
        """Make the folder, if it is missing, and see that files can be written there.

        Args:
            may_hold_one: Whether a checkpoint that is there may be replaced.

        Raises:
            ArgumentError: They cannot, there is one, or another run saves there.
        """
        if not may_hold_one and os.path.lexists(self.file):
            raise ArgumentError(
                f"{self.name} is '{self.path}', which has a checkpoint: go on from it with "
                f"resume='{self.path}', name another folder, or remove '{self.file}'"
            )
        try:
            self.path.mkdir(exist_ok=True)
            with self.held():
                for stale in self.path.glob(f".{_FILE}-*"):  # of a run that was killed as it wrote
                    stale.unlink(missing_ok=True)
                with tempfile.TemporaryFile(dir=self.path, prefix=f".{_FILE}-"):
                    pass
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"{self.name} is '{self.path}', which cannot be written: {reason_of(error)}"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs from saving there, where the file system has locks.

        Raises:
            ArgumentError: Another run saves there.
        """
        with ExitStack() as stack:
            try:
                descriptor = os.open(self.path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentError(
                    f"{self.name} is '{self.path}', but another run saves there; name another "
                    "folder, or wait for its end"
                ) from None
            except OSError:  # no locks here, or no folder any more: then writing fails, and says so
                pass
            yield

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the folder's checkpoint.

        Raises:
            RingarError: It cannot be written; the one that was there is whole.
        """
        try:
            write_file(self.file, checkpoint.encode())
        except OSError as error:
            raise RingarError(
                f"the checkpoint '{self.file}' cannot be written: {reason_of(error)}; the one "
                "before it, if there was one, is whole"
            ) from None


def reason_of(error: Exception) -> str:
    """Return the words of an error of the system, without its number and path."""
    return getattr(error, "strerror", None) or str(error)


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that there is either the old one or all of the new one, also after a crash.

    Raises:
        OSError: It cannot be written; the old one is as it was.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    new = path.with_name(f".{path.name[:40]}-{secrets.token_hex(4)}")  # names have 255 bytes
    try:
        with new.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    with suppress(OSError):  # some folders may not be read, some file systems cannot sync them
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def recipe_of(config: TrainConfig, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return what decides the bits of a run, but for its images, by the names of its options.

    Args:
        config: The run.
        devices: One per rank.
    """
    weights = config.weights
    if config.shards is not None:  # any number of ranks goes on with the bits of one
        devices = devices[:1]
    return {
        **{name: getattr(config, name) for name in _RECIPE},
        "momentum": config.momentum or None,  # which older checkpoints do not have
        "channels_last": bool(config.channels_last),
        "ranks": len(devices),
        "the kind of devices": describe_devices([torch.device(device.type) for device in devices]),
        "weights": (
            weights if weights is None or isinstance(weights, str) else [float(w) for w in weights]
        ),
    }


def setting(num_threads: int) -> dict[str, Any]:
    """Return what decides the bits of a run beside its recipe, by names for people.

    Args:
        num_threads: Of torch, that each rank has.
    """
    return {"torch": str(torch.__version__), "torch threads per rank": num_threads}


def to_file(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous: files do not depend on how it lies in memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def save_state(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write what was learned, for ``load_state_dict(torch.load(path, weights_only=True))``.

    Args:
        state: Tensors by name.
        path: The file; an older one is replaced in one step.

    Raises:
        OSError: It cannot be written; an older one is as it was.
    """
    buffer = io.BytesIO()
    torch.save({name: to_file(tensor) for name, tensor in state.items()}, buffer)
    write_file(Path(path), buffer.getvalue())


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with other choices than those of a checkpoint.

    Args:
        found: The checkpoint's, by the names of options.
        wanted: Those of the run that is to go on.
        folder: Where the checkpoint is, for messages.

    Raises:
        ArgumentError: Two differ; names the first of them and both values.
    """
    for name, value in wanted.items():
        saved = found.get(name, _OLDER.get(name))
        if saved != value:
            told = "not given" if value is None else repr(value)
            raise ArgumentError(f"{name} is {told}, but the checkpoint in '{folder}' has {saved!r}")


def images_digest(data: ImageData) -> str:
    """Return a digest of all images and labels. Cost: some 0.3 s for Fashion-MNIST."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (data.train_images, data.train_labels, data.test_images, data.test_labels):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def restore(targets: Sequence[Tensor], saved: Sequence[Tensor], where: Path) -> None:
    """Copy what was saved into tensors of the same shapes and dtypes.

    Raises:
        ArgumentError: They are not; nothing was copied.
    """
    if [(t.shape, t.dtype) for t in targets] != [(t.shape, t.dtype) for t in saved]:
        raise ArgumentError(f"resume is '{where}', which has tensors of another model")
    with torch.no_grad():
        for target, tensor in zip(targets, saved, strict=True):
            target.copy_(tensor)


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
