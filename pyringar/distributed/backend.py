"""The torch.distributed backend ``ringar``: process groups whose calls run in the engine or gloo.

A group is a ProcessGroup written in Python, which torch.distributed calls directly. With other
backends (``cpu:ringar,cuda:nccl``) it replaces torch's group, and creates these backends itself.
"""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._dynamo import eval_frame
from torch.distributed.algorithms.join import Join

from pyringar.comm.exits import close_at_exit, is_inherited, never_destroy
from pyringar.distributed.collectives import Collectives
from pyringar.distributed.fallback import Fallback
from pyringar.distributed.hierarchical import communicator_for
from pyringar.distributed.torch_works import Completer, PendingWork

NAME = "ringar"

_Backend: Any = _distributed_c10d.Backend
_ProcessGroup: Any = dist.ProcessGroup

# Open groups, referenced here because torch's debug wrapper keeps only their C++ half alive.
_open_groups: set[Any] = set()


def keep_gloo() -> None:
    """Never destroy the gloo groups of open process groups: each destruction takes 20 ms."""
    for group in _open_groups:
        never_destroy(group._fallback._gloo)


class _NamedBackend(_Backend):  # type: ignore[misc]
    """A Backend whose name, options and capabilities torch 2.14 and later query."""

    def __init__(self, options: Any) -> None:
        _Backend.__init__(self, options.group_rank, options.group_size)
        self._options = _Backend.Options(NAME, timeout=options.timeout)

    options = property(lambda self: self._options)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    # Without these attributes, a query would recurse endlessly between torch and this object.
    supports_splitting = supports_coalescing = supports_reconfigure = False
    supports_shrinking = supports_window = _supports_time_estimate = False


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """Base class of process groups in Python; subclasses add the collectives."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        _ProcessGroup.__init__(self, rank, size)  # the C++ constructor for Python subclasses
        self._rank: int = rank
        self._size: int = size
        self._group_name: str = options.group_id
        self._group_desc = "undefined"
        self._named_backend: Any = None
        if _backends_can_be_python():
            # torch's C++ code, such as its flight recorder, needs a backend of the group.
            custom = _ProcessGroup.BackendType.CUSTOM
            self._named_backend = _NamedBackend(options)
            self._set_default_backend(custom)
            self._register_backend(torch.device("cpu"), custom, self._named_backend)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    name = _get_backend_name = getBackendName

    def setSequenceNumberForGroup(self) -> None:  # noqa: N802
        """Do nothing: the engine counts calls itself, and compares the counts of all ranks."""

    def getSequenceNumberForGroup(self) -> int:  # noqa: N802
        return 0

    _set_sequence_number_for_group = setSequenceNumberForGroup
    _get_sequence_number_for_group = getSequenceNumberForGroup

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._group_desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def _wait_for_pending_works(self) -> None:
        """Do nothing, because futures of this group register no hooks."""

    def _has_hooks(self) -> bool:
        return False


class RingarProcessGroup(Collectives, PythonGroup):
    """The process group of the backend ``ringar``, with gloo and NCCL for other calls."""

    def __init__(self, options: Any) -> None:
        PythonGroup.__init__(self, options)
        self._timeout = options.timeout
        store, rank, size = options.store, options.group_rank, options.group_size
        self._global_ranks = list(options.global_ranks_in_group) or list(range(size))
        self._comm = comm = communicator_for(
            store,
            rank,
            size,
            name=options.group_id,
            timeout=options.timeout.total_seconds(),
            compares_shapes=False,
            global_ranks=self._global_ranks,
        )
        # Use comm.store: after a restart, the given store may hold addresses of dead processes.
        self._fallback = Fallback(
            comm.store, rank, size, options.timeout, self._backend_for, self.set_timeout
        )
        self._completer = Completer(f"of group {options.group_id}")
        self._batch = None
        _open_groups.add(self)
        # Close at exit: threads of gloo that outlive the interpreter would abort the process.
        close_at_exit(
            self,
            RingarProcessGroup.shutdown,
            abort=RingarProcessGroup.abort,
            progress=lambda group: len(group._fallback.under_way()),
        )

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._comm.set_timeout(timeout.total_seconds())
        self._fallback.set_timeout(timeout)

    def shutdown(self) -> None:
        """Wait for background calls, then close the group on this rank. Idempotent."""
        if is_inherited(self):
            return
        try:
            self._fallback.finish()
            self._comm.close()
        except BaseException:  # such as Ctrl-C during the wait
            self.abort()
            raise
        self._end()

    def abort(self) -> None:
        """Make the running calls of all ranks fail, then close the group on this rank."""
        if is_inherited(self):
            return
        self._comm.abort()
        self._fallback.abort()
        self._end()

    def _end(self) -> None:
        self._completer.close()
        self._fallback.close()
        _open_groups.discard(self)

    def _backend_for(self, device: str) -> str | None:
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        pairs = dict(part.split(":", 1) for part in str(config).split(",") if ":" in part)
        return pairs.get(device)

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = ["cuda"] if self._backend_for("cuda") is not None else []
        return [torch.device(name) for name in ["cpu", *cuda]]

    def _get_backend(self, device: Any) -> Any:
        return self._fallback.for_device(torch.device(device).type, "_get_backend")


def _backends_can_be_python() -> bool:
    try:
        _Backend(0, 1)
    except TypeError:  # before torch 2.14 Backend has no Python constructor
        return False
    return True


def keep_dynamo_out(*classes: type) -> None:
    """Make ``torch.compile`` skip the methods of these classes and the functions they call.

    Tracing an attribute of a ProcessGroup is an error in torch 2.15, and a warning before.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for kind in classes:
        for method in (m for base in kind.__mro__ for m in vars(base).values()):
            if isinstance(method, FunctionType) and method.__module__.startswith("pyringar."):
                eval_frame.set_code_exec_strategy(method.__code__, strategy)


def _keep_works_of_join() -> None:
    """Keep a Python reference to the work of DistributedDataParallel's join().

    join() holds only the C++ half of the work. Without this reference it waits forever.
    """
    own: Any = Join.notify_join_context
    if getattr(own, "keeps_work", False):
        return

    def notify(joinable: Any) -> Any:
        joinable._work_of_join = work = own(joinable)
        return work

    notify.keeps_work = True  # type: ignore[attr-defined]
    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]


def register() -> None:
    """Make ``init_process_group("ringar")`` work; importing ``pyringar.distributed`` does it."""
    keep_dynamo_out(RingarProcessGroup, PendingWork)
    _keep_works_of_join()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(
            NAME, lambda options, _: RingarProcessGroup(options), extended_api=True, devices=["cpu"]
        )
