"""Bring the calls of one group together: the last rank to call does what all asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyringar.cluster.calls import Call, copy_of, follow, mark, names_of, plain_torch
from pyringar.errors import ArgumentError

if TYPE_CHECKING:
    from pyringar.cluster.cluster import Cluster

__all__ = ["Meeting"]


class Meeting:
    """The calls of a group whose ranks are threads of this process.

    Args:
        cluster: Whose ranks they are.
        ranks: The group's ranks, by their numbers in the cluster.
        name: Of the group in reports.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[int], name: str) -> None:
        self.cluster = cluster
        self.ranks = ranks
        self.name = name
        self._numbers = [0] * len(ranks)
        self._open: dict[int, dict[int, Call]] = {}  # of each number, by rank in the group
        self._messages: list[Call] = []  # of which the other side is missing

    def post(self, index: int, call: Call) -> None:
        """Take part in a collective as the group's rank ``index``, without a wait.

        Raises:
            ArgumentError: All ranks have called, and not the same.
        """
        with self.cluster.schedule.lock:
            self.cluster.check_told()
            self._numbers[index] += 1
            call.number = self._numbers[index]
            calls = self._open.setdefault(call.number, {})
            calls[index] = call
            if len(calls) < len(self.ranks):
                return
            self.compare(call.number)
            del self._open[call.number]
        self._act([calls[i] for i in range(len(calls))])

    def post_message(self, call: Call) -> None:
        """Send, or receive, without a wait."""
        with self.cluster.schedule.lock:
            self.cluster.check_told()
            other = next((each for each in self._messages if _belong_together(each, call)), None)
            if other is None:
                self._messages.append(call)
                return
            self._messages.remove(other)
        self._act([call, other] if call.what == "send" else [other, call])

    def missing(self, call: Call) -> list[int]:
        """Return the ranks, of the cluster, that have not done their part."""
        if call.is_done:
            return []
        there = self._open.get(call.number, {})
        others = range(len(self.ranks)) if call.peers is None else call.peers
        return [self.ranks[i] for i in others if call.peers is not None or i not in there]

    def fail(self, error: BaseException) -> None:
        """End all calls that have not met."""
        calls = [*self._messages, *(c for there in self._open.values() for c in there.values())]
        self._messages, self._open = [], {}
        for call in calls:
            call.finish(error)

    def compare(self, *numbers: int) -> None:
        """Fail if ranks call different things as one of these numbers, or as any that is open."""
        for number in numbers or tuple(self._open):
            calls = self._open[number].values()
            kinds: dict[str, list[int]] = {}
            for call in sorted(calls, key=lambda call: call.rank.index):
                kinds.setdefault(call.signature(), []).append(call.rank.index)
            if len(kinds) > 1:
                what = "; ".join(f"{names_of(ranks)}: {kind}" for kind, ranks in kinds.items())
                text = f"ranks call different things as number {number} of {self.name}: {what}"
                raise copy_of(self.cluster.fail(ArgumentError, text, calls))

    def _act(self, calls: Sequence[Call]) -> None:
        act = calls[0].act
        error: BaseException | None = None
        try:
            if act is not None:
                with plain_torch():
                    for call in calls:
                        follow(call.begun)
                    act(calls)
            for call in calls:
                call.run_steps()
        except Exception as caught:
            error = self.cluster.fail(type(caught), f"{calls[0]}: {caught}", calls)
        ended = mark({event.device for call in calls for event in call.begun})
        for call in calls:
            call.ended = ended
            call.finish(error)
        self.cluster.schedule.look()


def _belong_together(one: Call, other: Call) -> bool:
    send, receive = (one, other) if one.what == "send" else (other, one)
    if (send.what, receive.what) != ("send", "recv"):
        return False
    (sender, _), (receiver, _) = send.args, receive.args
    is_from_it = receive.details.get("from", sender) == sender
    has_its_tag = receive.details.get("tag") == send.details.get("tag")
    return send.details["to"] == receiver and is_from_it and has_its_tag
