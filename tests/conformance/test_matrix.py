"""Has every row of docs/promises.md a test, and do refused calls raise?"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
from promises import BODIES, ELSEWHERE, MATRIX, marks_of, transports_of
from refusals import REFUSALS, check_refused
from registry import COLUMNS, TRANSPORTS

TESTS = Path(__file__).resolve().parents[1]
REFUSED = [cell for cells in MATRIX.values() for cell in cells.values() if cell.error]


def test_rows_and_bodies_match():
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    said = {row for row, cells in MATRIX.items() if any(c.text == "yes" for c in cells.values())}
    assert said == {*BODIES, *ELSEWHERE}
    for where in itertools.chain(*ELSEWHERE.values()):
        file, test = where.split("::")
        assert f"def {test}" in (TESTS / file).read_text(), where
    assert {cell.row for cell in REFUSED} == set(REFUSALS)


def test_every_column_has_a_transport():
    for column in next(iter(MATRIX.values())):
        assert any(column in transports_of(row) for row in MATRIX), column


@pytest.mark.parametrize(
    ("transport", "cell"),
    [
        pytest.param(name, cell, id=f"{name}-{cell.row}", marks=marks_of(name))
        for name in TRANSPORTS
        for cell in REFUSED
        if cell.column == COLUMNS.get(name, name)
    ],
    indirect=["transport"],
)
def test_refused_promise_raises(transport, cell):
    check_refused(transport, cell.row, cell.error)
