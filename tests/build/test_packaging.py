"""What pip makes of the checkout: wheels with and without the engine, an editable install.

Real pip, with build isolation, in fresh virtual environments. They borrow torch from the one that
runs the tests, so that nothing large is downloaded; the build requirements come from the index.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_engine import REPO, needs_compiler, run

import pyringar
from pyringar.engine import build

USE = """
import json, torch, pyringar
from pyringar.engine import build, load
ranks = [torch.full((5,), float(rank)) for rank in range(3)]
pyringar.allreduce(ranks)
print(json.dumps({
    "package": pyringar.__file__,
    "sources": str(build.Recipe().root()),
    "origin": build.find_engine().origin,
    "engine": load.engine().__file__,
    "sums": [rank.tolist() for rank in ranks],
}))
"""
SHIPPED = ("csrc", "pyringar", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")

slow = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout, for pip writes into it."""
    for name in SHIPPED:
        source, target = REPO / name, tmp_path / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.is_file():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    return tmp_path / "tree"


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all installations: they have one key, so one build serves them."""
    return tmp_path_factory.mktemp("shared") / "cache"


def wheel(python: Path, tree: Path, name: str = "dist", **environment: str | Path) -> Path:
    run(python, "-m", "pip", "wheel", "--no-deps", "-w", name, ".", cwd=tree, **environment)
    (made,) = (tree / name).glob("*.whl")
    return made


def names_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return set(opened.namelist())


def sources() -> set[str]:
    """Every source of both engines."""
    recipes = [build.Recipe(kind=kind) for kind in (build.CPU, build.CUDA)]
    return {
        path.relative_to(recipe.root()).as_posix() for recipe in recipes for path in recipe.files()
    }


def use(python: Path, cwd: Path, **environment: str | Path) -> Mapping[str, object]:
    report = run(python, "-c", USE, cwd=cwd, **environment).strip().splitlines()[-1]
    facts: Mapping[str, object] = json.loads(report)
    assert facts["sums"] == [[3.0] * 5] * 3
    return facts


def test_one_version() -> None:
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert declared is not None
    assert declared.group(1) == pyringar.__version__


class TestPlainWheel:
    pytestmark = slow

    def test_holds_the_sources_and_needs_no_compiler(self, tree: Path, python: Path) -> None:
        made = wheel(python, tree, CXX="/no/compiler", PATH=python.parent)
        assert made.name.endswith("-py3-none-any.whl")
        names = names_in(made)
        assert {f"pyringar/_csrc/{name}" for name in sources()} <= names
        assert not [name for name in names if name.endswith(".so") or name.startswith("tests")]

    @needs_compiler
    def test_compiles_at_the_first_call(
        self, tree: Path, python: Path, tmp_path: Path, shared_cache: Path
    ) -> None:
        run(python, "-m", "pip", "install", "--no-deps", ".", cwd=tree)
        command = python.parent / "pyringar"
        told = run(command, "info", cwd=tmp_path, PYRINGAR_CACHE_DIR=tmp_path / "empty")
        assert "not built yet" in told
        facts = use(python, tmp_path, PYRINGAR_CACHE_DIR=shared_cache)
        assert str(facts["package"]).startswith(str(python.parents[1]))
        assert str(facts["sources"]).endswith("/pyringar/_csrc")
        assert facts["origin"] == "cache"
        told = run(command, "build", "--no-cuda", cwd=tmp_path, PYRINGAR_CACHE_DIR=shared_cache)
        assert "it was there" in told

    def test_ships_no_source_that_was_deleted(self, tree: Path, python: Path) -> None:
        extra = tree / "csrc/core/extra.h"
        extra.write_text("// soon gone\n")
        assert "pyringar/_csrc/core/extra.h" in names_in(wheel(python, tree, "first"))
        extra.unlink()
        assert "pyringar/_csrc/core/extra.h" not in names_in(wheel(python, tree, "second"))


@needs_compiler
class TestPrebuiltWheel:
    pytestmark = slow

    def test_runs_without_a_compiler(self, tree: Path, python: Path, tmp_path: Path) -> None:
        made = wheel(python, tree, PYRINGAR_PREBUILD="1")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        assert re.search(rf"-{tag}-{tag}t?-(linux|macosx).*\.whl$", made.name)
        assert {f"pyringar/_csrc/{name}" for name in sources()} <= names_in(made)
        run(python, "-m", "pip", "install", "--no-deps", made, cwd=tmp_path)
        cache = tmp_path / "cache"
        facts = use(python, tmp_path, PATH=python.parent, PYRINGAR_CACHE_DIR=cache)
        assert facts["origin"] == "wheel"
        assert "/pyringar/_prebuilt/" in str(facts["engine"])
        assert not cache.exists()

    def test_fails_aloud_without_a_compiler(self, tree: Path, python: Path) -> None:
        told = run(
            *(python, "-m", "pip", "wheel", "--no-deps", "."),
            cwd=tree,
            fails=True,
            PYRINGAR_PREBUILD="1",
            PATH=python.parent,
        )
        assert "CompilerNotFoundError" in told
        assert "apt install" in told

    def test_refuses_a_value_it_does_not_know(self, tree: Path, python: Path) -> None:
        told = run(
            *(python, "-m", "pip", "wheel", "--no-deps", "."),
            cwd=tree,
            fails=True,
            PYRINGAR_PREBUILD="yes",
        )
        assert "PYRINGAR_PREBUILD='yes': expected 0 or 1" in told


class TestEditableInstall:
    pytestmark = slow

    @needs_compiler
    def test_uses_the_checkout(
        self, tree: Path, python: Path, tmp_path: Path, shared_cache: Path
    ) -> None:
        run(python, "-m", "pip", "install", "--no-deps", "-e", ".", cwd=tree)
        facts = use(python, tmp_path, PYRINGAR_CACHE_DIR=shared_cache)
        assert facts["package"] == str(tree / "pyringar/__init__.py")
        assert facts["sources"] == str(tree / "csrc")

    def test_does_not_prebuild(self, tree: Path, python: Path) -> None:
        told = run(
            *(python, "-m", "pip", "install", "--no-deps", "-e", "."),
            cwd=tree,
            fails=True,
            PYRINGAR_PREBUILD="1",
        )
        assert "run `pyringar build`" in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sdist_holds_the_sources_and_makes_a_wheel(tree: Path, python: Path) -> None:
    made = run(
        *(sys.executable, "-c"),
        "from setuptools import build_meta; print(build_meta.build_sdist('dist'))",
        cwd=tree,
    )
    archive = tree / "dist" / made.strip().splitlines()[-1]
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"csrc/{name}" for name in sources()} <= names
    assert {"pyproject.toml", "setup.py", "pyringar/engine/build.py"} <= names
    run(python, "-m", "pip", "wheel", "--no-deps", "-w", "from_sdist", archive, cwd=tree)
    (from_sdist,) = (tree / "from_sdist").glob("*.whl")
    assert {f"pyringar/_csrc/{name}" for name in sources()} <= names_in(from_sdist)
