"""Shared by all tests: one torch thread, communicators that are closed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
from collections.abc import Callable, Iterator
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


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is thorough is slow, too, whoever marked it."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
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
    """Real images, where the developer has some and torchvision can be imported to read them."""
    beside = Path(__file__).parents[2] / "shared/data/fashion-mnist-subset"
    folder = Path(os.environ.get("PYRINGAR_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real images in '{folder}'; PYRINGAR_TEST_DATA may name them")
    try:
        importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    return folder
