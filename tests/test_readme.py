"""Does the table of tests/README.md say what the first line of every file here says?

``python tests/test_readme.py`` writes it.
"""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
HEAD = "| file | question |\n|---|---|\n"


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path.relative_to(HERE)} does not say what it is for"
    return docstring.split("\n")[0]


def table() -> str:
    """List tests, then what they share, a row a file."""
    files = [path for path in HERE.rglob("*.py") if path.name != "__init__.py"]
    files.sort(key=lambda path: (not path.name.startswith("test_"), path.parent != HERE, path))
    rows = [f"| `{path.relative_to(HERE)}` | {first_line(path)} |\n" for path in files]
    return HEAD + "".join(rows)


def with_table(text: str) -> str:
    """Replace the table; the lines after it stay."""
    before, _, rest = text.partition(HEAD)
    after = [line for line in rest.splitlines(keepends=True) if not line.startswith("|")]
    return before + table() + "".join(after)


def test_the_table_says_what_the_files_say():
    text = README.read_text()
    assert not [line for line in text.splitlines() if line.startswith(("<<<<", "====", ">>>>"))]
    assert text == with_table(text), "run: python tests/test_readme.py"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
