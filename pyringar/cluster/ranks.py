"""One rank of a cluster, and which rank a thread belongs to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pyringar.cluster.state import ProcessState
from pyringar.errors import RingarError

if TYPE_CHECKING:
    from pyringar.cluster.calls import Wait

__all__ = ["Rank", "belong_to", "current", "this_rank"]

_here = threading.local()
_identities = itertools.count(1)


def current() -> Rank | None:
    """Return the rank whose thread this is; None: no rank's, or of one whose cluster is gone."""
    rank: Rank | None = getattr(_here, "rank", None)
    return None if rank is None or rank.is_gone else rank


def this_rank() -> Rank:
    """Return the rank whose thread this is.

    Raises:
        RingarError: It is no rank's.
    """
    rank = current()
    if rank is None:
        raise RingarError(
            "torch.distributed was called in a thread that a rank has started, expected the rank's "
            "own: run programs that call it in several threads with torchrun"
        )
    return rank


def belong_to(rank: Rank | None) -> None:
    """Make this thread a rank's; None: no rank's."""
    _here.rank = rank


class Rank:
    """Hold the state of one rank while its cluster runs.

    Args:
        index: Its number.
        device: Where its tensors are, if its program asks.
        environment: Its ``os.environ``.
    """

    def __init__(self, index: int, device: torch.device, environment: Mapping[Any, Any]) -> None:
        self.index = index
        self.device = device
        self.environment = dict(environment)
        self.identity = next(_identities)
        """Tells meshes of ranks, also of other clusters, apart."""
        self.thread: threading.Thread | None = None

        self.go = threading.Lock()
        """Held while others run; released when the schedule chooses this rank."""
        self.go.acquire()
        self.is_running = False
        self.waits_for: Wait | None = None
        """None while it runs, before it has begun and when it has ended."""
        self.has_asked = False
        """Its last call asked for something that was not there."""
        self.asks_for: Wait | None = None
        """What it polls without waiting; None: it does not poll."""
        self.has_ended = False
        self.is_gone = False
        """Its cluster is over; a thread that is left behind belongs to no rank."""
        self.result: Any = None
        self.error: BaseException | None = None

        self.num_calls = 0
        """Collectives and messages that it has begun, in all groups."""
        self.futures: list[Any] = []
        """Futures of its works that are not complete."""
        self.pending_error: BaseException | None = None
        """An exception of a callback that torch would not let through."""
        self.world: dict[str, Any] = {}
        """Its groups, as torch.distributed keeps them."""
        self.main: ModuleType | None = None
        """Its ``__main__``, where it runs a script."""
        self.num_groups: dict[Any, int] = {}
        """How many groups of a name it has made."""
        self.state: ProcessState | None = None
        """The state of the process when this rank last ran."""

    def restore_state(self) -> None:
        """Give the process the state that it had when this rank last ran."""
        if self.state is not None:
            self.state.restore()

    def complete_futures(self) -> None:
        """Complete futures whose works are done, one by one: callbacks may wait for others.

        Raises:
            BaseException: A callback raised what no future can hold, such as KeyboardInterrupt.
        """
        for future in list(self.futures):
            if future in self.futures and future.is_over():
                self.futures.remove(future)
                future.complete()
        if self.pending_error is not None:
            error, self.pending_error = self.pending_error, None
            raise error

    def let_go(self) -> None:
        """Forget its program's objects, when it has ended."""
        self.is_gone, self.main = True, None
        self.result = self.error = self.state = self.waits_for = None
        self.asks_for = self.pending_error = None
        self.world, self.environment, self.futures, self.num_groups = {}, {}, [], {}

    def __str__(self) -> str:
        return f"rank {self.index}"
