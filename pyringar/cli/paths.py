"""Check where a command will write, before minutes of work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["check_output_path"]


def check_output_path(
    option: str, path: str | Path, suffix: str | tuple[str, ...] = ".png"
) -> Path:
    """Check that a file can be written. One that is there stays as it is.

    Args:
        option: The flag, for messages.
        path: A file that ends in ``suffix``, in a folder that exists.
        suffix: ``".png"`` for pictures, which need matplotlib; or several to choose from.

    Returns:
        The path, ``~`` expanded.

    Raises:
        ArgumentError: It cannot, it is a folder, or it has another ending.
        UnsupportedError: It is a picture, and matplotlib cannot be imported.
    """
    path = _expanded(option, path, "a file name")
    suffixes = (suffix,) if isinstance(suffix, str) else suffix
    if path.suffix.lower() not in suffixes:
        raise ArgumentError(
            f"{option} is '{path}', expected a file name that ends in {' or '.join(suffixes)}"
        )
    _try_to_write(option, path)
    if ".png" not in suffixes:
        return path
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{option} needs matplotlib, which cannot be imported ({error}); "
            "install it with `pip install matplotlib`"
        ) from error
    return path


def check_output_dir(option: str, path: str | Path) -> Path:
    """Check that files can be written to a folder, which is made if only it is missing.

    Args:
        option: The flag, for messages.
        path: The folder.

    Returns:
        The path, ``~`` expanded.

    Raises:
        ArgumentError: They cannot.
    """
    path = _expanded(option, path, "the path of a folder")
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise _refusal(option, path, error) from None
    return path


def _expanded(option: str, path: str | Path, expected: str) -> Path:
    if not str(path):
        raise ArgumentError(f"{option} is '', expected {expected}")
    return Path(os.path.expanduser(path))


def _try_to_write(option: str, path: Path) -> None:
    """Open the file: folders' and files' rights, and file systems, have too many rules to know."""
    try:
        if not path.parent.is_dir():
            raise ArgumentError(f"{option} is '{path}', but there is no folder '{path.parent}'")
        target = Path(os.path.realpath(path))  # of a link, which may lead to no file yet
        if not os.path.lexists(target):
            target.open("xb").close()
            target.unlink()
        elif target.is_symlink() or target.is_file() or target.is_dir():  # a pipe would wait
            target.open("ab").close()
        if path.suffix.lower() == ".pt":  # written beside the old one, and then put in its place
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except ArgumentError:
        raise
    except (OSError, ValueError) as error:
        raise _refusal(option, path, error) from None


def _refusal(option: str, path: Path, error: Exception) -> ArgumentError:
    reason = getattr(error, "strerror", None) or error
    return ArgumentError(f"{option} is '{path}', which cannot be written: {reason}")
