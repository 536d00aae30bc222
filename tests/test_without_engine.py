"""Without a compiler and an engine, only the algorithms in plain torch run."""

from __future__ import annotations

import logging

import pytest
import torch
from training_runs import garments

import pyringar as pr
from pyringar.cli import main
from pyringar.comm import default_group
from pyringar.engine import load
from pyringar.errors import ArgumentError, CompilerNotFoundError, RingarError, UnsupportedError
from pyringar.train import trainer


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise CompilerNotFoundError("no C++ compiler: install one")

    monkeypatch.setattr(load, "engine", refuse)


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [(torch.arange(60) % 17 + rank).to(dtype).view(6, 10) for rank in range(3)]


@pytest.mark.parametrize("algorithm", ["naive", "sharded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_plain_torch_algorithms_run_and_warn(no_compiler, caplog, algorithm, dtype):
    caplog.set_level(logging.WARNING)
    with pr.Communicator(["cpu"] * 3, algorithm=algorithm) as comm:
        tensors = inputs(dtype)
        comm.all_reduce(tensors)
        lists = [[tensor, tensor.clone().t()] for tensor in inputs(dtype)]
        comm.all_reduce_coalesced(lists, "max")
    assert all(torch.equal(tensor, sum(inputs(dtype))) for tensor in tensors)
    assert all(torch.equal(one[1], inputs(dtype)[2].t()) for one in lists)
    assert f"{algorithm} runs in plain torch" in caplog.text
    assert comm.stats() == {algorithm: {"calls": 2}}


def test_engine_calls_raise_without_compiler(no_compiler, monkeypatch):
    # Simulate a process that has not called pr.allreduce yet.
    monkeypatch.setattr(default_group, "_default", type(default_group._default)())
    with pytest.raises(CompilerNotFoundError):
        pr.Communicator(["cpu"] * 3)
    with pytest.raises(CompilerNotFoundError):
        pr.allreduce(inputs())
    comm = pr.Communicator(["cpu"] * 3, algorithm="naive")
    for call in (
        lambda: comm.all_reduce(inputs(), algorithm="fused"),
        lambda: comm.all_reduce_coalesced([inputs()] * 3, algorithm="ring"),
        lambda: comm.broadcast(inputs()),
        lambda: comm.reduce(inputs()[0], inputs(), algorithm="fused"),
    ):
        with pytest.raises(CompilerNotFoundError, match="install one"):
            call()


def test_wrong_arguments_change_nothing(no_compiler):
    comm = pr.Communicator(["cpu"] * 3, algorithm="naive")
    x, y, z = inputs()
    base = torch.ones(120)
    wrong = {
        "expected one per rank, 3": [x, y],
        r"tensors\[1\] has dtype": [x, y.double(), z],
        r"tensors\[2\] has shape": [x, y, z.flatten()],
        r"tensors\[1\] shares memory with tensors\[0\]": [base[:60], base[30:90], z.view(60)],
        r"tensors\[0\] of shape \(60,\) overlaps itself": [torch.ones(1).expand(60)] * 3,
        r"tensors\[1\] requires grad": [x, y.clone().requires_grad_(), z],
        r"tensors\[0\] has dtype torch.bool": [t > 3 for t in (x, y, z)],
        r"tensors\[1\] is on meta, expected cpu": [x, y.to("meta"), z],
        r"tensors\[1\] has layout torch.sparse_coo": [x, y.to_sparse(), z],
    }
    for message, given in wrong.items():
        with pytest.raises((ArgumentError, UnsupportedError), match=message):
            comm.all_reduce(given)
    with pytest.raises(ArgumentError, match=r"lists\[1\] has 2 entries, expected 1"):
        comm.all_reduce_coalesced([[x], [y, y], [z]])
    with pytest.raises(ArgumentError, match=r"lists\[.\]\[1\] shares memory with lists"):
        comm.all_reduce_coalesced([[x, x], [y, y], [z, z]])
    assert all(map(torch.equal, (x, y, z), inputs()))
    comm.close()
    with pytest.raises(RingarError, match="closed"):
        comm.all_reduce([x, y, z])


@pytest.mark.parametrize("model", ["lenet", "resnet18 --width 2 --batchnorm sync"])
def test_train_without_compiler_keeps_bits(request, monkeypatch, capsys, model):
    images = garments(64, 30)
    monkeypatch.setattr(trainer, "load_data", lambda *_: images)

    def trained() -> str:
        command = f"train {model} --allreduce naive --ranks 2 --epochs 1 --batch-size 16"
        assert main(command.split()) == 0
        return capsys.readouterr().out

    with_engine = trained()
    request.getfixturevalue("no_compiler")
    without = trained()
    assert "summed after backward" in without
    epoch = next(line for line in without.splitlines() if line.startswith("    1 "))
    assert epoch.split()[:3] in [line.split()[:3] for line in with_engine.splitlines()]
    assert main(["train", "lenet", "--allreduce", "ring", "--epochs", "1"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
