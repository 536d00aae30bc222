"""Does the API reference build without a warning, and does it say of every public name what it is?

Of functions and methods: what every argument is and which errors they raise themselves.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib.util
import inspect
import operator
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pyringar import UnsupportedError

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs/build_api.py")
assert _spec is not None
assert _spec.loader is not None
build_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_api)

# Made by the library alone; its arguments are nobody's business.
NOT_MADE_BY_CALLERS = {"Work"}
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
# Where a docstring says once that the rest of it stands.
SEE = re.compile(r"\bSee\s+(?::\w+:)?`([\w.]+)`")
SEE_TORCH = re.compile(r"\bSee\s+``(torch\.[\w.]+)``")  # its arguments are torch's


class Documented(NamedTuple):
    """A function, method or class with arguments."""

    name: str
    obj: Any
    is_class: bool = False


def public_objects(modules: tuple[str, ...] = build_api.MODULES) -> dict[str, Any]:
    """Everything on the pages of the reference, by full name; what is on two, once."""
    by_id = {}
    for module_name in modules:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            obj = getattr(module, name)
            by_id.setdefault(id(obj), (f"{module_name}.{name}", obj))
    return dict(by_id.values())


def documented() -> Iterator[Documented]:
    for name, obj in public_objects().items():
        if inspect.isfunction(obj):
            yield Documented(name, obj)
        elif inspect.isclass(obj):
            if not (issubclass(obj, BaseException) or obj.__name__ in NOT_MADE_BY_CALLERS):
                yield Documented(name, obj, is_class=True)
            yield from methods_of(name, obj)


def methods_of(name: str, cls: type) -> Iterator[Documented]:
    for method_name, member in vars(cls).items():
        function = getattr(member, "__func__", member)  # of class and static methods
        if isinstance(function, types.FunctionType) and not method_name.startswith("_"):
            yield Documented(f"{name}.{method_name}", function)


def sections_of(doc: str) -> dict[str, list[str]]:
    """The entries of each section of a docstring: ``name: text`` gives the name."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in doc.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = line[:-1]
            found[section] = []
        elif line and not line.startswith(" "):
            section = ""
        elif section and (entry := re.match(r"    (\S[^:]*):(\s|$)", line)):
            found[section] += [name.strip() for name in entry[1].split(",")]
    return found


def arguments_of(item: Documented) -> list[str]:
    kinds = inspect.Parameter
    stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    return [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(item.obj).parameters.values()
        if parameter.name not in ("self", "cls")
    ]


def raised_by(item: Documented) -> set[str]:
    """The errors that its own lines raise by name."""
    function = item.obj
    if item.is_class:
        function = vars(item.obj).get("__post_init__" if is_record(item) else "__init__")
    if not isinstance(function, types.FunctionType):
        return set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except OSError:  # made by dataclass
        return set()
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return {
        call.func.id
        for call in raised
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }


def is_record(item: Documented) -> bool:
    return item.is_class and (dataclasses.is_dataclass(item.obj) or hasattr(item.obj, "_fields"))


def listed_by(item: Documented, section: str) -> list[str]:
    """The entries of a section, and those that stand where the docstring says "See" another."""
    doc = inspect.getdoc(item.obj) or ""
    own = sections_of(doc).get(section, [])
    pointed_to = [found(target, item) for target in SEE.findall(doc)]
    there = [name for other in pointed_to for name in listed_by(other, section)]
    return own + [name for name in there if name not in own]


def found(target: str, item: Documented) -> Documented:
    """What a docstring calls ``Class.method``, or ``method`` of its own class."""
    target = target.removeprefix("pyringar.")
    own_class = item.name.rpartition(".")[0]
    named = by_name()
    if f"{own_class}.{target}" in named:
        return named[f"{own_class}.{target}"]
    return next(other for name, other in named.items() if name.endswith(f".{target}"))


@functools.cache
def by_name() -> dict[str, Documented]:
    return {item.name: item for item in documented()}


def gaps_of(item: Documented) -> list[str]:
    """What the docstring of an object lacks, or says too much."""
    wanted = arguments_of(item)
    section = "Attributes" if is_record(item) else "Args"
    own = sections_of(inspect.getdoc(item.obj) or "").get(section, [])
    listed = listed_by(item, section)
    gaps = []
    of_torch = SEE_TORCH.findall(inspect.getdoc(item.obj) or "")
    for name in of_torch:
        theirs = operator.attrgetter(name.removeprefix("torch."))(torch)
        listed += [*inspect.signature(theirs).parameters, "*args", "**kwargs"]
    if own != [name for name in wanted if name in own] or set(wanted) - set(listed):
        gaps.append(f"arguments {wanted}, listed {listed}")
    if missing := raised_by(item) - set(listed_by(item, "Raises")):
        gaps.append(f"raises {', '.join(sorted(missing))}, which is not listed")
    return gaps


# -- docstrings ------------------------------------------------------------------------------------


def test_every_argument_and_error_is_documented() -> None:
    items = list(documented())
    assert len(items) > 100
    gaps = {item.name: found for item in items if (found := gaps_of(item))}
    assert not gaps


def test_every_public_name_has_a_docstring() -> None:
    bare = []
    for name, obj in public_objects().items():
        members = vars(obj).items() if inspect.isclass(obj) else ()
        parts = [(name, obj)]
        parts += [(f"{name}.{m}", p) for m, p in members if isinstance(p, property) and m[0] != "_"]
        bare += [n for n, part in parts if not isinstance(part, (dict, tuple)) and not part.__doc__]
        bare += [m.name for m in methods_of(name, obj) if not m.obj.__doc__] if members else []
    assert not bare


