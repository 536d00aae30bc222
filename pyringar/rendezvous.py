"""How ranks in processes of their own find each other: a torch store, then shared memory.

What comes out of the store is checked before it is used: another process may have written it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from pyringar import _native
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)

__all__ = ["Member", "Rendezvous", "default_store", "node_id"]

_VERSION = 1
_TOKEN_BYTES = 32
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
# How many groups of each name this process has made: every rank makes them in the same order.
_made: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def node_id() -> str:
    """Which machine this is: equal for processes that can share memory, else different.

    ``PYRINGAR_NODE_ID`` overrides it. Containers with process numbers of their own count as
    machines of their own.
    """
    given = os.environ.get("PYRINGAR_NODE_ID")
    if given:
        return given
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return os.uname().nodename if hasattr(os, "uname") else "this machine"
    return f"{boot} {namespace}"


@dataclass(frozen=True)
class Member:
    """What a rank tells the others about itself."""

    rank: int
    node: str
    host: str
    pid: int
    start_ticks: int
    check: str  # PYRINGAR_CHECK: ranks that check what others do not would wait for them
    kind: str = "cpu"  # of its device: "cpu" or "cuda"

    @classmethod
    def this_process(cls, rank: int, kind: str = "cpu") -> Member:
        """This process, as rank ``rank``, with tensors on this kind of device."""
        pid, start_ticks = _native.engine().process_id()
        host = os.uname().nodename if hasattr(os, "uname") else "this machine"
        check = os.environ.get("PYRINGAR_CHECK", "")
        return cls(rank, node_id(), host, pid, start_ticks, check, kind)

    @classmethod
    def parse(cls, text: bytes, rank: int) -> Member:
        """What another rank wrote.

        Raises:
            RingarError: It is not what this version of pyringar writes.
        """
        try:
            fields = _parse_object(text)
            version = fields.pop("version")
            member = cls(**fields)
        except (ValueError, TypeError, KeyError):
            raise RingarError(
                f"rank {rank} wrote {text[:80]!r} into the store, no member"
            ) from None
        is_whole = (
            version == _VERSION
            and _is_count(member.rank, rank, rank)
            and all(map(_is_text, (member.node, member.host, member.check, member.kind)))
            and _is_count(member.pid, 1, _INT32_MAX)
            and _is_count(member.start_ticks, 0, _UINT64_MAX)
        )
        if not is_whole:
            raise RingarError(
                f"rank {rank} wrote {text[:200]!r} of version {version!r} into the store, expected "
                f"rank {rank} of version {_VERSION}: do all ranks run the same pyringar?"
            )
        return member

    def text(self) -> str:
        """What :meth:`parse` reads."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"


# What is read from the store need not be what we wrote.
_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1
_LONGEST_BYTES = 4096  # of a member or a segment
_LONGEST_TEXT = 256


def _parse_object(text: bytes) -> dict[str, Any]:
    if len(text) > _LONGEST_BYTES:
        raise ValueError("too long")
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return fields


def _is_count(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= _LONGEST_TEXT


def default_store() -> tuple[Any, int, int]:
    """The store, rank and world size of this job: torch.distributed's, or torchrun's.

    Raises:
        ArgumentError: Neither is there.
        UnsupportedError: This torch was built without torch.distributed.
    """
    if not dist.is_available():
        raise UnsupportedError(
            "this torch has no torch.distributed; one process can drive all ranks"
        )
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"no store is given, torch.distributed is not initialised, and {', '.join(missing)} "
            "is not in the environment: start the processes with torchrun, or pass store, rank "
            "and world_size"
        )
    return _environment_store()


@functools.cache  # one per process: rank 0's listens on the port that the environment names
def _environment_store() -> tuple[Any, int, int]:
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(iter(rendezvous("env://")))
    return store, rank, world_size


