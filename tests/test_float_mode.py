"""Do bits depend on whether the caller's thread flushes denormals (torch.set_flush_denormal)?"""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import pyringar as pr
from pyringar.comm.float_mode import default_float_mode


@pytest.fixture(autouse=True)
def _keeps_denormals():
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return sys.float_info.min / 2 == 0


def test_the_mode_is_that_of_one_thread_and_comes_back():
    assert torch.set_flush_denormal(True)
    assert flushes()
    with default_float_mode():
        assert not flushes()
        torch.set_flush_denormal(False)
    assert flushes()
    with pytest.raises(ZeroDivisionError), default_float_mode():
        assert 1 / 0
    assert flushes()
    in_another = []
    with default_float_mode():
        thread = threading.Thread(target=lambda: in_another.append(flushes()))
        thread.start()
        thread.join()
    assert in_another == [False]
    torch.set_flush_denormal(False)
    with default_float_mode():
        assert not flushes()
    assert not flushes()


def test_denormals_in_the_books_call():
    torch.set_flush_denormal(True)
    tensors = [torch.tensor([1], dtype=torch.int32).view(torch.float32) for _ in range(2)]
    pr.allreduce(tensors)
    assert [t.view(torch.int32).item() for t in tensors] == [2, 2]
