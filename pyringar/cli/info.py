"""``pyringar info``: show versions, compilers, built engines and devices."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyringar
from pyringar.cli.parser import add_json_option, paragraph, why_no_gpu
from pyringar.engine import build, load, toolchain
from pyringar.engine.compile import CPU, CUDA, EngineKind, Recipe
from pyringar.errors import CompilerNotFoundError, RingarError

ENVIRONMENT = (
    "PYRINGAR_CACHE_DIR",
    "CXX",
    "PYRINGAR_NVCC",
    "PYRINGAR_CUDA_ARCHS",
    "PYRINGAR_PREBUILD",
    "PYRINGAR_NODE_ID",
)

_LABEL = 1 + max(map(len, ENVIRONMENT))


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="print versions, compilers, built engines and devices",
        description="Print versions, compilers, built engines and devices, for bug reports. Builds "
        "nothing and needs no compiler.",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    facts = gather()
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return 0


def gather() -> dict[str, dict[str, Any]]:
    return {
        "versions": _versions(),
        "build": _build_facts(),
        "engine": {
            "cpu": _or_error(lambda: _engine(CPU)),
            "cuda": _or_error(lambda: _engine(CUDA)),
        },
        "devices": _devices(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def _or_error(fact: Callable[[], Any]) -> Any:
    """Return ``fact()``, or the text of its RingarError."""
    try:
        return fact()
    except RingarError as error:
        return f"{type(error).__name__}: {error}"


def _versions() -> dict[str, Any]:
    import torch

    versions: dict[str, Any] = {
        "pyringar": f"{pyringar.__version__} ({Path(pyringar.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for name in ("torch", "torchvision", "pybind11", "ninja"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except Exception as error:  # torchvision for another torch raises RuntimeError
            versions[name] = f"cannot be imported: {type(error).__name__}: {error}"
    versions["torch_cuda"] = torch.version.cuda or "torch is a CPU build: the CUDA engine is absent"
    return versions


def _build_facts() -> dict[str, Any]:
    def compiler() -> str:
        found = toolchain.find_compiler()
        return f"{found}: {toolchain.compiler_version(found)}"

    def cuda_toolkit() -> str:
        nvcc = toolchain.find_nvcc()
        try:
            return str(toolchain.read_cuda_toolkit(nvcc, toolchain.find_compiler()))
        except CompilerNotFoundError:  # the fact "compiler" shows the error
            return f"{nvcc}, without a C++ compiler"

    return {
        "compiler": _or_error(compiler),
        "cuda_toolkit": _or_error(cuda_toolkit),
        "cuda_archs": _or_error(lambda: ", ".join(toolchain.cuda_archs_wanted())),
        "ninja": _or_error(toolchain.find_ninja),
        "sources": _or_error(lambda: str(Recipe().root())),
        "cache": _or_error(lambda: str(build.cache_dir())),
    }


def _engine(kind: EngineKind) -> str | dict[str, Any]:
    engine = build.find_engine(Recipe(kind=kind))
    if engine is None:
        if kind.cuda and (why := why_no_gpu()):
            return f"not built: {why}; `pyringar build --cuda` compiles it anyway"
        return "not built yet: the first call compiles it, or `pyringar build`"
    module, record = load.load(engine), engine.record
    made_for = "this CPU"
    if engine.origin == "wheel":
        made_for = f"any {platform.machine()} CPU; `pyringar build` compiles one for this CPU"
    return {
        "found_in": engine.origin,
        **({} if kind.cuda else {"made_for": made_for}),
        "path": str(engine.path),
        "built_with": record["compiler"],
        "flags": " ".join(record["flags"]),
        **({"nvcc": record["nvcc"], "archs": ", ".join(record["archs"])} if kind.cuda else {}),
        **(module.build_info() if hasattr(module, "build_info") else {}),
    }


def _devices() -> dict[str, Any]:
    import torch

    cpu = toolchain.read_cpu()
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    devices = {
        "cpu": f"{cpu.name}, {cpu.machine}",
        "cores": f"{toolchain.cores_allowed()} of {os.cpu_count()} may be used",
        "threads": f"{torch.get_num_threads()} torch threads",
        "memory": f"{memory_gib:.1f} GiB",
    }
    if why := why_no_gpu():
        return devices | {"cuda": f"none ({why})"}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = (
            f"{found.name}, compute capability {found.major}.{found.minor}, "
            f"{found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} processors"
        )
    return devices


def render(facts: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for section, entries in facts.items():
        lines += ["", section.capitalize()]
        for name, value in entries.items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for inner, text in parts.items():
                label = f"{name} {inner}".strip()
                lines.append(paragraph("(not set)" if text is None else str(text), label, _LABEL))
    return "\n".join(lines[1:])
