"""The grader passes right functions and fails wrong ones; `pyringar check` grades classes."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pyringar as pr
from pyringar.cli import check, main
from pyringar.grading import remote
from pyringar.grading.checks import CHECKS
from pyringar.grading.grader import GradeReport, Property, check_allreduce
from pyringar.grading.marks import REQUIRED, MarkedSolution, MarksFile
from pyringar.grading.solution import Solution

Allreduce = Callable[[list[Tensor]], object]


@functools.cache
def graded(fn: Allreduce) -> GradeReport:
    return check_allreduce(fn)


def fill(data, total):
    for tensor in data:
        tensor.copy_(total)


# -- correct functions -----------------------------------------------------------------------------


def rebinding(data):
    """The book's allreduce of 2021: its second loop rebinds items of the list."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)


def repaired(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def stacked(data):
    fill(data, torch.stack(data).sum(0))


def chunked_ring(data):
    """Adds each chunk in a different order of ranks, as a ring does."""
    k = len(data)
    flats = [t.reshape(-1) for t in data]
    bounds = [c * flats[0].numel() // k for c in range(k + 1)]
    total = flats[0].clone()
    for c in range(k):
        part = slice(bounds[c], bounds[c + 1])
        total[part] = flats[(c + 1) % k][part]
        for i in range(2, k + 1):
            total[part] += flats[(c + i) % k][part]
    fill(data, total.view(data[0].shape))


def ours(data):
    pr.allreduce(data)


@pytest.mark.parametrize("fn", [repaired, stacked, chunked_ring, ours])
def test_correct_solutions_pass(fn):
    report = graded(fn)
    assert report.passed, str(report)
    assert {p.verdict for p in report.properties} == {"pass", "reported"}


# -- wrong functions -------------------------------------------------------------------------------


def forgets_rank_2(data):
    fill(data, torch.stack([t for i, t in enumerate(data) if i != 2]).sum(0))


def shortens_the_list(data):
    repaired(data)
    data.pop()


def points_tensors_elsewhere(data):
    total = torch.stack(data).sum(0)
    for tensor in data:
        tensor.data = total.to(tensor.dtype, copy=True)


def random_order(data):
    order = torch.randperm(len(data)).tolist()
    total = data[order[0]].clone()
    for i in order[1:]:
        total += data[i]
    fill(data, total)


def each_rank_its_own_order(data):
    k = len(data)
    before = [t.clone() for t in data]
    for rank in range(k):
        data[rank].copy_(before[rank])
        for i in range(1, k):
            data[rank] += before[(rank + i) % k]


def only_contiguous(data):
    """Loses the results of strided tensors, since ravel() copies them."""
    repaired([t.ravel() for t in data])


def trusts_the_strides_of_rank_0(data):
    """Correct only if all ranks have the strides of rank 0."""
    repaired([t.as_strided(data[0].shape, data[0].stride()) for t in data])


def writes_between_elements(data):
    """Also reduces the memory between the elements of a strided tensor."""
    spans = []
    for tensor in data:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append(tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,)))
    repaired(spans)


def float32_only(data):
    fill(data, torch.stack([t.float() for t in data]).sum(0))


def leaves_ranks_beyond_32_alone(data):
    total = torch.stack(data).sum(0)
    fill(data[:32], total)


def drops_elements_beyond_two_million(data):
    if data[0].numel() > 2_000_000:
        data = [t.view(-1)[:2_000_000] for t in data]
    repaired(data)


def takes_a_group(data, group):
    repaired(data)


def averages(data):
    repaired(data)
    for tensor in data:
        tensor.copy_(tensor / len(data))


def skips_writing_the_last_rank(data):
    fill(data[: max(1, len(data) - 1)], torch.stack(data).sum(0))


def wrong_for_three(data):
    repaired(data)
    if len(data) == 3:
        data[2] += 1


def fails_on_empty_tensors(data):
    data[0].max()
    repaired(data)


def gives_sparse_tensors(data):
    total = torch.stack(data).sum(0)
    data[:] = [total.to_sparse() for _ in data]


def swallows_nan_and_infinities(data):
    total = torch.stack(data).sum(0)
    fill(data, total.nan_to_num() if total.is_floating_point() else total)


