"""Python programs for tests of what only an interpreter of its own can show."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]

# A program is forked, in milliseconds, from a process that has imported torch and pyringar
# (fork_server.py), which takes ``python -c`` seconds of a core. It ends as that does: with the
# interpreter taken down, and the code's exit status. `run_fresh` is for what only the beginning of
# an interpreter shows: variables that are read once, what is imported.


class Program:
    def __init__(self, code: str, words: Sequence[object], environment: dict[str, str]) -> None:
        from fork_server import servers

        self._server = servers()["programs"]
        self.returncode: int | None = None
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        task = os.memfd_create("program")
        os.pwrite(task, pickle.dumps((code, ["-c", *map(str, words)], environment)), 0)
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1], task]
        self.pid = self._server.fork("program", theirs)
        for fd in theirs:
            os.close(fd)
        self.stdin = os.fdopen(pipes[0][1], "w")
        self.stdout, self.stderr = os.fdopen(pipes[1][0]), os.fdopen(pipes[2][0])

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as pool:
            said = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                with contextlib.suppress(BrokenPipeError), self.stdin:
                    self.stdin.write(text)
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
            return said[0].result(), said[1].result()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            is_over = select.select([ended], [], [], timeout)[0]
            os.close(ended)
            if not is_over:
                raise subprocess.TimeoutExpired("a program", timeout or 0.0)
            self.returncode = self._server.reap(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)  # with what it left behind, which has our pipes

    def close(self) -> None:
        self.kill()
        self.wait()
        for file in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()


@contextlib.contextmanager
def programs(
    code: str, *arguments: Sequence[object], **environment: str
) -> Iterator[list[Program]]:
    with contextlib.ExitStack() as made:
        yield [
            made.enter_context(contextlib.closing(Program(code, words, environment)))
            for words in arguments
        ]


def run_programs(
    code: str, *arguments: Sequence[object], timeout_s: float = 60.0, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    with (
        programs(code, *arguments, **environment) as made,
        ThreadPoolExecutor(len(arguments)) as pool,
    ):
        ends = list(pool.map(lambda program: program.communicate(timeout=timeout_s), made))
        codes = [program.wait() for program in made]
    return [
        subprocess.CompletedProcess(code, status, *texts)
        for status, texts in zip(codes, ends, strict=True)
    ]


def run_fresh(
    code: str, *words: object, timeout_s: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def become(descriptors: Sequence[int]) -> None:
    with open(descriptors[3], "rb") as task:
        code, arguments, environment = pickle.load(task)
    for target, fd in enumerate(descriptors[:3]):
        os.dup2(fd, target)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()  # at its end cycles are taken down, as in any program
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, ""
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
