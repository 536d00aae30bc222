"""A command's parser: one line that names the flag where something is wrong with it."""

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

    Unlike argparse's own: options are not abbreviated, as those of tomorrow may begin alike; a
    mistake is one line, which names the nearest option or choice, and not the whole usage.
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
        # argparse's own lets no failure be known.
        print(message, end="", file=file)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        message = re.sub(r"^argument ([^:]+): (?=is )", r"\1 ", message)
        message = re.sub(r"^argument (?=[^:]+: )", "", message)
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End because of arguments that mean nothing here.

        Args:
            unknown: Those arguments.
        """
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
        """Return a message about an argument as one about the option that gave it.

        Args:
            message: Of an error of the library, which begins with the argument's name, and may
                advise another one as in ``with resume='run'``.
        """
        negated = {action.dest for action in self._actions if action.const is False}
        flags = {dest: flag for dest, flag in self.flags().items() if dest not in negated}
        return re.sub(
            r"^\w+|(?<=\bwith )\w+(?==)", lambda name: flags.get(name[0], name[0]), message
        )


def add_json_option(parser: Any) -> None:
    """Add ``--json``, which means the same in every command.

    Args:
        parser: Or a group of its options.
    """
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead, on stdout"
    )
