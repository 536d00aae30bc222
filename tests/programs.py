"""Python programs that run in separate interpreters."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIPE = subprocess.PIPE


def start(code: str, words: Sequence[object], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def programs(
    code: str, *arguments: Sequence[object], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a program for each argument list; kill their process groups at the end."""
    made = [start(code, words, environment) for words in arguments]
    try:
        yield made
    finally:
        for program in made:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.communicate()


def run_programs(
    code: str, *arguments: Sequence[object], timeout_s: float = 60.0, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    with (
        programs(code, *arguments, **environment) as made,
        ThreadPoolExecutor(len(arguments)) as pool,
    ):
        ends = list(pool.map(lambda program: program.communicate(timeout=timeout_s), made))
        return [
            subprocess.CompletedProcess(code, program.returncode, *texts)
            for program, texts in zip(made, ends, strict=True)
        ]


def run_fresh(
    code: str, *words: object, timeout_s: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    return run_programs(code, words, timeout_s=timeout_s, **environment)[0]
