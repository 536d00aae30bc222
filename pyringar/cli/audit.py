"""``pyringar audit``: which sum an allreduce computes, and on which bits one can rely."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from typing import TYPE_CHECKING, Any

from pyringar.choices import ORDERS, did_you_mean
from pyringar.cli.parser import add_json_option, add_options
from pyringar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pyringar.audit.ranks import Ranks
    from pyringar.grading.graded_calls import ListAllreduce

_DESCRIPTION = """\
Find out by experiment what an allreduce computes: in which order it adds, where
it rounds, whether bits depend on the rank, the run or the size of a message,
and what becomes of NaN, infinities, -0 and subnormals."""
_EPILOG = """\
TARGET is a library, whose ranks are started as processes of this machine
  gloo     torch.distributed's backend for CPUs
  ringar   pyringar.ProcessCommunicator, with the --order that it is to promise
  nccl     torch.distributed's backend for GPUs, of which every rank has one
or MODULE:FUNCTION or FILE.py:FUNCTION, which is called with a list of tensors,
one per rank, and leaves their sum in all. That runs the code, with your rights.

Exit status: 0 the audit ran, whatever it found; 1 the ranks did not start;
2 wrong arguments (a library that is not there, too).

examples:
  pyringar audit gloo --ranks 4
  pyringar audit ringar --ranks 3 --order rank
  pyringar audit solution.py:allreduce --ranks 5
"""
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": ("how many", {"metavar": "K", "type": int, "default": 4}),
    "sizes": ("elements of the messages (default: 1 to 1048576)", {"metavar": "N,N,..."}),
    "order": ("what ringar is to promise (default: any)", {"choices": ORDERS}),
    "timeout": (
        "for a call, and for the import of a function",
        {"metavar": "SECONDS", "type": float, "default": 30},
    ),
}
_LIBRARIES = ("gloo", "ringar", "nccl")
_MAX_RANKS = 30  # sets of ranks are bits of an int32
_MAX_ELEMENTS = 1 << 24


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="find out which sum an allreduce computes, bit for bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="a library or a function, see below")
    add_options(parser, _OPTIONS)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if not 2 <= args.ranks <= _MAX_RANKS:
        raise ArgumentError(f"ranks is {args.ranks}, expected 2 to {_MAX_RANKS}")
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise ArgumentError(f"timeout is {args.timeout:g}, expected a positive number of seconds")
    if args.order is not None and args.target != "ringar":
        raise ArgumentError(f"order is {args.order!r}, but only the target ringar takes one")
    sizes = _sizes(args.sizes)
    with _target(args) as target:
        from pyringar.audit.questions import SIZES, audit

        report = audit(target, sizes or SIZES)
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 0


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(1 <= numel <= _MAX_ELEMENTS for numel in sizes):
        raise ArgumentError(
            f"sizes is {text!r}, expected numbers from 1 to {_MAX_ELEMENTS} with commas between"
        )
    return sizes


def _target(args: argparse.Namespace) -> AbstractContextManager[Ranks | ListAllreduce]:
    if args.target not in _LIBRARIES:
        return _function(args)
    from pyringar.audit.ranks import Ranks

    if args.target == "nccl":
        import torch

        if torch.cuda.device_count() < args.ranks:
            raise ArgumentError(
                f"ranks is {args.ranks}, but nccl needs a GPU for each, and there are "
                f"{torch.cuda.device_count()}"
            )
    return Ranks(args.target, args.ranks, args.timeout, order=args.order or "any")


@contextlib.contextmanager
def _function(args: argparse.Namespace) -> Iterator[ListAllreduce]:
    from pyringar.cli.check import shower, target_of
    from pyringar.grading.graded_calls import ListAllreduce
    from pyringar.grading.remote import graded
    from pyringar.grading.solution import CannotLoadError

    if ":" not in args.target:
        expected = ", ".join(_LIBRARIES)
        raise ArgumentError(
            f"TARGET is {args.target!r}, expected one of {expected}, MODULE:FUNCTION, "
            f"FILE.py:FUNCTION{did_you_mean(args.target, _LIBRARIES)}"
        )
    target, show = target_of(args.target, ""), shower("pyringar audit")
    try:
        with graded(target, ["cpu"] * args.ranks, args.timeout, show) as remote:
            name = f"{os.path.basename(target.where)}:{target.function}"
            yield ListAllreduce(lambda case, x: remote.rested().run(case, x), name, args.ranks)
    except CannotLoadError as error:
        raise ArgumentError(f"nothing was audited: {error}") from error
