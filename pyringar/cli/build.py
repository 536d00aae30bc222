"""``pyringar build``: compile the engines before their first use."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from pyringar.cli.parser import add_json_option, paragraph, why_no_gpu
from pyringar.cli.status_line import STATUS, compiling_text
from pyringar.engine import build, load
from pyringar.engine.compile import CPU, CUDA, EngineKind, Recipe
from pyringar.errors import CompilerNotFoundError

_RECORDED = ("compiler", "flags", "nvcc", "archs", "build_s")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "build",
        help="compile the engines before their first use",
        description="Compile the engine for this CPU into the cache, and the CUDA engine if torch "
        "finds a GPU and nvcc is installed. Without this command the first collective call "
        "compiles them. Use it in container images, in job scripts and on slow machines.",
    )
    parser.add_argument("--force", action="store_true", help="compile again if it is in the cache")
    parser.add_argument(
        "--cuda",
        action=argparse.BooleanOptionalAction,
        help="compile the CUDA engine also without a GPU, and fail if that is impossible; for "
        "the architectures in PYRINGAR_CUDA_ARCHS, else of this machine's GPUs, else for all that "
        "nvcc knows; --no-cuda: only the CPU engine",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the compilers' commands and output"
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {}

    def tell(name: str, found: dict[str, Any] | str) -> None:
        facts[name] = found
        if not args.json:
            print("\n".join(_render(name, found)), flush=True)

    tell("engine", _build(CPU, args))
    # why_no_gpu() imports torch, by which the build finds this machine's GPU architectures.
    why = "" if args.cuda is False else why_no_gpu()
    if why and args.cuda is None:
        tell("cuda", f"not built: {why}; --cuda compiles it anyway")
    elif args.cuda is not False:
        try:
            tell("cuda", _build(CUDA, args))
        except CompilerNotFoundError as error:
            if args.cuda or os.environ.get("PYRINGAR_NVCC"):  # the user asked for CUDA
                raise
            tell("cuda", f"not built: {error}")
    if args.json:
        print(json.dumps(facts, indent=2))
    return 0


def _build(kind: EngineKind, args: argparse.Namespace) -> dict[str, Any]:
    started, recipe = time.monotonic(), Recipe(kind=kind)
    found = None if args.force else build.find_engine(recipe)
    if found is not None and found.origin == "wheel" and not kind.cuda:
        found = None  # the wheel's engine is for any CPU: compile for this CPU
    if found is None:
        with STATUS.elapsed(compiling_text(kind)):
            found = build.build_engine(recipe, force=args.force, verbose=args.verbose)
    engine = found
    seconds = time.monotonic() - started
    load.load(engine)
    recorded = {name: engine.record[name] for name in _RECORDED if name in engine.record}
    return {"path": str(engine.path), **recorded, "origin": engine.origin, "seconds": seconds}


def _render(name: str, found: dict[str, Any] | str) -> Iterator[str]:
    if isinstance(found, str):
        yield paragraph(found, name)
        return
    yield f"{name:<10} {found['path']}"  # not wrapped, since a path may have spaces
    yield paragraph(found["compiler"], "compiler")
    yield paragraph(" ".join(found["flags"]), "flags")
    if "nvcc" in found:
        yield paragraph(found["nvcc"], "nvcc")
        yield paragraph(", ".join(found["archs"]), "archs")
    if found["origin"] == "built":
        yield f"time       {found['build_s']:.1f} s"
    else:
        where = found["origin"]
        yield f"time       {found['seconds']:.2f} s: it was there ({where}); --force compiles again"
