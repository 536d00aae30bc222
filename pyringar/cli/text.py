"""Texts for a terminal: their layout, and what several commands say."""

from __future__ import annotations

import textwrap

_COLUMNS = 80
_LABEL = 11  # columns


def paragraph(text: str, label: str = "", width: int = _LABEL) -> str:
    """Wrap text to the width of a terminal, beside a label of fewer letters than ``width``."""
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=f"{label:<{width}}" if label else "",
        subsequent_indent=" " * (width if label else 2),
        break_on_hyphens=False,
        break_long_words=False,
    )


def why_no_gpu() -> str:
    """Return why torch has no GPU here, "" if it has one."""
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "" if torch.cuda.is_available() else "no GPU or no driver"
