"""Give each rank that runs in a thread its own copy of process-wide state."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import signal
import sys
from collections import UserDict
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch

# Globals that each rank gets a copy of: module, pattern of attributes, initial value ("...": the
# value of the process; dicts are copied). Globals of tracing, export and compilers are missing
# because ranks run uncompiled.
_GLOBALS: list[tuple[str, str, Any]] = [
    ("accelerate.state", "AcceleratorState._shared_state", {}),
    ("accelerate.state", "GradientState._shared_state", {}),
    ("accelerate.state", "PartialState._shared_state", {}),
    ("multiprocessing.context", "_default_context._actual_context", None),
    ("multiprocessing.forkserver", "_forkserver._forkserver_*", None),
    ("torch._functorch.eager_transforms", "JVP_NESTING", 0),
    ("torch.autograd.forward_ad", "_current_level", -1),
    ("torch.autograd.graph", "_allow_mutation_on_saved_tensors_enabled", False),
    ("torch.backends", "m.__allow_nonbracketed_mutation_flag", ...),
    ("torch.backends.opt_einsum", "m.enabled", ...),
    ("torch.backends.opt_einsum", "m.strategy", ...),
    ("torch.cpu", "_current_stream", ...),
    ("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP", None),
    ("torch.distributed.distributed_c10d", "_backend", ...),
    ("torch.distributed.distributed_c10d", "_default_pg_init_method", None),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "_enable_fsdp_module_new_init", True),
    ("torch.distributed.tensor._api", "DTensor._op_dispatcher._allow_implicit_replication", False),
    ("torch.distributed.tensor._api", "DTensor._op_dispatcher._custom_op_handlers", ...),
    ("torch.distributed.tensor._random", "_rng_tracker", None),
    ("torch.distributed.tensor._redistribute", "_DISABLE_*", False),
    ("torch.distributed.tensor._redistribute", "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", None),
    ("torch.nn.modules.module", "_global_*", ...),
    ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", None),
    ("torch.nn.utils.parametrize", "_cache", {}),
    ("torch.nn.utils.parametrize", "_cache_enabled", 0),
    ("torch.optim.optimizer", "_global_*", ...),
    ("torch.utils._debug_mode._mode", "_ACTIVE_DEBUG_MODE_COUNT", 0),
    ("torch.utils._device", "CURRENT_DEVICE", None),
    ("torch.utils._python_dispatch", "_is_in_*", False),
    ("torch.utils.checkpoint", "_checkpoint_debug_enabled", None),
    ("torch.utils.checkpoint", "_enable_checkpoint_early_stop", None),
]
_FLAGS = (
    "cudnn_benchmark cudnn_deterministic cudnn_enabled mkldnn_deterministic mkldnn_enabled "
    "nnpack_enabled sdp_priority_order"
)
_KERNELS = "cudnn flash math mem_efficient overrideable"
# Settings in C++: the getter, the setter, and the arguments of both, all in torch._C.
_FUNCTIONS: list[tuple[Any, ...]] = [
    ("get_default_dtype", "_set_default_dtype"),
    ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    ("_get_fp32_precision_getter", "_set_fp32_precision_setter", "generic", "all"),
    ("_get_fp32_precision_getter", "_set_fp32_precision_setter", "mkldnn", "all"),
]
_FUNCTIONS += [(f"_get_{name}", f"_set_{name}") for name in _FLAGS.split()]
_FUNCTIONS += [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _KERNELS.split()]
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (partial(getattr(torch._C, get), *args), partial(getattr(torch._C, put), *args))
    for get, put, *args in _FUNCTIONS
    if hasattr(torch._C, get) and hasattr(torch._C, put)
]
_SETTINGS += [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.set_anomaly_enabled(*values),
    ),
]
# The variables of torchrun. OMP_NUM_THREADS=1, as torchrun sets it, makes results bit-identical to
# a run under torchrun. LOCAL_RANK is the index of the rank's GPU.
_VARIABLES = """
RANK={rank} ROLE_RANK={rank} LOCAL_RANK={local_rank}
WORLD_SIZE={size} ROLE_WORLD_SIZE={size} LOCAL_WORLD_SIZE={size}
GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_NAME=default OMP_NUM_THREADS=1
MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=none
"""
_missing = list(_GLOBALS)  # rows of _GLOBALS with modules that are not imported yet
_found: list[tuple[Any, str, Any]] = []
_cuda: Any = torch.cuda


def _imported() -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, initial value) of each `_GLOBALS` row with an imported module."""
    for row in [row for row in _missing if row[0] in sys.modules]:
        owner: Any = sys.modules[row[0]]
        if not getattr(getattr(owner, "__spec__", None), "_initializing", False):
            _missing.remove(row)
            *path, pattern = row[1].split(".")
            for name in path:
                owner = getattr(owner, name, None)
            _found.extend((owner, name, row[2]) for name in fnmatch.filter(dir(owner), pattern))
    return _found


