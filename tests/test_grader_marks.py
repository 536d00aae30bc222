"""Marks of typical solutions are in the table of docs/grading.md; notebooks are graded."""

import itertools
import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from case_marks import mostly_slow
from test_grader import (
    BOOK,
    GOOD,
    averages,
    fill,
    graded,
    random_order,
    rebinding,
    repaired,
    rows,
    stacked,
)

from pyringar.cli import main
from pyringar.grading.causes import COSTS, OTHER_COST
from pyringar.grading.causes import costs as costs_of
from pyringar.grading.checks import CHECKS
from pyringar.grading.graded_calls import GradedCall, even_case
from pyringar.grading.grader import check_allreduce
from pyringar.grading.solution import Solution

PAGE = (Path(__file__).resolve().parents[1] / "docs/grading.md").read_text(encoding="utf-8")


def only_rank_0(data):
    data[0][:] = torch.stack(data).sum(0)


def counts_rank_0_twice(data):
    fill(data, torch.stack([data[0], *data]).sum(0))


def copies_to_all_but_last(data):
    for i in range(1, len(data)):
        data[0] += data[i]
    for i in range(1, len(data) - 1):
        data[i].copy_(data[0])


def new_list(data):
    return [sum(data) for _ in data]


def no_remainder(data):
    k, total = len(data), torch.stack(data).sum(0).flatten()
    n = len(total) // k
    for tensor in data:
        flat = tensor.flatten()
        flat[: n * k] = total[: n * k]
        tensor.copy_(flat.view(tensor.shape))


def no_remainder_and_copy(data):
    """Writes to a copy of a strided tensor, since ravel() copies."""
    flats = [tensor.ravel() for tensor in data]
    n = len(flats[0]) // len(data)
    for chunk in range(len(data)):
        part = slice(chunk * n, chunk * n + n)
        fill([flat[part] for flat in flats], torch.stack([f[part] for f in flats]).sum(0))


def float32_buffer(data):
    fill(data, torch.stack([tensor.float() for tensor in data]).sum(0))


def half_precision(data):
    fill(data, torch.stack([tensor.bfloat16() for tensor in data]).sum(0))


def two_ranks_only(data):
    data[0] += data[1]
    data[1].copy_(data[0])


calls = itertools.count()


def race(data):
    """Simulates threads that add without a lock: every third call loses all but the last tensor."""
    total, is_unlucky = torch.zeros_like(data[0]), next(calls) % 3 == 0

    def add(tensor):
        old = torch.zeros_like(total) if is_unlucky else total.clone()
        total.copy_(old + tensor)

    for tensor in data:
        thread = threading.Thread(target=add, args=(tensor,))
        thread.start()
        thread.join()
    fill(data, total)


def slow_for_millions(data):
    threading.Event().wait(3 if data[0].numel() > 2_000_000 else 0)
    stacked(data)


def not_one_rank(data):
    if len(data) == 1:
        raise IndexError
    stacked(data)


def hangs(data):
    threading.Event().wait(60)


COSTS_ON_PAGE = {f"`{name}`": cost for name, cost in COSTS.items()}
COSTS_ON_PAGE["every other property"] = OTHER_COST
# Each mark in the tables of the page, by the first cell of its row.
MARKS = dict(re.findall(r"^\| (.+?) \| (\d+) \|", PAGE, re.MULTILINE))
SOLUTIONS = {
    "right, by `torch.stack(data).sum(0)`": stacked,
    "the book's loop, in place": repaired,
    "float32 buffer, also for float64": float32_buffer,
    "raises for one rank, right for more": not_one_rank,
    "threads with a lock": random_order,
    "forgets the remainder (`n // k`)": no_remainder,
    "right, but too slow: a loop over elements": slow_for_millions,
    "forgets the remainder, and writes into `ravel()`": no_remainder_and_copy,
    "adds in half precision": half_precision,
    "works for two ranks only": two_ranks_only,
    "threads without a lock": race,
    "the mean, not the sum": averages,
    "counts rank 0 twice": counts_rank_0_twice,
    "a loop leaves out the last rank": copies_to_all_but_last,
    "rebinds: `data[i] = data[0].to(...)`": rebinding,
    "only rank 0 gets the sum": only_rank_0,
    "returns a new list": new_list,
    "returns the sum": sum,
    "copies rank 0 to all ranks": lambda data: fill(data, data[0].clone()),
    "fills zeros": lambda data: fill(data, torch.zeros_like(data[0])),
    "`pass  # TODO`": lambda data: None,
    "raises an exception": lambda data: 1 / 0,
    "never returns": hangs,
}
USELESS = list(SOLUTIONS)[list(SOLUTIONS).index("rebinds: `data[i] = data[0].to(...)`") :]


