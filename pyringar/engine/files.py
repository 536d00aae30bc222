"""Read JSON files with limits: their content is a value or a ValueError."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["read_json"]


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file of at most ``max_bytes``.

    Raises:
        OSError: It cannot be read, or is not a regular file.
        ValueError: It is too long, not UTF-8, not JSON, or nested too deeply for Python.
    """
    # O_NONBLOCK: opening a pipe would wait for its other end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has {status.st_size} bytes, expected at most {max_bytes}")
        try:
            return json.loads(file.read().decode())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
