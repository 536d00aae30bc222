"""Globals of torch that ranks on threads share, or that each rank has separately."""

import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import begin
from torch.autograd import forward_ad

import pyringar as pr
from pyringar.cluster import state


def test_global_module_hooks_are_per_rank():
    def program() -> list[int]:
        rank, calls = begin(), []
        net = torch.nn.Linear(2, 2)
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(rank))
        for _ in range(3):
            dist.barrier()
            net(torch.ones(1, 2))
        hook.remove()
        dist.barrier()
        net(torch.ones(1, 2))
        return calls

    for seed in range(5):
        assert pr.launch(program, 3, seed=seed) == [[rank] * 3 for rank in range(3)]


def test_overlapping_dual_levels_raise():
    def program() -> None:
        rank = begin()
        if rank == 0:
            with forward_ad.dual_level():
                for _ in range(4):
                    dist.barrier()
        else:
            for _ in range(2):
                with forward_ad.dual_level():
                    dist.barrier()
                    dist.barrier()

    with pytest.raises(pr.CollectiveTimeout, match="forward AD, which other ranks have to leave"):
        pr.launch(program, 2)
    with forward_ad.dual_level():
        pass


# Patterns of torch globals that need no copy per rank, by reason.
NOT_PER_RANK = {
    "compilers": "_custom_class* _jit_internal.* _ops._mode* distributed.device_mesh.* library.*"
    " nn.attention._f*",
    "constants": "backends.cu*version backends.cu*ID *_BUILD_ROOT distributed._spmd_*",
    "documented": "*._async_process_executor.* *.profiler._is_* *.rpc.* profiler.* *_cupti_*",
    "groups": "distributed.distributed_c10d.*",
    "processes": "*.elastic.* distributed.debug.* utils.data.*",
    "refused": "*._context_parallel.*",
    "registries": "*._extensions *_rendezvous_handlers *_composable_* nn.attention._registry.*"
    " *_privateuse1_* _ops.cached_ops utils._zip.* *sharded_tensor.api.*",
    "settings": "__future__.* _weights_only_unpickler.* backends.mha.* hub.* *._sharing_strategy",
    "streams": "nn.parallel._functions.*",
    "tests": "distributed._local_tensor.* *_symmetric_memory.* utils.benchmark.*",
    "threads": "*_tls *_GLOBAL_DEVICE_CONTEXT",
    "torch 2.11": "backends.mps._lib *._compiled_autograd_enabled utils._debug_mode._[A-Z]*",
    "warnings": "*_warn* sparse.* *_annotate_decorated _utils._original_os_* utils.cpp_extension.*",
}


def test_torch_globals_are_known():
    """A new ``global`` statement in torch may name state that ranks must not share."""
    root, statement = Path(torch.__file__).parent, r"^ +global (\w+(?:, *\w+)*) *(?:#.*)?$"
    parts = "autograd backends cpu distributed multiprocessing nn optim profiler sparse utils"
    files = [f for part in parts.split() for f in (root / part).rglob("*.py")] + [
        *root.glob("*.py")
    ]
    found = set()
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for names in re.findall(statement, file.read_text(encoding="utf-8"), re.MULTILINE):
            found |= {f"{module}.{name}" for name in re.split(", *", names)}
    patterns = " ".join(NOT_PER_RANK.values()).split()
    for module, attribute, _ in state._GLOBALS:
        patterns.append(f"{module.removeprefix('torch.')}.{attribute.rpartition('.')[2]}")
    assert len(found) > 50
    assert [n for n in sorted(found) if not any(fnmatchcase(n, p) for p in patterns)] == []


def test_recursion_error_starts_no_collective():
    def program(depth: int) -> bool:
        def down(levels: int) -> None:
            down(levels - 1) if levels else dist.barrier()

        begin()
        raised = False
        try:
            down(depth)
        except RecursionError:
            raised = True
        dist.barrier() if raised else None
        return raised

    limit = sys.getrecursionlimit()
    for depth in range(limit - 90, limit - 20, 7):
        assert len(set(pr.launch(program, 3, args=(depth,), timeout=2))) == 1