class Rendezvous:
    """One group's part of a store.

    Args:
        store: A torch.distributed store that all ranks share.
        rank: This process's rank.
        world_size: Number of ranks.
        name: Groups of one name are made in the same order by all ranks.
        timeout_s: How long to wait for the others.
        kind: Of the device on which this rank has its tensors.
        engine: The module that makes and maps the group's memory; None: the CPU's.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
        *,
        kind: str = "cpu",
        engine: ModuleType | None = None,
    ) -> None:
        # Not every build of torch has it.
        from torch._C._distributed_c10d import PrefixStore

        self.rank = rank
        self.world_size = world_size
        self.name = f"{name}/{next(_made[name])}"
        self._store = PrefixStore(f"pyringar/{self.name}", store)
        self._timeout_s = timeout_s
        self._kind = kind
        self._engine = engine or _native.engine()
        self._members: dict[int, Member] = {}
        self._deadline = time.monotonic() + timeout_s

    @property
    def store(self) -> Any:
        """The group's part of the store."""
        return self._store

    def exchange_members(self) -> list[Member]:
        """Every rank's member, in rank order; returns when all have come.

        Raises:
            CollectiveTimeout: Names the ranks that did not come in time.
            PeerLostError: A rank came and died, or the store is gone.
        """
        self._set(f"member/{self.rank}", Member.this_process(self.rank, self._kind).text())
        for rank in range(self.world_size):
            self._members[rank] = Member.parse(self._get(f"member/{rank}", [rank]), rank)
        return [self._members[rank] for rank in range(self.world_size)]

    def share_memory(self, note: str = "") -> tuple[Any, bytes, str]:
        """Rank 0's segment, mapped, its token, and its note.

        Args:
            note: What rank 0 wants all to know; the others' are not looked at.
        """
        if self.rank == 0:
            return *self._offer_memory(note), note
        text = self._get("segment", [0])
        try:
            fields = _parse_object(text)
            error = fields.get("error")
            fd, token = (0, b"") if error else (fields["fd"], bytes.fromhex(fields["token"]))
            if not (error or (_is_count(fd, 0, _INT32_MAX) and len(token) == _TOKEN_BYTES)):
                raise ValueError("no descriptor or token")
            note = fields.get("note", "")
            if type(note) is not str:
                raise ValueError("no note")
        except (ValueError, TypeError, KeyError):
            raise RingarError(f"rank 0 wrote {text[:80]!r} into the store, no segment") from None
        owner = self._members[0]
        if error:
            raise RingarError(f"{owner.name} could not make the group: {error}")
        try:
            memory = self._engine.open_segment(owner.pid, fd, self.world_size)
        except RingarError:
            # Rank 0 is being killed, and loses its descriptors a moment before it is gone; or it
            # lives, and has given up because another rank died.
            for _ in range(50):
                for member in self._members.values():
                    self._check_alive(member, [0], "to share its memory")
                time.sleep(_FIRST_POLL_S * 10)
            raise
        return memory, token, note

    def _offer_memory(self, note: str) -> tuple[Any, bytes]:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            memory = self._engine.create_segment(self.world_size, token)
        except RingarError as error:
            self._set("segment", json.dumps({"error": str(error)[:1000]}))
            raise
        self._set("segment", json.dumps({"fd": memory.fd, "token": token.hex(), "note": note}))
        return memory, token

    def wait_until(self, absent_ranks: Any, what: str) -> None:
        """Return when ``absent_ranks()`` is empty.

        Raises:
            CollectiveTimeout, PeerLostError: As :meth:`exchange_members`.
        """
        pause_s = _FIRST_POLL_S
        while absent := absent_ranks():
            self._check(absent, what)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    # -- the store ---------------------------------------------------------------------------------

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _get(self, key: str, ranks: list[int]) -> bytes:
        """A key that one of ``ranks`` writes: polled, so that one who dies meanwhile is noticed."""

        def absent() -> list[int]:
            return [] if self._ask(lambda: self._store.check([key])) else ranks

        self.wait_until(absent, "to join")
        value: bytes = self._ask(lambda: self._store.get(key))
        return value

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers, by the deadline.

        In a thread: a store that is stopped neither answers nor breaks off, and its own timeout is
        not ours.
        """
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            except Exception as error:  # for the caller, below
                answers.put((None, error))

        asking = threading.Thread(target=ask, name="pyringar store", daemon=True)
        asking.start()
        try:
            left_s = min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)
            answer, error = answers.get(timeout=max(_LONGEST_POLL_S, left_s))
        except queue.Empty:
            raise CollectiveTimeout(
                f"the store of group {self.name} did not answer rank {self.rank} in "
                f"{self._timeout_s:g} s"
            ) from None
        asking.join()
        if isinstance(error, RuntimeError):
            raise PeerLostError(
                f"the store of group {self.name} does not answer rank {self.rank}, so its process "
                f"is gone: {error}"
            ) from error
        if error is not None:
            raise error
        return answer

    def _check_alive(self, member: Member, absent: list[int], what: str) -> None:
        is_here = member.node == node_id()
        if is_here and not _native.engine().is_alive(member.pid, member.start_ticks):
            raise PeerLostError(
                f"{member.name} is gone; rank {self.rank} waited for ranks {absent} {what} in "
                f"group {self.name}"
            )

    def _check(self, absent: list[int], what: str) -> None:
        for member in self._members.values():
            self._check_alive(member, absent, what)
        if time.monotonic() > self._deadline:
            known = [self._members[r].name for r in absent if r in self._members]
            raise CollectiveTimeout(
                f"rank {self.rank} waited {self._timeout_s:g} s for ranks {absent} {what} in "
                f"group {self.name} of {self.world_size} ranks"
                + (f": {', '.join(known)}" if known else "")
            )