# Each row: a function, its failing properties, and words from the detail of the last property.
# "only": all other properties pass.
MISTAKES: list[tuple[Allreduce, str, str]] = [
    (rebinding, "only list, in place", "rank 1's own tensor still holds its own values"),
    (averages, "every rank, sizes, sum", "this is the mean, not the sum"),
    (
        skips_writing_the_last_rank,
        "in place, same bits, every rank",
        "expected -15.0, got -7.0 (k=2",
    ),
    (forgets_rank_2, "sum, ranks", "the values of rank 2 are missing"),
    (wrong_for_three, "sizes, same bits, ranks", "k=3, numel=840"),
    (shortens_the_list, "only list", "the list had 1 items before and 0 after"),
    (points_tensors_elsewhere, "only in place", "made to point at other memory"),
    (random_order, "only repeatable", "than in run 1"),
    (each_rank_its_own_order, "only same bits", "has other bits than rank 0"),
    (only_contiguous, "only mixed strides, strides", "every other element"),
    (trusts_the_strides_of_rank_0, "only mixed strides", "beside transposed [6, 12]"),
    (writes_between_elements, "outside", "that is not part of its tensor was written"),
    (float32_only, "dtypes", "float64, random values"),
    (fails_on_empty_tensors, "only sizes", "raises RuntimeError"),
    (gives_sparse_tensors, "same bits, sum", "rank 0 holds sparse float32 of shape [840]"),
    (swallows_nan_and_infinities, "only nan and inf", "element 0: expected nan, got 0.0"),
    (leaves_ranks_beyond_32_alone, "only ranks", "k=33, numel=9240, float32, positional values"),
    (drops_elements_beyond_two_million, "only sizes", "element 2000000: expected -13.0, got -7.0"),
    (takes_a_group, "sum", f"argument: 'group' (called as fn(data)) at {__file__}:"),
]


@pytest.mark.parametrize(
    ("fn", "failing", "words"), MISTAKES, ids=[p[0].__name__ for p in MISTAKES]
)
def test_wrong_solutions_fail(fn, failing, words):
    report = graded(fn)
    names = failing.removeprefix("only ").split(", ")
    assert not report.passed
    assert set(names) <= {p.name for p in report.failed}, str(report)
    assert len(names) == len(report.failed) or not failing.startswith("only ")
    assert words in report[names[-1]].detail
    if fn is rebinding:
        mark = "mark: 0 of 100 (rank without sum -100)"
        assert str(report).endswith(f"properties: in place, list\n{mark}\nfirst look at: in place")


@pytest.mark.parametrize("columns", [60, 120])
def test_report_has_terminal_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    longest = max(len(line) for line in str(graded(rebinding)).splitlines())
    assert columns - 15 < longest <= columns


# -- deadlines, devices, arguments -----------------------------------------------------------------


def test_repeated_hang_ends_grading():
    release = threading.Event()
    started = time.monotonic()
    report = check_allreduce(lambda data: release.wait(60), timeout_s=0.2)
    took_s = time.monotonic() - started
    release.set()
    assert took_s < 10
    assert report["sum"].detail.startswith("no answer within 0.2 s (k=2, numel=840, float32,")
    assert report["dtypes"].detail.startswith("not run")
    assert [p.verdict for p in report.required] == 3 * ["timeout"] + 10 * ["fail"]
    assert report.first_look_at is report["sum"]


@pytest.mark.parametrize("world_size", [1, 2, 12])
def test_device_count_sets_world_size(world_size):
    seen = set()

    def watched(data):
        seen.add(len(data))
        repaired(data)

    report = check_allreduce(watched, ["cpu"] * world_size, timeout_s=math.inf)
    assert report.passed, str(report)
    assert seen == {*range(1, world_size + 1), 17, 33}
    assert report["ranks"].detail == f"{'1 to ' * (world_size > 1)}{world_size}, 17 and 33 ranks"


def test_wrong_arguments_are_named():
    with pytest.raises(pr.ArgumentError, match="fn is 3"):
        check_allreduce(3)
    with pytest.raises(pr.ArgumentError, match="timeout_s is 0"):
        check_allreduce(repaired, timeout_s=0)


# -- the command -----------------------------------------------------------------------------------


