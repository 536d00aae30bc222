"""Python programs for tests of what only an interpreter of its own can show."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def programs(
    code: str, *arguments: Sequence[object], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run code once for each of these lists of arguments, in Pythons of their own, with pipes."""
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    made = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for words in arguments
    ]
    try:
        yield made
    finally:
        for program in made:
            program.kill()
            program.communicate()


def run_programs(
    code: str, *arguments: Sequence[object], timeout_s: float = 60.0, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run `programs` to their ends."""
    with programs(code, *arguments, **environment) as made:
        ends = [program.communicate(timeout=timeout_s) for program in made]
        codes = [program.returncode for program in made]
    return [
        subprocess.CompletedProcess(code, status, *texts)
        for status, texts in zip(codes, ends, strict=True)
    ]
