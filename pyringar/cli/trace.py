"""``pyringar trace``: print a trace of a training run as a table."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyringar.cli.parser import add_json_option

_DESCRIPTION = """Print how long each phase of each training step took. The file comes from
`pyringar train --trace FILE`; https://ui.perfetto.dev shows it as a timeline."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trace", help="print the time of each phase of a training run", description=_DESCRIPTION
    )
    parser.add_argument("file", metavar="FILE.json", help="written by pyringar train --trace")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from pyringar.train.step_trace import Trace

    trace = Trace.load(args.file)
    print(json.dumps(trace.as_json(), indent=2) if args.json else trace)
    return 0
