"""Is the chapter fit to be read, and does it run: docs/chapter.ipynb, cell by cell?

What it claims it asserts itself, so a claim that no longer holds is a cell that raises.
"""

from __future__ import annotations

import ast
import os
import re
import resource
from pathlib import Path

import pytest

from pyringar.engine import load

nbformat = pytest.importorskip("nbformat", reason="the chapter needs pip install '.[test]'")

ROOT = Path(__file__).resolve().parents[1]
CHAPTER = ROOT / "docs" / "chapter.ipynb"
MAX_CELL_LINES = 35  # of a screen
MAX_RUN_S = 360  # on two cores that have nothing else to do
MAX_WAIT_S = 1200  # on busy ones
EXERCISES = 7
NOTEBOOK = nbformat.read(CHAPTER, as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
TEXT = [cell for cell in NOTEBOOK.cells if cell.cell_type == "markdown"]


def test_the_file_is_a_valid_notebook_with_names_for_its_cells():
    nbformat.validate(NOTEBOOK)
    ids = [cell.id for cell in NOTEBOOK.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z0-9-]+", name) for name in ids), "names, not random ids"


def test_no_outputs_counts_or_editors_traces_are_kept():
    assert all(cell.outputs == [] and cell.execution_count is None for cell in CODE)
    assert all(cell.metadata == {} for cell in NOTEBOOK.cells)
    assert set(NOTEBOOK.metadata) == {"kernelspec", "language_info"}
    assert NOTEBOOK.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("cell", NOTEBOOK.cells, ids=lambda cell: cell.id)
def test_a_cell_fits_a_screen(cell):
    assert 0 < len(cell.source.splitlines()) <= MAX_CELL_LINES


@pytest.mark.parametrize("cell", CODE, ids=lambda cell: cell.id)
def test_a_cell_of_code_is_python_alone(cell):
    """No magics and no shell commands, which would tie it to one kind of notebook."""
    ast.parse(cell.source)


def test_no_path_or_host_of_anybodys_machine():
    for cell in NOTEBOOK.cells:
        found = re.search(r"(?<![\w.])(/[a-z]+/[\w.-]+|~/|[A-Z]:\\|https?://)", cell.source)
        assert found is None, f"cell {cell.id}: {found}"


def cells_below(heading):
    """The cells from a heading to the next of its kind."""
    sources = [(cell.cell_type, cell.source) for cell in NOTEBOOK.cells]
    start = next(i for i, (_, text) in enumerate(sources) if heading in text)
    below = []
    for kind, text in sources[start:]:
        if below and kind == "markdown" and re.search(r"^##? ", text, re.MULTILINE):
            break
        below.append((kind, text))
    return below


@pytest.mark.parametrize("number", range(1, EXERCISES + 1))
def test_every_exercise_is_answered_in_words_and_by_something_checked(number):
    below = cells_below(f"## Exercise {number}: ")
    assert "**Answer.**" in below[0][1]
    code = "\n".join(text for kind, text in below if kind == "code")
    assert "assert " in code
    assert "plt.show()" in code


def test_there_are_no_other_exercises():
    headings = [n for cell in TEXT for n in re.findall(r"^## Exercise (\d+): ", cell.source, re.M)]
    assert headings == [str(number) for number in range(1, EXERCISES + 1)]


@pytest.mark.parametrize(
    "name",
    [
        *("check_replicas_equal", "check_allreduce", "split_batch", "evaluate_accuracy_gpus"),
        *("GradientBucketer", "DataParallel", "LivePlot", "ring_schedule", "count_correct"),
    ],
)
def test_the_packages_own_parts_are_used(name):
    assert any(re.search(rf"\b{name}\(", cell.source) for cell in CODE)


@pytest.fixture
def images_dir(tmp_path):
    """Real images where there are some, else an empty folder: the chapter then draws its own."""
    beside = ROOT.parent / "shared/data/fashion-mnist-subset"
    folder = Path(os.environ.get("PYRINGAR_TEST_DATA", beside))
    return folder if folder.is_dir() else tmp_path


@pytest.fixture
def built_engine():
    """Compiled before the time is taken."""
    return load.engine()


@pytest.mark.slow
@pytest.mark.timeout(MAX_WAIT_S)
@pytest.mark.usefixtures("built_engine")
def test_it_runs_from_top_to_bottom(images_dir, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYRINGAR_TEST_DATA", str(images_dir))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's settings
    notebook = nbformat.read(CHAPTER, as_version=4)
    where = {"metadata": {"path": str(CHAPTER.parent)}}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    nbclient.NotebookClient(notebook, timeout=MAX_WAIT_S, resources=where).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, for others may want it, too. One thread computes, and little sleeps.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_RUN_S
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 20, "a plot is missing"
