"""Describe the machine that runs the benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pyringar
from pyringar.engine import load

PROC_STAT = Path("/proc/stat")


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Return facts about the host, the engine and, for CUDA, the GPU; may compile the engines."""
    facts = describe_host() | {"engine": load.engine().build_info()}
    if device.startswith("cuda"):
        facts |= describe_gpu() | {"engine_cuda": load.cuda_engine().runtime_version()}
    return facts


def describe_host() -> dict[str, Any]:
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
    }


def machine_in_words(machine: Mapping[str, Any]) -> str:
    """Return the GPU, processor, cores, torch version and, if known, commit in words."""
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    commit = f", commit {machine['commit'][:7]}" if machine.get("commit") else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}{commit}"


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class OtherPrograms:
    """Measures the use of the processors by other programs.

    Create and read it while this process has no child: the time of a child counts when it ends.
    """

    def __init__(self) -> None:
        self._begin_s, self._begin = time.monotonic(), _foreign_s()

    def facts(self) -> dict[str, Any]:
        """Return the cores and the mean share since creation, 0 to 1; None except on Linux."""
        end, elapsed_s, share = _foreign_s(), time.monotonic() - self._begin_s, None
        if self._begin is not None and end is not None:
            share = round(min(max((end - self._begin) / elapsed_s / num_cores(), 0.0), 1.0), 3)
        return {"cores": num_cores(), "other_programs": share}


def _foreign_s() -> float | None:
    """Return seconds that this process's processors spent on other programs since boot."""
    if not PROC_STAT.exists():
        return None
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in PROC_STAT.read_text().splitlines()]
    # User, nice and system time. Interrupts are excluded: the benchmark's own messages cause them.
    ticks = sum(int(value) for name, *values in lines if name in names for value in values[:3])
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def disturbance(machine: Mapping[str, Any]) -> float:
    """Return the share of the processors that other programs used, 0 if negligible or unknown."""
    share = machine.get("other_programs") or 0.0
    return share if share > max(0.1 / machine.get("cores", 1), 0.02) else 0.0


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", path.read_text()) if path.exists() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def describe_gpu() -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(0)
    return {
        "gpu": facts.name,
        "gpus": torch.cuda.device_count(),
        "compute_capability": f"{facts.major}.{facts.minor}",
        "gpu_memory_gib": round(facts.total_memory / 2**30, 1),
        "driver": _driver_version(),
        "torch_cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: no nvidia-smi"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown: nvidia-smi failed"
