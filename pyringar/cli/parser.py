"""Parser of a command, whose errors are one line that names the option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from pyringar.choices import did_you_mean

__all__ = ["Parser", "add_json_option"]


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number") from None


class Parser(argparse.ArgumentParser):
    """Read a command's arguments.

    Unlike in argparse, options cannot be abbreviated, and an error is one line that suggests the
    nearest option or choice.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            raise argparse.ArgumentError(
                action,
                f"is {value!r}, expected one of {', '.join(choices)}{did_you_mean(value, choices)}",
            )

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors of writing.
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        message = re.sub(r"^argument ([^:]+): (?=is )", r"\1 ", message)
        message = re.sub(r"^argument (?=[^:]+: )", "", message)
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error that names the first unknown argument."""
        first = unknown[0].partition("=")[0]
        if first.startswith("-"):
            self.error(f"there is no option {first}{did_you_mean(first, self.flags().values())}")
        self.error(f"{first!r} is one argument too many")

    def flags(self) -> dict[str, str]:
        """Return the options as they are typed, by the names of their values."""
        return {
            action.dest: next((f for f in action.option_strings if f.startswith("--")), "-")
            for action in self._actions
            if action.option_strings
        }

    def with_flag(self, message: str) -> str:
        """Replace the argument's name at the beginning of an error message by its option.

        The name in advice such as ``with resume='run'`` is replaced too.
        """
        negated = {action.dest for action in self._actions if action.const is False}
        flags = {dest: flag for dest, flag in self.flags().items() if dest not in negated}
        return re.sub(
            r"^\w+|(?<=\bwith )\w+(?==)", lambda name: flags.get(name[0], name[0]), message
        )


def add_json_option(parser: Any) -> None:
    """Add ``--json`` to a parser or to a group of its options."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead, on stdout"
    )
