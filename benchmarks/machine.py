"""What a results file must say about where it was made."""

from __future__ import annotations

import datetime
import os
import platform
from typing import Any

import torch

import pyringar
from pyringar.engine import load

__all__ = ["describe_machine", "num_cores"]


def describe_machine() -> dict[str, Any]:
    """Processor, memory, versions and the engine's own build, for the head of every report."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "pyringar": pyringar.__version__,
        "engine": load.engine().build_info(),
    }


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows something
    return platform.processor() or platform.machine()
