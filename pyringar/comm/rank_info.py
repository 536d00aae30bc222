"""Describe a rank to the others, and read the JSON that ranks wrote into a store."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError

T = TypeVar("T")


def node_id() -> str:
    """Return an id of this machine, equal for processes that can share memory.

    ``PYRINGAR_NODE_ID`` overrides it. A container with separate pids or clocks is a machine.
    """
    if given := os.environ.get("PYRINGAR_NODE_ID"):
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink("/proc/self/ns/pid")]
    except OSError:
        return platform.node()
    with suppress(OSError):  # Linux before 5.6 has one clock
        namespaces.append(os.readlink("/proc/self/ns/time"))
    return " ".join((boot, *namespaces))


@dataclass(frozen=True)
class RankInfo:
    """One rank, as it describes itself to the others."""

    rank: int
    node: str
    host: str
    pid: int
    start_ticks: int
    kind: str = "cpu"  # of its device: "cpu" or "cuda"
    attempt: str = ""  # random: tells this attempt to meet from all others

    @classmethod
    def this_process(cls, rank: int, kind: str = "cpu", attempt: str = "") -> RankInfo:
        """Return this process, as rank ``rank``, with tensors on this kind of device."""
        pid, start_ticks = load.engine().process_id()
        return cls(rank, node_id(), platform.node(), pid, start_ticks, kind, attempt)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def read(text: bytes, rank: int, make: Callable[..., T]) -> T:
    """Call ``make`` with the fields of a JSON object that a rank wrote into the store."""
    try:
        return make(**json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise RingarError(
            f"rank {rank} wrote {text[:300]!r} into the store ({error}), expected a JSON object of "
            "this version: do all ranks run the same pyringar?"
        ) from error


def ranks_by_node(members: Sequence[RankInfo]) -> list[list[int]]:
    """Return the ranks of every machine, machines in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    return list(nodes.values())


def check_agreed(members: Sequence[RankInfo]) -> None:
    """Raise ArgumentError if a rank's device is of another kind than rank 0's."""
    first = members[0]
    for other in members:
        if other.kind != first.kind:
            raise ArgumentError(
                f"device is a {first.kind} device for {first.name} and a {other.kind} device for "
                f"{other.name}, expected GPUs for all ranks, or for none"
            )


def check_one_node(members: Sequence[RankInfo]) -> None:
    """Raise ArgumentError, with the machines' names, if the ranks are on several."""
    nodes = ranks_by_node(members)
    if len(nodes) == 1:
        return
    where = "; ".join(f"ranks {ranks} on {members[ranks[0]].host}" for ranks in nodes)
    if len({member.host for member in members}) < len(nodes):
        where += "; process numbers or clocks of their own, or no /proc, make one of a container"
    raise ArgumentError(
        f"the ranks are on {len(nodes)} machines ({where}), a ProcessCommunicator is for one; "
        "take pyringar.distributed.HierarchicalCommunicator, or make one per machine"
    )
