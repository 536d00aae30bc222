"""Shared by all tests: one torch thread, communicators that are closed; how a run is shown."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from ranks import Crew, crews, store

import pyringar as pr

# A shell's background jobs are started with Ctrl-C ignored, and hand that down.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import settings
except ImportError:  # the tests that need it skip themselves
    pass
else:
    # The same examples in every run: a red test must stay red until it is mended.
    settings.register_profile("pyringar", deadline=None, derandomize=True, database=None)
    settings.load_profile("pyringar")


# Files that take longest, which begin first: so that no core waits for the last one.
LONG = (
    *("test_compiled", "test_processes", "test_distributed_machines", "test_process_deaths"),
    *("test_rendezvous", "test_train_checkpoints", "test_distributed_ends"),
    *("test_grader", "test_orders", "test_build", "test_peers", "test_all_reduce", "test_exits"),
    *("test_audit_processes", "test_sharded_training", "test_torch_team"),
    *("test_hierarchical_parts", "test_grader_processes", "test_process_faults", "test_signals"),
    *("test_distributed", "test_bound_lists", "test_differential", "test_bucketing_interrupts"),
    *("test_hierarchical", "test_docs", "test_deadlines", "test_private_cache", "test_examples"),
)
# What a plain `pytest` takes, about: seconds times cores.
WORK_S = 460
MOST_WORKERS = 8  # each imports torch, and tests have several ranks
_LAST_RUN = "pyringar/last run"
_DEFAULT = "not slow"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is thorough is slow, too, whoever marked it; long files begin first."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        last = len(LONG)
        places = {name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path.stem, last))


# -- how a run is shown ----------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers a core, for many tests wait; none for tests that were picked, or have a GPU."""
    option = config.option
    is_picked = any("::" in word or word.endswith(".py") for word in config.args) or option.keyword
    if is_picked or option.collectonly or option.markexpr != _DEFAULT or torch.cuda.is_available():
        return 0
    return min(2 * count_cores(), MOST_WORKERS)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


class Progress:
    """Says how long all tests will take, by their last run here, or by one on two idle cores."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._num_tests = 0
        self._begin = 0.0

    def begin(self, num_tests: int) -> None:
        option = self._config.option
        is_all = option.markexpr == _DEFAULT and not option.keyword and num_tests > 2000
        if not is_all or self._num_tests:
            return
        self._num_tests, self._begin = num_tests, time.monotonic()
        num_workers = max(1, getattr(option, "numprocesses", None) or 1)
        cache = getattr(self._config, "cache", None)
        last_s = cache.get(f"{_LAST_RUN} {num_workers}", None) if cache else None
        num_cores = min(count_cores(), num_workers)
        minutes = (last_s or WORK_S / num_cores) / 60
        by = "as the last time" if last_s else f"on {num_cores} idle cores"
        self._write(f"{num_tests:,} tests: about {max(1, round(minutes))} minutes {by}")

    def end(self, exit_status: int) -> None:
        cache = getattr(self._config, "cache", None)
        if self._num_tests and cache and exit_status == pytest.ExitCode.OK:
            num_workers = max(1, getattr(self._config.option, "numprocesses", None) or 1)
            seconds = time.monotonic() - self._begin
            cache.set(f"{_LAST_RUN} {num_workers}", round(seconds))

    def _write(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.begin(len(ids))

    @pytest.hookimpl
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.end(exitstatus)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped", sep="-")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} tests: {reason}")


# -- fixtures --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    """Two torch threads, which large calls join: else they are their caller's alone."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def make_comm() -> Iterator[Callable[..., pr.Communicator]]:
    """``make_comm(k, **kwargs)``: a communicator of k CPU ranks, closed after the test."""
    with contextlib.ExitStack() as made:
        yield lambda k, **options: made.enter_context(pr.Communicator(["cpu"] * k, **options))


@pytest.fixture(scope="session")
def comm_of() -> Iterator[Callable[[int], pr.Communicator]]:
    """``comm_of(k)``: one communicator of k CPU ranks for all tests that leave it as it was."""
    with contextlib.ExitStack() as made:
        yield functools.cache(lambda k: made.enter_context(pr.Communicator(["cpu"] * k)))


# For tests/cuda. In a conftest.py of that folder, pytest 9.1 does not find them for files that are
# named on the command line after a file of another folder.


@pytest.fixture(scope="session")
def device() -> str:
    """The device of all ranks."""
    return "cpu" if os.environ.get("PYRINGAR_TEST_CUDA_ON_CPU") == "1" else "cuda:0"


@pytest.fixture
def make_ranks(device: str) -> Iterator[Callable[..., pr.Communicator]]:
    """``make_ranks(k, **kwargs)``: a communicator of k ranks on the device, closed afterwards."""
    with contextlib.ExitStack() as made:
        yield lambda k, **options: made.enter_context(pr.Communicator([device] * k, **options))


@pytest.fixture(scope="session")
def ranks_of(device: str) -> Iterator[Callable[[int], pr.Communicator]]:
    """``ranks_of(k)``: one communicator of k ranks for all tests that leave it as it was."""
    with contextlib.ExitStack() as made:
        yield functools.cache(lambda k: made.enter_context(pr.Communicator([device] * k)))


@pytest.fixture(scope="session")
def store_port() -> int:
    """The port of a store for all groups."""
    return store().port


@pytest.fixture(scope="session")
def crew_of() -> Iterator[Callable[[int], Crew]]:
    """``crew_of(k)``: k processes with a communicator, for all tests that leave it as it was."""
    with crews(timeout=60) as get:
        yield get


@pytest.fixture
def new_crew() -> Iterator[Callable[[int], Crew]]:
    """``new_crew(k)``: k processes for one test to do with as it likes; gone afterwards."""
    with contextlib.ExitStack() as made:
        yield lambda world_size: made.enter_context(Crew(world_size))


@pytest.fixture
def joined_crew(new_crew: Callable[[int], Crew]) -> Callable[..., Crew]:
    """``joined_crew(k, **options)``: a new crew with a communicator."""

    def make(world_size: int, **options: object) -> Crew:
        crew = new_crew(world_size)
        crew.join(**options)
        return crew

    return make


@pytest.fixture(scope="session")
def real_data_dir():
    """A folder with real images, where there is one."""
    folder = os.environ.get("PYRINGAR_TEST_DATA")
    if not folder:
        pytest.skip("no real images: PYRINGAR_TEST_DATA may name a folder that holds some")
    return Path(folder)
