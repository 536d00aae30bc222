"""Process and host of a rank, exchanged as JSON through a store."""

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

    ``PYRINGAR_NODE_ID`` overrides it. A container with its own pids or clocks counts as a machine.
    """
    if given := os.environ.get("PYRINGAR_NODE_ID"):
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink("/proc/self/ns/pid")]
    except OSError:
        return platform.node()
    with suppress(OSError):  # Linux before 5.6 has no time namespaces
        namespaces.append(os.readlink("/proc/self/ns/time"))
    return " ".join((boot, *namespaces))


@dataclass(frozen=True)
class RankInfo:
    """Process, host and device kind of one rank."""

    rank: int
    global_rank: int  # number of the rank in messages
    node: str
    host: str
    pid: int
    start_ticks: int
    kind: str = "cpu"  # type of the rank's device: "cpu" or "cuda"
    attempt: str = ""  # random id of one attempt to join the group

    @classmethod
    def this_process(
        cls, rank: int, kind: str = "cpu", attempt: str = "", global_rank: int | None = None
    ) -> RankInfo:
        """Describe this process as rank ``rank`` with tensors on ``kind``."""
        pid, start_ticks = load.engine().process_id()
        number = rank if global_rank is None else global_rank
        return cls(rank, number, node_id(), platform.node(), pid, start_ticks, kind, attempt)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """Rank, process and host for messages."""
        return f"rank {self.global_rank} (process {self.pid} on {self.host})"


def read(text: bytes, rank: int, make: Callable[..., T]) -> T:
    """Parse a JSON object that a rank wrote into the store; return ``make(**fields)``."""
    try:
        return make(**json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise RingarError(
            f"rank {rank} wrote {text[:300]!r} into the store ({error}), expected a JSON object of "
            "this version: do all ranks run the same pyringar?"
        ) from error


def ranks_by_node(members: Sequence[RankInfo]) -> list[list[int]]:
    """Return the ranks of each machine, ordered by the first rank."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    return list(nodes.values())


def check_agreed(members: Sequence[RankInfo]) -> None:
    """Raise ArgumentError if some ranks are on GPUs and others on the CPU."""
    first = members[0]
    for other in members:
        if other.kind != first.kind:
            raise ArgumentError(
                f"device is a {first.kind} device for {first.name} and a {other.kind} device for "
                f"{other.name}, expected GPUs for all ranks, or for none"
            )


def check_one_node(members: Sequence[RankInfo]) -> None:
    """Raise ArgumentError if the ranks are on several machines; name the machines."""
    nodes = ranks_by_node(members)
    if len(nodes) == 1:
        return
    where = "; ".join(
        f"ranks {[members[rank].global_rank for rank in ranks]} on {members[ranks[0]].host}"
        for ranks in nodes
    )
    if len({member.host for member in members}) < len(nodes):
        where += "; a container counts as a machine if it has its own pids or clocks, or no /proc"
    raise ArgumentError(
        f"the ranks are on {len(nodes)} machines ({where}), a ProcessCommunicator is for one; "
        "take pyringar.distributed.HierarchicalCommunicator, or make one per machine"
    )