@pytest.mark.parametrize("name", mostly_slow(SOLUTIONS, *list(SOLUTIONS)[::3]))
def test_mark_is_on_page(name):
    timeout_s = 1 if SOLUTIONS[name] in (hangs, slow_for_millions) else 60
    report = check_allreduce(SOLUTIONS[name], timeout_s=timeout_s)
    assert report.points == int(MARKS[name]), str(report)


def test_marks_table_is_complete_and_ordered():
    marks = [int(MARKS[name]) for name in SOLUTIONS]
    assert marks == sorted(marks, reverse=True)
    assert set(MARKS) == {*SOLUTIONS, *COSTS_ON_PAGE}
    assert all(int(MARKS[name]) == 0 for name in USELESS)
    assert min(int(MARKS[name]) for name in SOLUTIONS if name not in USELESS) >= 50


def test_property_costs_match_docs_page():
    assert {name: int(MARKS[name]) for name in COSTS_ON_PAGE} == COSTS_ON_PAGE


def test_docs_explain_every_property():
    explained = re.findall(r"^\| `([a-z ]+)` \| [A-Z]", PAGE, re.MULTILINE)
    required = [check.name for check in CHECKS if check.verdict_on_failure == "fail"]
    assert explained == required


def test_missing_remainder_fails_only_sizes():
    report = check_allreduce(no_remainder)
    assert [p.name for p in report.failed] == ["sizes"], str(report)


def test_one_mistake_costs_once():
    report = check_allreduce(two_ranks_only)
    assert len(report.failed) > 3
    assert report.costs == {"ranks": 50}


def half_without_remainder(data):
    halves = [tensor.half() for tensor in data]
    no_remainder(halves)
    for tensor, half in zip(data, halves, strict=True):
        tensor.copy_(half)


def mean_without_remainder(data):
    num = len(data[0].view(-1)) // len(data) * len(data)
    averages([tensor.view(-1)[:num] for tensor in data])


def appends(data):
    not_one_rank(data)
    data.append(data[0])


@pytest.mark.parametrize(
    ("fn", "costs"),
    [
        (half_without_remainder, {"digits": 40, "sizes": 30}),
        (mean_without_remainder, {"wrong sum": 50, "sizes": 30, "strides": 10}),
        (appends, {"one rank": 10, "list": 10}),
    ],
)
def test_no_mistake_hides_others(fn, costs):
    report = graded(fn)
    assert report.costs == costs, str(report)
    assert report.points == 100 - sum(costs.values())


# -- one mistake, one cost -------------------------------------------------------------------------


def mean_of_floats(data):
    """Raises for integers, like `examples/solutions/cleo.py`."""
    fill(data, torch.stack(data).mean(0))


def divides_in_place(data):
    repaired(data)
    for tensor in data:
        tensor /= len(data)


def chunks(data):
    """Cuts axis 0 into as many pieces as ranks; raises if there are fewer pieces."""
    pieces = [tensor.chunk(len(data)) for tensor in data]
    for i in range(len(data)):
        repaired([piece[i] for piece in pieces])


def rows_without_remainder(data):
    n = data[0].shape[0] // len(data)
    for i in range(len(data)):
        repaired([tensor[i * n : i * n + n] for tensor in data])


def adds_changed_ranks(data):
    for i in range(len(data)):
        for j in range(len(data)):
            if i != j:
                data[i] += data[j]


def ring(data, all_gather_steps):
    k = len(data)
    pieces = [tensor.tensor_split(k) for tensor in data]
    for step in range(k - 1):
        for rank in range(k):
            pieces[(rank + 1) % k][rank - step].add_(pieces[rank][rank - step])
    for step in range(all_gather_steps):
        for rank in range(k):
            chunk = (rank + 1 - step) % k
            pieces[(rank + 1) % k][chunk].copy_(pieces[rank][chunk])


def ring_without_all_gather(data):
    ring(data, 0)


def ring_short_of_a_step(data):
    ring(data, len(data) - 2)


def ring_in_views(data):
    ring([tensor.view(-1) for tensor in data], 0)


def adds_all_but_last(data):
    for i in range(1, len(data) - 1):
        data[0] += data[i]
    fill(data[1:], data[0])


