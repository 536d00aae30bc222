"""``pyringar build``: compile the engine now rather than at the first call."""

from __future__ import annotations

import argparse
import time
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add ``build`` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="compile the engine now rather than at the first call",
        description="Compile the C++ engine for this CPU and keep it in the cache. The first call "
        "of a collective does the same; do it here for images, job scripts and slow machines.",
    )
    parser.add_argument("--force", action="store_true", help="compile even if it is there")
    parser.add_argument(
        "--verbose", action="store_true", help="show the compiler's commands and output"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build and load the engine, and print where it is, what compiled it, how long it took."""
    from pyringar import _build, _native

    started = time.monotonic()
    found = None if args.force else _build.find_engine()
    engine = found or _build.build_engine(force=args.force, verbose=args.verbose)
    seconds = time.monotonic() - started
    _native.load(engine)
    print(f"engine    {engine.path}")
    print(f"compiler  {engine.record['compiler']}")
    print(f"flags     {' '.join(engine.record['flags'])}")
    if engine.origin == "built":
        print(f"time      {engine.record['build_s']:.1f} s")
    else:
        print(f"time      {seconds:.2f} s: it was there ({engine.origin}); --force compiles again")
    return 0
