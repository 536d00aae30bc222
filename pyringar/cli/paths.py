"""Check where a command will write, before minutes of work."""

from __future__ import annotations

from pathlib import Path

from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["check_output_path"]


def check_output_path(option: str, path: str | Path, suffix: str = ".png") -> Path:
    """Check that a file can be written.

    Args:
        option: The flag, for messages.
        path: A file that ends in ``suffix``, in a folder that exists.
        suffix: ``".png"`` for pictures, which need matplotlib.

    Raises:
        ArgumentError: It does not, or the folder does not exist.
        UnsupportedError: It is a picture, and matplotlib cannot be imported.
    """
    path = Path(path)
    if path.suffix.lower() != suffix:
        raise ArgumentError(f"{option} is '{path}', expected a file name that ends in {suffix}")
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} is '{path}', but there is no folder '{path.parent}'")
    if suffix != ".png":
        return path
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{option} needs matplotlib, which cannot be imported ({error}); "
            "install it with `pip install matplotlib`"
        ) from error
    return path
