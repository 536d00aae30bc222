"""Are errors of arrays of other libraries raised as they are, and is nothing broken afterwards?

`test_layouts.py` reduces NumPy arrays where they lie.
"""

from __future__ import annotations

import pytest
import torch

import pyringar as pr


class Hostile:
    """An object that says that it is an array, and fails when it is asked for its memory."""

    def __init__(self, error=None, **attributes):
        self._error = error
        self.__dict__.update(attributes)

    def __dlpack__(self, **_options):
        if self._error is not None:
            raise self._error
        return "no capsule"

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("make", [list, tuple])
def test_errors_of_arrays_are_raised(comm_of, make):
    comm = comm_of(2)
    cases = [
        (Hostile(KeyError("mine")), KeyError, "mine"),
        (Hostile(KeyboardInterrupt("now")), KeyboardInterrupt, "now"),
        (Hostile(), Exception, "capsule|PyCapsule|dlpack|DLPack"),
        (Hostile(__array_interface__=5), pr.ArgumentError, "Hostile's __array_interface__ is 5"),
        (Hostile(__array_interface__={}), pr.ArgumentError, "__array_interface__ is {}"),
    ]
    for hostile, error, words in cases:
        for call, tensors in (
            (pr.allreduce, make([torch.ones(2), hostile])),
            (comm.all_reduce, make([hostile, torch.ones(2)])),
            (comm.all_reduce_coalesced, make([make([torch.ones(2)]), make([hostile])])),
            (comm.broadcast, make([torch.ones(2), hostile])),
        ):
            with pytest.raises(error, match=words) as raised:
                call(tensors)
            assert not isinstance(raised.value, SystemError)
    comm.all_reduce([torch.ones(2), torch.ones(2)])  # as usable as before
