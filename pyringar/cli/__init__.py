"""The ``pyringar`` command: one module per subcommand, each with ``add_parser`` and ``run``.

Modules import torch inside functions, so ``--help`` and wrong arguments need no torch.
``run`` returns the exit status. If an `ArgumentError` begins with an argument's name, `main`
prints the option, such as ``--lr``, instead of the name.
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
from pyringar.cli.status_line import STATUS, LogHandler
from pyringar.errors import ArgumentError, RingarError

_COMMANDS = ("train", "run", "trace", "info", "build", "check", "audit", "completion")
# Shells report 128 plus the signal number: SIGINT is 2, SIGPIPE 13.
_INTERRUPTED, _NO_READER = 130, 141
# An OSError with one of these numbers and no file name comes from writing to stdout.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; ``argv`` defaults to the arguments of the process.

    Returns the exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted, 141 stdout
    was closed by its reader. SystemExit after ``--help``, ``--version`` and a parsing error.
    """
    argv = sys.argv[1:] if argv is None else argv
    while argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    name = argv[0] if argv and argv[0] in _COMMANDS else ""
    prog = f"pyringar {name}".rstrip()
    try:
        try:
            return _run(argv, [name] if name else _COMMANDS)
        finally:  # flush here: Python's flush at exit would print a traceback
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `pyringar info | head -1`
        _forget_stdout()
        return _NO_READER
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", _INTERRUPTED)
    except RingarError as error:
        return _fail(prog, str(error), 1)
    except OSError as error:
        where = error.filename
        if where is None and error.errno in _WRITE_ERRORS:
            _forget_stdout()
            where = "standard output"
        return _fail(prog, f"{where}: {error.strerror}" if where else str(error), 1)


def make_parser(names: Sequence[str] = _COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and the parsers of the named commands."""
    parser = Parser(
        prog="pyringar",
        description="Train on many ranks with an allreduce, and check what an allreduce computes.",
        epilog="`pyringar help COMMAND` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"pyringar {pyringar.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name in names:
        importlib.import_module(f"pyringar.cli.{name}").add_parser(commands)
    return parser, commands.choices


def _run(argv: Sequence[str], names: Sequence[str]) -> int:
    parser, commands = make_parser(names)
    args, unknown = parser.parse_known_args(argv)
    command = commands.get(args.command, parser)
    if unknown:
        command.refuse(unknown)
    if command is parser:
        parser.print_help()
        return 0
    run = importlib.import_module(f"pyringar.cli.{args.command}").run
    del args.command
    # Escape bytes that are not valid text, which paths and variables may contain.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    _show_log(is_verbose=getattr(args, "verbose", False))
    try:
        status: int = run(args)
    except ArgumentError as error:
        return _fail(command.prog, command.with_flag(str(error)), 2)
    return status


def _show_log(*, is_verbose: bool) -> None:
    """Show the library's log on stderr, without changing the root logger."""
    logger = logging.getLogger("pyringar")
    logger.setLevel(logging.INFO)
    if not logger.handlers and not logging.root.handlers:
        logger.addHandler(LogHandler(is_verbose=is_verbose))
        logger.propagate = False


def _fail(prog: str, message: str, status: int) -> int:
    STATUS.clear()
    print(f"{prog}: {message}", file=sys.stderr)
    return status


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, so that the flush at Python's exit succeeds."""
    with contextlib.suppress(OSError, ValueError):  # stdout may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
