"""Import what a package's public names stand for when they are first used (PEP 562).

``import pyringar`` and ``pyringar train --help`` then take milliseconds: torch takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyringar.errors import UnsupportedError


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], subpackages: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    ``homes`` has the public names of each module; ``subpackages`` are public themselves.
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names}

    def resolve(name: str) -> Any:
        """Import a public name; from then on it is an attribute like any other."""
        if name not in home_of and name not in subpackages:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home_of.get(name, f"{package}.{name}"))
        except UnsupportedError as error:  # `distributed`, where torch has none
            raise AttributeError(f"{package}.{name}: {error}") from error
        value = module if name in subpackages else getattr(module, name)
        vars(sys.modules[package])[name] = value
        return value

    return resolve
