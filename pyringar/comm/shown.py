"""Let a ``__repr__`` say what state an object is in, whatever happened to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["never_fails"]


def never_fails(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a ``__repr__`` that raises nothing: it is called by those who tell what went wrong.

    Args:
        describe: The method. It waits for nothing and changes nothing.
    """

    @functools.wraps(describe)
    def shown(self: Any) -> str:
        try:
            return describe(self)
        except Exception as error:  # such as AttributeError, where __init__ was left early
            return f"<{type(self).__name__}, not usable ({type(error).__name__})>"

    return shown