GOOD = """\
import torch

def allreduce(data):
    print("passed: all 13 required properties")
    total = torch.stack(data).sum(0)
    for t in data:
        t.copy_(total)
"""
BOOK = """\
def allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i]
    for i in range(1, len(data)):
        data[i] = data[0]
"""
LESSON = f"""\
print("noise")
{GOOD}
{BOOK.replace("allreduce", "bad")}
class Ring:
    run = staticmethod(allreduce)

answer = 42
"""
CLASS = {
    "anna.py": GOOD,
    "book.py": BOOK,
    "cut/solution.py": "def allreduce(data):\n    x = (1,\n",
    "other_name.py": "def all_reduce(data):\n    pass\n",
    ".hidden.py": "1 / 0",
    ".venv/lib.py": "1 / 0",
    "__pycache__/anna.py": "1 / 0",
    "notes.txt": "1 / 0",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, code in CLASS.items():
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    (tmp_path / "class" / "folder.py").mkdir()
    (tmp_path / "lesson.py").write_text(LESSON)
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "class"


@pytest.fixture
def verdicts(monkeypatch):
    given: dict[str, object] = {}

    def grade(target, devices, timeout_s, show=None):
        found = given.get(Path(target.where).name)
        if isinstance(found, BaseException):
            raise found
        return found or report("fail", "sum", "k=2: wrong")

    monkeypatch.setattr(remote, "grade", grade)
    return given


def report(verdict: str, name: str = "sum", detail: str = "as it should") -> GradeReport:
    properties = tuple(
        Property(n, verdict if n == name else "pass", detail if n == name else "") for n in REQUIRED
    )
    return GradeReport("solution.allreduce", ("cpu",), properties)


def rows(path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- one function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["lesson.py:allreduce", "./lesson.py:Ring.run", "lesson:bad"])
def test_function_is_graded(folder, capsys, target):
    is_bad = target == "lesson:bad"
    assert main(["check", target, "--devices", "cpu,cpu,cpu"]) == is_bad
    out = capsys.readouterr().out
    assert "on cpu x 3 ranks" in out
    assert "noise" not in out


def test_function_report_is_json(folder, capsys):
    assert main(["check", "lesson:bad", "--json", "--devices", "cpu,cpu"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["target"], document["passed"]) == ("lesson:bad", False)
    assert document["properties"][2]["case"]["k"] == 2


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lesson", "is not MODULE:FUNCTION"),
        ("no_such_solution:f", "there is no module 'no_such_solution'"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
        ("lesson:nothing", "it has: Ring, allreduce, bad"),
        ("lesson:answer", "is a value of type int"),
        ("broken.py:f", "broken.py:2"),
    ],
)
def test_failed_import_is_explained(folder, capsys, target, words):
    assert main(["check", target]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


# -- a whole class ---------------------------------------------------------------------------------


def test_class_is_graded(folder, capsys):
    assert main(["check", "class", "--csv", "marks.csv", "--devices", "cpu,cpu"]) == 1
    out, err = capsys.readouterr()
    anna, book, cut, other = rows("marks.csv")
    names = ["class/anna.py", "class/book.py", "class/cut/solution.py", "class/other_name.py"]
    assert [r["file"] for r in (anna, book, cut, other)] == names
    assert {r["out_of"] for r in rows("marks.csv")} == {"100"}
    assert [r["marks"] for r in rows("marks.csv")] == ["100", "0", "0", "0"]
    assert [r["costs"] for r in rows("marks.csv")] == [
        "",
        "rank without sum 100",
        *2 * ["loading 100"],
    ]
    assert {anna[name] for name in REQUIRED} == {"pass"}
    assert [name for name in REQUIRED if book[name] == "fail"] == ["in place", "list"]
    assert book["first_look_at"] == "in place"
    assert "rebinds list items" in book["message"]
    assert cut["first_look_at"] == other["first_look_at"] == "loading"
    assert cut["message"].endswith(
        f"SyntaxError: '(' was never closed at {folder}/cut/solution.py:2"
    )
    assert "class/other_name.py has no 'allreduce'" in other["message"]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == "class/anna.py          100/100"
    assert lines[2].startswith("class/book.py            0/100  in place: the function rebinds")
    assert lines[3].startswith("class/cut/solution.py    0/100  loading: SyntaxError: '(' was")
    assert lines[-1] == "1 of 4 pass all 13 properties; marks.csv has a row for each"
    assert "required" not in out + err  # anna.py prints a fake verdict


def test_json_is_one_document(folder, capsys):
    (folder / "other_name.py").unlink()
    targets = ["class/anna.py", "class/cut/solution.py:allreduce"]
    assert main(["check", *targets, "--json", "--devices", "cpu"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["passed"] is False
    anna, cut = document["solutions"]
    assert anna["target"] == "class/anna.py:allreduce"
    assert (anna["passed"], anna["marks"], anna["out_of"]) == (True, 100, 100)
    assert len(anna["properties"]) == len(CHECKS)
    assert (cut["passed"], cut["marks"], cut["first_look_at"]) == (False, 0, "loading")
    assert "SyntaxError" in cut["error"]
    assert "class/anna.py" in err  # the table goes to stderr


def test_target_order_is_kept(folder, verdicts, capsys):
    targets = ["class/cut", "class/book.py", "class/anna.py:f"]
    assert main(["check", *targets, "--json", "--function", "g"]) == 1
    found = [s["target"] for s in json.loads(capsys.readouterr().out)["solutions"]]
    assert found == ["class/cut/solution.py:g", "class/book.py:g", "class/anna.py:f"]


def test_solution_cannot_change_next_solution(folder, capsys):
    code = "import pathlib\npathlib.Path(__file__).with_name('book.py').write_text('1 / 0')\n"
    (folder / "anna.py").write_text(code + GOOD)
    assert main(["check", "class/anna.py", "class/book.py", "--devices", "cpu,cpu"]) == 1
    assert (folder / "book.py").read_text() == "1 / 0"
    assert "class/book.py    0/100  in place" in capsys.readouterr().out


# -- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["class", "--csv", "marks.txt"], "--csv is 'marks.txt', expected a file name that ends"),
        (["class", "--csv", "nowhere/marks.csv"], "marks.csv', but there is no folder 'nowhere'"),
        (["class", "--csv", "taken.csv"], "--csv is 'taken.csv', which cannot be written: Is a"),
        (["class", "--timeout", "0"], "--timeout is 0, expected a positive number"),
        (["class", "class/none.py"], "there is no file 'class/none.py'"),
        (["class", "class/notes.txt:f"], "'class/notes.txt' is not a Python file"),
        (["empty"], "there is no *.py or *.ipynb in the folder 'empty'"),
        (["class", "--resume"], "--resume needs --csv"),
        (["class", "--csv", "other.csv", "--resume"], "'other.csv' has other columns than"),
        (["class", "--devices", "cpu,tpu"], "check: --devices[1] is 'tpu'"),
    ],
)
def test_wrong_arguments_start_no_grading(folder, capsys, arguments, words):
    for name in ("empty", "taken.csv"):
        Path(name).mkdir()
    Path("other.csv").write_text("name,mark\n")
    for file in folder.rglob("*.py"):
        if file.is_file():
            file.write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert not (folder / "ran").exists()
    files = ["class", "empty", "lesson.py", "other.csv", "taken.csv"]
    assert sorted(os.listdir("."))[1:] == files


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("planted")])
def test_interrupted_grading_resumes(folder, verdicts, error, capsys):
    verdicts["book.py"] = error
    assert main(["check", "class", "--csv", "marks.csv"]) in (1, 130)
    assert [row["file"] for row in rows("marks.csv.part")] == ["class/anna.py"]
    assert "marks.csv.part has 1 row; go on with --resume" in capsys.readouterr().err
    assert main(["check", "class", "--csv", "marks.csv"]) == 2
    assert "'marks.csv.part' has the rows of a grading that did not end" in capsys.readouterr().err
    verdicts.update({"anna.py": AssertionError("graded twice"), "book.py": report("pass")})
    with Path("marks.csv.part").open("a") as part:
        part.write("class/book.py,allreduce,10")  # a row that a dying grader did not finish
    assert main(["check", "class", "--csv", "marks.csv", "--resume"]) == 1
    graded_files = [row["file"].removeprefix("class/") for row in rows("marks.csv")]
    assert graded_files == ["anna.py", "book.py", "cut/solution.py", "other_name.py"]
    assert rows("marks.csv")[1]["marks"] == "100"
    assert capsys.readouterr().out.endswith(
        "1 of 4 pass all 13 properties; marks.csv has a row for each\n"
    )
    assert not Path("marks.csv.part").exists()
    assert main(["check", "class/anna.py", "--csv", "marks.csv"]) == 2
    assert "--csv is 'marks.csv', which exists: add rows" in capsys.readouterr().err
    excel = "\ufeff" + Path("marks.csv").read_text()
    Path("marks.csv").write_text(excel.replace(",", ";"))
    assert main(["check", "class", "--csv", "marks.csv", "--resume"]) == 2
    assert "'marks.csv' is separated by ';': save it with commas" in capsys.readouterr().err
    Path("marks.csv").write_bytes(b"\xff")
    assert main(["check", "class", "--csv", "marks.csv", "--resume"]) == 2
    assert "'marks.csv' is not UTF-8: save it as CSV UTF-8" in capsys.readouterr().err
    Path("marks.csv").write_text(excel)
    (folder / "new.py").write_text(GOOD)
    assert main(["check", "class", "--csv", "marks.csv", "--resume"]) == 1
    assert [row["file"] for row in rows("marks.csv")][4:] == ["class/new.py"]


