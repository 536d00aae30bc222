"""The key-value store of ranks that are threads, in place of torch's TCPStore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d

from pyringar.cluster.rank_calls import Wait, seconds_of
from pyringar.cluster.rank_threads import this_rank

_c10d: Any = _distributed_c10d
_Call = Callable[..., None]


class _Keys(Wait):
    def __init__(self, data: Any, keys: Sequence[str], limit_s: float | None) -> None:
        super().__init__(this_rank(), _text_of(keys), limit_s)
        self._data, self._keys = data, keys

    @property
    def is_done(self) -> bool:
        return self._is_over or bool(self._data.check(self._keys))


def _method(name: str, first: _Call | None = None) -> Any:
    """Return a store method, which calls ``first`` before the operation if a key is missing."""

    def call(self: ThreadStore, keys: Any, *args: Any) -> Any:
        listed = [keys] if isinstance(keys, str) else keys
        if first is not None and not self._data.check(listed):
            first(self, listed)
        result = getattr(self._data, name)(keys, *args)
        if first is None:
            self._changed()
        return result

    return call


class ThreadStore(_c10d.Store):  # type: ignore[misc]
    """Keys, values and queues of all ranks of a cluster; a waiting rank lets other ranks run."""

    def __init__(self, wait: _Call, ask: _Call, changed: _Call, data: Any = None) -> None:
        _c10d.Store.__init__(self)
        self._wait, self._ask, self._changed = wait, ask, changed
        self._data = data or _c10d.HashStore()
        self._data.set_timeout(timedelta(milliseconds=1))  # queue_pop() must not wait in C++
        self.kind: type = ThreadStore
        """The class of torch that isinstance() sees."""

    def view(self, prefix: str, **attributes: Any) -> ThreadStore:
        """Return a store of the keys that begin with the prefix and a slash."""
        data = _c10d.PrefixStore(prefix, self._data)
        store = ThreadStore(self._wait, self._ask, self._changed, data)
        store.__dict__.update(attributes)
        return store

    def _ask_for(self, keys: Sequence[str]) -> None:
        self._ask(_text_of(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self._data.check(keys):
            self._wait(_Keys(self._data, keys, seconds_of(timeout)))

    __class__ = property(lambda self: self.kind)
    append = _method("append")
    check = _method("check", first=_ask_for)
    delete_key = _method("delete_key")
    get = _method("get", first=wait)
    queue_len = _method("queue_len", first=_ask_for)
    queue_push = _method("queue_push")
    set = _method("set")

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum; with 0 let other ranks run first."""
        if amount == 0:
            self._ask_for([key])
        total = int(self._data.add(key, amount))
        self._changed()
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes | str) -> bytes:
        found = bytes(self._data.compare_set(key, expected, desired))
        self._changed()
        if found != (desired.encode() if isinstance(desired, str) else desired):
            self._ask_for([key])
        return found

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not block:
            self.check([key])
        while block and not self._data.queue_len(key):
            self.wait([key])
        return bytes(self._data.queue_pop(key, False))

    def num_keys(self) -> int:
        base: Any = getattr(self, "_underlying_non_prefix_store", self)
        return len(base.list_keys()) + 1

    def list_keys(self) -> list[str]:
        return list(self._data.list_keys())

    def clone(self) -> ThreadStore:
        return self

    def let_go(self) -> None:
        for key in self.list_keys():
            self._data.delete_key(key)


def _text_of(keys: Sequence[str]) -> str:
    return f"the store's {', '.join(key.rpartition('/')[2] for key in keys)}"
