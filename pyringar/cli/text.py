"""Texts for a terminal: their layout, and what several commands say."""

from __future__ import annotations

import textwrap

__all__ = ["COLUMNS", "paragraph", "why_no_gpu"]

COLUMNS = 80
_LABEL = 11  # columns


def paragraph(text: str, label: str = "") -> str:
    """Return text in lines that fit a terminal, beside its label; words stay whole.

    Args:
        text: Words with spaces between.
        label: Of up to 10 letters; without one, the lines are indented a little.
    """
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=f"{label:<{_LABEL}}" if label else "",
        subsequent_indent=" " * (_LABEL if label else 2),
        break_on_hyphens=False,
        break_long_words=False,
    )


def why_no_gpu() -> str:
    """Return why torch has no GPU here, "" if it has one."""
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "" if torch.cuda.is_available() else "no GPU or no driver"