def absolute_sum(data):
    fill(data, torch.stack(data).abs().sum(0))


def clamped_sum(data):
    fill(data, torch.stack(data).sum(0).clamp(min=0))


def clamped_inputs(data):
    fill(data, torch.stack(data).clamp(min=0).sum(0))


ONE_MISTAKE = [
    (mean_of_floats, {"wrong sum": 50}),
    (divides_in_place, {"wrong sum": 50}),
    (chunks, {"sizes": 30}),
    (rows_without_remainder, {"sizes": 30}),
    (adds_changed_ranks, {"wrong sum": 50}),
    (ring_without_all_gather, {"wrong sum": 50}),
    (ring_short_of_a_step, {"wrong sum": 50}),
    (ring_in_views, {"wrong sum": 50, "strides": 10}),
    (adds_all_but_last, {"some ranks without sum": 50}),
    (absolute_sum, {"wrong sum": 50}),
    (clamped_sum, {"wrong sum": 50}),
    (clamped_inputs, {"wrong sum": 50}),
]


@pytest.mark.parametrize(("fn", "costs"), mostly_slow(ONE_MISTAKE, *ONE_MISTAKE[1:3]))
def test_mistake_has_no_other_cost(fn, costs):
    report = graded(fn)
    assert report.costs == costs, str(report)


def test_no_expected_sum_is_zero():
    for k in (2, 8):
        assert GradedCall(even_case(k), [torch.device("cpu")]).expected[0].all()


def test_report_ends_with_mark_and_costs():
    assert "\nmark: 60 of 100 (sizes -30, strides -10)\n" in str(
        check_allreduce(no_remainder_and_copy)
    )


def without_bfloat16(data):
    data[0].numpy()
    stacked(data)


@pytest.mark.parametrize(("fn", "name"), [(not_one_rank, "ranks"), (without_bfloat16, "dtypes")])
def test_first_look_is_at_the_mistake(fn, name):
    assert graded(fn).first_look_at.name == name


def rotates(data):
    fill(data[:1], data[1 % len(data)])


def skips_the_first_elements(data):
    repaired([tensor[3:] for tensor in data])


def mean_without_bfloat16(data):
    data[0].numpy()
    averages(data)


def test_detail_shows_every_charged_mistake():
    report = check_allreduce(mean_without_bfloat16)
    assert report.costs == {"wrong sum": 50, "dtypes": 10}
    first, own = report["dtypes"].detail.split("; also: ")
    assert first.startswith("this is the mean")
    assert own.startswith("raises TypeError: Got unsupported ScalarType BFloat16")


def hangs_for_odd_ranks(data):
    threading.Event().wait(60 if len(data) % 2 and len(data) > 1 else 0)
    stacked(data)


def test_hang_costs_as_much_as_exception():
    report = check_allreduce(hangs_for_odd_ranks, timeout_s=1)
    assert report.costs == {"ranks": 50}, str(report)
    assert report.first_look_at.name == "ranks"


def replaces_memory(data):
    total = torch.stack(data).sum(0)
    for tensor in data:
        tensor.data = total.to(tensor.dtype, copy=True)


def rarely_right(data):
    if next(calls) % 5 == 0:
        stacked(data)


@pytest.mark.parametrize(
    ("fn", "costs"), [(replaces_memory, {"other memory": 40}), (rarely_right, {"unstable": 50})]
)
def test_cause_is_found_in_basic_call(fn, costs):
    report = graded(fn)
    assert report.costs == costs, str(report)


def test_race_hides_other_mistakes():
    assert costs_of(["ranks", "sizes", "unstable"]) == {"unstable": 50}


def test_race_gets_verdict_unstable():
    report = check_allreduce(race)
    assert {p.verdict for p in report.failed} == {"unstable"}
    detail = report.first_look_at.detail
    assert detail.startswith(
        "looks like a race: results differ between runs: rank 0 holds the values"
    )


HINTS = [
    (averages, "this is the mean, not the sum: rank 0, element 0: expected -15.0, got -7.5"),
    (counts_rank_0_twice, "rank 0 is counted twice: rank 0, element"),
    (float32_buffer, "computed in float32?: rank 0, element"),
    (half_precision, "computed in bfloat16?: rank 0, element"),
    (new_list, "rank 0 still holds its own values; the function returned a list instead: rank"),
    (rotates, "rank 0 holds the values of rank 1: rank 0, element"),
    (skips_the_first_elements, "only the first 3 elements are wrong: rank 0, element"),
]


