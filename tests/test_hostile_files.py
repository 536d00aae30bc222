"""Environment variables and limits with nonsense values end in pyringar's errors, or in none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import pyringar as pr
from pyringar.cli import main
from pyringar.engine import build, toolchain


@contextlib.contextmanager
def nothing_or(error: type[Exception], told: str) -> Iterator[None]:
    """Let the block fail with this error if it says this; whatever else is raised comes out."""
    try:
        yield
    except error as caught:
        if told not in str(caught):
            raise


# -- the environment -------------------------------------------------------------------------------


def test_compiler_words_may_have_blanks(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable}\t-O1\n")
    assert toolchain.find_compiler().command == (sys.executable, "-O1")


@pytest.mark.parametrize("archs", ["9" * 5000 + ".0", "\u0669.\u0660", "-9.0", "\udcff"])
def test_silly_architectures_are_refused(monkeypatch, archs):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", archs)
    with pytest.raises(pr.BuildError, match="PYRINGAR_CUDA_ARCHS="):
        toolchain.cuda_archs_wanted()


SILLY = ["", " ", "\t\n", "x" * 5000, "\udcff\udcfe", "~no-such-user/x", "/dev/null/x", "\x1b[2J"]


@pytest.mark.parametrize("value", SILLY)
def test_silly_cache_paths(monkeypatch, tmp_path, value):
    """By looking only: what is built where is for tests/build."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", value)
    with nothing_or(pr.RingarError, "PYRINGAR_CACHE_DIR"):
        build.find_engine()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", SILLY[1:])
def test_info_shows_whatever_is_set(monkeypatch, capsys, value):
    monkeypatch.setattr("pyringar.cli.info.ENVIRONMENT", ("PYRINGAR_NODE_ID", "CXX"))
    monkeypatch.setenv("PYRINGAR_NODE_ID", value)
    monkeypatch.setenv("CXX", value)
    assert main(["info"]) == 0
    assert capsys.readouterr().out


# -- limits ----------------------------------------------------------------------------------------

NO_DESCRIPTORS = """
import contextlib, os, resource
import pyringar as pr
from torch.distributed import HashStore
from pyringar.train.trace import Trace

def join():
    return pr.ProcessCommunicator(HashStore(), 0, 1).world_size

join()  # the engine is there
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
with contextlib.suppress(OSError):
    while True:
        held.append(os.dup(0))
for call in (join, lambda: Trace.load("x")):
    try:
        call()
        print("well")
    except pr.RingarError as error:
        print(type(error).__name__, error)
for fd in held:
    os.close(fd)
print(join())
"""


@pytest.mark.slow
def test_without_descriptors_there_are_errors_of_ours():
    command = [sys.executable, "-c", NO_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert "bytes of shared memory" in first
    assert "x cannot be read" in second
    assert last == "1", "and afterwards all is well"


# -- the command line ------------------------------------------------------------------------------


def test_check_says_that_it_runs_the_code(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "This runs the code that it grades, with your rights" in told
