"""Publish the last torch.distributed call of ranks that are processes, for tables of failures."""

from __future__ import annotations

import json
import mmap
import re
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyringar.cluster.calls import call_of_program, some
from pyringar.distributed.backend import RingarBackend, RingarProcessGroup, keep_dynamo_out
from pyringar.distributed.convert import reduction_name
from pyringar.errors import UnsupportedError

__all__ = ["Board", "Publisher"]

_SLOT_BYTES = 4096
_HALF_BYTES = 2040
# The methods of a process group that wait for other ranks.
_METHODS = re.findall(
    r"\w+",
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced _allgather_base "
    "all_gather_single allgather_into_tensor_coalesced gather scatter reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced alltoall "
    "alltoall_base all_to_all_single send recv recv_anysource barrier monitored_barrier",
)


class Board:
    """Anonymous shared memory with a slot per rank, which only that rank writes.

    A slot has two halves, and a first byte that says which half counts: a rank that is killed while
    it writes leaves the half before.
    """

    def __init__(self, num_ranks: int) -> None:
        self._memory = mmap.mmap(-1, num_ranks * _SLOT_BYTES)

    def write(self, rank: int, call: dict[str, Any]) -> None:
        """Publish a rank's last call."""
        text = json.dumps(call).encode()
        if len(text) >= _HALF_BYTES:  # the ranks of a large group, the numbers of many groups
            text = json.dumps({**call, "ranks": [], "numbers": {}}).encode()[: _HALF_BYTES - 1]
        start = rank * _SLOT_BYTES
        half = 1 - self._memory[start]
        first = start + 1 + half * _HALF_BYTES
        self._memory[first : first + len(text) + 1] = text + b"\0"
        self._memory[start] = half

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's last call; empty before the first, and if it is too long for a slot."""
        first = rank * _SLOT_BYTES + 1 + self._memory[rank * _SLOT_BYTES] * _HALF_BYTES
        text, _, _ = self._memory[first : first + _HALF_BYTES].partition(b"\0")
        try:
            found: dict[str, Any] = json.loads(text or b"{}")
        except ValueError:
            return {}
        return found


class Publisher:
    """Publish each call that this rank makes of a process group, of any backend."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._numbers: dict[str, int] = {}  # of the last call, by group
        self._num_calls = 0
        self._here = threading.local()
        self._is_inside = False
        self._work: Any = None
        self._group: Any = None
        for kind in (dist.ProcessGroup, RingarProcessGroup, RingarBackend):
            for name in _METHODS:
                if hasattr(kind, name):
                    setattr(kind, name, self._published(getattr(kind, name), name))
            keep_dynamo_out(kind)

    def state(self) -> tuple[bool, Any]:
        """Return whether the last call has not ended, and a value that changes as it goes on."""
        waits = self._is_inside or not (self._work is None or self._work.is_completed())
        engine = getattr(getattr(self._group, "_comm", None), "_group", None)
        return waits, (self._num_calls, engine.progress() if engine is not None else 0)

    def _published(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "is_inside", False):  # one method of a group calls another
                return method(group, *args, **kwargs)
            self._here.is_inside = self._is_inside = True
            self._group = group
            try:
                self._publish(group, name, [*args, *kwargs.values()])
                self._work = work = method(group, *args, **kwargs)
            finally:
                self._here.is_inside = self._is_inside = False
            return work

        return call

    def _publish(self, group: Any, name: str, args: list[Any]) -> None:
        ranks = list(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
        ranks = ranks or getattr(group, "_global_ranks", None) or list(range(self._world_size))
        is_world = len(ranks) == self._world_size
        key = "the world" if is_world else f"group {', '.join(map(str, ranks))}"
        rows = [[t for t in tree_leaves([arg]) if isinstance(t, Tensor)] for arg in args]
        tensors = next((row for row in reversed(rows) if row), [])  # inputs come after outputs
        details = [f"op {_name_of(a.reduceOp)}" for a in args if hasattr(a, "reduceOp")]
        details += [f"root {a.rootRank}" for a in args if hasattr(a, "rootRank")]
        peers = ranks
        self._num_calls += 1
        if name in ("send", "recv"):
            peers = [ranks[args[1]]]
            details.append(f"{'to' if name == 'send' else 'from'} {peers[0]}")
        elif name != "recv_anysource":
            self._numbers[key] = self._numbers.get(key, 0) + 1
        line, function = call_of_program()
        call = {
            "call": (function or name) + (f" ({', '.join(details)})" if details else ""),
            "number": self._numbers[key] if peers is ranks and name != "recv_anysource" else 0,
            "in": key,
            "shape": some(tuple(tensor.shape) for tensor in tensors),
            "dtype": some(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)),
            "line": line,
            "ranks": peers,
            "numbers": self._numbers,
            "calls": self._num_calls,
        }
        self._board.write(self._rank, call)


def _name_of(reduce_op: Any) -> str:
    try:
        return reduction_name(reduce_op, "")
    except UnsupportedError:  # of another backend
        return str(getattr(reduce_op, "op", reduce_op))