@pytest.mark.parametrize(("fn", "hint"), mostly_slow(HINTS, HINTS[1]))
def test_failure_detail_begins_with_hint(fn, hint):
    assert graded(fn).first_look_at.detail.startswith(hint)


# -- notebooks and exported notebooks --------------------------------------------------------------


def notebook(*cells: str) -> str:
    markdown = {"cell_type": "markdown", "source": ["# %not code"]}
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [markdown, *code], "nbformat": 4})


EXPORTED = f"get_ipython().run_line_magic('matplotlib', 'inline')\n{GOOD}\nprint(undefined)\n"
NOTEBOOKS = {
    "same.py": BOOK,
    "same.ipynb": notebook("%matplotlib inline\n!pip install \\\n  d2l\nx = !ls\nhelp?", GOOD),
    "bash.ipynb": notebook("%%bash\nls | grep (", "%%time\nimport d2l_missing", GOOD, "1 / 0"),
    "error.ipynb": notebook("x = 1\n1 / 0"),
    "damaged.ipynb": '{"cells": 3}',
    "export.py": EXPORTED,
    "import.py": f"import d2l_missing\n{GOOD}",
    "import.ipynb": notebook(f"import d2l_missing\n{GOOD}"),
    ".ipynb_checkpoints/same.ipynb": "not read",
}


@pytest.mark.slow
def test_notebooks_are_graded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in NOTEBOOKS.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert main(["check", ".", "--csv", "marks.csv", "--devices", "cpu,cpu"]) == 1
    found = {row["file"]: row for row in rows("marks.csv")}
    right = ["same.ipynb", "bash.ipynb", "export.py", "import.py", "import.ipynb"]
    marks = {name: int(row["marks"]) for name, row in found.items()}
    assert marks == {name: 100 * (name in right) for name in list(NOTEBOOKS)[:-1]}
    missing = "another line failed: ModuleNotFoundError: No module named 'd2l_missing' at "
    assert found["bash.ipynb"]["remark"] == f"{missing}{tmp_path}/bash.ipynb, code cell 2:2"
    assert found["same.ipynb"]["remark"] == ""
    assert "NameError: name 'undefined' is not defined at" in found["export.py"]["remark"]
    zero = f"ZeroDivisionError: division by zero at {tmp_path}/error.ipynb, code cell 1:2"
    assert found["error.ipynb"]["message"] == f"importing error.ipynb failed with {zero}"
    assert "damaged.ipynb cannot be read: it is not a notebook" in found["damaged.ipynb"]["message"]
    assert "export.py      100/100\n" in capsys.readouterr().out


IMPORTS = {
    "from pyringar import allreduce": ["pyringar.allreduce"],
    "import pyringar as pr; pr.allreduce([])": ["pyringar"],
    "import torch; torch.distributed.all_reduce(x)": ["torch.distributed.all_reduce"],
    "from torch import distributed": ["torch.distributed"],
    "__import__('pyringar')": ["pyringar"],
    "import sys; sys.modules['pyringar'].allreduce": ["pyringar"],
    f"x = 0x{'f' * 5000}; name = 'torch.distributed'": ["torch.distributed"],
    "'pyringar. No import.'": [],
    "import torch, pyringarden": [],
    "x = (1,": [],
}


@pytest.mark.parametrize(("code", "names"), IMPORTS.items(), ids=[code[:30] for code in IMPORTS])
def test_solution_lists_its_imports(code, names):
    assert Solution("a.py", "f", code.encode()).imports == names
    assert Solution("a.ipynb", "f", notebook(code).encode()).imports == names


