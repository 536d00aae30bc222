"""Write and read checkpoints, from which a training run resumes bit for bit.

A folder holds one file, the checkpoint of the last finished epoch. The file consists of a first
line, a digest, and the bytes of ``torch.save``.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError, RingarError
from pyringar.train.config import TrainConfig
from pyringar.train.devices import describe_devices

_FILE = "checkpoint.bin"
_FIRST_LINE = b"pyringar checkpoint 3\n"
_DIGEST_BYTES = 32
_MAX_SHOWN = 80  # maximum characters of a wrong value in an error
_MAX_SECONDS = 1e12
SETTING = ("torch", "torch threads per rank")
# Options that do not affect the bits of a run, or that the recipe stores under another name.
_FREE = {"ranks", "devices", "allreduce", "epochs", "dataset", "data_dir", "cuda_graph"}
_RECIPE = ("model", *(field.name for field in fields(TrainConfig) if field.name not in _FREE))
_NAMES = (*_RECIPE, "ranks", "the kind of devices", "dataset", "allreduce")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after an epoch."""

    recipe: dict[str, Any]  # options that affect the bits of the run
    setting: dict[str, Any]  # torch's version and number of threads, which also affect bits
    num_epochs: int  # planned epochs of the run
    epochs: list[list[float]]  # [number, loss, accuracy, seconds] of each finished epoch
    shuffle: Tensor  # state of the generator that shuffles the images
    tensors: list[Tensor]  # parameters, buffers and momentum buffers, equal on all ranks

    def check(self, recipe: Mapping[str, Any], folder: Path) -> None:
        for name, value in recipe.items():
            if self.recipe[name] != value:
                given = "not given" if value is None else repr(value)
                raise ArgumentError(
                    f"{name} is {given}, but the checkpoint has {_shown(self.recipe[name])}, in "
                    f"'{folder / _FILE}'"
                )

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of a folder atomically; RingarError if writing fails."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        payload = buffer.getvalue()
        try:
            write_file(folder / _FILE, _FIRST_LINE + _digest(payload) + payload)
        except OSError as error:
            raise RingarError(
                f"the checkpoint '{folder / _FILE}' cannot be written: {error.strerror}; an older "
                "checkpoint in it is unchanged"
            ) from None

    @classmethod
    def decode(cls, content: bytes, folder: Path) -> Checkpoint:
        """Decode the content of a checkpoint file; ArgumentError names the damaged field."""
        named = named_in(folder)
        if not content.startswith(_FIRST_LINE):
            raise ArgumentError(f"{named} is no checkpoint of this version of pyringar")
        rest = content[len(_FIRST_LINE) :]
        payload = rest[_DIGEST_BYTES:]
        if rest[:_DIGEST_BYTES] != _digest(payload):
            raise ArgumentError(f"{named} is damaged: cut short or changed after it was written")
        try:
            state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many types of exceptions
            words = (str(error).splitlines() or [type(error).__name__])[0]
            raise ArgumentError(f"{named} cannot be read by torch.load: {words}") from error
        names = [field.name for field in fields(cls)]
        found = sorted(map(str, state)) if isinstance(state, dict) else kind_of(state)
        if found != sorted(names):
            raise ArgumentError(f"{named} holds {found}, expected the fields {names}")
        for name, (is_right, expected) in _FIELDS.items():
            if not is_right(state[name]):
                shown = _shown(state[name])
                raise ArgumentError(f"{named} has {name} {shown}, expected {expected}")
        if len(state["epochs"]) > state["num_epochs"]:
            raise ArgumentError(
                f"{named} has {len(state['epochs'])} epochs, expected at most num_epochs, which is "
                f"{state['num_epochs']}"
            )
        return cls(**state)


def named_in(folder: Path) -> str:
    return f"resume is '{folder}', but its {_FILE}"


def _are_options(value: Any, names: Sequence[str]) -> bool:
    return isinstance(value, dict) and {*value} == {*names} and all(map(_is_plain, value.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _are_epochs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_epoch, value, count(1)))


def _is_epoch(row: Any, number: int) -> bool:
    kinds = (int,), (float,), (int, float), (int, float)
    if not isinstance(row, list) or len(row) != 4:
        return False
    is_typed = all(type(entry) in kind for entry, kind in zip(row, kinds, strict=True))
    return is_typed and row[0] == number and 0 <= row[2] <= 1 and 0 <= row[3] <= _MAX_SECONDS


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.is_cpu
        for tensor in value
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


# Checkpoint field to the check of its value, and to a description of valid values for errors.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (lambda value: _are_options(value, _NAMES), f"a dict with {', '.join(_NAMES)}"),
    "setting": (
        lambda value: _are_options(value, SETTING),
        f"a dict with {' and '.join(map(repr, SETTING))}",
    ),
    "num_epochs": (
        lambda value: type(value) is int and 1 <= value < 2**63,
        "a whole number, 1 or more",
    ),
    "epochs": (
        _are_epochs,
        "a list of [number, loss, accuracy, seconds] with numbers 1, 2, ..., accuracies from 0 to "
        "1, and seconds of 0 or more",
    ),
    "shuffle": (
        lambda value: isinstance(value, Tensor) and value.dtype == torch.uint8 and value.is_cpu,
        "the state of a torch.Generator",
    ),
    "tensors": (_are_tensors, "a list of dense tensors"),
}


def has_checkpoint(folder: Path) -> bool:
    return os.path.lexists(folder / _FILE)


def read_checkpoint(folder: Path) -> bytes:
    try:
        return (folder / _FILE).read_bytes()
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"resume is '{folder}', expected a folder that save has written, but "
            f"'{folder / _FILE}' cannot be read: {_reason_of(error)}"
        ) from None


def prepare_folder(name: str, folder: Path, *, may_replace: bool) -> None:
    """Create the folder if it does not exist, and check that files can be written to it."""
    try:
        is_taken = not may_replace and has_checkpoint(folder)
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"{name} is '{folder}', which cannot be written: {_reason_of(error)}"
        ) from None
    if is_taken:
        raise ArgumentError(
            f"{name} is '{folder}', which has a checkpoint: go on from it with "
            f"resume='{folder}', name another folder, or remove '{folder / _FILE}'"
        )


def _reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. After an OSError the old file is unchanged."""
    path = Path(os.path.realpath(path))  # replace the target of a symbolic link, not the link
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
    """Return the options that affect the bits of a run on these devices, one per rank."""
    if config.shards is not None:  # the run may resume with another number of ranks
        devices = devices[:1]
    return {
        **{name: getattr(config, name) for name in _RECIPE},
        "ranks": len(devices),
        "the kind of devices": describe_devices([torch.device(device.type) for device in devices]),
    }


def to_file(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU and make it contiguous: files must not depend on its strides."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def save_state(state: Mapping[str, Tensor], path: str | Path) -> None:
    buffer = io.BytesIO()
    torch.save({name: to_file(tensor) for name, tensor in state.items()}, buffer)
    write_file(Path(path), buffer.getvalue())


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
