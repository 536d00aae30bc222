"""The store of a cluster: what ranks tell each other by name, as torch's TCPStore does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d

from pyringar.cluster.calls import Wait, seconds_of
from pyringar.cluster.ranks import this_rank

__all__ = ["ThreadStore"]

_Store: Any = _distributed_c10d.Store


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
    """Keys and values of all ranks of a cluster; who waits for a key lets others run.

    Args:
        wait: Returns when a wait is done, and raises what it ended with.
        ask: Lets others run: who does not find a thing may ask for it in a loop. Told for what.
        changed: Called when there are new keys.
    """

    def __init__(
        self,
        wait: Callable[[Wait], None],
        ask: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._wait = wait
        self._ask = ask
        self._changed = changed
        self._timeout = timedelta(seconds=300)

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._changed()

    def get(self, key: str) -> bytes:
        """Return a key's value, when it is there."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        if amount == 0:
            self._ask(f"the store's {_short(key)}")
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        self._changed()
        return total

    def append(self, key: str, value: bytes | str) -> None:
        """Put more at the end of a key's value."""
        more = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = self._values.get(key, b"") + more
        self._changed()

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key if it has the expected value, or if it has none and none is expected."""
        found = self._values.get(key)
        if found == bytes(expected) or (found is None and not expected):
            self._values[key] = bytes(desired)
            self._changed()
            return bytes(desired)
        self._ask(f"the store's {_short(key)}")
        return bytes(expected) if found is None else found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; if not, let others run first."""
        if not self.has(keys):
            self._ask(f"the store's {', '.join(map(_short, keys))}")
        return self.has(keys)

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there now."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there."""
        if not self.has(keys):
            self._wait(_Keys(self, keys, seconds_of(timeout)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait for keys may last."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Return how long a wait for keys may last."""
        return self._timeout

    def let_go(self) -> None:
        """Forget all keys."""
        self._values = {}

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815


def _short(key: str) -> str:
    return key.rpartition("/")[2]
