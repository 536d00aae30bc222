"""Parse arguments, check output files, and wrap text for a terminal."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pyringar.choices import did_you_mean
from pyringar.errors import ArgumentError, UnsupportedError

_MIN_COLUMNS, _MAX_COLUMNS = 40, 100
_LABEL = 11  # columns
_OF_TORCHRUN = {"--nproc-per-node": "--ranks", "--nproc_per_node": "--ranks"}


def _reader(kind: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}, expected {expected}") from None

    return read


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors that suggest the nearest option or choice."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.register("type", int, _reader(int, "a whole number"))
        self.register("type", float, _reader(float, "a number"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action,
                f"is {value!r}, expected one of {', '.join(choices)}{did_you_mean(value, choices)}",
            )

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's method ignores write errors; this print raises them.
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+): (?=is )", r"\1 ", message)
        message = re.sub(r"^argument (?=[^:]+: )", "", message)
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        first = unknown[0].partition("=")[0]
        near = _OF_TORCHRUN.get(first, first)
        if first.startswith("-"):
            self.error(f"there is no option {first}{did_you_mean(near, self.flags().values())}")
        self.error(f"{first!r} is one argument too many")

    def flags(self) -> dict[str, str]:
        """Return the long option of each argument, by the argument's name."""
        return {
            action.dest: next((f for f in action.option_strings if f.startswith("--")), "-")
            for action in self._actions
            if action.option_strings
        }

    def with_flag(self, message: str) -> str:
        """Replace an argument's name, at the start or in ``with NAME=``, by its option."""
        negated = {action.dest for action in self._actions if action.const is False}
        flags = {dest: flag for dest, flag in self.flags().items() if dest not in negated}
        return re.sub(r"^\w+|(?<=\bwith )\w+(?==)", lambda m: flags.get(m[0], m[0]), message)


def add_options(parser: Any, options: Mapping[str, tuple[str, dict[str, Any]]]) -> None:
    """Add options by name; each has a help text and arguments for argparse."""
    for name, (text, how) in options.items():
        default = " (default: %(default)s)" if "default" in how else ""
        parser.add_argument(f"--{name}", help=f"{text}{default}", **how)


def add_json_option(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")


def check_output_path(option: str, path: str | Path, suffix: str = ".png") -> Path:
    """Check the suffix and that the file can be written; return the path with ``~`` expanded."""
    if not str(path):
        raise ArgumentError(f"{option} is '', expected a file name")
    path = Path(os.path.expanduser(path))
    if path.suffix.lower() != suffix:
        raise ArgumentError(f"{option} is '{path}', expected a file name that ends in {suffix}")
    try:
        has_folder = path.parent.is_dir()
        if has_folder:
            _try_to_write(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"{option} is '{path}', which cannot be written: {reason}") from None
    if not has_folder:
        raise ArgumentError(f"{option} is '{path}', but there is no folder '{path.parent}'")
    if suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UnsupportedError(
                f"{option} needs matplotlib, which cannot be imported ({error}); "
                "install it with `pip install matplotlib`"
            ) from error
    return path


def _try_to_write(path: Path) -> None:
    """Open the file, and create a temporary file in its folder, as an atomic write does."""
    target = Path(os.path.realpath(path))  # a symbolic link may point to a missing file
    if os.path.lexists(target):
        target.open("ab").close()
    else:
        target.open("xb").close()
        target.unlink()
    with tempfile.TemporaryFile(dir=target.parent):
        pass


def paragraph(text: str, label: str = "", width: int = _LABEL) -> str:
    """Wrap text to the width of the terminal, beside a label shorter than ``width``."""
    return textwrap.fill(
        text,
        max(_MIN_COLUMNS, min(shutil.get_terminal_size().columns, _MAX_COLUMNS)),
        initial_indent=f"{label:<{width}}" if label else "",
        subsequent_indent=" " * (width if label else 2),
        break_on_hyphens=False,
        break_long_words=False,
    )


def why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "" if torch.cuda.is_available() else "no GPU or no driver"
