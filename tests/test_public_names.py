"""Does `import pyringar` show what is public, nothing else, and import the rest when used?"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import pyringar as pr

SUBPACKAGES = {
    "distributed": "ddp_hook",
    "figures": "draw",
    "ops": "all_reduce",
    "train": "train",
}

FIRST_USE = """
import sys
import pyringar as pr

names = {names!r}
assert not {{f"pyringar.{{name}}" for name in names}} & set(sys.modules)
for name, member in names.items():
    before = dir(pr)
    assert callable(getattr(getattr(pr, name), member))
    assert getattr(pr, name) is sys.modules[f"pyringar.{{name}}"]
    assert dir(pr) == before, "what is imported shows nothing new"
"""


@pytest.mark.slow
def test_subpackages_are_imported_by_their_first_use():
    program = FIRST_USE.format(names=SUBPACKAGES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT = """
import sys
import torch.distributed

{missing}
import pyringar as pr
from pyringar.cli import main

assert hasattr(pr, "distributed") is {has_distributed}
assert callable(pr.train.train)
sys.exit(main(["build", "--help"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "has_distributed"),
    [
        ("torch.distributed.is_available = lambda: False", False),
        pytest.param("sys.modules['platformdirs'] = None", True, marks=pytest.mark.slow),
    ],
)
def test_commands_and_trainers_need_no_more_than_they_use(missing, has_distributed):
    program = WITHOUT.format(missing=missing, has_distributed=has_distributed)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dir_shows_what_is_public():
    assert all(hasattr(pr, name) for name in dir(pr))
    shown = {name for name in dir(pr) if not name.startswith("_")}
    assert shown == {*pr.__all__, *SUBPACKAGES}
    assert {"comm", "engine", "parallel"} <= set(vars(pr)), "else this test shows nothing"


def docs_of(obj: object) -> list[str]:
    """The docstrings of a public object that are ours, its own and its methods'."""
    members = vars(obj).values() if inspect.isclass(obj) else ()
    functions = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    return [doc for found in (obj, *functions) if (doc := getattr(found, "__doc__", None))]


@pytest.mark.parametrize("package", ["", *SUBPACKAGES])
def test_help_is_plain_text(package):
    """``help()`` shows docstrings as they are: no markup, nothing to look up elsewhere."""
    module = getattr(pr, package) if package else pr
    public = [module, *(getattr(module, name) for name in module.__all__)]
    docs = [doc for found in public for doc in docs_of(found)]
    assert len(docs) > 2
    for doc in docs:
        assert not re.search(r":\w+:`|: As (there|in `)", doc), doc


def test_other_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="'pyringar' has no attribute 'al_reduce'"):
        pr.al_reduce  # noqa: B018
