"""Tensor properties that the engine reads from torch, in C++ or through Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pyringar as pr
from pyringar.engine import load


@pytest.fixture(params=[True, False], ids=["C++", "Python"])
def comm(request: pytest.FixtureRequest) -> Iterator[pr.Communicator]:
    engine = load.engine()
    assert engine.use_torch_functions(request.param) is request.param
    with pr.Communicator(["cpu"] * 2) as comm:
        yield comm
    assert engine.use_torch_functions(True)


def reduced(comm: pr.Communicator, tensors: list[torch.Tensor], times: int = 3) -> list[float]:
    for _ in range(times):
        comm.all_reduce(tensors)
    return [tensor.flatten()[0].item() for tensor in tensors]


def test_repeated_all_reduce_is_right(comm: pr.Communicator) -> None:
    assert reduced(comm, [torch.ones(3), torch.ones(3)]) == [8, 8]


def test_negated_view_is_detected(comm: pr.Communicator) -> None:
    first, second = torch.ones(3), torch.ones(3)
    assert reduced(comm, [first, second]) == [8, 8]
    assert reduced(comm, [torch._neg_view(first), second], times=1) == [0, 0]


def test_requires_grad_raises_in_grad_mode(comm: pr.Communicator) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    reduced(comm, tensors)
    tensors[1].requires_grad_()
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] requires grad"):
        comm.all_reduce(tensors)
    with torch.no_grad():
        assert reduced(comm, tensors, times=1) == [16, 16]


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex"])
def test_unsupported_tensor_after_dense_raises(comm: pr.Communicator, kind: str) -> None:
    dense = [torch.ones(3), torch.ones(3)]
    reduced(comm, dense)
    refused = {
        "sparse": dense[1].to_sparse,
        "meta": lambda: dense[1].to("meta"),
        "complex": lambda: dense[1].to(torch.complex64),
    }[kind]()
    for _ in range(3):
        with pytest.raises(pr.UnsupportedError, match=r"tensors\[1\]"):
            comm.all_reduce([dense[0], refused])
        with pytest.raises(pr.UnsupportedError, match=r"tensors\[0\]"):
            comm.all_reduce([refused, refused.clone()])
    assert reduced(comm, dense, times=1) == [16, 16]


def test_each_call_increments_tensor_version(comm: pr.Communicator) -> None:
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    before = [tensor._version for tensor in tensors]
    reduced(comm, tensors)
    assert [tensor._version for tensor in tensors] == [version + 3 for version in before]


def test_inference_tensors_are_reduced(comm: pr.Communicator) -> None:
    with torch.inference_mode():
        tensors = [torch.ones(3), torch.ones(3)]
        assert reduced(comm, tensors) == [8, 8]
    assert reduced(comm, tensors) == [64, 64]


def test_dispatch_mode_skips_prepared_call(comm: pr.Communicator) -> None:
    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    tensors = [torch.ones(3), torch.ones(3)]
    reduced(comm, tensors)
    with Counts():
        assert not comm._run_prepared(tensors, "sum", None, None)
    assert comm._run_prepared(tensors, "sum", None, None)
