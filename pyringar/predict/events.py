"""The event loop: messages queue at ports, and arrive when their last byte does.

A port serves messages one at a time, in the order in which they come to it (those that come at
once, in the order of issue), at its link's bandwidth. A message moves on to its next port with its
first byte, a latency later, and does not hold the port before while it waits there: buffers are
taken to be large enough. A message that needs others starts when the last of them has arrived.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pyringar.errors import ArgumentError
from pyringar.predict.network import Network, Port

__all__ = ["Message", "Outcome", "Program", "simulate"]


class Message(NamedTuple):
    """Bytes from one rank to another, sent once the messages that it needs have arrived."""

    src: int
    dst: int
    nbytes: int
    needs: tuple[int, ...]


class Program:
    """Messages in the order of issue; a message is known by its index.

    Args:
        is_folded: The first ``Network.unit`` ranks stand for all. Only they send (or own), messages
            to and from others are those of their representatives, and ports count as the
            representatives' do. The program must look alike from every one of them; bytes are
            then exact to the element, and times up to how ties for a shared port are broken
            (6 % at most in the tests, with `direct` through a node's one card).
    """

    def __init__(self, *, is_folded: bool = False) -> None:
        self.messages: list[Message] = []
        self.is_folded = is_folded

    def __repr__(self) -> str:
        nbytes = sum(message.nbytes for message in self.messages)
        return f"Program({len(self.messages)} messages, {nbytes:,} bytes)"

    def send(self, src: int, dst: int, nbytes: int, needs: Iterable[int] = ()) -> int:
        """Add a message and return its index.

        Args:
            src: The rank that sends.
            dst: The rank that receives.
            nbytes: Its size.
            needs: Indices of messages that must have arrived before it leaves.
        """
        self.messages.append(Message(src, dst, nbytes, tuple(needs)))
        return len(self.messages) - 1

    def join(self, rank: int, needs: Iterable[int]) -> int:
        """Add an event that takes no time, and return its index.

        Args:
            rank: Where it happens.
            needs: Indices of messages that must have arrived.
        """
        return self.send(rank, rank, 0, needs)


@dataclass(frozen=True)
class Outcome:
    """The times and bytes of a program.

    Attributes:
        time_s: Until the last message has arrived.
        nbytes: Bytes through every port that saw a message; in a folded program those of the
            representatives, which all others equal.
        arrived_s: When every message arrived, by its index.
    """

    time_s: float = 0.0
    nbytes: dict[Port, int] = field(default_factory=dict)
    arrived_s: tuple[float, ...] = ()

    def then(self, other: Outcome) -> Outcome:
        """Return the outcome of both programs, one after the other.

        Args:
            other: The later one's.
        """
        ports = self.nbytes | other.nbytes
        nbytes = {port: self.nbytes.get(port, 0) + other.nbytes.get(port, 0) for port in ports}
        later = tuple(self.time_s + time_s for time_s in other.arrived_s)
        return Outcome(self.time_s + other.time_s, nbytes, self.arrived_s + later)

    def busiest_bytes(self, *kinds: str) -> int:
        """Return the most bytes through one port of these kinds.

        Args:
            *kinds: First words of kinds, such as ``"rank"`` for ``"rank out"`` and ``"rank in"``.
        """
        return max(
            (n for port, n in self.nbytes.items() if port.kind.split()[0] in kinds), default=0
        )


def simulate(program: Program, network: Network) -> Outcome:
    """Run a program on a network: ``O(m log m)`` for m messages, some 4 us each.

    Args:
        program: The messages.
        network: The machine whose ports they pass.

    Raises:
        ArgumentError: A message needs one that cannot arrive before it.
    """
    messages = program.messages
    missing = [len(message.needs) for message in messages]
    dependents = _dependents(program)
    routes = _Routes(program, network)
    arrived_s = [0.0] * len(messages)  # at its last port so far; before the first: of all it needs
    # (when it comes to a port, index of the message, index of the port on its route)
    queue = [(0.0, index, 0) for index, count in enumerate(missing) if count == 0]
    while queue:
        now_s, index, at = heapq.heappop(queue)
        src, dst, nbytes, _ = messages[index]
        route = routes[src, dst]
        if at < len(route):
            port, s_per_byte, latency_s = route[at]
            begin_s = max(now_s, port.free_s)
            port.free_s = begin_s + nbytes * s_per_byte
            port.nbytes += nbytes
            arrived_s[index] = max(arrived_s[index], port.free_s) + latency_s
            if at + 1 < len(route):
                heapq.heappush(queue, (begin_s + latency_s, index, at + 1))
                continue
        for other in dependents[index]:
            arrived_s[other] = max(arrived_s[other], arrived_s[index])
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(queue, (arrived_s[other], other, 0))
    stuck = next((index for index, needs in enumerate(missing) if needs), None)
    if stuck is not None:
        raise ArgumentError(
            f"message {stuck} of program never starts: its needs lead back to itself, or to a "
            "message whose needs do; expected no such cycle"
        )
    by_port = {port: busy.nbytes for port, busy in routes.ports.items()}
    return Outcome(max(arrived_s, default=0.0), by_port, tuple(arrived_s))


def _dependents(program: Program) -> list[list[int]]:
    """Return, for every message, the messages that need it."""
    dependents: list[list[int]] = [[] for _ in program.messages]
    for index, message in enumerate(program.messages):
        for need in message.needs:
            dependents[need].append(index)
    return dependents


@dataclass(slots=True)
class _BusyPort:
    """A port's bytes so far, and when it has served all that came to it."""

    free_s: float = 0.0
    nbytes: int = 0


class _Routes(dict[tuple[int, int], list[tuple[_BusyPort, float, float]]]):
    """Routes by pair of ranks, each worked out when first asked for."""

    def __init__(self, program: Program, network: Network) -> None:
        self.ports: defaultdict[Port, _BusyPort] = defaultdict(_BusyPort)
        self._is_folded = program.is_folded
        self._network = network

    def __missing__(self, pair: tuple[int, int]) -> list[tuple[_BusyPort, float, float]]:
        route = self[pair] = []
        for port, s_per_byte, latency_s in self._network.route(*pair):
            counted = self._network.representative(port) if self._is_folded else port
            route.append((self.ports[counted], s_per_byte, latency_s))
        return route
