"""pytest plugin: run tests of distributed code on ranks that are threads or forked processes.

    @pytest.mark.ranks(4)
    def test_sum():
        mine = torch.ones(3)
        dist.all_reduce(mine)            # the default group is there
        assert mine.tolist() == [4.0] * 3

The body runs on every rank, see `pyringar.launch`. ``pytest --ranks-seeds 20`` runs tests with the
mark in twenty orders of their ranks. Ranks of ``ranks(4, processes=True)`` have no order: the test
runs once. pytest finds the plugin of an installed pyringar.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import logging
import os
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_OUTCOMES: dict[str, Any] = {"skip": pytest.skip, "xfail": pytest.xfail, "fail": pytest.fail}
_CLASSES = tuple(of.Exception for of in _OUTCOMES.values())
_MARK = (
    "ranks(k, **options): run the test on k ranks of torch.distributed; options are those of "
    "pyringar.launch"
)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a positive number")
    return int(text)


def pytest_addoption(parser: Any) -> None:
    """Add the options that set the order of ranks."""
    group = parser.getgroup("pyringar", "ranks in one process (pyringar)")
    group.addoption(
        "--ranks-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the order in which ranks run (default: 0)",
    )
    group.addoption(
        "--ranks-seeds",
        type=_positive,
        default=1,
        metavar="N",
        help="run each marked test with N seeds, from --ranks-seed on (default: 1)",
    )


def pytest_configure(config: Any) -> None:
    """Register the mark ``ranks``."""
    config.addinivalue_line("markers", _MARK)


@pytest.fixture
def launch_ranks(request: Any) -> Callable[..., list[Any]]:
    """Return `pyringar.launch` with the seed of ``--ranks-seed``."""
    from pyringar.cluster.launch import launch

    return functools.partial(launch, seed=request.config.getoption("ranks_seed"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    """Fail an async test or a unittest.TestCase with the mark ``ranks``."""
    if item.get_closest_marker("ranks") is None:
        return
    test = getattr(item, "obj", None)
    if inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test):
        pytest.fail("mark 'ranks' needs a function, not async def", pytrace=False)
    if getattr(item, "cls", None) is not None and issubclass(item.cls, unittest.TestCase):
        pytest.fail("mark 'ranks' needs a function, not a TestCase", pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Restore ``os.environ``: undoing `monkeypatch` may have written a rank's variables there."""
    before = dict(os.environ)
    yield
    if item.get_closest_marker("ranks") is not None and dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test with the mark ``ranks`` on all ranks."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from pyringar.cluster.launch import launch
    from pyringar.cluster.rank_table import of_program

    # Hide c10d_logger's debug record of a failed call, which repeats the table of all ranks.
    importlib.import_module("torch.distributed.c10d_logger")._c10d_logger.setLevel(logging.INFO)
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    first, number = (pyfuncitem.config.getoption(name) for name in ("ranks_seed", "ranks_seeds"))
    seeds = [mark.kwargs["seed"]] if "seed" in mark.kwargs else range(first, first + number)
    if mark.kwargs.get("processes"):
        seeds = [mark.kwargs.get("seed", 0)]
    for seed in seeds:
        options = {**mark.kwargs, "seed": seed, "args": (pyfuncitem.obj, given)}
        failure: BaseException | None = None
        try:
            launch(_run_test, *mark.args, **options)
        except BaseException as error:
            failure = error
        if isinstance(failure, _Outcome):
            name, reason = failure.args
            if isinstance(failure.__cause__, _CLASSES):  # only threads keep the cause
                raise failure.__cause__
            _OUTCOMES[name](reason)
        if failure is not None:
            own, cause = of_program(failure.__traceback__), failure.__cause__
            if own is None:
                tracebacks = "" if cause is None else f"\n{cause}"
                pytest.fail(f"{type(failure).__name__}: {failure}{tracebacks}", pytrace=False)
            raise failure.with_traceback(own) from cause
    return True


class _Outcome(BaseException):
    """Name and reason of a pytest outcome, because pytest's exceptions cannot be pickled."""


def _run_test(test: Callable[..., object], given: dict[str, Any]) -> None:
    import torch.distributed as dist

    from pyringar.cluster.internals import let_init_replace_default_group

    dist.init_process_group()
    let_init_replace_default_group()
    try:
        test(**given)
    except SystemExit as error:  # launch would count SystemExit(0) as success
        raise AssertionError(f"the test ended with SystemExit({error.code!r})") from error
    except _CLASSES as error:
        name = next(name for name, of in _OUTCOMES.items() if type(error) is of.Exception)
        raise _Outcome(name, error.msg) from error
