"""The chapter runs from top to bottom, and its stored outputs match its code.

Cells of docs/chapter.ipynb assert the claims of the text. docs/run_chapter.py writes the outputs.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import os
import re
import resource
from pathlib import Path

import pytest

from pyringar.engine import load

nbformat = pytest.importorskip("nbformat", reason="the chapter needs pip install '.[test]'")

ROOT = Path(__file__).resolve().parents[1]
CHAPTER = ROOT / "docs" / "chapter.ipynb"
MAX_BYTES = 700_000
MAX_PICTURE_BYTES = 60_000
PICTURE = re.compile(r"figures\.(draw|images|splits|ring_steps)\(|LivePlot\(")
MAX_CELL_LINES = 35  # a cell fits a screen
MAX_RUN_S = 600  # CPU time; 220 s on a fast machine, 370 s on a slow machine
MAX_WAIT_S = 1500  # timeout on a busy machine
SAME_EVERYWHERE = {"lenet", "params", "naive", "bug-verdict", "init", "ex3-sharded", "machines"}

spec = importlib.util.spec_from_file_location("run_chapter", ROOT / "docs/run_chapter.py")
run_chapter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_chapter)
NOTEBOOK = nbformat.read(CHAPTER, as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def test_notebook_is_valid_and_small():
    nbformat.validate(NOTEBOOK)
    assert CHAPTER.stat().st_size <= MAX_BYTES
    assert set(NOTEBOOK.metadata) == {"kernelspec", "language_info"}
    for cell in NOTEBOOK.cells:
        assert re.fullmatch(r"[a-z][a-z0-9-]+", cell.id), "expected a readable id, not a random one"
        assert set(cell.metadata) == ({run_chapter.FINGERPRINT} if cell in CODE else set())
        assert 0 < len(cell.source.splitlines()) <= MAX_CELL_LINES, cell.id


def test_stored_outputs_match_code():
    stale = [
        cell.id
        for cell, fingerprint in run_chapter.fingerprints(NOTEBOOK)
        if cell.metadata.get(run_chapter.FINGERPRINT) != fingerprint
    ]
    assert stale == [], "run `python docs/run_chapter.py` after you change code"
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))


def test_cells_have_expected_outputs():
    for cell in CODE:
        pictures = [out for out in cell.outputs if "image/png" in out.get("data", {})]
        texts = [out for out in cell.outputs if out.get("name") == "stdout"]
        assert len(pictures) == bool(PICTURE.search(cell.source)), cell.id
        assert len(texts) == bool(re.search(r"^ *print\(", cell.source, re.MULTILINE)), cell.id
        assert len(pictures) + len(texts) == len(cell.outputs), cell.id
        for picture in pictures:
            png = base64.b64decode(picture.data["image/png"])
            assert png.startswith(b"\x89PNG")
            assert len(png) <= MAX_PICTURE_BYTES, cell.id


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    default = ROOT.parent / "shared/data/fashion-mnist-subset"
    folder = Path(os.environ.get("PYRINGAR_TEST_DATA", default))
    chapter = copy.deepcopy(NOTEBOOK)
    if folder.is_dir():
        monkeypatch.setenv("PYRINGAR_TEST_DATA", str(folder))
    else:
        (cell,) = (cell for cell in chapter.cells if cell.id == "data")
        assert 'load_data("auto", folder)' in cell.source
        cell.source = cell.source.replace('load_data("auto", folder)', 'load_data("synthetic")')
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # ignore the user's settings
    return chapter


@pytest.mark.thorough
@pytest.mark.timeout(MAX_WAIT_S)
def test_chapter_notebook_runs(notebook):
    pytest.importorskip("nbclient")
    load.engine()  # compile before the measurement
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_chapter.execute(notebook)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_RUN_S
    run_chapter.tidy(notebook)
    for cell, kept in zip(notebook.cells, NOTEBOOK.cells, strict=True):
        kinds = [out.output_type for out in cell.get("outputs", [])]
        assert kinds == [out.output_type for out in kept.get("outputs", [])], cell.id
        if cell.id in SAME_EVERYWHERE:
            texts = [out.text for out in cell.outputs if out.output_type == "stream"]
            assert texts == [out.text for out in kept.outputs if out.output_type == "stream"]