def _complete(first: int, *rest: int, **options: int) -> None:
    """Do.

    Args:
        first: One.
        *rest: More.
        **options: Named.

    Raises:
        ValueError, KeyError: Always.
    """
    if first:
        raise ValueError("one")
    raise KeyError("other")


def _without_error(first: int) -> None:
    """Do.

    Args:
        first: One.
    """
    raise ValueError("one")


def _with_other_names(first: int, second: int) -> None:
    """Do.

    Args:
        second: Two.
        third: Three: there is none.
    """


def _without_arguments(first: int) -> None:
    """Do."""


def _elsewhere(root: int, op: str) -> None:
    """Do.

    Args:
        root: One.

    See :meth:`Communicator.all_reduce` for the rest.
    """
    raise UnsupportedError("there")


def _nowhere(first: int, op: str) -> None:
    """Do. See :meth:`Communicator.all_reduce` for the rest."""
    raise KeyError("nowhere")


def test_gaps_are_noticed_where_a_docstring_points_elsewhere() -> None:
    arguments, raised = gaps_of(Documented("planted", _nowhere))
    assert "arguments ['first', 'op']" in arguments
    assert raised == "raises KeyError, which is not listed"


@pytest.mark.parametrize(
    ("function", "gap"),
    [
        (_complete, ""),
        (_without_error, "raises ValueError"),
        (_with_other_names, "listed ['second', 'third']"),
        (_without_arguments, "listed []"),
        (_elsewhere, ""),
    ],
)
def test_gaps_are_noticed(function: Callable[..., None], gap: str) -> None:
    gaps = gaps_of(Documented("planted", function))
    assert len(gaps) == bool(gap)
    assert all(gap in found for found in gaps)


# -- pages -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, as the command that docs/README.md names writes them."""
    out = tmp_path_factory.mktemp("reference")
    command = [sys.executable, str(ROOT / "docs/build_api.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "pdoc and what it imports have nothing to complain of"
    return out


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.mark.parametrize("module", build_api.MODULES)
def test_every_public_name_is_on_its_page(reference: Path, module: str) -> None:
    page = (reference / f"{module.replace('.', '/')}.html").read_text()
    imported = importlib.import_module(module)
    for name in imported.__all__:
        _, found, rest = page.partition(f'<section id="{name}">')
        assert found, f"{name} has no section"
        section = rest.split("</section>")[0]
        _, found, doc = section.partition('<div class="docstring">')
        if isinstance(getattr(imported, name), dict):  # described with the package
            assert name in (imported.__doc__ or "")
            continue
        assert found, f"{name} has no docstring"
        assert len(text_of(doc.split("</div>")[0]).split()) > 2, f"{name} has an empty docstring"


def test_every_page_can_be_reached(reference: Path) -> None:
    pages = {str(page.relative_to(reference)) for page in reference.rglob("*.html")}
    expected = {f"{module.replace('.', '/')}.html" for module in build_api.MODULES}
    assert pages == expected | {"index.html"}
    assert "pyringar.html" in (reference / "index.html").read_text()
    first = (reference / "pyringar.html").read_text()
    assert all(f'href="{page}"' in first for page in expected - {"pyringar.html"})


def test_markup_is_rendered(reference: Path) -> None:
    """No role, literal block or back quote that a reader would see as it is written."""
    for path in reference.rglob("*.html"):
        page = re.sub(r"<(script|style|pre)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        seen = re.findall(r".*(?::\w+:`|`|~pyringar|::\s*$|\bArgs:).*", text_of(page), re.MULTILINE)
        assert not seen, path.name


def sections_in(page: Path) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page.read_text())


def test_what_users_need_first_is_on_top_and_errors_are_last(reference: Path) -> None:
    for module in build_api.MODULES:
        shown = sections_in(reference / f"{module.replace('.', '/')}.html")
        imported = importlib.import_module(module)
        first = build_api.FIRST.get(module, ())
        assert tuple(shown[: len(first)]) == first, f"{module}: FIRST names what is not there"
        kinds = [getattr(imported, name) for name in shown if hasattr(imported, name)]
        are_errors = [isinstance(k, type) and issubclass(k, BaseException) for k in kinds]
        assert are_errors == sorted(are_errors), module
    assert sections_in(reference / "pyringar.html")[0] == "allreduce"


def test_only_names_that_users_import_are_shown(reference: Path) -> None:
    known = {*build_api.MODULES, *build_api.public_names(build_api.MODULES).values()}
    for path in reference.rglob("*.html"):
        page = re.sub(r"<(script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        for name in re.findall(r"\bpyringar(?:\.\w+)+", text_of(page)):
            assert any(name == n or name.startswith(f"{n}.") for n in known - {"pyringar"}), name
        assert "Submodules" not in page


def test_what_a_class_has_from_internal_bases_is_shown_as_its_own(reference: Path) -> None:
    page = (reference / "pyringar.html").read_text()
    for name in ("Communicator.close", "ProcessCommunicator.close", "Communicator.all_reduce"):
        assert f'<div id="{name}" class="classattr">' in page
    (bases,) = re.findall(r'<span class="name">DataParallel</span>(<wbr>.*?):', page, re.DOTALL)
    assert "torch.nn.modules.module.Module" in text_of(bases)


def test_examples_of_packages_are_code(reference: Path) -> None:
    for module in ("", "/train", "/distributed"):
        page = (reference / f"pyringar{module}.html").read_text()
        info = page.split('<section class="module-info">')[1].split("</section>")[0]
        assert "import" in "".join(re.findall(r"<pre>(.*?)</pre>", info, re.DOTALL)), module


def test_a_warning_of_pdocs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("def f(x: 'NoSuchName') -> None:\n    '''Do.'''\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"pdoc: .*NoSuchName"):
        build_api.build(tmp_path / "out", ["planted"])