def test_long_name_keeps_its_beginning():
    name = "Adler_Eva_101_assignsubmission_file_/allreduce.py"
    line = MarkedSolution(Solution(name, "f"), report("pass")).line(80, 32)
    assert line == "Adler_Eva_101_...e_/allreduce.py  100/100"


def test_progress_names_solution_and_time_left(folder, verdicts, monkeypatch):
    texts: list[str] = []
    shown = contextlib.nullcontext()
    monkeypatch.setattr(check.STATUS, "elapsed", lambda text: texts.append(text) or shown)
    assert main(["check", "class"]) == 1
    assert texts[0] == "0 of 4 done; grading class/anna.py"
    assert texts[1] == "1 of 4 done, about 0 s left; grading class/book.py"
    assert check._progress(1, 4, time.monotonic() - 100) == "1 of 4 done, about 5 min left"


def test_solution_killing_parent_fails_alone(folder, capsys):
    code = "import os, signal\ndef allreduce(data): os.kill(os.getppid(), signal.SIGKILL)\n"
    (folder / "anna.py").write_text(code)
    assert main(["check", "class", "--csv", "marks.csv", "--devices", "cpu,cpu"]) == 1
    assert "the process killed its parent process" in rows("marks.csv")[0]["message"]
    assert len(rows("marks.csv")) == 4


