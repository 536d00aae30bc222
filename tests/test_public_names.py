"""The public names: which there are, that they are imported at first use, and their docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyringar as pr
from pyringar import cli, errors

NAMES = """
allreduce Communicator ProcessCommunicator GradientBucketer ShardedStep DataParallel
replicate get_params split_batch evaluate_accuracy_gpus check_allreduce launch
RingarError ArgumentError UnsupportedError BuildError CompilerNotFoundError CudaError
CollectiveTimeout PeerLostError
"""
SUBPACKAGES = {
    "distributed": "ddp_hook",
    "figures": "draw",
    "ops": "all_reduce",
    "train": "train",
}
COMMANDS = "train run trace info build check audit"


def test_public_names_are_listed():
    assert set(pr.__all__) == set(NAMES.split())
    assert {name for name in dir(pr) if name[0] != "_"} == {*pr.__all__, *SUBPACKAGES}
    assert all(hasattr(pr, name) for name in dir(pr))
    assert set(cli._COMMANDS) == set(COMMANDS.split())


def test_reference_has_all_names():
    page = (Path(__file__).parents[1] / "docs/api/README.md").read_text()
    assert "::: pyringar.errors\n" in page
    names = set(pr.__all__) - set(errors.__all__)
    assert {name for name in names if f"::: pyringar.{name}\n" not in page} == set()
    with pytest.raises(AttributeError, match="'pyringar' has no attribute 'al_reduce'"):
        pr.al_reduce  # noqa: B018


FIRST_USE = """
import sys
import pyringar as pr

names = {names!r}
assert not {{"torch", *(f"pyringar.{{name}}" for name in names)}} & set(sys.modules)
before = dir(pr)
for name, member in names.items():
    assert callable(getattr(getattr(pr, name), member))
    assert getattr(pr, name) is sys.modules[f"pyringar.{{name}}"]
assert dir(pr) == before
"""
WITHOUT = """
import sys
import torch.distributed

{missing}
import pyringar as pr
from pyringar.cli import main

assert callable(pr.train.train)
sys.exit(main(["build", "--help"]))
"""
PROGRAMS = {
    "first use": FIRST_USE.format(names=SUBPACKAGES),
    "no distributed": WITHOUT.format(missing="torch.distributed.is_available = lambda: False"),
    "no platformdirs": WITHOUT.format(missing="sys.modules['platformdirs'] = None"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_imports_happen_at_first_use(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- docstrings ------------------------------------------------------------------------------------


def documented(package: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a package, and the classes' public methods."""
    module = importlib.import_module(f"pyringar{package}")
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            function = getattr(value, "__func__", value)  # of a class method
            if isinstance(function, types.FunctionType) and member[0] != "_":
                yield f"{name}.{member}", function


def undocumented(found: Any) -> list[str]:
    """The arguments that a docstring does not name, unless it says to see another one."""
    doc = inspect.getdoc(found) or ""
    if not doc:
        return ["docstring"]
    is_error = inspect.isclass(found) and issubclass(found, BaseException)
    if "See `" in doc or is_error:
        return []
    names = [name for name in inspect.signature(found).parameters if name not in ("self", "cls")]
    return [name for name in names if not re.search(rf"^    .*\b{name}\b.*:", doc, re.MULTILINE)]


@pytest.mark.parametrize("package", ["", *(f".{name}" for name in SUBPACKAGES)])
def test_docstrings_name_all_arguments(package):
    """In plain text, as ``help()`` shows it."""
    for name, found in documented(package):
        assert undocumented(found) == [], name
        assert not re.search(r":\w+:`", inspect.getdoc(found) or ""), name
