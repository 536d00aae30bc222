"""Keep for each rank of a cluster what a process has only once."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

__all__ = ["Environment", "ProcessState", "environment_of"]

# More of the kind: how to read it, and how to set it.
Extras = Sequence[tuple[Callable[[], Any], Callable[[Any], object]]]


class ProcessState:
    """Random states of torch, Python and NumPy, and the default dtype.

    Args:
        extras: More of the kind.

    Cost: 15 us to take and to restore.
    """

    def __init__(self, extras: Extras = ()) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = _of_cuda()
        self._python = random.getstate()
        self._numpy = _NumpyState.now()
        self._dtype = torch.get_default_dtype()
        self._extras = [(put, get()) for get, put in extras]

    @classmethod
    def fresh(cls, number: int, extras: Extras = ()) -> ProcessState:
        """Return the state of a process that has just begun, but for what is random there.

        Args:
            number: What random numbers begin with: other ones in each process.
            extras: See `ProcessState`; these are as the process has them.
        """
        self = cls(extras)
        self._torch = torch.Generator().manual_seed(number).get_state()
        self._cuda = [
            torch.Generator(f"cuda:{i}").manual_seed(number).get_state()
            for i, _ in enumerate(self._cuda)
        ]
        self._python = random.Random(number).getstate()
        if self._numpy is not None:
            self._numpy = _NumpyState(numpy_random().MT19937(number))
        self._dtype = torch.float32
        return self

    def restore(self) -> None:
        """Give the process this state."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.restore()
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        for put, value in self._extras:
            put(value)


def _of_cuda() -> list[torch.Tensor]:
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if is_used else []


class _NumpyState:
    """NumPy's generator of a rank: exchanged, since to copy its state takes longer than a turn.

    The legacy functions keep every second normal number outside it, and forget that with it.

    Args:
        generator: As ``numpy.random.MT19937``.
        normal: The number that they keep, if they do.
    """

    _restored: _NumpyState | None = None  # what was restored last

    def __init__(self, generator: Any, normal: dict[str, Any] | None = None) -> None:
        self._generator = generator
        self._normal = normal or {}
        self._position: Any = None

    @classmethod
    def now(cls) -> _NumpyState | None:
        """Return the process's; None: the program has no NumPy, or one that cannot be told."""
        numpy = numpy_random()
        if numpy is None:
            return None
        generator, last = numpy.get_bit_generator(), cls._restored
        if last is not None and generator is last._generator and not last._normal:
            position = _position(generator)
            if position is not None and position == last._position:
                return last  # no number was drawn since
        state = numpy.get_state(legacy=False)
        kept = {key: state[key] for key in ("has_gauss", "gauss")} if state["has_gauss"] else None
        return cls(generator, kept)

    def restore(self) -> None:
        """Give it to the process."""
        numpy = numpy_random()
        numpy.set_bit_generator(self._generator)
        if self._normal:
            numpy.set_state(numpy.get_state(legacy=False) | self._normal)
        self._position = _position(self._generator)
        _NumpyState._restored = self


def _position(generator: Any) -> tuple[int, int] | None:
    """Return what every number drawn changes: the place in MT19937's 624 words, and the first."""
    if type(generator).__name__ != "MT19937":
        return None
    words = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    return words[624], words[0]


def numpy_random() -> Any:
    """Return NumPy's module of random numbers, if the program has it and it can be told."""
    numpy = sys.modules.get("numpy")
    found = getattr(numpy, "random", None)
    return found if hasattr(found, "set_bit_generator") else None


class Environment(MutableMapping[Any, Any]):
    """Keep the variables of ``os.environ``: a rank's own for its threads.

    Args:
        outside: Those of all other threads.
        mine: Returns those of this thread's rank; None: it is no rank's.
    """

    def __init__(self, outside: MutableMapping[Any, Any], mine: Callable[[], Any]) -> None:
        self._outside = outside
        self._mine = mine
        self.changed: set[Any] = set()
        """Variables that a rank has set or removed."""

    def _here(self) -> MutableMapping[Any, Any]:
        own: MutableMapping[Any, Any] | None = self._mine()
        return self._outside if own is None else own

    def __getitem__(self, key: Any) -> Any:
        return self._here()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.changed.add(key)
        self._here()[key] = value

    def __delitem__(self, key: Any) -> None:
        self.changed.add(key)
        del self._here()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._here())

    def __len__(self) -> int:
        return len(self._here())


def environment_of(index: int, world_size: int, device: torch.device) -> dict[bytes, bytes]:
    """Return a rank's environment: the process's, and what torchrun sets.

    ``LOCAL_RANK`` is the number of the rank's GPU where it has one: that is what programs take it
    for.
    """
    own = {
        "RANK": index,
        "LOCAL_RANK": device.index if device.type == "cuda" else index,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "ROLE_RANK": index,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
    }
    if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        own["OMP_NUM_THREADS"] = 1  # as torchrun: then the bits are its, too
    variables = {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
    return variables | {os.fsencode(k): os.fsencode(str(v)) for k, v in own.items()}
