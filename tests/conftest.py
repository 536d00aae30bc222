"""Fixtures and hooks of all tests: torch threads, communicators, processes, worker count."""

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
from rank_processes import RankGroup, rank_groups, store

import pyringar as pr

# Tests import benchmarks/. The path is last, so that an installed pyringar has priority.
sys.path.append(str(Path(__file__).resolve().parents[1]))
# For tests that import modules of tests/conformance.
sys.path.append(str(Path(__file__).resolve().parent / "conformance"))
# Background jobs of a shell inherit an ignored SIGINT; tests of Ctrl-C need the handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import settings
except ImportError:  # tests that need hypothesis skip themselves
    pass
else:
    # The same examples in every run, so that a failure is reproducible.
    settings.register_profile("pyringar", deadline=None, derandomize=True, database=None)
    settings.load_profile("pyringar")

# Long files run first, so that no worker idles while the last file runs.
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
MAX_WORKERS = 8  # each worker imports torch, and its tests start several ranks


@pytest.hookimpl(tryfirst=True)  # runs before pytest selects tests by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark thorough tests as slow, and run long files first."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONG.split())}
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two workers per core; 0 if files or keywords are selected, or with a GPU."""
    option = config.option
    is_selection = (
        any("::" in word or word.endswith(".py") for word in config.args) or option.keyword
    )
    if is_selection or option.collectonly or option.markexpr != "not slow":
        return 0
    if torch.cuda.is_available():  # all workers would share the GPU
        return 0
    return min(2 * len(os.sched_getaffinity(0)), MAX_WORKERS)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
    # Without one backward pass here, torch.compile breaks backward in forked ranks.
    if not torch.cuda.is_available():
        torch.zeros((), requires_grad=True).backward()
    gc.freeze()  # without frozen modules, each gc.collect() of a test takes 0.4 s


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    """Set two torch threads. With one thread, a call runs only on the calling thread."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def make_comm() -> Iterator[Callable[..., pr.Communicator]]:
    """``make_comm(k, **kwargs)``: a new communicator of k CPU ranks, closed after the test."""
    with contextlib.ExitStack() as made:
        yield lambda k, **options: made.enter_context(pr.Communicator(["cpu"] * k, **options))


@pytest.fixture(scope="session")
def comm_of() -> Iterator[Callable[[int], pr.Communicator]]:
    """``comm_of(k)``: a shared communicator of k CPU ranks, which tests must not break."""
    with contextlib.ExitStack() as made:
        yield functools.cache(lambda k: made.enter_context(pr.Communicator(["cpu"] * k)))


# The next fixtures are for tests/conformance and tests/cuda. In a conftest.py of these folders,
# pytest 9.1 finds no fixture if the command line names a file of another folder first.


@pytest.fixture(scope="session")
def transport_of() -> Iterator[Callable[[str], Any]]:
    """``transport_of(name)``: a shared transport of `transports.TRANSPORTS`."""
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
    """``make_ranks(k, **kwargs)``: a new communicator of k ranks on `device`."""
    with contextlib.ExitStack() as made:
        yield lambda k, **options: made.enter_context(pr.Communicator([device] * k, **options))


@pytest.fixture(scope="session")
def ranks_of(device: str) -> Iterator[Callable[[int], pr.Communicator]]:
    """``ranks_of(k)``: a shared communicator of k ranks on `device`."""
    with contextlib.ExitStack() as made:
        yield functools.cache(lambda k: made.enter_context(pr.Communicator([device] * k)))


@pytest.fixture(scope="session")
def store_port() -> int:
    return store().port


@pytest.fixture(scope="session")
def rank_group_of() -> Iterator[Callable[[int], RankGroup]]:
    """``rank_group_of(k)``: k shared processes with a communicator, which tests must not break."""
    with rank_groups(timeout=60) as get:
        yield get


@pytest.fixture
def new_rank_group() -> Iterator[Callable[[int], RankGroup]]:
    """``new_rank_group(k)``: k new processes, killed after the test."""
    with contextlib.ExitStack() as made:
        yield lambda world_size: made.enter_context(RankGroup(world_size))


@pytest.fixture
def joined_rank_group(new_rank_group: Callable[[int], RankGroup]) -> Callable[..., RankGroup]:
    """``joined_rank_group(k, **options)``: k new processes with a communicator."""

    def make(world_size: int, **options: object) -> RankGroup:
        group = new_rank_group(world_size)
        group.join(**options)
        return group

    return make


@pytest.fixture(scope="session")
def real_data_dir():
    folder = os.environ.get("PYRINGAR_TEST_DATA")
    if not folder:
        pytest.skip("needs PYRINGAR_TEST_DATA, a folder with Fashion-MNIST")
    return Path(folder)
