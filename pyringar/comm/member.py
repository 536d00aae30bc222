"""Describe a rank to the others, and read what others wrote into a store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyringar.comm.arguments import is_count
from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError

__all__ = [
    "INT32_MAX",
    "LONGEST_BYTES",
    "Member",
    "check_agreed",
    "check_one_node",
    "garbage",
    "node_id",
    "parse_object",
    "ranks_by_node",
]

_VERSION = 3
# What is read from the store need not be what we wrote.
INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1
LONGEST_BYTES = 4096  # of a member, of a segment
_LONGEST_TEXT = 256


def node_id() -> str:
    """Return which machine this is: equal for processes that can share memory, else different.

    ``PYRINGAR_NODE_ID`` overrides it. Containers with process numbers or clocks of their own count
    as machines of their own.
    """
    given = os.environ.get("PYRINGAR_NODE_ID")
    if given:
        # Members tell it each other, and what they write has a limit.
        is_short = len(given) <= _LONGEST_TEXT
        return given if is_short else hashlib.sha256(os.fsencode(given)).hexdigest()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink("/proc/self/ns/pid")]
    except OSError:
        return os.uname().nodename if hasattr(os, "uname") else "this machine"
    with suppress(OSError):  # Linux before 5.6 has one clock
        namespaces.append(os.readlink("/proc/self/ns/time"))
    return " ".join((boot, *namespaces))


@dataclass(frozen=True)
class Member:
    """Hold what a rank tells the others about itself."""

    rank: int
    node: str
    host: str
    pid: int
    start_ticks: int
    check: str  # PYRINGAR_CHECK: ranks that check what others do not would wait for them
    kind: str = "cpu"  # of its device: "cpu" or "cuda"
    attempt: str = ""  # random: tells this attempt to meet from all others

    @classmethod
    def this_process(cls, rank: int, kind: str = "cpu", attempt: str = "") -> Member:
        """Return this process, as rank ``rank``, with tensors on this kind of device."""
        pid, start_ticks = load.engine().process_id()
        host = os.uname().nodename if hasattr(os, "uname") else "this machine"
        check = os.environ.get("PYRINGAR_CHECK", "")
        return cls(rank, node_id(), host, pid, start_ticks, check, kind, attempt)

    @classmethod
    def parse(cls, text: bytes, rank: int) -> Member:
        """Return what rank ``rank`` wrote.

        Raises:
            RingarError: It is not what this version of pyringar writes.
        """
        try:
            fields = parse_object(text, LONGEST_BYTES)
            version = fields.pop("version")
            member = cls(**fields)
        except (ValueError, TypeError, KeyError):
            raise garbage(rank, text, "no member") from None
        is_whole = (
            version == _VERSION
            and is_count(member.rank, rank, rank)
            and all(map(_is_text, (member.node, member.host, member.check, member.kind)))
            and _is_text(member.attempt)
            and is_count(member.pid, 1, INT32_MAX)
            and is_count(member.start_ticks, 0, _UINT64_MAX)
        )
        if not is_whole:
            raise RingarError(
                f"rank {rank} wrote {text[:200]!r} of version {_shortened(version)} into the "
                f"store, expected rank {rank} of version {_VERSION}: do all ranks run the same "
                "pyringar?"
            )
        return member

    def text(self) -> str:
        """Return what `parse` reads."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def ranks_by_node(members: Sequence[Member]) -> list[list[int]]:
    """Return the ranks of every machine, machines in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    return list(nodes.values())


def check_agreed(members: Sequence[Member]) -> None:
    """Refuse ranks that check, or keep tensors on, what others do not.

    Raises:
        ArgumentError: Names two that differ.
    """
    first = members[0]
    for other in members:
        if other.check != first.check:
            raise ArgumentError(
                f"PYRINGAR_CHECK is {first.check!r} for {first.name} and {other.check!r} for "
                f"{other.name}, expected the same for all ranks"
            )
        if other.kind != first.kind:
            raise ArgumentError(
                f"device is a {first.kind} device for {first.name} and a {other.kind} device for "
                f"{other.name}, expected GPUs for all ranks, or for none"
            )


def where_nodes_are(nodes: Sequence[Sequence[int]], members: Sequence[Member]) -> str:
    """Return the ranks and host of every machine, for messages."""
    return "; ".join(f"ranks {list(ranks)} on {members[ranks[0]].host}" for ranks in nodes)


def parse_object(text: bytes, longest_bytes: int) -> dict[str, Any]:
    """Return a JSON object that a rank wrote; raise ValueError for anything else."""
    if len(text) > longest_bytes:
        raise ValueError("too long")
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return fields


def garbage(rank: int, text: Any, expected: str) -> RingarError:
    """Return the error for what cannot be read; does not raise it."""
    return RingarError(f"rank {rank} wrote {_shortened(text)} into the store, {expected}")


def _shortened(value: Any) -> str:
    try:
        return repr(value[:80] if isinstance(value, (bytes, str)) else value)[:200]
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return f"a {type(value).__name__}"


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _LONGEST_TEXT


def check_one_node(members: Sequence[Member]) -> None:
    """Refuse ranks on several machines.

    Raises:
        ArgumentError: Names the machines.
    """
    nodes = ranks_by_node(members)
    if len(nodes) > 1:
        where = where_nodes_are(nodes, members)
        if len({member.host for member in members}) < len(nodes):
            where += (
                "; process numbers or clocks of their own, or no /proc, make one of a container"
            )
        raise ArgumentError(
            f"the ranks are on {len(nodes)} machines ({where}), a ProcessCommunicator is for one; "
            "take pyringar.distributed.HierarchicalCommunicator, or make one per machine"
        )
