"""``pyringar trace``: a trace in the terminal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyringar.cli.parser import add_json_option
from pyringar.cli.paths import check_output_path
from pyringar.errors import ArgumentError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Print what the steps of a training run spent their time on, from the file that
`pyringar train --trace FILE` wrote. Open the file itself in https://ui.perfetto.dev."""


def add_parser(subparsers: Any) -> None:
    """Add ``trace`` to the command line."""
    parser = subparsers.add_parser(
        "trace", help="print where the time of a training run went", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE.json", help="written by pyringar train --trace")
    add_json_option(parser)
    parser.add_argument("--timeline", metavar="FILE.png", help="draw a step as a picture too")
    parser.add_argument("--step", type=int, metavar="N", help="which step to draw (the last)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables; draw the picture."""
    from pyringar.train.trace import Trace

    if args.timeline is not None:
        args.timeline = check_output_path("--timeline", args.timeline)
    trace = Trace.load(args.file)
    if args.step is not None and args.step not in trace.steps():
        steps = f"{trace.steps()[0]} to {trace.steps()[-1]}"
        raise ArgumentError(f"--step is {args.step}, expected one of the trace's steps, {steps}")
    if args.step is not None and args.timeline is None:
        raise ArgumentError(f"--step is {args.step}, which needs --timeline: it says what to draw")
    if args.timeline is not None:
        trace.plot(args.timeline, args.step)
    if args.json:
        print(json.dumps(trace.as_json(), indent=2))
        return 0
    print(trace)
    if args.timeline is not None:
        print(f"\ntimeline   {args.timeline}")
    return 0
