"""``pyringar build``: compile the engines now rather than at the first call."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyringar.engine import build, load
from pyringar.errors import CompilerNotFoundError

__all__ = ["add_parser", "kernel_table", "run"]

_KERNEL_COLUMNS = {
    **{"arch": "arch", "registers": "registers", "stack_bytes": "stack B"},
    **{"spill_store_bytes": "spill stores B", "spill_load_bytes": "spill loads B"},
    "name": "kernel",
}


def add_parser(subparsers: Any) -> None:
    """Add ``build`` to the command line."""
    parser = subparsers.add_parser(
        "build",
        help="compile the engines now rather than at the first call",
        description="Compile the engine for this CPU, and the CUDA engine where torch is a CUDA "
        "build and nvcc is there, and keep them in the cache. The first call of a collective does "
        "the same; do it here for images, job scripts and slow machines.",
    )
    parser.add_argument("--force", action="store_true", help="compile even what is there")
    parser.add_argument(
        "--cuda",
        action=argparse.BooleanOptionalAction,
        help="the CUDA engine: whatever torch is, and an error if it cannot be; or not at all",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show the compilers' commands and output, and each kernel's registers and spills",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build and load the engines, and print where each is, what compiled it, how long it took."""
    _build_and_describe(build.CPU, args)
    if args.cuda is None and torch.version.cuda is None:
        print("cuda      not built: torch is a CPU build (--cuda builds it all the same)")
    elif args.cuda is not False:
        try:
            _build_and_describe(build.CUDA, args)
        except CompilerNotFoundError as error:
            if args.cuda or os.environ.get("PYRINGAR_NVCC"):  # asked for, in one way or the other
                raise
            print(f"cuda      not built: {error}")
    return 0


def _build_and_describe(kind: build.EngineKind, args: argparse.Namespace) -> None:
    started, recipe = time.monotonic(), build.Recipe(kind=kind)
    found = None if args.force else build.find_engine(recipe)
    engine = found or build.build_engine(recipe, force=args.force, verbose=args.verbose)
    seconds = time.monotonic() - started
    load.load(engine)
    print(f"{'cuda' if kind.cuda else 'engine':<9} {engine.path}")
    print(f"compiler  {engine.record['compiler']}")
    print(f"flags     {' '.join(engine.record['flags'])}")
    if kind.cuda:
        print(f"nvcc      {engine.record['nvcc']}")
        print(f"archs     {', '.join(engine.record['archs'])}")
        if args.verbose:
            print("\n".join(kernel_table(engine.record["kernels"])))
    if engine.origin == "built":
        print(f"time      {engine.record['build_s']:.1f} s")
    else:
        print(f"time      {seconds:.2f} s: it was there ({engine.origin}); --force compiles again")


def kernel_table(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of the kernels in a build's record, their names last."""
    rows = [[str(kernel[key]) for key in _KERNEL_COLUMNS] for kernel in kernels]
    rows.insert(0, list(_KERNEL_COLUMNS.values()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*map(str.rjust, row[:-1], widths), row[-1]])  # names are long: not padded
        for row in rows
    ]
