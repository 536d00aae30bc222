"""Write the API reference as HTML, from the docstrings: ``python docs/build_api.py --out DIR``.

A warning of pdoc's is an error: a name that does not resolve, an annotation that cannot be read.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pdoc

TEMPLATES = Path(__file__).with_name("site") / "api"
# The public packages, then the modules whose types their calls return. A page holds what its
# module's __all__ names.
MODULES = (
    "pyringar",
    "pyringar.distributed",
    "pyringar.train",
    "pyringar.figures",
    "pyringar.ops",
    "pyringar.comm.ring_schedule",
    "pyringar.parallel.bucketer",
    "pyringar.grading.grader",
    "pyringar.train.trace",
)
# What a page shows before the rest, most wanted first; errors come last.
FIRST = {
    "pyringar": (
        *("allreduce", "Communicator", "ProcessCommunicator", "GradientBucketer", "DataParallel"),
        *("ShardedStep", "check_allreduce", "get_params", "split_batch", "replicate"),
        *("check_replicas_equal", "evaluate_accuracy_gpus", "shared_empty", "Work", "Plan"),
        *("Guarantee", "Topology"),
    ),
    "pyringar.distributed": ("register", "HierarchicalCommunicator", "communicator_for"),
    "pyringar.train": ("train", "train_resnet18", "TrainConfig", "Trainer", "TrainResult"),
    "pyringar.train.trace": ("Trace", "Span"),
}
# A name with dots, as text or as Pygments marks it up.
_DOT = r'(?:\.|</span><span class="o">\.</span><span class="n">)'
_NAME = re.compile(rf"\bpyringar(?:{_DOT}\w+)+")


def build(out: Path, modules: Sequence[str] = MODULES, home: str | None = None) -> None:
    """Write one page per module and an index.

    Args:
        out: The folder; made if need be.
        modules: Names of what can be imported.
        home: Where every page's first button leads, seen from ``out``; none if not given.

    Raises:
        RuntimeError: Names what pdoc warned of.
    """
    for name in modules:
        importlib.import_module(name)  # what other packages warn of is not our pages' fault
    pdoc.render.configure(docformat="google", show_source=False, template_directory=TEMPLATES)
    pdoc.render.env.globals["home"] = home
    names = public_names(modules)
    pdoc.render.env.filters |= {
        "in_order": _in_order,
        "public_bases": functools.partial(_public_bases, names),
        "public_parts": functools.partial(_public_parts, names),
        "linkify": jinja2.pass_context(functools.partial(_linkify, names)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # In a checkout, with pyringar installed: it is the installed one that is documented.
        warnings.filterwarnings("ignore", ".* may refer to either the installed Python module")
        pdoc.pdoc(*modules, output_directory=out)
    if caught:
        raise RuntimeError("\n".join(f"pdoc: {warning.message}" for warning in caught))


def public_names(modules: Sequence[str]) -> dict[int, str]:
    """Return the name by which users import each thing on the pages, by its id."""
    found: dict[int, str] = {}
    for name in modules:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            found.setdefault(id(getattr(module, public)), f"{name}.{public}")
    return found


# -- what the templates ask for --------------------------------------------------------------------


def _in_order(members: Iterable[Any], module: Any) -> list[Any]:
    """Put what is wanted first on top and errors at the bottom."""
    first = FIRST.get(module.modulename, ())

    def place(member: Any) -> int:
        if member.name in first:
            return first.index(member.name)
        is_error = isinstance(member.obj, type) and issubclass(member.obj, BaseException)
        return len(first) + is_error

    return sorted(members, key=place)


def _public_bases(names: dict[int, str], cls: Any) -> list[str]:
    """Return the full names of the bases that a user can know: not our own internal ones."""
    bases = [base for base in cls.obj.__bases__ if base is not object]
    return [
        names.get(id(base), f"{base.__module__}.{base.__qualname__}".removeprefix("builtins."))
        for base in bases
        if id(base) in names or not base.__module__.startswith("pyringar")
    ]


def _public_parts(names: dict[int, str], cls: Any) -> list[Any]:
    """Return what a class has: its own, and what it inherits from internal bases of ours."""
    shown = [part for part in cls.own_members if part.kind != "class"]
    for (module, qualname), parts in cls.inherited_members.items():
        base = functools.reduce(getattr, qualname.split("."), sys.modules.get(module))
        if module.startswith("pyringar") and id(base) not in names:
            shown += [part for part in parts if part.kind != "class" and part.name != "__init__"]
    return shown


def _linkify(names: dict[int, str], context: Any, code: str, **options: Any) -> Any:
    """Link names, each as users import it; of what they cannot import, show the last part."""
    text = _NAME.sub(lambda match: _public_name(re.sub(_DOT, ".", match[0]), names), str(code))
    html = pdoc.render_helpers.linkify(context, text, **options)

    def unless_hidden(link: re.Match[str]) -> str:
        bases = getattr(getattr(context["module"].obj, link[1], None), "__mro__", ())
        ours = (vars(base) for base in bases if base.__module__.startswith("pyringar"))
        return link[0] if any(link[2] in members for members in ours) else link[3]

    # What a class has from torch is not on its page.
    return type(html)(re.sub(r'<a href="#(\w+)\.(\w+)">(.*?)</a>', unless_hidden, html))


def _public_name(dotted: str, names: dict[int, str]) -> str:
    if dotted in MODULES:
        return dotted
    parts = dotted.split(".")
    cut = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    found: Any = sys.modules[".".join(parts[:cut])]
    for number, part in enumerate(parts[cut:], start=cut + 1):
        found = getattr(found, part, None)
        if id(found) in names:
            return ".".join([names[id(found)], *parts[number:]])
    return parts[-1]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    out = parser.parse_args().out
    build(out)
    print(f"{len(MODULES)} pages: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
