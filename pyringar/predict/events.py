"""The event loop: messages queue at ports, and arrive when their last byte does.

A port serves messages one at a time, in the order in which they come to it (those that come at
once, in the order of issue), at its link's bandwidth. A message moves on to its next port with its
first byte, a latency later, and does not hold the port before while it waits there: buffers are
taken to be large enough. A message that needs others starts when the last of them has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pyringar.predict.network import Memory, Network, Port

__all__ = ["Message", "Outcome", "Program", "simulate"]


class Message(NamedTuple):
    """Bytes from one rank to another, once others have arrived; by their place in the program."""

    src: int
    dst: int
    nbytes: int
    needs: tuple[int, ...]


class Program:
    """Messages in the order of issue, each after those that it needs.

    Args:
        is_folded: The first ``Network.unit`` ranks stand for all. Only they send (or own), messages
            to and from others are those of their representatives, and ports count as the
            representatives' do. It takes a program that looks alike from every one of them; bytes
            are exact to the element then, and times up to how ties for a shared port are broken
            (6 % at most in the tests, with `direct` through a node's one card).
    """

    def __init__(self, *, is_folded: bool = False) -> None:
        self.messages: list[Message] = []
        self.is_folded = is_folded

    def send(self, src: int, dst: int, nbytes: int, needs: Iterable[int] = ()) -> int:
        """Add a message.

        Args:
            src: The rank that sends.
            dst: The rank that receives.
            nbytes: Its size.
            needs: Places of what must have arrived before it leaves.

        Returns:
            Its place.
        """
        self.messages.append(Message(src, dst, nbytes, tuple(needs)))
        return len(self.messages) - 1

    def join(self, rank: int, needs: Iterable[int]) -> int:
        """Add an event that takes no time.

        Args:
            rank: Where it happens.
            needs: Places of what must have arrived.

        Returns:
            Its place.
        """
        return self.send(rank, rank, 0, needs)


@dataclass(frozen=True)
class Outcome:
    """Hold the times of a program.

    Attributes:
        time_s: Until the last message has arrived.
        nbytes: Bytes through every port that saw a message; in a folded program those of the
            representatives, which all others equal.
        arrived_s: When every message arrived, by its place in the program.
    """

    time_s: float = 0.0
    nbytes: dict[Port, int] = field(default_factory=dict)
    arrived_s: tuple[float, ...] = ()

    def then(self, other: Outcome) -> Outcome:
        """Both, one after the other.

        Args:
            other: What comes after this.
        """
        nbytes = dict(self.nbytes)
        for port, count in other.nbytes.items():
            nbytes[port] = nbytes.get(port, 0) + count
        later = tuple(self.time_s + time_s for time_s in other.arrived_s)
        return Outcome(self.time_s + other.time_s, nbytes, self.arrived_s + later)

    def busiest_bytes(self, *kinds: str) -> int:
        """Most bytes through one port of these kinds.

        Args:
            *kinds: First words of kinds, such as ``"rank"`` for ``"rank out"`` and ``"rank in"``.
        """
        return max(
            (n for port, n in self.nbytes.items() if port.kind.split()[0] in kinds), default=0
        )


def simulate(program: Program, network: Network | Memory) -> Outcome:
    """Run a program on a network.

    Args:
        program: Messages.
        network: Whose ports they take.

    Returns:
        Times and bytes. Cost: ``O(m log m)`` for m messages, some 4 us each.
    """
    messages = program.messages
    missing = [len(message.needs) for message in messages]
    dependents: list[list[int]] = [[] for _ in messages]
    for index, message in enumerate(messages):
        for need in message.needs:
            dependents[need].append(index)
    ways = _Ways(program, network)
    free_s: list[float] = []  # when a port has served all that came to it
    nbytes: list[int] = []
    ready_s = [0.0] * len(messages)  # when all that a message needs has arrived
    arrived_s = [0.0] * len(messages)
    # (when it comes to a port, place in the program, number of the port on its way)
    queue = [(0.0, index, 0) for index, count in enumerate(missing) if count == 0]
    while queue:
        now_s, index, at = heapq.heappop(queue)
        src, dst, size, _ = messages[index]
        way = ways[src, dst]
        if at < len(way):
            port, s_per_byte, latency_s = way[at]
            if port >= len(free_s):
                free_s += [0.0] * (port + 1 - len(free_s))
                nbytes += [0] * (port + 1 - len(nbytes))
            start_s = max(now_s, free_s[port])
            free_s[port] = start_s + size * s_per_byte
            nbytes[port] += size
            arrived_s[index] = max(arrived_s[index], free_s[port]) + latency_s
            if at + 1 < len(way):
                heapq.heappush(queue, (start_s + latency_s, index, at + 1))
                continue
        else:
            arrived_s[index] = now_s
        for other in dependents[index]:
            ready_s[other] = max(ready_s[other], arrived_s[index])
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(queue, (ready_s[other], other, 0))
    assert not any(missing), "a message needs one that comes after it"
    by_port = dict(zip(ways.ports, nbytes, strict=True))
    return Outcome(max(arrived_s, default=0.0), by_port, tuple(arrived_s))


class _Ways(dict[tuple[int, int], list[tuple[int, float, float]]]):
    """Routes by pair of ranks, with numbers in place of ports: worked out when first asked for."""

    def __init__(self, program: Program, network: Network | Memory) -> None:
        self.ports: dict[Port, int] = {}
        self._is_folded = program.is_folded
        self._network = network

    def __missing__(self, pair: tuple[int, int]) -> list[tuple[int, float, float]]:
        way = []
        for port, s_per_byte, latency_s in self._network.route(*pair):
            counted = self._network.representative(port) if self._is_folded else port
            number = self.ports.setdefault(counted, len(self.ports))
            way.append((number, s_per_byte, latency_s))
        self[pair] = way
        return way
