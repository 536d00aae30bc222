"""The store of a cluster: what ranks tell each other by name, as torch's TCPStore does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from pyringar.cluster.calls import Wait, seconds_of
from pyringar.cluster.ranks import this_rank

__all__ = ["ThreadStore"]

_Store: Any = _distributed_c10d.Store
_FIRST_PORT = 49152  # of those that a store chooses


class _Keys(Wait):
    """A wait for keys of the store."""

    def __init__(self, store: ThreadStore, keys: Sequence[str], limit_s: float | None) -> None:
        super().__init__(this_rank(), f"the store's {', '.join(map(_short, keys))}", limit_s)
        self._store = store
        self._keys = keys

    @property
    def is_done(self) -> bool:
        """Whether all are there, or the wait was ended."""
        return self._is_over or self._store.has(self._keys)

    @is_done.setter
    def is_done(self, value: bool) -> None:
        self._is_over = value


class ThreadStore(_Store):  # type: ignore[misc]
    """Keys, values and queues of all ranks of a cluster; a rank that waits lets others run.

    Args:
        wait: Returns when a wait is done, and raises the error that it ended with.
        ask: Lets others run: a rank may ask in a loop for a key, which the argument names.
        changed: Called when there are new keys.
    """

    kind: Any = None
    """The class of torch that it stands for."""

    def __init__(
        self,
        wait: Callable[[Wait], None],
        ask: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        super().__init__()
        self._calls = wait, ask, changed
        self._wait, self._ask, self._changed = wait, ask, changed
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, list[bytes]] = {}
        self._prefix = ""
        self._timeout = timedelta(seconds=300)
        self._stores: dict[Any, ThreadStore] = {}

    def store_at(self, kind: type, place: Sequence[Any]) -> ThreadStore:
        """Return the store that ranks share by its class and place.

        Args:
            kind: A class of torch.
            place: Host and port, where 0 is a port that was not used, or the path of a file.
        """
        key = kind, *(each or _FIRST_PORT + len(self._stores) for each in place)
        if key not in self._stores:
            names = ("path",) if len(key) == 2 else ("host", "port")
            attributes = dict(zip(names, key[1:], strict=True), kind=kind, libuvBackend=True)
            self._stores[key] = ThreadStore(*self._calls)._with(attributes)
        return self._stores[key]

    def view(self, prefix: str, kind: type | None = None) -> ThreadStore:
        """Return a store of the keys of this one that begin with a prefix, of a class of torch."""
        made = ThreadStore(*self._calls)._with(self.__dict__)
        root = getattr(self, "_underlying_non_prefix_store", self)
        more = {"underlying_store": self, "_underlying_non_prefix_store": root, "kind": kind}
        return made._with({"_prefix": self._prefix + prefix, **(more if kind is not None else {})})

    def _with(self, attributes: dict[str, Any]) -> ThreadStore:
        self.__dict__.update(attributes)
        return self

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._values[self._prefix + key] = _bytes(value)
        self._changed()

    def get(self, key: str) -> bytes:
        """Return a key's value, when it is there."""
        self.wait([key])
        return self._values[self._prefix + key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        if amount == 0:
            self._ask(f"the store's {_short(key)}")
        total = int(self._values.get(self._prefix + key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: bytes | str) -> None:
        """Put more at the end of a key's value."""
        self.set(key, self._values.get(self._prefix + key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it has the expected value, or if it has none and none is expected."""
        found = self._values.get(self._prefix + key)
        if found == _bytes(expected) or (found is None and not expected):
            self.set(key, desired)
            return _bytes(desired)
        self._ask(f"the store's {_short(key)}")
        return _bytes(expected) if found is None else found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; if not, let others run first."""
        if not self.has(keys):
            self._ask(f"the store's {', '.join(map(_short, keys))}")
        return self.has(keys)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there now."""
        full = [self._prefix + key for key in keys]
        return all(key in self._values or self._queues.get(key) for key in full)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        if not self.has(keys):
            self._wait(_Keys(self, keys, seconds_of(timeout)))

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Put a value at the end of a queue."""
        self._queues.setdefault(self._prefix + key, []).append(_bytes(value))
        self._changed()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, when there is one.

        Raises:
            QueueEmptyError: There is none, and ``block`` is false.
        """
        while not (queue := self._queues.get(self._prefix + key)):
            if not block and not self.check([key]):
                raise dist.QueueEmptyError("queue is empty")
            self.wait([key])
        return queue.pop(0)

    def queue_len(self, key: str) -> int:
        """Return how many values are in a queue; if none, let others run first."""
        self.check([key])
        return len(self._queues.get(self._prefix + key, ()))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._values.pop(self._prefix + key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys there are, and one of the server's as torch does."""
        return len(self._values) + 1

    def list_keys(self) -> list[str]:
        """Return all keys."""
        start = len(self._prefix)
        return [key[start:] for key in self._values if key.startswith(self._prefix)]

    def clone(self) -> ThreadStore:
        """Return another object for the same store."""
        return self.view("")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait for keys may last."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Return how long a wait for keys may last."""
        return self._timeout

    def let_go(self) -> None:
        """Forget all keys."""
        for store in [self, *self._stores.values()]:
            store._values.clear()
            store._queues.clear()
        self._stores.clear()

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _short(key: str) -> str:
    return key.rpartition("/")[2]
