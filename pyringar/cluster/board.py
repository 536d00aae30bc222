"""Publish the last torch.distributed call of ranks that are processes, for tables of failures."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import threading
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from pyringar.cluster.calls import call_of_program, some
from pyringar.distributed.backend import RingarBackend, RingarProcessGroup, keep_dynamo_out
from pyringar.distributed.convert import reduction_name
from pyringar.errors import UnsupportedError

__all__ = ["Board", "Publisher"]

_SLOT_BYTES = 4096
# The methods of a process group that wait for other ranks.
_METHODS = re.findall(
    r"\w+",
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced _allgather_base "
    "all_gather_single allgather_into_tensor_coalesced gather scatter reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced alltoall "
    "alltoall_base all_to_all_single send recv recv_anysource barrier monitored_barrier",
)


class Board:
    """Shared memory with a slot for the last call of each rank, also of one that is killed."""

    def __init__(self, num_ranks: int) -> None:
        memory = mmap.mmap(-1, num_ranks * _SLOT_BYTES)
        self._slots = (ctypes.c_char * _SLOT_BYTES * num_ranks).from_buffer(memory)

    def write(self, rank: int, call: dict[str, Any]) -> None:
        """Publish a rank's last call."""
        text = json.dumps(call).encode()
        if len(text) >= _SLOT_BYTES:  # the ranks of a large group, the numbers of many groups
            text = json.dumps({**call, "ranks": [], "numbers": {}}).encode()
        self._slots[rank].value = text[: _SLOT_BYTES - 1]

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's last call; empty before the first, and if it is too long for a slot."""
        try:
            found: dict[str, Any] = json.loads(self._slots[rank].value)
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
        self._inside: set[int] = set()  # the threads that are in a call
        self._work: Any = None
        self._group: Any = None
        for kind in (dist.ProcessGroup, RingarProcessGroup, RingarBackend):
            for name in _METHODS:
                if hasattr(kind, name):
                    setattr(kind, name, self._published(getattr(kind, name), name))
            keep_dynamo_out(kind)
        store: Any = dist.Store  # type: ignore[attr-defined]
        for name in ("get", "wait"):
            setattr(store, name, _with_a_frame(getattr(store, name)))

    def state(self, frame: FrameType | None) -> tuple[str, Any]:
        """Return what the program does in a frame, and a value that changes as calls go on."""
        engine = getattr(getattr(self._group, "_comm", None), "_group", None)
        progress = (self._num_calls, engine.progress() if engine is not None else 0)
        if self._inside or not (self._work is None or self._work.is_completed()):
            return "waits", progress
        waiting = (vars(distributed_c10d), globals())
        if any(outer.f_globals in waiting for outer, _ in walk_stack(frame)):
            return "waits in the store", progress  # for ranks that join a group, or for a key
        return "runs", progress

    def _published(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread in self._inside:  # one method of a group calls another
                return method(group, *args, **kwargs)
            self._inside.add(thread)
            self._group = group
            try:
                self._publish(group, name, [*args, *kwargs.values()])
                self._work = work = method(group, *args, **kwargs)
            finally:
                self._inside.remove(thread)
            return work

        return call

    def _publish(self, group: Any, name: str, args: list[Any]) -> None:
        ranks = list(distributed_c10d._world.pg_group_ranks.get(group, ()))
        ranks = ranks or getattr(group, "_global_ranks", None) or list(range(self._world_size))
        is_world = len(ranks) == self._world_size
        key = "the world" if is_world else f"group {', '.join(map(str, ranks))}"
        rows = [[t for t in tree_leaves([arg]) if isinstance(t, Tensor)] for arg in args]
        tensors = next((row for row in reversed(rows) if row), [])  # inputs come after outputs
        details = [f"op {_name_of(a.reduceOp)}" for a in args if hasattr(a, "reduceOp")]
        details += [f"root {a.rootRank}" for a in args if hasattr(a, "rootRank")]
        number = 0
        if name in ("send", "recv"):
            ranks = [ranks[args[1]]]
            details.append(f"{'to' if name == 'send' else 'from'} {ranks[0]}")
        elif name != "recv_anysource":
            number = self._numbers[key] = self._numbers.get(key, 0) + 1
        self._num_calls += 1
        line, function = call_of_program()
        columns = [
            (function or name) + (f" ({', '.join(details)})" if details else ""),
            str(number or ""),
            key,
            some(tuple(tensor.shape) for tensor in tensors),
            some(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)),
        ]
        call = {"columns": columns, "line": line, "in": key, "number": number, "ranks": ranks}
        call |= {"numbers": self._numbers, "calls": self._num_calls}
        self._board.write(self._rank, call)


def _with_a_frame(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in C++ as a function in Python, which stacks show."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _name_of(reduce_op: Any) -> str:
    try:
        return reduction_name(reduce_op, "")
    except UnsupportedError:  # of another backend
        return str(getattr(reduce_op, "op", reduce_op))
