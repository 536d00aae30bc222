"""Let ranks in processes find each other: through a torch store, then shared memory.

A store may outlive the processes that wrote into it (torchrun keeps one for all restarts), and a
process may outlive its stores and groups. So nothing is counted: every attempt to meet draws a
random name (``Member.attempt``), a group is what rank 0 agrees to, and it is agreed to in the
store, below ``pyringar/NAME``:

================== ================================== =============================================
key                written by                         says
================== ================================== =============================================
``call``           rank 0, as it begins               its member; answer below its attempt, A
``A/member/R``     rank R, having read ``call``       its member
``A/came``         rank R, afterwards: counts up      that rank 0 should look again
``A/members``      rank 0, once                       all members; or why there will be no group
``A/segment``      rank 0, once                       where its memory is
``A/failed``       whoever fails after ``members``    why there will be no group
everything else    the group (`Rendezvous.store`)     below ``A``, too: gloo, sub-groups, machines
================== ================================== =============================================

Rank 0 believes an answer because it stands below a name that nobody knew before; rank R believes
``members`` because they repeat its own attempt. What another attempt left fits neither:

- ``call`` of a process that was gone before we looked, or that ended without us, is no call yet;
- ``call`` that changes is answered anew; first rank R looks whether the old one named it after all;
- an answer that is written again, by a rank that gave up and came again, counts instead of the old;
- a process that called, or answered, and *then* died, has died in this attempt: PeerLostError.

No process number is compared between machines; there the attempts' names do it alone. The number of
a torchrun restart would not: each agent counts its own.

The store is asked a few times per rank, rank 0 a few times per member, then in turns that grow
longer. What comes out of it is checked before it is used: another process may have written it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from pyringar.comm.arguments import is_count
from pyringar.comm.member import INT32_MAX, LONGEST_BYTES, Member, garbage, parse_object
from pyringar.comm.stores import PatientStore
from pyringar.engine import load
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
)

__all__ = ["Rendezvous"]

_TOKEN_BYTES = 32
_ATTEMPT_BYTES = 16
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_POLL_S_PER_RANK = 0.001  # all of them ask one store
# A process that is being killed loses its descriptors a moment before it is gone.
_DYING_S = 0.5
_KINDS = {kind.__name__: kind for kind in (PeerLostError, CollectiveTimeout)}
T = TypeVar("T")


class Rendezvous:
    """One attempt to meet, for ``with``: leaving it with an error tells the others why.

    Args:
        store: A torch.distributed store that all ranks share.
        rank: This process's rank.
        world_size: Number of ranks.
        name: Groups of one name are made in the same order by all ranks.
        timeout_s: How long to wait for the others.
        kind: Of the device on which this rank has its tensors: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
        kind: str = "cpu",
    ) -> None:
        # Not every build of torch has it.
        from torch._C._distributed_c10d import PrefixStore

        # Before the clock starts: they may have to be compiled. The CPU's tells processes apart.
        cpu_engine = load.engine()
        self.engine = cpu_engine if kind == "cpu" else load.cuda_engine()
        self._prefixed = PrefixStore
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        prefixed = PrefixStore(f"pyringar/{name}", store)
        self._store = PatientStore(prefixed, name, rank, self._deadline)
        attempt = secrets.token_hex(_ATTEMPT_BYTES)
        self._own = Member.this_process(rank, kind, attempt)
        # Of whom we know, by rank. Of rank 0, the last that called; answered, if it was alive.
        self._members = {rank: self._own}
        self._has_answered = False
        self._given_up = ""  # why the last call came to nothing
        self._is_agreed = False
        self._was_told = False  # by another why there will be no group

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and not self._was_told:
                # The store may be what failed.
                with suppress(RingarError):
                    self._tell(error)
        finally:
            self._store.close()

    @property
    def store(self) -> Any:
        """The part of the store that belongs to this group alone, once the members have met."""
        return self._prefixed(self._members[0].attempt, self._store.store)

    def exchange_members(self) -> list[Member]:
        """Return every rank's member, in rank order, when all have come.

        Raises:
            CollectiveTimeout: Names the ranks that did not come in time.
            PeerLostError: A rank came and died, or the store is gone.
            RingarError: A rank wrote what cannot be read (names it).
            ArgumentError: Ranks have another ``world_size``.
        """
        members = self._collect() if self.rank == 0 else self._join()
        self._members = dict(enumerate(members))
        self._is_agreed = True
        if len(members) != self.world_size:
            raise ArgumentError(
                f"world_size is {self.world_size} for rank {self.rank} and {len(members)} for "
                f"{members[0].name}, expected the same for all ranks"
            )
        return members

    def share_memory(self) -> tuple[Any, bytes]:
        """Return rank 0's segment, mapped, and its token.

        Raises as `exchange_members`, and RingarError for a rank that could not make or map
        it: names it, with the reason.
        """
        if self.rank == 0:
            token = secrets.token_bytes(_TOKEN_BYTES)
            memory = self.engine.create_segment(self.world_size, token)
            offer = {"fd": memory.fd, "token": token.hex()}
            self._store.set(self._key("segment"), json.dumps(offer))
            return memory, token
        text = self._poll(self._segment, lambda: [0], "to share its memory")
        fd, token = self._parse_segment(text)
        try:
            memory = self.engine.open_segment(self._members[0].pid, fd, self.world_size)
        except RingarError:
            # Rank 0 is being killed; or it lives, and has given up because another rank died.
            until = time.monotonic() + _DYING_S
            while time.monotonic() < until:
                self._segment(True)
                time.sleep(_LONGEST_POLL_S)
            raise
        return memory, token

    def wait_until_mapped(self, absent_ranks: Callable[[], list[int]]) -> None:
        """Return when ``absent_ranks()``, who have not mapped the memory yet, is empty.

        Raises as `share_memory`.
        """

        def look(is_late: bool) -> bool | None:
            if not absent_ranks():
                return True
            if is_late:
                self._segment(True)
            return None

        self._poll(look, absent_ranks, "to map the group's memory")

    # -- rank 0 ------------------------------------------------------------------------------------

    def _collect(self) -> list[Member]:
        """Call, and return who answered."""
        self._store.set("call", self._own.text())
        others = range(1, self.world_size)
        came: Any = None

        def missing() -> list[int]:
            return [rank for rank in others if rank not in self._members]

        def look(is_late: bool) -> list[Member] | None:
            nonlocal came
            if is_late:
                self._check_alive(missing, "to join")
            before, came = came, self._look_up("came")
            if came != before:
                self._read_answers(missing())
            if missing():
                return None
            if came != str(len(others)).encode():  # some have answered twice
                self._read_answers(others)
            return [self._members[rank] for rank in range(self.world_size)]

        members = self._poll(look, missing, "to join")
        self._store.set(
            self._key("members"), json.dumps({"members": [member.text() for member in members]})
        )
        return members

    def _read_answers(self, ranks: Sequence[int]) -> None:
        texts = self._store.look_up([self._key(f"member/{rank}") for rank in ranks])
        for rank, text in zip(ranks, texts, strict=True):
            if text is not None:
                self._members[rank] = Member.parse(text, rank)

    # -- other ranks -------------------------------------------------------------------------------

    def _join(self) -> list[Member]:
        """Answer whoever calls, and return the members of the group that names this attempt."""
        return self._poll(self._answer, self._not_answered, "to join")

    def _answer(self, is_late: bool) -> list[Member] | None:
        del is_late  # one process is looked at, in every turn
        (text,) = self._store.look_up(["call"])
        if text is None:
            return None
        caller = Member.parse(text, 0)
        known = self._members.setdefault(0, caller)
        if known.attempt != caller.attempt:
            # Before it called anew it may have named us.
            agreed = self._parse_members(self._look_up("members"))
            if agreed is not None:
                return agreed
            self._members[0] = caller
            self._has_answered = False
            self._given_up = ""
        is_alive = self._is_alive(caller)  # before the look, so that its last word is heard
        text = self._look_up("members")
        if text is not None:
            self._has_answered = False  # it ended, perhaps without us
            return self._parse_members(text)
        if self._has_answered and not is_alive:
            self._check_alive(self._not_answered, "to join")
        if not self._has_answered and is_alive:
            self._store.set(self._key(f"member/{self.rank}"), self._own.text())
            self._store.add(self._key("came"))
            self._has_answered = True
        return None

    def _not_answered(self) -> list[int]:
        """Return for whom the group waits: rank 0, or those that its call waits for."""
        if not self._has_answered:
            return [0]
        others = range(1, self.world_size)
        try:
            texts = self._store.look_up([self._key(f"member/{rank}") for rank in others])
        except RingarError:  # the last words of an error that is raised already
            return [0]
        return [rank for rank, text in zip(others, texts, strict=True) if text is None] or [0]

    def _parse_members(self, text: Any) -> list[Member] | None:
        """Return who is in the group, None if this attempt is not; raise if it came to nothing."""
        if text is None:
            return None
        try:
            fields = parse_object(text, (self.world_size + 1) * LONGEST_BYTES)
            if "error" in fields:
                if self._own.attempt in fields["attempts"]:
                    self._raise_told(fields)
                return None
            members = [Member.parse(m, rank) for rank, m in enumerate(fields["members"])]
        except (ValueError, TypeError, KeyError):
            raise garbage(0, text, "no list of members") from None
        return members if self._own in members else None

    # -- the memory --------------------------------------------------------------------------------

    def _segment(self, is_late: bool) -> Any:
        """Return what stands there; raise what a rank says that failed, or for one that died."""
        keys = [self._key("segment"), self._key("failed")]
        segment, failed = self._store.look_up(keys)
        if failed is not None:
            # What cannot be read is nobody's reason; who wrote it will be missed.
            with suppress(ValueError, TypeError, KeyError):
                self._raise_told(parse_object(failed, LONGEST_BYTES))
        if is_late:
            self._check_alive(lambda: [0], "to share its memory")
        return segment

    def _parse_segment(self, text: Any) -> tuple[int, bytes]:
        try:
            fields = parse_object(text, LONGEST_BYTES)
            fd, token = fields["fd"], bytes.fromhex(fields["token"])
            if not (is_count(fd, 0, INT32_MAX) and len(token) == _TOKEN_BYTES):
                raise ValueError("no descriptor or token")
        except (ValueError, TypeError, KeyError):
            raise garbage(0, text, "no segment") from None
        return fd, token

    # -- failures ----------------------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        """Say why there will be no group, to those who count on this rank."""
        told: dict[str, Any] = {"error": str(error)[:1000] or type(error).__name__}
        told |= {"kind": type(error).__name__, "rank": self.rank}
        if self._is_agreed:
            self._store.set(self._key("failed"), json.dumps(told))
        elif self.rank == 0 and isinstance(error, RingarError):
            # An answer that comes after this is another attempt's.
            keys = [self._key(f"member/{rank}") for rank in range(1, self.world_size)]
            told["attempts"] = []
            for rank, text in enumerate(self._store.look_up(keys), start=1):
                with suppress(RingarError):
                    told["attempts"] += [Member.parse(text, rank).attempt] if text else []
            self._store.set(self._key("members"), json.dumps(told))

    def _raise_told(self, told: dict[str, Any]) -> None:
        rank, text, kind = told["rank"], told["error"], told["kind"]
        if not is_count(rank, 0, self.world_size - 1) or type(text) is not str:
            raise ValueError("no error")
        # Before there are members, one that did not wait long enough may call again.
        if kind == CollectiveTimeout.__name__ and not self._is_agreed:
            self._given_up = f"; {self._members[rank].name} has given up: {text}"
            return
        self._was_told = True
        raise _KINDS.get(kind, RingarError)(
            f"{self._members[rank].name} could not make the group: {text}"
        )

    def _is_alive(self, member: Member) -> bool:
        is_here = member.node == self._own.node
        return not is_here or load.engine().is_alive(member.pid, member.start_ticks)

    def _check_alive(self, absent: Callable[[], list[int]], what: str) -> None:
        for member in self._members.values():
            if not self._is_alive(member):
                raise PeerLostError(
                    f"{member.name} is gone; rank {self.rank} waited for ranks {absent()} {what} "
                    f"in group {self.name}"
                )

    # -- waiting -----------------------------------------------------------------------------------

    def _key(self, name: str, caller: Member | None = None) -> str:
        return f"{(caller or self._members[0]).attempt}/{name}"

    def _look_up(self, name: str, caller: Member | None = None) -> Any:
        (text,) = self._store.look_up([self._key(name, caller)])
        return text

    def _poll(
        self, look: Callable[[bool], T | None], absent: Callable[[], list[int]], what: str
    ) -> T:
        """Look in turns that grow longer; in the longest, late ones, ``look`` may take its time."""
        longest_s = _LONGEST_POLL_S + min(_POLL_S_PER_RANK * self.world_size, 0.2)
        pause_s = _FIRST_POLL_S
        while (found := look(pause_s == longest_s)) is None:
            if time.monotonic() >= self._deadline:
                raise self._timed_out(absent(), what)
            time.sleep(max(0.0, min(pause_s, self._deadline - time.monotonic())))
            pause_s = min(2 * pause_s, longest_s)
        return found

    def _timed_out(self, absent: list[int], what: str) -> CollectiveTimeout:
        known = [self._members[rank] for rank in absent if rank in self._members]
        names = [m.name + ("" if self._is_alive(m) else ", which is gone") for m in known]
        return CollectiveTimeout(
            f"rank {self.rank} waited {self._timeout_s:g} s for ranks {absent} {what} in group "
            f"{self.name} of {self.world_size} ranks"
            + (f": {', '.join(names)}" if names else "")
            + self._given_up
        )
