"""The table that ``auto`` follows: measured here by ``pyringar tune``, or the shipped one.

A table says, for a place where ranks can be and a number of them, from which number of bytes on
which algorithm is taken. Both are JSON of one form: ``tuning.json`` beside this file, and one file
for every processor in the cache, so that machines may share a cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import reprlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.engine import build as _build
from pyringar.engine import toolchain as _toolchain
from pyringar.engine.files import read_json
from pyringar.errors import ArgumentError, RingarError

__all__ = [
    "ENVIRONMENT",
    "VERSION",
    "Choices",
    "Table",
    "algorithms_for",
    "choices",
    "describe",
    "machine",
    "parse_table",
    "path",
    "shipped",
]

VERSION = 1
ENVIRONMENT = "PYRINGAR_TUNING"
SHIPPED_PATH = Path(__file__).with_name("tuning.json")

# What ranks at a place can take, and what of it adds in the order of the ranks.
ALGORITHMS = {
    "host": ("fused", "direct", "ring"),
    "gpu": ("fused", "direct", "ring"),
    "gpus": ("direct", "ring"),
    "mixed": ("direct",),
    "processes": ("direct", "ring"),
}
IN_RANK_ORDER = ("fused", "direct")

_MOST = 2**63
_MOST_FILE_BYTES = 64 << 20
_short = reprlib.Repr().repr  # whatever it is: neither long nor deep

logger = logging.getLogger(__name__)


def algorithms_for(place: str, order: str) -> tuple[str, ...]:
    """What ``auto`` may take at a place, in an order."""
    known = ALGORITHMS[place]
    return known if order == "any" else tuple(name for name in known if name in IN_RANK_ORDER)


@dataclass(frozen=True)
class Choices:
    """What ``auto`` takes at one place, for one number of ranks.

    Attributes:
        from_bytes: Ascending, from 0: where the next algorithm begins, in bytes of one rank.
        algorithms: One for each of these.
        whys: Likewise, for people.
        rule: What the engines take for an algorithm: the name of the only one, or
            ``(name, bytes, name, bytes, name, ...)``, each from so many bytes on.
    """

    from_bytes: tuple[int, ...]
    algorithms: tuple[str, ...]
    whys: tuple[str, ...]
    rule: str | tuple[str | int, ...]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, str, str]]) -> Choices:
        """From ``(from_bytes, algorithm, why)``."""
        from_bytes, algorithms, whys = zip(*rows, strict=True)
        rule: tuple[str | int, ...] = (algorithms[0],)
        for begin, name in zip(from_bytes, algorithms, strict=True):
            if name != rule[-1]:
                rule += (begin, name)
        return cls(from_bytes, algorithms, whys, rule if len(rule) > 1 else algorithms[0])

    @classmethod
    def parse(cls, rows: Any, place: str, order: str) -> Choices:
        """From a list of ``{"from_bytes", "algorithm", "why"}``, as JSON has it.

        Raises:
            ValueError: It is none, or says what this place or order does not have.
        """
        try:
            triples = [(row["from_bytes"], row["algorithm"], row["why"]) for row in rows]
        except (TypeError, KeyError):
            raise ValueError(f"{_short(rows)} is no list of choices") from None
        known = algorithms_for(place, order)
        for _, name, why in triples:
            if name not in known:
                raise ValueError(
                    f"{_short(name)} is not among {known}, which {place!r} has in order {order!r}"
                )
            _check_text("why", why)
        begins = [begin for begin, _, _ in triples]
        are_bytes = all(type(begin) is int and begin < _MOST for begin in begins)
        if not are_bytes or begins != sorted({0, *begins}):
            raise ValueError(
                f"choices begin at {_short(begins)}, expected ascending bytes from 0 on, below 2^63"
            )
        return cls.of(triples)

    def rows(self) -> list[dict[str, Any]]:
        """What :meth:`parse` reads."""
        names = ("from_bytes", "algorithm", "why")
        triples = zip(self.from_bytes, self.algorithms, self.whys, strict=True)
        return [dict(zip(names, triple, strict=True)) for triple in triples]

    def at(self, nbytes: int) -> tuple[str, str]:
        """The algorithm for ``nbytes`` per rank, and why."""
        i = bisect_right(self.from_bytes, nbytes) - 1
        return self.algorithms[i], self.whys[i]


@dataclass(frozen=True)
class Entry:
    """One table of a file: where it holds, and what it says."""

    place: str
    device: str | None  # the GPUs' name; None for any, and for the host
    world_size: int | None  # None: any
    order: str | None  # "any" or "rank"; None for both
    choices: Choices


@dataclass(frozen=True)
class Table:
    """All tables of a file, and when they were measured; None for the shipped ones."""

    entries: tuple[Entry, ...]
    date: str | None

    def find(self, place: str, world_size: int, order: str, device: str | None) -> Choices | None:
        """The choices for the nearest number of ranks there is; None if there are none here."""
        fitting = [
            e
            for e in self.entries
            if e.place == place and e.order in (None, order) and e.device in (None, device)
        ]
        if not fitting:
            return None
        return min(fitting, key=lambda e: _distance(e.world_size, world_size)).choices


def _distance(measured: int | None, wanted: int) -> float:
    if measured is None:
        return 0.0
    return max(measured / wanted, wanted / measured)


def choices(place: str, world_size: int, order: str, device: str | None = None) -> Choices:
    """What ``auto`` takes on this machine.

    Args:
        place: ``"host"`` or ``"gpu"``: all ranks of one process share its memory; ``"gpus"``: they
            are on several GPUs; ``"mixed"``: on the host and on GPUs; ``"processes"``: each is in
            a process of its own, on the CPU.
        world_size: Number of ranks.
        order: ``"any"`` or ``"rank"``.
        device: The GPUs' name.

    Raises:
        ArgumentError: ``PYRINGAR_TUNING`` names what is not there; or unknown ``place`` or
            ``order``.
        RingarError: The shipped table cannot be read (no file descriptor is left).
    """
    measured = _measured()
    found = measured.find(place, world_size, order, device) if measured is not None else None
    return found or shipped(place, order)


def shipped(place: str, order: str) -> Choices:
    """What ``auto`` takes where nobody has measured; as :func:`choices`."""
    found = _shipped_table().find(place, 1, order, None)
    if found is None:
        raise ArgumentError(
            f"place is {place!r} and order {order!r}, expected one of {', '.join(ALGORITHMS)} and "
            "'any' or 'rank'"
        )
    return found


# -- files -----------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a measured table holds for: the processor, and how many cores may be used."""
    return {"cpu": _cpu_name(), "cores": _toolchain.cores_allowed()}


