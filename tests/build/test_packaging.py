"""Wheels and editable installs, by pip in virtual environments that link to installed packages."""

from __future__ import annotations

import email
import json
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    "origin": build.find_engine(build.Recipe()).origin,
    "engine": load.engine().__file__,
    "sums": [rank.tolist() for rank in ranks],
}))
"""
SHIPPED = ("csrc", "pyringar", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def slow(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the checkout, since pip writes into the folder that it installs."""
    for name in SHIPPED:
        source, target = REPO / name, tmp_path / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.is_file():
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    return tmp_path / "tree"


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    """Return one engine cache for all tests: their engines have equal cache keys."""
    return tmp_path_factory.mktemp("shared") / "cache"


def pip(python: Path, *arguments: str | Path, **options: Any) -> str:
    command, *rest = arguments
    return run(python, "-m", "pip", command, "--no-deps", *rest, **options)


def wheel(python: Path, tree: Path, name: str = "dist", source: Path | str = ".", **environment):
    pip(python, "wheel", "-w", name, source, cwd=tree, **environment)
    (made,) = (tree / name).glob("*.whl")
    return made


def names_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return set(opened.namelist())


def sources() -> set[str]:
    recipes = [build.Recipe(kind=kind) for kind in (build.CPU, build.CUDA)]
    return {
        path.relative_to(recipe.root()).as_posix() for recipe in recipes for path in recipe.files()
    }


def use(python: Path, cwd: Path, **environment: str | Path) -> Mapping[str, object]:
    report = run(python, "-c", USE, cwd=cwd, **environment).strip().splitlines()[-1]
    facts: Mapping[str, object] = json.loads(report)
    assert facts["sums"] == [[3.0] * 5] * 3
    return facts


def test_version_is_equal_in_all_files():
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{pyringar.__version__}"\n' in project
    citation = (REPO / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {pyringar.__version__}\n" in citation


@slow
def test_wheel_holds_sources_and_metadata(tree, python):
    extra = tree / "csrc/core/extra.h"
    extra.write_text("// soon gone\n")
    assert "pyringar/_csrc/core/extra.h" in names_in(wheel(python, tree, "first"))
    extra.unlink()
    made = wheel(python, tree, CXX="/no/compiler", PATH=python.parent)
    assert made.name.endswith("-py3-none-any.whl")
    names = names_in(made)
    assert {f"pyringar/_csrc/{name}" for name in sources()} <= names
    assert "pyringar/_csrc/core/extra.h" not in names
    assert not [name for name in names if name.endswith(".so") or name.startswith("tests")]
    (about,) = (name for name in names if name.endswith("/METADATA"))
    assert {"pyringar/py.typed", about.replace("METADATA", "licenses/LICENSE")} <= names
    with zipfile.ZipFile(made) as opened:
        metadata = email.message_from_bytes(opened.read(about))
    assert metadata.get_payload(decode=True) == (REPO / "README.md").read_bytes()
    assert metadata["License-Expression"] == "MIT"


@slow
@pytest.mark.thorough
@needs_compiler
def test_plain_wheel_compiles_at_first_call(tree, python, tmp_path, shared_cache):
    pip(python, "install", ".", cwd=tree)
    facts = use(python, tmp_path, PYRINGAR_CACHE_DIR=shared_cache)
    assert str(facts["package"]).startswith(str(python.parents[1]))
    assert str(facts["sources"]).endswith("/pyringar/_csrc")
    assert facts["origin"] == "cache"
    command = (python.parent / "pyringar", "build", "--no-cuda")
    assert "it was there" in run(*command, cwd=tmp_path, PYRINGAR_CACHE_DIR=shared_cache)


@slow
@pytest.mark.thorough
@needs_compiler
def test_prebuilt_wheel_needs_no_compiler(tree, python, tmp_path):
    made = wheel(python, tree, PYRINGAR_PREBUILD="1")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.search(rf"-{tag}-{tag}t?-(linux|macosx).*\.whl$", made.name)
    names = names_in(made)
    assert {f"pyringar/_csrc/{name}" for name in sources()} <= names
    assert not [name for name in names if name.endswith((".log", ".o", ".ninja"))]
    pip(python, "install", made, cwd=tmp_path)
    run(python, REPO / "tests/build/check_wheel.py", cwd=tmp_path)
    cache, alone = tmp_path / "cache", {"PATH": python.parent}
    assert use(python, tmp_path, PYRINGAR_CACHE_DIR=cache, **alone)["origin"] == "wheel"
    assert not cache.exists()


@slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "prebuild", "messages"),
    [
        (["wheel", "."], "1", ["CompilerNotFoundError", "apt install"]),
        (["wheel", "."], "yes", ["PYRINGAR_PREBUILD='yes': expected 0 or 1"]),
        (["install", "-e", "."], "1", ["run `pyringar build`"]),
    ],
)
def test_impossible_prebuild_fails(tree, python, command, prebuild, messages):
    options = {"PYRINGAR_PREBUILD": prebuild, "PATH": python.parent}
    error = pip(python, *command, cwd=tree, fails=True, **options)
    assert [words for words in messages if words not in error] == []


@slow
@pytest.mark.thorough
@needs_compiler
def test_editable_install_uses_the_checkout(tree, python, tmp_path, shared_cache):
    pip(python, "install", "-e", ".", cwd=tree)
    facts = use(python, tmp_path, PYRINGAR_CACHE_DIR=shared_cache)
    assert facts["package"] == str(tree / "pyringar/__init__.py")
    assert facts["sources"] == str(tree / "csrc")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wheel_builds_from_sdist(tree, python):
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    made = run(sys.executable, "-c", code, cwd=tree)
    archive = tree / "dist" / made.strip().splitlines()[-1]
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"csrc/{name}" for name in sources()} <= names
    assert {"pyproject.toml", "setup.py", "pyringar/engine/build.py"} <= names
    from_sdist = wheel(python, tree, "from_sdist", archive)
    assert {f"pyringar/_csrc/{name}" for name in sources()} <= names_in(from_sdist)
