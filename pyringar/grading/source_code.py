"""Read the code of a solution: a Python file, or the code cells of a notebook."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

SUFFIXES = (".py", ".ipynb")
_MAX_PARSED_BYTES = 1 << 20
# Lines that only IPython understands: %magic, !command (with continuation lines), ?help and help?.
_MAGIC_LINE = re.compile(r"^([ \t]*)(?:[%!](?:.*\\\n)*.*|\?.*|[\w.]+\?+[ \t]*)$", re.MULTILINE)
_MAGIC_VALUE = re.compile(r"^([ \t]*\w+[ \t]*=[ \t]*)[%!].*$", re.MULTILINE)
_FOREIGN_CELL = re.compile(r"\s*%%(?!time|capture|prun)")  # cells in %%bash, %%html and so on


def code_parts(path: str, source: bytes) -> list[tuple[str, str | bytes]]:
    """Return (name for tracebacks, code) of a file, or of every code cell of a notebook.

    ValueError if a notebook cannot be read.
    """
    if not path.endswith(".ipynb"):
        return [(path, source)]
    try:
        cells = json.loads(source)["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a notebook of format 4 ({type(error).__name__})") from error
    return [(f"{path}, code cell {n}", _without_magics(c)) for n, c in enumerate(codes, 1)]


def _without_magics(code: str) -> str:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if _FOREIGN_CELL.match(code):
            return ""
        return _MAGIC_VALUE.sub(r"\1None", _MAGIC_LINE.sub(r"\1pass", code))
    return code


def noted_imports(path: str, source: bytes) -> list[str]:
    """Return the names of pyringar and torch.distributed that appear in the code.

    Names that the code computes are not found. Files above 1 MB are not searched.
    """
    found: set[str] = set()
    if len(source) > _MAX_PARSED_BYTES:
        return ["not searched: the file is larger than 1 MB"]
    try:
        for _, code in code_parts(path, source):
            for node in ast.walk(ast.parse(code)):
                found.update(name for name in _names(node) if _is_noted(name))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return sorted(found)  # unreadable code: loading the solution reports it
    longer = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    return sorted(found - longer)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        is_import = ast.unparse(node.func).endswith(("__import__", "import_module"))
        yield from (str(node.args[0].value),) if is_import else ()


def _is_noted(name: str) -> bool:
    return f"{name}.".startswith(("pyringar.", "torch.distributed."))
