"""Wheels with the C++ sources, and optionally with the compiled engine.

``pip install .`` makes a pure Python wheel with the C++ sources in ``pyringar/_csrc``; no compiler
is needed. ``PYRINGAR_PREBUILD=1 python -m build --wheel`` also compiles the engine for any CPU of
this architecture into ``pyringar/_prebuilt`` and tags the wheel with this platform and Python; if
``PYRINGAR_CUDA_ARCHS`` is set, the CUDA engine too, for these architectures. See docs/wheels.md.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


def prebuild_wanted() -> bool:
    """Return whether PYRINGAR_PREBUILD is 1, not unset, "" or 0."""
    value = os.environ.get("PYRINGAR_PREBUILD", "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"PYRINGAR_PREBUILD={value!r}: expected 0 or 1")
    return value == "1"


def load_builder() -> Any:
    """Import ``pyringar.engine.build`` from this checkout, without torch."""
    sys.path.insert(0, str(HERE))
    return importlib.import_module("pyringar.engine.build")


class BuildWithEngine(build_py):
    """Copy the Python files, then compile the engine if PYRINGAR_PREBUILD is 1."""

    def run(self) -> None:
        """Run the command."""
        if not self.editable_mode:  # else the wheel would contain deleted sources
            shutil.rmtree(Path(self.build_lib) / "pyringar", ignore_errors=True)
        super().run()
        if not prebuild_wanted():
            return
        if self.editable_mode:
            raise SystemExit("PYRINGAR_PREBUILD=1 is for wheels; here, run `pyringar build` after")
        logging.basicConfig(level=logging.INFO, format="pyringar: %(message)s")
        load_builder().prebuild(Path(self.build_lib) / "pyringar")


class MaybeBinaryDistribution(Distribution):
    """A distribution whose wheel has a platform tag only if it contains the engine."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel contains machine code."""
        return prebuild_wanted()


setup(
    distclass=MaybeBinaryDistribution,
    cmdclass={"build_py": BuildWithEngine},
    packages=[*find_packages(include=["pyringar", "pyringar.*"]), "pyringar._csrc"],
    package_dir={"pyringar._csrc": "csrc"},
    package_data={
        "pyringar": ["py.typed"],
        "pyringar._csrc": ["**/*.h", "**/*.cpp", "**/*.cuh", "**/*.cu", "**/*.md"],
    },
    include_package_data=False,
)
