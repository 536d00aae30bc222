"""Do files, variables and limits with nonsense in them end in pyringar's errors, or in none?

What cannot be read is an error that names it; nothing of Python's own (RecursionError,
OverflowError, ...) comes out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyringar as pr
from pyringar.cli import main
from pyringar.engine import build, toolchain
from pyringar.train.trace import Trace

SPAN = {
    **{"name": "bucket 0", "cat": "bucket", "ph": "X", "pid": 0, "tid": 1, "ts": 1.5, "dur": 2},
    "args": {"step": 0, "bytes": 100},
}
TRACE = {"traceEvents": [SPAN, {"ph": "M"}, {**SPAN, "cat": "wait", "pid": 1}]}
DEEP = '{"version": 1, "tables": ' + "[" * 20_000
# What JSON can say where a number, a name or a list is expected.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**63, 2**64, 10**400, 1e308, -1e308, float("nan"), float("inf")]),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "\x1b[2J", "host", "ring", "rank", "bucket", "X", "a" * 5000]),
    st.sampled_from([[], {}, [[]], [{}], {"step": 1}, [SPAN, SPAN]]).map(copy.deepcopy),
    st.integers(100, 900).map(lambda depth: json.loads("[" * depth + "]" * depth)),
)
quick = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextlib.contextmanager
def nothing_or(error: type[Exception], told: str) -> Iterator[None]:
    """Let the block fail with this error if it says this; whatever else is raised comes out."""
    try:
        yield
    except error as caught:
        if told not in str(caught):
            raise


def places_in(value: Any, path: tuple = ()) -> list[tuple]:
    """Every key and index in a JSON value down to 6 levels, as the way to it."""
    if not isinstance(value, (dict, list)) or len(path) == 6:
        return []
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [way for key, item in inside for way in ((*path, key), *places_in(item, (*path, key)))]


@st.composite
def damaged(draw, original: dict) -> Any:
    """The original with a few places overwritten, deleted or repeated."""
    content = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        ways = places_in(content)
        if not ways:
            break
        way = draw(st.sampled_from(ways))
        holder = content
        for key in way[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["overwrite", "overwrite", "delete", "repeat"]))
        if how == "delete":
            del holder[way[-1]]
        elif how == "repeat" and isinstance(holder, list):
            holder.append(holder[way[-1]])
        else:
            holder[way[-1]] = draw(ODD)
    return content


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.slow
@quick
@given(content=damaged(TRACE))
def test_a_damaged_trace_is_a_trace_or_an_argument_error(tmp_path, content):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    with nothing_or(pr.ArgumentError, str(file)):
        assert all(line.isprintable() for line in str(Trace.load(file)).splitlines())


@pytest.mark.parametrize("content", [DEEP.encode(), b"\xff", b"", b"9" * 5000, b"[]"])
def test_the_command_line_names_a_trace_that_is_none(tmp_path, capsys, content):
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    assert main(["trace", str(file)]) == 2
    assert f"pyringar trace: {file} is not a trace" in capsys.readouterr().err
    assert main(["trace", str(file), "--timeline", str(tmp_path / "picture.xyz")]) == 2
    assert "--timeline is" in capsys.readouterr().err


# -- the environment -------------------------------------------------------------------------------


def test_blanks_between_the_words_of_a_compiler_are_no_matter(monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable}\t-O1\n")
    assert toolchain.find_compiler().command == (sys.executable, "-O1")


@pytest.mark.parametrize("archs", ["9" * 5000 + ".0", "\u0669.\u0660", "-9.0", "\udcff"])
def test_silly_architectures_are_refused(monkeypatch, archs):
    monkeypatch.setenv("PYRINGAR_CUDA_ARCHS", archs)
    with pytest.raises(pr.BuildError, match="PYRINGAR_CUDA_ARCHS="):
        toolchain.cuda_archs_wanted()


SILLY = ["", " ", "\t\n", "x" * 5000, "\udcff\udcfe", "~no-such-user/x", "/dev/null/x", "\x1b[2J"]


@pytest.mark.parametrize("value", SILLY)
def test_silly_paths_are_refused_or_not_used(monkeypatch, tmp_path, value):
    """By looking only: what is built where is for tests/build."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYRINGAR_CACHE_DIR", value)
    with nothing_or(pr.RingarError, "PYRINGAR_CACHE_DIR"):
        build.find_engine()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", SILLY[1:])
def test_info_shows_whatever_is_set(monkeypatch, capsys, value):
    monkeypatch.setattr("pyringar.cli.info.ENVIRONMENT", {"PYRINGAR_NODE_ID": "", "CXX": ""})
    monkeypatch.setenv("PYRINGAR_NODE_ID", value)
    monkeypatch.setenv("CXX", value)
    assert main(["info"]) == 0
    assert capsys.readouterr().out


# -- limits ----------------------------------------------------------------------------------------

NO_DESCRIPTORS = """
import contextlib, os, resource
import pyringar as pr
from pyringar.comm.shared_tensors import shared_empty
from pyringar.train.trace import Trace
shared_empty(1)  # the engine is there
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
with contextlib.suppress(OSError):
    while True:
        held.append(os.dup(0))
for call in (lambda: shared_empty(10), lambda: Trace.load("x")):
    try:
        call()
        print("well")
    except pr.RingarError as error:
        print(type(error).__name__, error)
for fd in held:
    os.close(fd)
print(shared_empty(10).numel())
"""


@pytest.mark.slow
def test_without_descriptors_there_are_errors_of_ours():
    command = [sys.executable, "-c", NO_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert "cannot create 40 bytes of shared memory" in first
    assert "x cannot be read" in second
    assert last == "10", "and afterwards all is well"


# -- the command line ------------------------------------------------------------------------------


def test_check_says_that_it_runs_the_code(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "This runs the code that it grades, with your rights" in told