# -- unreadable files -----------------------------------------------------------------------------


def test_unreadable_files_have_csv_row(folder, capsys):
    for file in folder.glob("*.py"):
        if file.is_file():
            file.unlink()
    (folder / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(folder / "pipe.py")
    (folder / "self.py").symlink_to("self.py")
    arguments = ["check", "class", "--csv", "marks.csv", "--devices", "cpu"]
    assert main(arguments) == 1
    gone, pipe, loop = (r["message"] for r in rows("marks.csv") if "cut" not in r["file"])
    assert gone == "class/gone.py cannot be read: No such file or directory"
    assert pipe == "class/pipe.py cannot be read: it is no regular file"
    assert loop == "class/self.py cannot be read: Too many levels of symbolic links"


# -- odd text --------------------------------------------------------------------------------------


def test_odd_text_is_kept_in_csv(tmp_path):
    """File names stay exact, so that a teacher can join tables. Messages become printable."""
    path, name = tmp_path / "marks.csv", 'a  b\t=1\r\n,"é 漢\udcff' + 600 * "x" + ".py"
    failing = report("fail", "strides", "\x00\x1b[2J\u202e")
    file = MarksFile(path, resume=False)
    file.add(MarkedSolution(Solution(name, "f"), failing))
    file.add(MarkedSolution(Solution("=1+1", "f"), None, 600 * "x"))
    assert file.has(Solution(name, "f"))
    assert file.has(Solution("=1+1", "f"))
    file.complete()
    first, second = rows(path)
    assert second["file"] == "'=1+1", "no formula for a spreadsheet"
    assert first["file"] == name.replace("\udcff", "\\udcff")
    assert first["message"] == "\\x00\\x1b[2J\\u202e"
    assert (first["strides"], first["first_look_at"]) == ("fail", "strides")
    assert (second["message"], second["marks"], second["sum"]) == (500 * "x", "0", "fail")
    before, after = (
        ["file", "function", "marks", "out_of", "costs"],
        ["first_look_at", "message", "imports", "remark"],
    )
    assert list(first) == [*before, *REQUIRED, *after]
