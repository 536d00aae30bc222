"""Form a group of processes through a torch store, and map the segment of rank 0.

A store may outlive the processes that use it: torchrun keeps one store for all restarts. Therefore
every attempt to join has a random id, ``RankInfo.attempt``, and rank 0 decides which attempts form
a group. The keys, below ``pyringar/NAME``:

================== ================================== =============================================
key                written by                         holds
================== ================================== =============================================
``call``           rank 0, when it starts             its RankInfo; the other keys are below its
                                                      attempt, A
``A/member/R``     rank R, after it reads ``call``    its RankInfo
``A/members``      rank 0, once                       the RankInfo of all ranks
``A/segment``      rank 0, once                       descriptor of its segment
``A/failed``       the rank that fails                the error
other keys         the group (`Rendezvous.store`)     also below ``A``: gloo, sub-groups
================== ================================== =============================================

Values of earlier attempts are ignored: rank 0 reads only answers below its attempt, and rank R
accepts only ``members`` that contain its attempt. Rank R ignores the ``call`` of a dead process on
its machine, and answers again when ``call`` changes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from pyringar.comm.rank_info import RankInfo, read
from pyringar.comm.stores import PatientStore
from pyringar.engine import load
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

_ATTEMPT_BYTES = 16  # random bytes; in hex they are the 32 bytes of a segment's token
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_POLL_S_PER_RANK = 0.001  # added to the poll interval: all ranks poll one store
# A killed process may close its descriptors up to this long before it counts as dead.
_DYING_S = 0.5
# Error classes that the other ranks raise, too. For other errors they raise RingarError.
_KINDS = {kind.__name__: kind for kind in (ArgumentError, CollectiveTimeout, PeerLostError)}
T = TypeVar("T")


class Rendezvous:
    """One attempt to join a group. As a context manager it sends errors to the other ranks.

    See `ProcessCommunicator` for the arguments. ``kind`` is the type of this rank's device.

    Its methods raise:
        CollectiveTimeout: Ranks did not join in time (names them).
        PeerLostError: A rank died after joining, or the store's process ended.
        RingarError: A rank wrote a malformed value, or could not make or map the segment.
        ArgumentError: Ranks have different values of ``world_size``.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
        kind: str = "cpu",
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not in every build of torch

        # Compiling an engine must not count towards the timeout. RankInfo needs the CPU engine.
        cpu_engine = load.engine()
        self.engine = cpu_engine if kind == "cpu" else load.cuda_engine()
        self._prefixed = PrefixStore
        self.rank = rank
        self.world_size = world_size
        self.global_ranks = _checked_global_ranks(global_ranks, world_size)
        self.name = name
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        prefixed = PrefixStore(f"pyringar/{name}", store)
        self._number = own = self.global_ranks[rank]
        self._store = PatientStore(prefixed, name, own, self._deadline)
        self._own = RankInfo.this_process(rank, kind, secrets.token_hex(_ATTEMPT_BYTES), own)
        self._members = {rank: self._own}  # known RankInfos; entry 0 is from the last ``call``
        self._has_answered = False
        self._may_tell = rank == 0  # whether this rank may write ``failed``
        self.group: Any = None  # the engine's group after its creation; errors are sent to it, too

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                with suppress(RingarError):  # the store may have failed
                    self._tell(error)
        finally:
            self._store.close()

    @property
    def store(self) -> Any:
        """The store with a key prefix for this group. Valid after `exchange_members`."""
        return self._prefixed(self._members[0].attempt, self._store.store)

    def exchange_members(self) -> list[RankInfo]:
        if self.rank == 0:
            self._store.set("call", self._own.text())
            members = self._poll(self._read_answers, self._missing, "to join")
            self._store.set(
                self._key("members"), json.dumps({"members": list(map(asdict, members))})
            )
        else:
            members = self._poll(self._answer, self._not_answered, "to join")
        self._members = dict(enumerate(members))
        self._may_tell = True
        if len(members) != self.world_size:
            raise ArgumentError(
                f"world_size is {self.world_size} for rank {self._number} and {len(members)} for "
                f"{members[0].name}, expected the same for all ranks"
            )
        if (theirs := [member.global_rank for member in members]) != self.global_ranks:
            raise ArgumentError(
                f"global_ranks is {self.global_ranks} for rank {self._number} and has {theirs} "
                "for these ranks themselves, expected the same for all ranks"
            )
        return members

    @property
    def token(self) -> bytes:
        return self._members[0].attempt.encode()

    def share_memory(self) -> Any:
        """Return the mapped segment of rank 0."""
        if self.rank == 0:
            memory = self.engine.create_segment(self.global_ranks, self.token)
            self._store.set(self._key("segment"), json.dumps({"fd": memory.fd}))
            return memory
        text = self._poll(self._segment, lambda: [0], "to share its memory")
        fd = read(text, self.global_ranks[0], lambda fd: int(fd))
        try:
            return self.engine.open_segment(self._members[0].pid, fd, self.world_size)
        except RingarError:
            # Rank 0 may have died or published a failure. Prefer that error, raised by _segment().
            until = time.monotonic() + _DYING_S
            while time.monotonic() < until:
                self._segment()
                time.sleep(_LONGEST_POLL_S)
            raise

    def wait_until_mapped(self, absent_ranks: Callable[[], list[int]]) -> None:
        """Wait until ``absent_ranks()``, the ranks that have not mapped the segment, is empty."""

        def look() -> bool | None:
            if not absent_ranks():
                return True
            self._segment()
            return None

        self._poll(look, absent_ranks, "to map the group's memory")

    # -- rank 0 ------------------------------------------------------------------------------------

    def _read_answers(self) -> list[RankInfo] | None:
        self._members |= self._answers(self._missing())
        if self._missing():
            self._check_alive()
            return None
        # A rank may have given up and joined again. Read its latest answer.
        self._members |= self._answers(range(1, self.world_size))
        return [self._members[rank] for rank in range(self.world_size)]

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._members]

    def _answers(self, ranks: Sequence[int]) -> dict[int, RankInfo]:
        texts = self._store.look_up([self._key(f"member/{rank}") for rank in ranks])
        answers = zip(ranks, texts, strict=True)
        numbers = self.global_ranks
        return {r: read(text, numbers[r], RankInfo) for r, text in answers if text is not None}

    # -- other ranks -------------------------------------------------------------------------------

    def _answer(self) -> list[RankInfo] | None:
        """Answer the call of rank 0; return all ranks once the group contains this attempt."""
        (text,) = self._store.look_up(["call"])
        if text is None:
            return None
        caller = read(text, self.global_ranks[0], RankInfo)
        if self._members.get(0) != caller:  # rank 0 has called, or called again
            self._members[0] = caller
            self._has_answered = False
        # Check this before reading the keys: rank 0 may write `members` and then die.
        is_alive = self._is_alive(caller)
        # Read `failed` before `members`: a `failed` written after `members` must not hide them.
        failed, members = self._store.look_up([self._key("failed"), self._key("members")])
        if members is not None:
            # The group is complete. If this rank is not in it, wait for rank 0's next call.
            self._has_answered = False
            group = read(
                members,
                self.global_ranks[0],
                lambda members: [RankInfo(**each) for each in members],
            )
            return group if self._own in group else None
        if not self._has_answered:
            if failed is None and is_alive:
                self._store.set(self._key(f"member/{self.rank}"), self._own.text())
                self._has_answered = True
        elif failed is not None:
            self._raise_told(failed)
        elif not is_alive:
            self._check_alive()
        return None

    def _not_answered(self) -> list[int]:
        """Return the ranks that block the group: rank 0, or ranks without an answer."""
        if not self._has_answered:
            return [0]
        answers = self._answers(range(1, self.world_size))
        return [rank for rank in range(1, self.world_size) if rank not in answers] or [0]

    # -- the segment -------------------------------------------------------------------------------

    def _segment(self) -> Any:
        segment, failed = self._store.look_up([self._key("segment"), self._key("failed")])
        if failed is not None:
            self._raise_told(failed)
        self._check_alive()
        return segment

    # -- failures ----------------------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        kind = type(error).__name__
        text = str(error)[:1000] or kind
        if self._may_tell:
            text = f"{self._own.name} could not make the group: {text}"
        if self.group is not None:  # ranks with a group no longer read the store
            encoded = text.encode("utf-8", "backslashreplace")
            self.group.tell(encoded.decode(), kind == "CollectiveTimeout")
        if self._may_tell:
            self._store.set(self._key("failed"), json.dumps({"error": text, "kind": kind}))

    def _raise_told(self, text: bytes) -> None:
        error = read(
            text, self.global_ranks[0], lambda error, kind: _KINDS.get(kind, RingarError)(error)
        )
        self._may_tell = False
        raise error

    def _is_alive(self, member: RankInfo) -> bool:
        is_here = member.node == self._own.node
        return not is_here or load.engine().is_alive(member.pid, member.start_ticks)

    def _check_alive(self) -> None:
        for member in self._members.values():
            if not self._is_alive(member):
                raise PeerLostError(
                    f"{member.name} is gone; rank {self._number} waited to make group "
                    f"{self.name} of {self.world_size} ranks"
                )

    # -- waiting -----------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._members[0].attempt}/{name}"

    def _poll(self, look: Callable[[], T | None], absent: Callable[[], list[int]], what: str) -> T:
        """Poll until ``look`` returns a value, with pauses of an eighth of the elapsed time."""
        longest_s = _LONGEST_POLL_S + min(_POLL_S_PER_RANK * self.world_size, 0.2)
        began_s = time.monotonic()
        while (found := look()) is None:
            now_s = time.monotonic()
            if now_s >= self._deadline:
                raise self._timed_out(absent(), what)
            pause_s = min(max(_FIRST_POLL_S, (now_s - began_s) / 8), longest_s)
            time.sleep(min(pause_s, self._deadline - now_s))
        return found

    def _timed_out(self, absent: list[int], what: str) -> CollectiveTimeout:
        known = [self._members[rank] for rank in absent if rank in self._members]
        numbers = [self.global_ranks[rank] for rank in absent]
        names = [m.name + ("" if self._is_alive(m) else ", which is gone") for m in known]
        return CollectiveTimeout(
            f"rank {self._number} waited {self._timeout_s:g} s for ranks {numbers} {what} in group "
            f"{self.name} of {self.world_size} ranks" + (f": {', '.join(names)}" if names else "")
        )


def _checked_global_ranks(global_ranks: Sequence[int] | None, world_size: int) -> list[int]:
    given: Any = range(world_size) if global_ranks is None else global_ranks
    is_list = isinstance(given, Sequence) and len(given) == world_size
    are_ranks = is_list and all(type(rank) is int and 0 <= rank < 2**31 for rank in given)
    if not are_ranks or len(set(given)) != world_size:
        raise ArgumentError(
            f"global_ranks is {global_ranks!r}, expected a list of {world_size} different numbers "
            "from 0, one per rank of this group"
        )
    return list(given)
