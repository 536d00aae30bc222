"""``pyringar trace``: a trace in the terminal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyringar.cli.parser import add_json_option

_DESCRIPTION = """Print what the steps of a training run spent their time on, from the file that
`pyringar train --trace FILE` wrote. Open the file itself in https://ui.perfetto.dev."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace", help="print where the time of a training run went", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE.json", help="written by pyringar train --trace")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from pyringar.train.step_trace import Trace

    trace = Trace.load(args.file)
    print(json.dumps(trace.as_json(), indent=2) if args.json else trace)
    return 0
