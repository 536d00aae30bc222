"""Communicators of ranks on a GPU."""

from __future__ import annotations

import contextlib

import gpu
import pytest

import pyringar as pr


@pytest.fixture(scope="session")
def device():
    """Where the ranks are."""
    return "cpu" if gpu.ON_CPU else "cuda:0"


@pytest.fixture
def make_ranks(device):
    """``make_ranks(k, **kwargs)``: a communicator of k ranks on the device, closed afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda k, **kwargs: stack.enter_context(pr.Communicator([device] * k, **kwargs))


@pytest.fixture(scope="session")
def ranks_of(device):
    """``ranks_of(k)``: one communicator of k ranks for all tests that leave it as it was."""
    made = {}
    with contextlib.ExitStack() as stack:

        def get(k):
            if k not in made:
                made[k] = stack.enter_context(pr.Communicator([device] * k))
            return made[k]

        yield get
