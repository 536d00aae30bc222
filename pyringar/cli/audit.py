"""``pyringar audit``: find out which sum an allreduce computes, bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from pyringar.choices import ORDERS, did_you_mean
from pyringar.cli.parser import add_json_option, add_options
from pyringar.cli.status_line import STATUS, duration, load_engine
from pyringar.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pyringar.audit.library_ranks import LibraryTarget
    from pyringar.audit.probes import AuditTarget
    from pyringar.grading.graded_calls import ListAllreduce

_DESCRIPTION = """\
Find out by experiment how an allreduce adds: in which order, where it rounds,
whether bits depend on the rank, the run or the size of a message, and how it
treats NaN, infinities, -0 and subnormals. Takes 10 s to some minutes."""
_EPILOG = """\
TARGET is a library, whose ranks run as processes on this machine:
  gloo     the backend of torch.distributed for CPUs
  ringar   pyringar.ProcessCommunicator, with the order of --order
  nccl     the backend of torch.distributed for GPUs; each rank needs a GPU
or a function: MODULE:FUNCTION or FILE.py:FUNCTION. The function takes a list of
tensors, one per rank, and leaves their sum in each. Its code runs with your
user's rights.

Exit status: 0 the audit ran, whatever it found; 1 the ranks did not start;
2 wrong arguments, or a library that is not installed.

examples:
  pyringar audit gloo --ranks 4
  pyringar audit ringar --ranks 3 --order rank
  pyringar audit solution.py:allreduce --ranks 5
"""
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": ("number of ranks", {"metavar": "K", "type": int, "default": 4}),
    "sizes": ("elements of each message (default: 1 to 1048576)", {"metavar": "N,N,..."}),
    "order": ("order of addition, for ringar (default: any)", {"choices": ORDERS}),
    "timeout": (
        "limit of a call, and of the import of a function",
        {"metavar": "SECONDS", "type": float, "default": 30},
    ),
}
_LIBRARIES = ("gloo", "ringar", "nccl")
_MAX_RANKS = 30  # the audit encodes a set of ranks as bits of an int32
_MAX_ELEMENTS = 1 << 24


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="find out in which order an allreduce adds and where it rounds",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="a library or a function (see below)")
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

        # Estimated number of calls, from measurements with the default sizes and 2 to 5 ranks.
        usual_calls = 0 if sizes else 200 + 15 * args.ranks * (args.ranks - 1)
        report = audit(_Progressive(target, usual_calls), sizes or SIZES)
    STATUS.clear()
    print(json.dumps(report.as_dict(), indent=2) if args.json else report)
    return 0


class _Progressive:
    """An audit target that shows the number of its calls on the status line."""

    def __init__(self, target: AuditTarget, usual_calls: int) -> None:
        self.name, self.ranks, self.ways = target.name, target.ranks, target.ways
        self._target, self._usual, self._count = target, usual_calls, 0
        self._begin_s = time.monotonic()
        STATUS.start()

    def reduce(
        self, inputs: Sequence[Tensor], way: str = "in place", cuts: Sequence[int] = ()
    ) -> list[Tensor]:
        self._count += 1
        text = f"auditing {self.name}: call {self._count}"
        if self._count < self._usual:
            left_s = (time.monotonic() - self._begin_s) * (self._usual / self._count - 1)
            text += f" of about {self._usual}, about {duration(left_s)} left"
        STATUS.show(text)
        return self._target.reduce(inputs, way, cuts)


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


def _target(args: argparse.Namespace) -> AbstractContextManager[LibraryTarget | ListAllreduce]:
    if args.target not in _LIBRARIES:
        return _function(args)
    from pyringar.audit.library_ranks import LibraryTarget

    if args.target == "ringar":
        load_engine()  # show progress here; later the ranks load the engine
    if args.target == "nccl":
        import torch

        if torch.cuda.device_count() < args.ranks:
            raise ArgumentError(
                f"ranks is {args.ranks}, but nccl needs a GPU for each, and there are "
                f"{torch.cuda.device_count()}"
            )
    return LibraryTarget(args.target, args.ranks, args.timeout, order=args.order or "any")


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
