"""``pyringar run``: run a torchrun program on ranks that are threads or forked processes."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from pyringar.cli.parser import add_options
from pyringar.errors import RingarError

_DESCRIPTION = """\
Run a program for torchrun unchanged, with all ranks as threads of this process:
no ports, one rank at a time. Deadlocks, calls that differ and lost ranks are
reported at once, with a table of the calls of all ranks. Ranks share modules
and other state of the process. Take --processes for programs that keep state
per rank in modules (accelerate, Lightning), and for programs that call
torch.distributed in several threads."""
# Modules that raise errors of ranks; other modules raise errors about options.
_OF_RANKS = ("pyringar.cluster.cluster", "pyringar.cluster.processes")
_EPILOG = """\
Exit status: 0 all ranks succeeded; 1 a rank raised, or a deadlock; 2 wrong
arguments; 130 interrupted; else the status that a rank gave to sys.exit().

examples:
  pyringar run --ranks 4 train.py --epochs 2
  pyringar run --ranks 2 --seed 7 -m my.package.train
  pyringar run --ranks 2 --processes train_with_accelerate.py
"""

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": ("number of ranks", {"metavar": "K", "type": int, "default": 4}),
    "devices": (
        "one per rank, such as cuda:0,cuda:0 (default: cpu)",
        {"metavar": "D,D,...", "type": lambda text: text.split(",")},
    ),
    "seed": (
        "order of threads; the same seed repeats the run",
        {"metavar": "N", "type": int, "default": 0},
    ),
    "timeout": (
        "limit for a rank that runs while another rank waits",
        {"metavar": "SECONDS", "type": float, "default": 30},
    ),
    "processes": (
        "run ranks as forked processes; each line of output begins with its rank",
        {"action": "store_true"},
    ),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a torchrun program with ranks as threads, or as forked processes",
        usage="pyringar run [OPTION ...] SCRIPT.py|-m MODULE [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, _OPTIONS)
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="for the program"
    )
    rest.required = False


def run(args: argparse.Namespace) -> int:
    """Run the program on all ranks; print the error of a rank like Python does."""
    from pyringar.cli.script import as_program
    from pyringar.cluster.launch import launch
    from pyringar.cluster.rank_table import of_program

    _hint_at_options_of_script(args)
    try:
        with as_program(args.script, args.arguments, is_module=args.is_module) as program:
            launch(
                program,
                args.ranks,
                devices=args.devices,
                seed=args.seed,
                timeout=args.timeout,
                processes=args.processes,
            )
    except Exception as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        is_of_ranks = any(frame.f_globals.get("__name__") in _OF_RANKS for frame in frames)
        if isinstance(error, RingarError) and not is_of_ranks:  # an option of `run` is wrong
            raise
        own = of_program(error.__traceback__)  # omit the frames of pyringar
        traceback.print_exception(type(error), error, own, file=sys.stderr)
        return 1
    return 0


def _hint_at_options_of_script(args: argparse.Namespace) -> None:
    """Warn if an option of `run` follows the script, unless the script has the option in quotes."""
    source = b""
    with contextlib.suppress(OSError):
        source = Path(args.script).read_bytes()
    for flag in (f"--{name}" for name in _OPTIONS):
        given = any(word == flag or word.startswith(f"{flag}=") for word in args.arguments)
        is_known = re.search(rf"['\"]{flag}['\"=]".encode(), source)
        if given and not is_known:
            print(
                f"pyringar run: {flag} after the script belongs to {args.script}; an option of "
                f"pyringar goes before it: pyringar run {flag} ... {args.script}",
                file=sys.stderr,
            )
