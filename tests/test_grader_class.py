"""Does `pyringar check` grade a function, and a class: folders, marks, table, JSON, exit status?"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from pyringar.cli import main
from pyringar.grading import remote
from pyringar.grading.checks import CHECKS
from pyringar.grading.grader import Property, Report
from pyringar.grading.marks import REQUIRED, Marked, write_csv
from pyringar.grading.solution import Target

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


def report(verdict: str, name: str = "sum", detail: str = "as it should") -> Report:
    properties = tuple(
        Property(n, verdict if n == name else "pass", detail if n == name else "") for n in REQUIRED
    )
    return Report("solution.allreduce", ("cpu",), properties)


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


def test_report_of_a_function_is_json(folder, capsys):
    assert main(["check", "lesson:bad", "--json", "--devices", "cpu,cpu"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["target"], document["passed"]) == ("lesson:bad", False)
    assert document["properties"][2]["case"]["k"] == 2


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lesson", "is not MODULE:FUNCTION"),
        ("lesson:", "is not MODULE:FUNCTION"),
        ("no_such_solution:f", "there is no module 'no_such_solution'"),
        ("no/such/file.py:f", "there is no file 'no/such/file.py'"),
        ("lesson:nothing", "what can be called: Ring, allreduce, bad"),
        ("lesson:answer", "is a value of type int"),
        ("broken:f", "failed with ZeroDivisionError"),
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
    total = str(len(REQUIRED))
    assert {r["out_of"] for r in rows("marks.csv")} == {total}
    assert [r["marks"] for r in rows("marks.csv")] == [total, str(len(REQUIRED) - 2), "0", "0"]
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
    assert lines[1] == "class/anna.py          13/13"
    assert lines[2].startswith("class/book.py          11/13  in place: rank 1's own tensor still")
    assert lines[3].startswith("class/cut/solution.py   0/13  loading: SyntaxError: '(' was never")
    assert lines[-1] == "1 of 4 pass all 13 properties; marks.csv has a row for each"
    assert "required" not in out + err  # which anna prints


def test_json_is_one_document(folder, capsys):
    (folder / "other_name.py").unlink()
    targets = ["class/anna.py", "class/cut/solution.py:allreduce"]
    assert main(["check", *targets, "--json", "--devices", "cpu"]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["passed"] is False
    anna, cut = document["solutions"]
    assert anna["target"] == "class/anna.py:allreduce"
    assert (anna["passed"], anna["marks"], anna["out_of"]) == (True, 13, 13)
    assert len(anna["properties"]) == len(CHECKS)
    assert (cut["passed"], cut["marks"], cut["first_look_at"]) == (False, 0, "loading")
    assert "SyntaxError" in cut["error"]
    assert "class/anna.py" in err  # the table


def test_targets(folder, verdicts, capsys):
    targets = ["class/cut", "class/book.py", "class/anna.py:f"]
    assert main(["check", *targets, "--json", "--function", "g"]) == 1
    found = [s["target"] for s in json.loads(capsys.readouterr().out)["solutions"]]
    assert found == ["class/cut/solution.py:g", "class/book.py:g", "class/anna.py:f"]


def test_solution_cannot_change_the_next(folder, capsys):
    code = "import pathlib\npathlib.Path(__file__).with_name('book.py').write_text('1 / 0')\n"
    (folder / "anna.py").write_text(code + GOOD)
    assert main(["check", "class/anna.py", "class/book.py", "--devices", "cpu,cpu"]) == 1
    assert (folder / "book.py").read_text() == "1 / 0"
    assert "class/book.py  11/13  in place" in capsys.readouterr().out


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["class", "--csv", "marks.txt"], "--csv is 'marks.txt', expected a file name that ends"),
        (["class", "--csv", "nowhere/marks.csv"], "marks.csv', but there is no folder 'nowhere'"),
        (["class", "--csv", "taken.csv"], "--csv is 'taken.csv', which cannot be written: Is a"),
        (["class", "--timeout", "0"], "--timeout is 0, expected a positive number"),
        (["class", "class/none.py"], "there is no file 'class/none.py'"),
        (["class", "class/notes.txt:f"], "'class/notes.txt' is not a Python file"),
        (["empty"], "there is no *.py in the folder 'empty'"),
        (["class", "--devices", "cpu,tpu"], "check: --devices[1] is 'tpu'"),
    ],
)
def test_wrong_arguments_are_refused_first(folder, capsys, arguments, words):
    for name in ("empty", "taken.csv"):
        Path(name).mkdir()
    for file in folder.rglob("*.py"):
        if file.is_file():
            file.write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "ran").exists()
    assert sorted(os.listdir("."))[1:] == ["class", "empty", "lesson.py", "taken.csv"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("planted")])
def test_broken_off_grading_keeps_old_marks(folder, verdicts, error):
    Path("marks.csv").write_text("old")
    verdicts["book.py"] = error
    assert main(["check", "class", "--csv", "marks.csv"]) in (1, 130)
    assert Path("marks.csv").read_text() == "old"
    assert sorted(os.listdir("."))[1:] == ["class", "lesson.py", "marks.csv"]


# -- nothing vanishes ------------------------------------------------------------------------------


def test_unreadable_files_have_a_row(folder, capsys):
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
    """A teacher joins the table by the names of the files; messages are short and printable."""
    path, name = tmp_path / "marks.csv", 'a  b\t=1\r\n,"é 漢\udcff' + 600 * "x" + ".py"
    failing = report("fail", "strides", "\x00\x1b[2J\u202e")
    write_csv(
        path, [Marked(Target(name, "f"), failing), Marked(Target("=1+1", "f"), None, 600 * "x")]
    )
    first, second = rows(path)
    assert second["file"] == "'=1+1", "no formula for a spreadsheet"
    assert first["file"] == name.replace("\udcff", "\\udcff")
    assert first["message"] == "\\x00\\x1b[2J\\u202e"
    assert (first["strides"], first["first_look_at"]) == ("fail", "strides")
    assert (second["message"], second["marks"], second["sum"]) == (500 * "x", "0", "fail")
    before, after = ["file", "function", "marks", "out_of"], ["first_look_at", "message"]
    assert list(first) == [*before, *REQUIRED, *after]
