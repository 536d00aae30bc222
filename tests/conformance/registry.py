"""All transports by name. To add one, import its class, and name it in `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transports import (
    Backend,
    BackendMachines,
    CudaProcesses,
    Launch,
    Lists,
    Machines,
    Naive,
    Processes,
)

TRANSPORTS: dict[str, Callable[[], Any]] = {
    "threads": lambda: Lists("cpu"),
    "processes": Processes,
    "launch": Launch,
    "backend": Backend,
    "machines": Machines,
    "backend machines": BackendMachines,
    "naive": Naive,
    "cuda": lambda: Lists("cuda:0"),
    "cuda processes": CudaProcesses,
}
# Columns of docs/promises.md for transports that are named otherwise there.
COLUMNS = {"backend": "launch"}
