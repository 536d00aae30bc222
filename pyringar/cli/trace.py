"""``pyringar trace``: a trace in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from pyringar.cli.paths import check_output_path
from pyringar.train.trace import Trace

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Print what the steps of a training run spent their time on, from the file that
`pyringar train --trace FILE` wrote. Open the file itself in https://ui.perfetto.dev."""


def add_parser(subparsers: Any) -> None:
    """Add ``trace`` to the command line."""
    parser = subparsers.add_parser(
        "trace", help="print where the time of a training run went", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE.json", help="written by pyringar train --trace")
    parser.add_argument("--timeline", metavar="FILE.png", help="draw a step as a picture too")
    parser.add_argument("--step", type=int, metavar="N", help="which step to draw (the last)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; draw the picture."""
    if args.timeline:
        check_output_path("--timeline", args.timeline)
    trace = Trace.load(args.file)
    print(trace)
    if args.timeline:
        trace.plot(args.timeline, args.step)
        print(f"timeline   {args.timeline}")
    return 0
