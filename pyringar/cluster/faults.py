"""Faults that a cluster plays on its ranks, to test what the program does about them."""

from __future__ import annotations

from dataclasses import dataclass

from pyringar.choices import check_choice
from pyringar.comm.arguments import is_count
from pyringar.errors import ArgumentError

__all__ = ["Fault", "RankDied"]

KINDS = ("dies", "late", "swaps")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with one rank, for `pyringar.launch`.

    Attributes:
        kind: ``"dies"``: the rank ends where it would begin the call; others that need it get a
            `PeerLostError`. ``"late"``: it begins the call when all others can do nothing but wait,
            and if ``late_s`` is more than the cluster's timeout, they get a `CollectiveTimeout`; no
            real time passes. ``"swaps"``: it makes the call after the one that follows, and goes on
            until then with what is in its tensors.
        rank: Which.
        call: The number of its collective or message, from 1 on, in all groups together.
        late_s: How late, in seconds.

    Raises:
        ArgumentError: An argument is none of these.
    """

    kind: str
    rank: int
    call: int
    late_s: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        for name, least in (("rank", 0), ("call", 1)):
            if not is_count(getattr(self, name), least):
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}, expected an int from {least} on"
                )
        if not (isinstance(self.late_s, (int, float)) and self.late_s > 0):
            raise ArgumentError(f"late_s is {self.late_s!r}, expected a positive number of seconds")


class RankDied(BaseException):  # it is no error of the program's
    """Ends the thread of a rank that a fault has die; a program's ``except`` lets it pass."""
