"""Check at the start of a command that its output files can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["check_output_path"]


def check_output_path(option: str, path: str | Path, suffix: str = ".png") -> Path:
    """Check that a file with a suffix can be written, and return its path with ``~`` expanded.

    An old file stays as it is. For ``".png"`` matplotlib must be installed.
    """
    if not str(path):
        raise ArgumentError(f"{option} is '', expected a file name")
    path = Path(os.path.expanduser(path))
    if path.suffix.lower() != suffix:
        raise ArgumentError(f"{option} is '{path}', expected a file name that ends in {suffix}")
    _try_to_write(option, path)
    if suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(
                f"{option} needs matplotlib, which cannot be imported ({error}); "
                "install it with `pip install matplotlib`"
            ) from error
    return path


def _try_to_write(option: str, path: Path) -> None:
    """Open the file, and make a temporary one beside it, since files are replaced atomically."""
    try:
        target = Path(os.path.realpath(path))  # of a link, which may lead to no file yet
        if not path.parent.is_dir():
            raise ArgumentError(f"{option} is '{path}', but there is no folder '{path.parent}'")
        if target.is_symlink() or os.path.lexists(target):
            target.open("ab").close()
        else:
            target.open("xb").close()
            target.unlink()
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except ArgumentError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"{option} is '{path}', which cannot be written: {reason}") from None
