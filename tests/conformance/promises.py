"""The tables of docs/promises.md, and the tests of each row."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transports import COLUMNS, TRANSPORTS

PAGE = Path(__file__).resolve().parents[2] / "docs/promises.md"
CELL = re.compile(r"yes|not promised|refused \((\w+)\)")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Cell(NamedTuple):
    row: str
    column: str
    text: str

    @property
    def error(self) -> str | None:
        """Return the error class that a cell "refused (error)" names, else None."""
        return CELL.fullmatch(self.text)[1]


def read_matrix(text: str) -> dict[str, dict[str, Cell]]:
    """Parse the tables of docs/promises.md: return the cells by row and column."""
    matrix: dict[str, dict[str, Cell]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        words = [word.strip() for word in line.strip().strip("|").split("|")]
        if words[:2] == ["id", "promise"]:
            columns = words[2:]
        elif line.startswith("| `"):
            row, cells = words[0].strip("`"), words[2:]
            assert row not in matrix, line
            assert all(map(CELL.fullmatch, cells)), line
            matrix[row] = {c: Cell(row, c, t) for c, t in zip(columns, cells, strict=True)}
    return matrix


MATRIX = read_matrix(PAGE.read_text(encoding="utf-8"))
BODIES: dict[str, list[str]] = defaultdict(list)


def keeps(transport: str, row: str) -> bool:
    column = COLUMNS.get(transport, transport)
    if column in MATRIX[row]:
        return MATRIX[row][column].text == "yes"
    return row in TRANSPORTS[transport].rows.split()


def transports_of(*rows: str) -> list[str]:
    return [name for name in TRANSPORTS if all(keeps(name, row) for row in rows)]


# Rows with tests that cannot run as one function on all ranks, and the names of these tests.
ELSEWHERE = {
    "abort": "cuda/test_gpu_streams.py::test_abort_ends_waits",
    "compile": "test_compiled.py::test_one_graph_holds_all_calls",
    "graphs": "cuda/test_gpu_graphs.py::test_graph_replays_all_reduce",
    "deadline": "test_communicator.py::test_timeout_names_late_rank",
    "interrupt": "test_signals.py::test_signal_ends_wait_in_one_process",
    "exit": "test_exits.py::test_forked_child_exits_cleanly",
    "fork": "test_exits.py::test_child_cannot_use_communicator",
    "nothing-left": "test_communicator.py::test_closed_communicator_leaves_no_thread",
}
SLOW = ("naive",)  # slow tests, since other transports run the same code


def marks_of(transport: str) -> list[Any]:
    if transport in SLOW:
        return [pytest.mark.slow]
    return [pytest.mark.cuda, NO_GPU] if transport.startswith("cuda") else []


def parameters(where: str, *rows: str, only: tuple[str, ...] = ()) -> list[Any]:
    """Return the transports that keep all ``rows``, as pytest parameters of the test ``where``."""
    for row in rows:
        BODIES[row].append(where)
    names = [name for name in transports_of(*rows) if not only or name in only]
    return [pytest.param(name, marks=marks_of(name)) for name in names]


def promise(*rows: str, only: tuple[str, ...] = ()) -> Callable:
    """Run a test on every transport that keeps all rows.

    Args:
        rows: Ids of docs/promises.md.
        only: Transports that the test supports.
    """

    def mark(test: Callable) -> Callable:
        where = f"{test.__module__}.{test.__qualname__}"
        values = parameters(where, *rows, only=only)
        return pytest.mark.parametrize("transport", values, indirect=True)(test)

    return mark
