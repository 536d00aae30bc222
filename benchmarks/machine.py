"""Describe the machine that runs the benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pyringar
from pyringar.engine import load


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
