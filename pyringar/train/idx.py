"""Read IDX files, the format of MNIST and its relatives.

A header of big-endian 32-bit numbers (a magic number, then the size of every dimension), then one
byte for every pixel or label; as it is, or packed by gzip.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from pyringar.errors import ArgumentError

__all__ = ["read_images", "read_labels"]

_SIDE = 28
_NUM_CLASSES = 10
_UINT8 = 0x0800  # the magic number of bytes in no dimension; the number of dimensions is added


def read_images(path: Path) -> Tensor:
    """Read a file of images.

    Args:
        path: Of the file; unpacked first if it ends in ``.gz``.

    Returns:
        uint8 ``(n, 28, 28)``, n at least 1.

    Raises:
        ArgumentError: It cannot be read, or is anything else; names the file, what it holds and
            what was expected.
    """
    return _read(path, "images", (_SIDE, _SIDE))


def read_labels(path: Path) -> Tensor:
    """Read a file of labels.

    Args:
        path: As in `read_images`.

    Returns:
        uint8 ``(n,)`` from 0 to 9, n at least 1.

    Raises:
        ArgumentError: As in `read_images`.
    """
    labels = _read(path, "labels", ())
    wrong = (labels >= _NUM_CLASSES).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ArgumentError(
            f"'{path}' has label {int(labels[index])} at index {index:,}, "
            f"expected 0 to {_NUM_CLASSES - 1}"
        )
    return labels


def _read(path: Path, what: str, shape: tuple[int, ...]) -> Tensor:
    content = _content(path)
    header = struct.Struct(f">{2 + len(shape)}I")
    if len(content) < header.size:
        raise ArgumentError(
            f"'{path}' holds {len(content)} bytes, expected {what} after a header of {header.size}"
        )
    magic, count, *sides = header.unpack_from(content)
    expected_magic = _UINT8 + 1 + len(shape)
    if magic != expected_magic:
        raise ArgumentError(
            f"'{path}' begins with the magic number {magic}, expected {expected_magic} for {what}"
        )
    if tuple(sides) != shape:
        raise ArgumentError(
            f"'{path}' holds {what} of {' x '.join(map(str, sides))} pixels, "
            f"expected {' x '.join(map(str, shape))}"
        )
    expected_size = header.size + count * math.prod(shape)
    if count == 0 or len(content) != expected_size:
        raise ArgumentError(
            f"'{path}' holds {len(content):,} bytes for {count:,} {what}, expected "
            + ("1 or more" if count == 0 else f"{expected_size:,} bytes")
        )
    values = torch.frombuffer(content, dtype=torch.uint8, offset=header.size)
    return values.view(count, *shape)


def _content(path: Path) -> bytearray:
    """Return a file's bytes, unpacked, in memory that a tensor may share."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return bytearray(file.read())
    # Not there, not ours to read, not gzip's; cut short; damaged; a lie about its size.
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise ArgumentError(f"'{path}' cannot be read ({type(error).__name__}: {error})") from error
