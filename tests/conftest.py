"""Shared by all tests: one torch thread, communicators that are closed, the number of workers."""

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Crew, crews, store

import pyringar as pr

# For tests of benchmarks/. Last: an installed pyringar comes first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
# For tests that run calls of the conformance suite.
sys.path.append(str(Path(__file__).resolve().parent / "conformance"))
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


# The files that take longest begin first, so that no core waits for the last one.
LONG = """
test_stress test_symbols test_cuda_emulated
test_compiled test_layouts test_distributed_machines test_rendezvous
test_train_checkpoints test_distributed_ends test_grader test_bits test_build test_peers
test_refused test_exits test_audit_processes test_sharded_training test_torch_team
test_grader_processes test_faults test_group test_process_deaths test_signals
test_cluster_failures test_cluster test_launch_processes
test_cluster_run test_distributed test_prepared test_entries test_docs
test_deadlines test_private_cache test_examples
"""
MOST_WORKERS = 8  # each imports torch, and tests have several ranks


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark thorough tests slow, too, and let long files begin first."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONG.split())}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers a core, for many tests wait. None for tests that were picked, or with a GPU."""
    option = config.option
    is_picked = any("::" in word or word.endswith(".py") for word in config.args) or option.keyword
    if is_picked or option.collectonly or option.markexpr != "not slow":
        return 0
    if torch.cuda.is_available():
        return 0
    return min(2 * len(os.sched_getaffinity(0)), MOST_WORKERS)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # before torch.compile, or ranks that are forked could not
        torch.zeros((), requires_grad=True).backward()
    gc.freeze()  # the modules imported so far: each gc.collect() of a test takes 0.4 s with them


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


# For tests/conformance and tests/cuda. In a conftest.py of such a folder, pytest 9.1 does not find
# them for files that are named on the command line after a file of another folder.


@pytest.fixture(scope="session")
def transport_of() -> Iterator[Callable[[str], Any]]:
    """``transport_of(name)``: one of `transports.TRANSPORTS`, with groups for all tests."""
    from transports import TRANSPORTS

    with contextlib.ExitStack() as made:
        yield functools.cache(
            lambda name: made.enter_context(contextlib.closing(TRANSPORTS[name]()))
        )


@pytest.fixture
def transport(request: pytest.FixtureRequest, transport_of: Callable[[str], Any]) -> Any:
    return transport_of(request.param)


@pytest.fixture(scope="session")
def device() -> str:
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
    folder = os.environ.get("PYRINGAR_TEST_DATA")
    if not folder:
        pytest.skip("no real images: PYRINGAR_TEST_DATA may name a folder that holds some")
    return Path(folder)
