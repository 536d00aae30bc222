"""``pyringar tune``: measure this machine, and write the table that ``auto`` follows."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyringar.comm.tuner import Case, Sample

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Time every algorithm on this machine, for CPU ranks, ranks in processes of
their own, and GPUs where there are some; write the table that `auto` follows
from then on. comm.plan(nbytes) cites it. Takes about a minute; leave the
machine alone meanwhile."""
_EPILOG = """\
The table lies in the cache, apart for every kind of processor and number of
cores, or where PYRINGAR_TUNING says; PYRINGAR_TUNING=shipped ignores it.
Processes that run go on with the table that they began with.

examples:
  pyringar tune
  pyringar tune --places host --ranks 2,4 --sizes 4KiB,1MiB,64MiB
  pyringar tune --show
  pyringar tune --reset
"""
_PLACES = ("host", "processes", "gpu", "gpus")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZES = "4KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def add_parser(subparsers: Any) -> None:
    """Add ``tune`` to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure this machine, for `auto` to choose by",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--places",
        type=_places,
        default=_PLACES,
        metavar="LIST",
        help=f"what to measure, of {', '.join(_PLACES)} (all that is there)",
    )
    parser.add_argument(
        "--ranks", type=_counts, default=(2, 4, 8), metavar="LIST", help="numbers of ranks (2,4,8)"
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes(_SIZES),
        metavar="LIST",
        help=f"of one rank's tensor ({_SIZES})",
    )
    parser.add_argument(
        "--rounds", type=_count, default=11, metavar="N", help="measurements of each (11)"
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--out", type=Path, metavar="FILE", help="write there, not to the cache")
    other.add_argument("--show", action="store_true", help="measure nothing; show the table")
    other.add_argument("--reset", action="store_true", help="delete the table")
    parser.set_defaults(run=run)


def _places(text: str) -> tuple[str, ...]:
    places = tuple(text.split(","))
    odd = [place for place in places if place not in _PLACES]
    if odd:
        raise argparse.ArgumentTypeError(f"{odd[0]!r} is none of {', '.join(_PLACES)}")
    return places


def _count(text: str) -> int:
    if re.fullmatch("[0-9]{1,4}", text) is None or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 9999")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> int:
    found = re.fullmatch("([0-9]{1,19})([KMG]iB|B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 4KiB or 64MiB")
    nbytes = int(found[1]) * _UNITS[found[2] or "B"]
    if nbytes == 0 or nbytes % 4 or nbytes >= 2**40:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive number of 4-byte elements, below 1 TiB"
        )
    return nbytes


def run(args: argparse.Namespace) -> int:
    """Measure and write, or show, or delete."""
    from pyringar.comm import tuning

    path = tuning.path()
    if args.reset:
        return _reset(path)
    if args.show:
        return _show(path)
    return _tune(args, args.out or path)


def _reset(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        print(f"there is no table at {path}: `auto` follows the shipped one")
    else:
        print(f"deleted {path}: `auto` follows the shipped table again")
    return 0


def _show(path: Path) -> int:
    if not path.exists():
        print(f"there is no table at {path}: `auto` follows the shipped one (run `pyringar tune`)")
        return 0
    print(path)
    print(path.read_text(encoding="utf-8", errors="backslashreplace"), end="")
    return 0


def _tune(args: argparse.Namespace, path: Path) -> int:
    from tqdm import tqdm

    from pyringar.comm import tuner

    cases = tuner.plan_cases(args.places, args.ranks, args.sizes)
    if not cases:
        print(f"nothing to measure: no GPUs for {', '.join(args.places)}", file=sys.stderr)
        return 1
    samples: list[Sample] = []
    total = sum(len(case.sizes_bytes) for case in cases)
    with tqdm(total=total, unit="size", disable=None) as bar:
        for case in cases:
            bar.set_description(f"{case.place}, {case.world_size} ranks")
            for sample in tuner.measure(case, args.rounds):
                samples.append(sample)
                bar.update()
    content = tuner.table_of(samples)
    tuner.write_table(content, path)
    print(_render(cases, samples, content))
    print(f"\nwritten to {path}")
    if args.out is not None:
        print(f"set PYRINGAR_TUNING={path} for `auto` to follow it")
    return 0


def _render(cases: Sequence[Case], samples: Sequence[Sample], content: dict[str, Any]) -> str:
    """What was measured, and what ``auto`` makes of it."""
    from pyringar.comm import tuning

    names = tuple(dict.fromkeys(n for s in samples for n in s.seconds))
    form = "{:<10} {:>5} {:>9}" + " {:>12}" * len(names) + "  {:<8} {:<8}"
    lines = [
        form.format(
            "place", "ranks", "per rank", *(f"{n} us" for n in names), "auto", "in rank order"
        )
    ]
    table = tuning.parse_table(content)
    for sample in samples:
        case = sample.case
        cells = [f"{sample.seconds[n] * 1e6:.1f}" if n in sample.seconds else "" for n in names]
        chosen = []
        for order in ("any", "rank"):
            found = table.find(case.place, case.world_size, order, case.device_name)
            chosen.append(found.at(sample.nbytes)[0] if found is not None else "")
        size = _format_size(sample.nbytes)
        lines.append(form.format(case.place, case.world_size, size, *cells, *chosen).rstrip())
    return "\n".join(lines)


def _format_size(nbytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]} {unit}"
    return f"{nbytes} B"
