"""Keep for each rank of a cluster the state that a process has once."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Environment", "ProcessState", "environment_of"]

# Hooks of all modules and optimizers, which contexts such as CommDebugMode set while they last.
_HOOKS: list[dict[Any, Any]] = [
    value
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    for name, value in vars(module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


class ProcessState:
    """Random states of torch, Python and NumPy, the default dtype, and globals of torch contexts.

    NumPy's generator is exchanged, which takes 1 us; to copy its state takes 160. The legacy
    functions keep the second of a pair of normal numbers beside it, and forget that then.

    Cost: 20 us to take and to restore.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = _of_cuda()
        self._python = random.getstate()
        numpy = _numpy_random()
        self._numpy = None if numpy is None else numpy.get_bit_generator()
        self._dtype = torch.get_default_dtype()
        self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        self._hooks = [dict(hooks) for hooks in _HOOKS]
        # The module whose forward pass runs, which torch puts back as it found it.
        self._module = DistributedDataParallel._active_ddp_module
        self._dtensor = _read_dtensor()

    @classmethod
    def fresh(cls, number: int) -> ProcessState:
        """Return the state of a process that has just begun; its random numbers are fixed.

        Args:
            number: Seeds random numbers, which differ between ranks as between processes.
        """
        self = cls()
        self._torch = torch.Generator().manual_seed(number).get_state()
        self._cuda = [
            torch.Generator(f"cuda:{i}").manual_seed(number).get_state()
            for i, _ in enumerate(self._cuda)
        ]
        self._python = random.Random(number).getstate()
        if self._numpy is not None:
            self._numpy = _numpy_random().MT19937(number)
        self._dtype = torch.float32
        self._dtensor = (None, False)
        return self

    def restore(self) -> None:
        """Give the process this state."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_bit_generator(self._numpy)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        torch.set_anomaly_enabled(*self._anomaly)
        for hooks, own in zip(_HOOKS, self._hooks, strict=True):
            if hooks != own:
                hooks.clear()
                hooks.update(own)
        DistributedDataParallel._active_ddp_module = self._module
        _write_dtensor(*self._dtensor)


def _of_cuda() -> list[torch.Tensor]:
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if is_used else []


def _numpy_random() -> Any:
    """Return NumPy's random numbers; None: it is not imported, or too old to exchange them."""
    found = getattr(sys.modules.get("numpy"), "random", None)
    return found if hasattr(found, "set_bit_generator") else None


def _read_dtensor() -> tuple[Any, bool]:
    """Return DTensor's random numbers, and whether `implicit_replication` is on."""
    api: Any = sys.modules.get("torch.distributed.tensor._api")
    if api is None:
        return None, False
    numbers: Any = sys.modules["torch.distributed.tensor._random"]
    return numbers._rng_tracker, api.DTensor._op_dispatcher._allow_implicit_replication


def _write_dtensor(tracker: Any, is_implicit: bool) -> None:
    api: Any = sys.modules.get("torch.distributed.tensor._api")
    if api is not None:
        numbers: Any = sys.modules["torch.distributed.tensor._random"]
        numbers._rng_tracker = tracker
        api.DTensor._op_dispatcher._allow_implicit_replication = is_implicit


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