def _first(owner: Any, name: str, value: Any) -> Any:
    value = getattr(owner, name) if value is ... else value
    return value.copy() if isinstance(value, dict) else value


class ProcessState:
    """Snapshot of random states, settings and globals; saving and restoring takes 35 us."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = _cuda.get_rng_state_all() if _cuda.is_initialized() else []
        self._python = random.getstate()
        numpy = _numpy_random()  # kept as an object: copying its state takes 160 us
        self._numpy = None if numpy is None else numpy.get_bit_generator()
        self._settings = [get() for get, _ in _SETTINGS]
        self._globals = [getattr(owner, name) for owner, name, _ in _imported()]

    @classmethod
    def fresh(cls, number: int) -> ProcessState:
        """Return the initial state of a rank; ``number`` seeds its random numbers."""
        self = cls()
        self._torch = torch.Generator().manual_seed(number).get_state()
        self._cuda = [torch.Generator("cuda").manual_seed(number).get_state() for _ in self._cuda]
        self._python = random.Random(number).getstate()
        if self._numpy is not None:
            self._numpy = _numpy_random().MT19937(number)
        self._settings[0] = torch.float32  # the default dtype
        self._globals = [_first(*each) for each in _imported()]
        return self

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_bit_generator(self._numpy)
        for (get, put), value in zip(_SETTINGS, self._settings, strict=True):
            if get() != value:
                put(value)
        found = _imported()
        # Globals of modules that were imported after the snapshot get initial values.
        more = [_first(*each) for each in found[len(self._globals) :]]
        for (owner, name, _), value in zip(found, self._globals + more, strict=True):
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        environ: Any = os.environ
        if isinstance(environ._data, Environment):
            environ._data.give_to_process()


def end_fork_server() -> None:
    server: Any = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if server is not None and server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGTERM)
        server._stop()


def _numpy_random() -> Any:
    """Return ``numpy.random``; None if NumPy is not imported or lacks ``set_bit_generator``."""
    found = getattr(sys.modules.get("numpy"), "random", None)
    return found if hasattr(found, "set_bit_generator") else None


class Environment(UserDict[Any, Any]):
    """Data of ``os.environ``: separate variables for the threads of each rank."""

    def __init__(self, outside: MutableMapping[Any, Any], mine: Callable[[], Any]) -> None:
        self._outside, self._mine = outside, mine
        # The variables in the C environment, which child processes inherit.
        self._given = {key: outside.get(key) for key in _variables(0, 2, 0)}

    @property
    def data(self) -> Any:  # type: ignore[override]
        own = self._mine()
        return self._outside if own is None else own

    def give_to_process(self) -> None:
        """Copy this thread's variables to the C environment, for child processes."""
        variables = self.data
        for key, given in self._given.items():
            value = variables.get(key)
            if value != given:
                os.putenv(key, value) if value is not None else os.unsetenv(key)
                self._given[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = self._given[key] = value  # os.environ has already called putenv

    def __delitem__(self, key: Any) -> None:
        del self.data[key]
        self._given[key] = None


def environment_of(index: int, world_size: int, device: torch.device) -> dict[bytes, bytes]:
    own = _variables(index, world_size, device.index if device.type == "cuda" else index)
    if world_size == 1 or "OMP_NUM_THREADS" in os.environ:
        del own[b"OMP_NUM_THREADS"]
    return dict(os.environb) | own


def _variables(rank: int, size: int, local_rank: int) -> dict[bytes, bytes]:
    text = _VARIABLES.format(rank=rank, size=size, local_rank=local_rank)
    return dict(pair.split(b"=") for pair in text.encode().split())
