"""Read the code of a solution: a Python file, or the code cells of a notebook."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping

_SUFFIXES = (".py", ".ipynb")
_MAX_PARSED_BYTES = 1 << 20
# Lines that only IPython understands: %magic, !command (with continuation lines), ?help and help?.
_MAGIC_LINE = re.compile(r"^([ \t]*)(?:[%!](?:.*\\\n)*.*|\?.*|[\w.]+\?+[ \t]*)$", re.MULTILINE)
_MAGIC_VALUE = re.compile(r"^([ \t]*\w+[ \t]*=[ \t]*)[%!].*$", re.MULTILINE)
_FOREIGN_CELL = re.compile(r"\s*%%(?!time|capture|prun)")  # cells in %%bash, %%html and so on
_DOTTED_NAME = re.compile(r"[\w.]+")
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def is_code_file(path: str) -> bool:
    return path.lower().endswith(_SUFFIXES)


def code_parts(path: str, source: bytes) -> list[tuple[str, str | bytes]]:
    """Return (name for tracebacks, code) of a file, or of every code cell of a notebook.

    ValueError if a notebook cannot be read.
    """
    if not path.lower().endswith(".ipynb"):
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
    except _UNREADABLE:
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
        for node in _nodes(path, source):
            found.update(name for name in _names(node) if _is_noted(name))
    except _UNREADABLE:
        return sorted(found)  # unreadable code: loading the solution reports it
    longer = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    return sorted(found - longer)


def _nodes(path: str, source: bytes) -> Iterator[ast.AST]:
    for _, code in code_parts(path, source):
        yield from ast.walk(ast.parse(code))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value  # as in sys.modules["pyringar"] and import_module("pyringar")


def _is_noted(name: str) -> bool:
    is_below = f"{name}.".startswith(("pyringar.", "torch.distributed."))
    return is_below and _DOTTED_NAME.fullmatch(name) is not None


def helpers(sources: Mapping[str, bytes], function: str) -> dict[str, set[str]]:
    """Return the helper modules that each graded file of a folder imports.

    A helper module is a readable ``.py`` file that does not define ``function``, and that a graded
    file or another helper module imports. All other files are graded.
    """
    modules = {os.path.splitext(os.path.basename(p))[0]: p for p in sources if p.endswith(".py")}
    imports: dict[str, set[str]] = {}
    without_function: set[str] = set()
    for path, source in sources.items():
        try:
            defined, imported = _defined_and_imported(path, source)
        except _UNREADABLE:
            imports[path] = set()
            continue
        imports[path] = {modules[name] for name in imported if name in modules} - {path}
        if path in modules.values() and function.split(".")[0] not in defined:
            without_function.add(path)
    maybe = without_function & set().union(*imports.values())
    found: dict[str, set[str]] = {}
    for path in sources.keys() - maybe:
        found[path], new = set(), imports[path] & maybe
        while new:
            found[path] |= new
            new = set().union(*(imports[name] for name in new)) & maybe - found[path]
    alone = maybe.difference(*found.values())  # files that only import each other
    return found | {path: set() for path in alone}


def _defined_and_imported(path: str, source: bytes) -> tuple[set[str], set[str]]:
    """Return the names that a file defines, and the modules that it imports."""
    defined: set[str] = set()
    imported: set[str] = set()
    if len(source) > _MAX_PARSED_BYTES:
        raise ValueError(f"{path} is larger than 1 MB")
    for node in _nodes(path, source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module] if module else [alias.name for alias in node.names]
            imported.update(name.split(".")[0] for name in names)
    return defined, imported
