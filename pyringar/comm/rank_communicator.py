"""Base of communicators with one local rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyringar.comm.arguments import check_list, check_timeout
from pyringar.comm.base_communicator import BaseCommunicator
from pyringar.comm.rank_info import RankInfo


class RankCommunicator(BaseCommunicator):
    """One local rank of a group whose other ranks are in other processes.

    A transport sets ``_rank``; ``_store``, ``_members``, ``_device`` and ``_name`` are optional.
    The torch.distributed backend also needs ``_global_ranks`` and two methods.
    ``_submit_step(step)`` runs a non-blocking step in the order of calls and returns its `Work`.
    ``_tell(error)`` sends the error of a late or lost rank to the other ranks.
    """

    _takes_bare_tensors = True
    _refused: Mapping[str, str] = {
        "reduce": "take all_reduce",
        "reduce_coalesced": "take all_reduce_coalesced",
        "broadcast_coalesced": "take broadcast for each tensor, or for one flat tensor",
    }
    _rank: int
    _global_ranks: Sequence[int]  # numbers of the ranks in messages
    _store: Any
    _members: Sequence[RankInfo]
    _device = torch.device("cpu")
    _name: str
    _place = ""  # this rank's machine, for repr()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def store(self) -> Any:
        """The torch.distributed store with a key prefix for this group alone."""
        return self._store

    @property
    def device(self) -> torch.device:
        """Device of this rank's tensors."""
        return self._device

    @property
    def members(self) -> tuple[RankInfo, ...]:
        """Process and host of every rank, in rank order."""
        return tuple(self._members)

    def _number(self, rank: int) -> int:
        """Return the number of the rank in messages."""
        return self._global_ranks[rank] if 0 <= rank < self._world_size else rank

    @property
    def timeout_s(self) -> float:
        """Seconds that a call waits for a rank without progress."""
        return self._timeout_s

    def set_timeout(self, timeout: float) -> None:
        """Change the timeout of later calls.

        Args:
            timeout: Seconds that a call waits for a rank without progress.

        Raises:
            ArgumentError: ``timeout`` is not a positive number of seconds.
        """
        self._timeout_s = check_timeout(timeout)
        self._set_timeout(self._timeout_s)

    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raise if the group has failed or one of these ranks is lost. Never waits.

        Args:
            ranks: The ranks to check.

        Raises:
            PeerLostError: One of the ranks has exited or closed the group: names it.
            RingarError: The group is closed, or failed earlier (with the class of that error).
        """
        self._check_peers(ranks)

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"{type(self).__name__}({closed}rank {self._rank} of {self._world_size}, {self._place}"
            f"name={self._name!r}, algorithm={self._algorithm!r}, order={self._order!r}, "
            f"timeout={self._timeout_s:g} s, device={str(self._device)!r})"
        )

    def _begin_as(
        self,
        what: object,
        operation: str,
        outputs: Any,
        inputs: Any = None,
        *,
        op: str = "sum",
        root: int = 0,
    ) -> Any:
        """Begin a call on replacements for tensors that the engine does not support.

        ``what`` describes the user's call. Ranks compare this text.
        """
        call = self._checked(operation, outputs, inputs, op, root=root)
        return self._run(call, async_op=True, what=what)

    def _set_timeout(self, seconds: float) -> None:
        raise NotImplementedError

    def _check_peers(self, ranks: Sequence[int]) -> None:
        raise NotImplementedError

    def _check(self) -> None:
        self._check_peers([])

    def _of_lists(self, operation: str, lists: Any) -> str:
        check_list(operation, lists, "lists")
        return "all_reduce"