def test_annotations_need_no_import(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    annotated = GOOD.replace("(data)", "(data: List[d2l.Tensor]) -> d2l.Tensor", 1)
    Path("one.py").write_text(f"from d2l_missing import torch as d2l\n{annotated}")
    Path("two.ipynb").write_text(notebook("import pandas_missing", "import d2l_missing", GOOD))
    Path("three.py").write_text("import d2l_missing\n")
    assert main(["check", ".", "--devices", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "one.py     100/100" in out
    missing = "d2l_missing (2 solutions), pandas_missing (1 solution)"
    assert f"\n\nnot installed here: {missing}\n2 of 3 pass all 13 properties\n" in out


# -- the files of a folder -------------------------------------------------------------------------


def write(files):
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.slow
def test_helper_modules_have_no_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "class/eva/solution.py": "from utils import total, fill\n"
        "def allreduce(data):\n    fill(data, total(data))\n",
        "class/eva/utils.py": "from more import fill\ntotal = sum\n",
        "class/eva/more.py": "import torch.distributed\nfrom pyringar.comm import topology\n"
        "def fill(data, total):\n    for tensor in data: tensor.copy_(total)\n",
        "class/ann/mine.py": GOOD,  # defines the function, so it is no helper
        "class/ann/other.py": "from mine import allreduce\n",
        "class/max/solution.PY": GOOD,
        "class/max/utils.py": "def all_reduce(data): ...\n",
        "class/two/a.py": "import b\n",
        "class/two/b.py": "import a\n",
        "class/zoe/cut.py": "x = (1,",
        "class/zoe/main.py": "from cut import allreduce\n",
    }
    write(files)
    assert main(["check", "class", "--csv", "marks.csv", "--devices", "cpu,cpu"]) == 1
    graded = {row["file"]: row for row in rows("marks.csv")}
    marks = {name: int(row["marks"]) for name, row in graded.items()}
    right = ("ann/mine.py", "ann/other.py", "eva/solution.py", "max/solution.PY")
    assert marks == {
        **dict.fromkeys((f"class/{name}" for name in right), 100),
        **dict.fromkeys(("class/max/utils.py", "class/two/a.py", "class/two/b.py"), 0),
        **dict.fromkeys(("class/zoe/cut.py", "class/zoe/main.py"), 0),
    }
    assert graded["class/eva/solution.py"]["imports"] == "pyringar.comm.topology; torch.distributed"
    assert (
        "ignored: imported by other files: eva/more.py, eva/utils.py\n" in capsys.readouterr().err
    )


def test_other_files_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hidden = [".git/config", ".hidden", "__pycache__/a.pyc"]
    others = [f"{n}.pdf" for n in range(6)]
    write(dict.fromkeys((*hidden, *others), "") | {"a.IPYNB": notebook(GOOD)})
    assert main(["check", ".", "--devices", "cpu"]) == 0
    some = "0.pdf, 1.pdf, 2.pdf, 3.pdf, 4.pdf, ..."
    line = f"ignored: 6 files that are no .py or .ipynb: {some}\n"
    assert line in capsys.readouterr().err


# -- a text file per solution ----------------------------------------------------------------------


@pytest.mark.parametrize("csv", mostly_slow([[], ["--csv", "marks.csv"]], []))
def test_feedback_has_reports(tmp_path, monkeypatch, capsys, csv):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    write({"../class/book.py": BOOK, "class/cut.py": "x = (1,", str(tmp_path / "good.py"): GOOD})
    targets = ["../class", "class", str(tmp_path / "good.py")]
    arguments = ["check", "--devices", "cpu,cpu", "--feedback", "out/all", *csv]
    assert main([*arguments, *targets]) == 1
    book, cut = Path("out/all/class/book.py.txt"), Path("out/all/class/cut.py.txt")
    good = Path(f"out/all{tmp_path}/good.py.txt")
    assert sorted(p for p in Path("out").rglob("*") if p.is_file()) == sorted([book, cut, good])
    assert "SyntaxError: '(' was never closed" in cut.read_text()
    assert cut.read_text().endswith("\n\nmark: 0 of 100\n")
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    assert main(["check", "../class/book.py", "--devices", "cpu,cpu"]) == 1
    assert book.read_text() == capsys.readouterr().out
    if csv:
        good.unlink()
        Path("class/new.py").write_text(GOOD)
        assert main([*arguments, *targets, "--resume"]) == 1
        assert Path("out/all/class/new.py.txt").exists()
        assert not good.exists()


@pytest.mark.slow
def test_two_functions_of_a_file_have_feedback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({"a.py": GOOD + BOOK.replace("allreduce", "book")})
    targets = ["a.py", "a.py:book"]
    assert main(["check", *targets, "--devices", "cpu,cpu", "--feedback", "out"]) == 1
    assert sorted(os.listdir("out")) == ["a.py.allreduce.txt", "a.py.book.txt"]


@pytest.mark.parametrize("path", ["file", "file/below", ""])
def test_feedback_file_is_no_folder(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    write({"a.py": GOOD, "file": ""})
    assert main(["check", "a.py", "--feedback", path]) == 2
    assert f"--feedback is '{path}', but this folder cannot be made: " in capsys.readouterr().err
