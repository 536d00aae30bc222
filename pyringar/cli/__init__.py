"""The ``pyringar`` command: one module per subcommand, each with ``add_parser`` and ``run``.

Modules import torch inside functions, so ``--help`` and wrong arguments are answered at once.
``run`` returns the exit status. An `ArgumentError` that begins with an option's name is reported
with the flag.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

import pyringar
from pyringar.cli.parser import Parser
from pyringar.errors import ArgumentError, RingarError

_COMMANDS = ("train", "run", "trace", "info", "build", "check", "audit")
# As shells name the end by a signal: 128 and its number.
_INTERRUPTED, _NO_READER = 130, 141
# Errors of writing a file; an error without a file name is about stdout.
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; ``argv`` defaults to the arguments of the process.

    Returns the exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted, 141 the
    reader of stdout closed it. SystemExit after ``--help``, ``--version`` and a parsing error.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv and argv[0] in _COMMANDS else ""
    prog = f"pyringar {name}".rstrip()
    try:
        try:
            return _run(argv, [name] if name else _COMMANDS)
        finally:  # here, where a failure can be told, and not when Python ends
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # `| head` has what it wanted
        _forget_stdout()
        return _NO_READER
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", _INTERRUPTED)
    except RingarError as error:
        return _fail(prog, str(error), 1)
    except OSError as error:
        where = error.filename
        if where is None and error.errno in _OF_WRITING:
            _forget_stdout()
            where = "standard output"
        return _fail(prog, f"{where}: {error.strerror}" if where else str(error), 1)


def _run(argv: Sequence[str], names: Sequence[str]) -> int:
    parser = Parser(
        prog="pyringar",
        description="Allreduce for many ranks in one process, and the trainers that use it.",
        epilog="`pyringar COMMAND --help` tells what each takes.",
    )
    parser.add_argument("--version", action="version", version=f"pyringar {pyringar.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    modules = {name: importlib.import_module(f"pyringar.cli.{name}") for name in names}
    for module in modules.values():
        module.add_parser(commands)
    args, unknown = parser.parse_known_args(argv)
    command: Parser = commands.choices.get(args.command, parser)
    if unknown:
        command.refuse(unknown)
    if command is parser:
        parser.print_help()
        return 0
    run = modules[args.command].run
    del args.command
    # Paths and variables may hold bytes that are no text: shown all the same.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    _show_log()
    try:
        status: int = run(args)
    except ArgumentError as error:
        return _fail(command.prog, command.with_flag(str(error)), 2)
    return status


def _show_log() -> None:
    """Show the library's log on stderr, without changing the root logger."""
    logger = logging.getLogger("pyringar")
    logger.setLevel(logging.INFO)
    if not logger.handlers and not logging.root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("pyringar: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _fail(prog: str, message: str, status: int) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return status


def _forget_stdout() -> None:
    """Replace stdout by /dev/null, so that Python's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):  # stdout of a test or a notebook is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
