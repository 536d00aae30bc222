"""Lazy imports of a package's public names (PEP 562).

Importing torch takes seconds; ``import pyringar`` and ``pyringar train --help`` take milliseconds.
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
    """Return a ``__getattr__`` for a package that imports names at first use.

    ``homes`` maps modules to their public names; ``subpackages`` are the public subpackages.
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names}

    def resolve(name: str) -> Any:
        if name not in home_of and name not in subpackages:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package])  # for "Did you mean"
        try:
            module = importlib.import_module(home_of.get(name, f"{package}.{name}"))
        except UnsupportedError as error:  # raised if torch has no torch.distributed
            raise AttributeError(f"{package}.{name}: {error}") from error
        value = module if name in subpackages else getattr(module, name)
        vars(sys.modules[package])[name] = value
        return value

    return resolve
