"""The ``pyringar`` command: one module per subcommand, each with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from pyringar.errors import RingarError

__all__ = ["main"]

_COMMANDS = ("train", "trace", "predict", "info", "build", "check")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 fine, 1 failed, 2 wrong arguments)."""
    parser = argparse.ArgumentParser(
        prog="pyringar",
        description="Allreduce for many ranks in one process, and the trainers that use it.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in _COMMANDS:
        importlib.import_module(f"pyringar.cli.{name}").add_parser(commands)
    args = parser.parse_args(argv)
    # Paths and variables may hold bytes that are no text: shown all the same.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="pyringar: %(message)s", stream=sys.stderr)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except RingarError as error:
        print(f"pyringar: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a file that was named: its words name it
        print(f"pyringar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pyringar: interrupted", file=sys.stderr)
        return 130
    return status