@functools.lru_cache(maxsize=1)
def _cpu_name() -> str:
    return _toolchain.read_cpu().name


def path() -> Path:
    """Where ``pyringar tune`` writes, and ``auto`` looks: ``PYRINGAR_TUNING``, else in the cache.

    Creates nothing.

    Raises:
        ArgumentError: ``PYRINGAR_TUNING`` begins with ~ and a user who has no home.
        BuildError: There can be no cache.
    """
    given = os.environ.get(ENVIRONMENT)
    if given and given != "shipped":
        try:
            return Path(given).expanduser().absolute()
        except (RuntimeError, OSError) as error:  # no such user, no current folder
            raise ArgumentError(
                f"{ENVIRONMENT} is {given!r}, expected a file of `pyringar tune`, or 'shipped' "
                f"({error})"
            ) from error
    digest = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return _build.cache_dir() / f"tuning-{digest}.json"


def describe() -> str:
    """Which table ``auto`` follows here."""
    measured = _measured()
    return "shipped" if measured is None else f"of `pyringar tune`, {measured.date}"


def _measured() -> Table | None:
    """This machine's table; None if there is none, or none that is to be used."""
    if os.environ.get(ENVIRONMENT) == "shipped":
        return None
    file = path()
    try:
        return _read_measured(file, file.stat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get(ENVIRONMENT):
            raise ArgumentError(
                f"{ENVIRONMENT} is {str(file)!r}, where nothing is; expected a file of "
                "`pyringar tune`, or 'shipped'"
            ) from None
        return None
    except OSError:
        return _read_measured(file, None)  # which fails likewise, and says so once


@functools.lru_cache(maxsize=4)
def _read_measured(file: Path, changed_ns: int | None) -> Table | None:
    # A table that cannot be used costs speed, not results: a warning, once for every file.
    try:
        return parse_table(read_json(file, _MOST_FILE_BYTES))
    except (OSError, ValueError) as error:
        logger.warning(
            "the table in %s is not used: %s; run `pyringar tune` again, or delete it", file, error
        )
        return None


@functools.lru_cache(maxsize=1)
def _shipped_table() -> Table:
    try:
        return parse_table(read_json(SHIPPED_PATH, _MOST_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise RingarError(f"pyringar's own table {SHIPPED_PATH} cannot be read: {error}") from error


def parse_table(content: Any) -> Table:
    """A file's content, checked.

    Args:
        content: The JSON as Python has it.

    Raises:
        ValueError: It is not what this version writes on this machine; says what.
    """
    if not isinstance(content, Mapping) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, Mapping) else content
        raise ValueError(f"version is {_short(found)}, expected {VERSION}")
    here = machine()
    if content.get("machine") not in (None, here):
        raise ValueError(f"it was measured on {_short(content.get('machine'))}, this is {here}")
    tables = content.get("tables")
    if not isinstance(tables, list):
        raise ValueError(f"tables is {_short(tables)}, expected a list")
    date = content.get("date")
    if date is not None:
        _check_text("date", date)
    return Table(tuple(_parse_entry(table) for table in tables), date)


def _parse_entry(table: Any) -> Entry:
    try:
        place, order, world_size = table["place"], table["order"], table["world_size"]
        device, rows = table["device"], table["choices"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"a table has no {error}: {_short(table)}") from None
    if place not in list(ALGORITHMS) or order not in (None, "any", "rank"):
        raise ValueError(f"a table is for {_short(place)} in order {_short(order)}")
    if world_size is not None and not (type(world_size) is int and 1 <= world_size < _MOST):
        raise ValueError(f"a table is for {_short(world_size)} ranks")
    if device is not None:
        _check_text("device", device)
    # What holds in any order, if the table says so, must hold in that of the ranks.
    choices_here = Choices.parse(rows, place, "any" if order == "any" else "rank")
    return Entry(place, device, world_size, order, choices_here)


def _check_text(name: str, value: Any) -> None:
    # Printable: people see it in plans, logs and terminals.
    if not (isinstance(value, str) and value.isprintable()):
        raise ValueError(f"{name} is {_short(value)}, expected printable text")
